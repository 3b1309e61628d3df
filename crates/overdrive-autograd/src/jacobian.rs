//! Jacobians by backward and by finite differences, in float64.

use tch::{Kind, Tensor};

use crate::guards::no_grad;
use crate::{Error, FunctionResult, GradOptions, Result, grad};

/// A Jacobian matrix: one row per element of the input, one column per element of the output.
pub(crate) struct Jacobian {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) values: Vec<f64>,
}

impl Jacobian {
    fn zeros(rows: usize, columns: usize) -> Self {
        Self {
            rows,
            columns,
            values: vec![0.0; rows * columns],
        }
    }

    pub(crate) fn at(&self, row: usize, column: usize) -> f64 {
        self.values[row * self.columns + column]
    }
}

pub(crate) fn run(
    function: &dyn Fn(&[Tensor]) -> FunctionResult<Vec<Tensor>>,
    inputs: &[Tensor],
) -> Result<Vec<Tensor>> {
    function(inputs).map_err(|source| Error::Tested { source })
}

/// Returns one Jacobian for each output by central differences, with two calls for each element of
/// `inputs[input]`.
pub(crate) fn numerical(
    function: &dyn Fn(&[Tensor]) -> FunctionResult<Vec<Tensor>>,
    inputs: &[Tensor],
    input: usize,
    eps: f64,
) -> Result<Vec<Jacobian>> {
    let rows = inputs[input].numel();
    // Central differences: their error is O(eps²), that of one-sided ones O(eps).
    let at = |row: usize, change: f64| -> Result<Vec<Vec<f64>>> {
        // Copies of all inputs, because the function may store or change them.
        let moved = no_grad(|| -> Result<Vec<Tensor>> {
            inputs
                .iter()
                .enumerate()
                .map(|(index, tensor)| {
                    let copy = tensor.f_detach_copy()?.f_contiguous()?;
                    if index == input {
                        let row = i64::try_from(row).unwrap_or(i64::MAX);
                        let _ = copy
                            .f_view([-1])?
                            .f_narrow(0, row, 1)?
                            .f_add_scalar_(change)?;
                    }
                    Ok(copy.f_set_requires_grad(tensor.requires_grad())?)
                })
                .collect()
        })?;
        run(function, &moved)?.iter().map(flat).collect()
    };
    let mut jacobians: Vec<Jacobian> = Vec::new();
    for row in 0..rows {
        let (above, below) = (at(row, eps)?, at(row, -eps)?);
        for (output, (above, below)) in above.iter().zip(&below).enumerate() {
            if jacobians.len() <= output {
                jacobians.push(Jacobian::zeros(rows, above.len()));
            }
            for (column, (a, b)) in above.iter().zip(below).enumerate() {
                let columns = jacobians[output].columns;
                jacobians[output].values[row * columns + column] = (a - b) / (2.0 * eps);
            }
        }
    }
    Ok(jacobians)
}

/// Returns one Jacobian for each of `inputs`, with one backward pass for each element of `output`.
pub(crate) fn analytical(output: &Tensor, inputs: &[&Tensor]) -> Result<Vec<Jacobian>> {
    let columns = output.numel();
    let mut jacobians: Vec<Jacobian> = inputs
        .iter()
        .map(|input| Jacobian::zeros(input.numel(), columns))
        .collect();
    for column in 0..columns {
        let seed = output.f_zeros_like()?.f_contiguous()?;
        let at = i64::try_from(column).unwrap_or(i64::MAX);
        let _ = seed.f_view([-1])?.f_narrow(0, at, 1)?.f_fill_(1.0)?;
        let options = GradOptions {
            gradients: &[Some(&seed)],
            // One graph serves all columns.
            retain_graph: Some(true),
            allow_unused: true,
            ..GradOptions::default()
        };
        for (jacobian, gradient) in jacobians.iter_mut().zip(grad(&[output], inputs, &options)?) {
            // The output does not depend on this input: its Jacobian stays zero.
            let Some(gradient) = gradient else { continue };
            for (row, value) in flat(&gradient)?.into_iter().enumerate() {
                jacobian.values[row * columns + column] = value;
            }
        }
    }
    Ok(jacobians)
}

fn flat(tensor: &Tensor) -> Result<Vec<f64>> {
    let tensor = tensor
        .f_detach()?
        .f_to_kind(Kind::Double)?
        .f_contiguous()?
        .f_view([-1])?;
    Ok(Vec::try_from(tensor)?)
}
