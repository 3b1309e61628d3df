//! Comparisons of gradients with finite differences.

use tch::{Kind, Tensor};

use crate::jacobian::{analytical, numerical, run};
use crate::{Error, FunctionResult, GradOptions, Result, grad};

/// The options of [`gradcheck`]; the defaults are those of `torch.autograd.gradcheck`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradcheckOptions {
    /// The step of the finite differences. Default: 1e-6, which suits float64.
    pub eps: f64,
    /// The absolute tolerance. Default: 1e-5.
    pub atol: f64,
    /// The relative tolerance. Default: 1e-3.
    pub rtol: f64,
    /// The largest allowed difference between two backward passes over the same values. Default: 0.
    pub nondet_tol: f64,
}

impl Default for GradcheckOptions {
    fn default() -> Self {
        Self {
            eps: 1e-6,
            atol: 1e-5,
            rtol: 1e-3,
            nondet_tol: 0.0,
        }
    }
}

/// Compares the gradients of `function` with finite differences, element by element of the Jacobians
/// (`torch.autograd.gradcheck`).
///
/// Inputs that require a gradient must be float64; the others are passed on unchanged.
///
/// ```
/// use overdrive_autograd::{gradcheck, GradcheckOptions};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::rand([2, 3], (Kind::Double, Device::Cpu)).set_requires_grad(true);
/// gradcheck(|inputs| Ok(vec![inputs[0].f_tanh()?]), &[x], &GradcheckOptions::default())?;
/// # Ok::<(), overdrive_autograd::Error>(())
/// ```
///
/// # Errors
/// [`Error::GradientMismatch`] with the first element that differs, [`Error::NonDeterministic`],
/// [`Error::NothingToCheck`] if no input requires a gradient or no output depends on one,
/// [`Error::Common`] for an input that is not float64, [`Error::Tested`] with the error of the function.
pub fn gradcheck(
    function: impl Fn(&[Tensor]) -> FunctionResult<Vec<Tensor>>,
    inputs: &[Tensor],
    options: &GradcheckOptions,
) -> Result<()> {
    check(&function, inputs, options)
}

fn check(
    function: &dyn Fn(&[Tensor]) -> FunctionResult<Vec<Tensor>>,
    inputs: &[Tensor],
    options: &GradcheckOptions,
) -> Result<()> {
    let wanted: Vec<usize> = (0..inputs.len())
        .filter(|index| inputs[*index].requires_grad())
        .collect();
    if wanted.is_empty() {
        return Err(Error::NothingToCheck {
            reason: "no input requires a gradient; call `set_requires_grad(true)` on the inputs",
        });
    }
    for index in &wanted {
        let kind = inputs[*index].kind();
        if kind != Kind::Double {
            // In float32 the rounding errors of the differences are as large as the tolerances.
            let expected = "Double: finite differences need float64";
            return Err(
                overdrive_core::Error::dtype(format!("inputs[{index}]"), kind, expected).into(),
            );
        }
    }
    let outputs = run(function, inputs)?;
    let checked: Vec<&Tensor> = wanted.iter().map(|index| &inputs[*index]).collect();
    let differentiable = |output: &Tensor| output.requires_grad() && output.is_floating_point();
    if !outputs.iter().any(differentiable) {
        return Err(Error::NothingToCheck {
            reason: "no output depends on an input that requires a gradient",
        });
    }
    let mut by_differences = Vec::new();
    for index in &wanted {
        by_differences.push(numerical(function, inputs, *index, options.eps)?);
    }
    for (o, output) in outputs.iter().enumerate() {
        // An integer output, or one that depends on no checked input, has no gradient to compare.
        if !differentiable(output) {
            continue;
        }
        for (slot, jacobian) in analytical(output, &checked)?.iter().enumerate() {
            let expected = &by_differences[slot][o];
            for row in 0..jacobian.rows {
                for column in 0..jacobian.columns {
                    let (a, n) = (jacobian.at(row, column), expected.at(row, column));
                    let close = (a - n).abs() <= options.atol + options.rtol * n.abs();
                    if !close {
                        return Err(Error::GradientMismatch {
                            output: o,
                            input: wanted[slot],
                            row,
                            column,
                            analytical: a,
                            numerical: n,
                            atol: options.atol,
                            rtol: options.rtol,
                        });
                    }
                }
            }
        }
        check_determinism(output, &checked, &wanted, options.nondet_tol)?;
    }
    Ok(())
}

fn check_determinism(
    output: &Tensor,
    inputs: &[&Tensor],
    names: &[usize],
    nondet_tol: f64,
) -> Result<()> {
    // One seed for both passes: only the backward may cause a difference.
    let seed = output.f_ones_like()?;
    let gradients = || {
        grad(
            &[output],
            inputs,
            &GradOptions {
                gradients: &[Some(&seed)],
                retain_graph: Some(true),
                materialize_grads: true,
                ..GradOptions::default()
            },
        )
    };
    for (slot, (first, second)) in gradients()?.into_iter().zip(gradients()?).enumerate() {
        let (Some(first), Some(second)) = (first, second) else {
            continue;
        };
        // The maximum of no elements is an error.
        if first.numel() == 0 {
            continue;
        }
        let difference = f64::try_from(first.f_sub(&second)?.f_abs()?.f_max()?)?;
        // NaN compares false with every tolerance, and is a difference.
        if difference.is_nan() || difference > nondet_tol {
            return Err(Error::NonDeterministic {
                input: names[slot],
                difference,
                nondet_tol,
            });
        }
    }
    Ok(())
}

/// Compares second derivatives with finite differences of the first (`torch.autograd.gradgradcheck`).
///
/// The gradients of the outputs are drawn from a normal distribution.
///
/// # Errors
/// As [`gradcheck`]; indices of inputs count the inputs first and then the gradients of the outputs. A
/// function without double backward is an [`Error::Sys`] or [`Error::Tested`] with libtorch's error.
pub fn gradgradcheck(
    function: impl Fn(&[Tensor]) -> FunctionResult<Vec<Tensor>>,
    inputs: &[Tensor],
    options: &GradcheckOptions,
) -> Result<()> {
    let outputs = run(&function, inputs)?;
    let n = inputs.len();
    let mut all: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
    for output in outputs.iter().filter(|output| output.requires_grad()) {
        let seed = output.f_detach()?.f_randn_like()?;
        all.push(seed.f_set_requires_grad(true)?);
    }
    let first_gradients = move |all: &[Tensor]| -> FunctionResult<Vec<Tensor>> {
        let (inputs, seeds) = all.split_at(n);
        let outputs: Vec<Tensor> = function(inputs)?
            .into_iter()
            .filter(Tensor::requires_grad)
            .collect();
        let outputs: Vec<&Tensor> = outputs.iter().collect();
        let seeds: Vec<Option<&Tensor>> = seeds.iter().map(Some).collect();
        let wanted: Vec<&Tensor> = inputs.iter().filter(|i| i.requires_grad()).collect();
        let gradients = grad(
            &outputs,
            &wanted,
            &GradOptions {
                gradients: &seeds,
                create_graph: true,
                materialize_grads: true,
                ..GradOptions::default()
            },
        )?;
        Ok(gradients.into_iter().flatten().collect())
    };
    check(&first_gradients, &all, options)
}
