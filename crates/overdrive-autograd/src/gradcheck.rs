use tch::{Kind, Tensor};

use crate::jacobian::{analytical, numerical, run};
use crate::{Error, FunctionResult, GradOptions, Result, grad};

/// Tolerances of [`gradcheck`]; the defaults are those of `torch.autograd.gradcheck`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradcheckOptions {
    /// The step of the finite differences. Default: 1e-6, meant for float64.
    pub eps: f64,
    /// Absolute tolerance. Default: 1e-5.
    pub atol: f64,
    /// Relative tolerance. Default: 1e-3.
    pub rtol: f64,
    /// How far two backward passes may lie apart. Default: 0.
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
/// Inputs that require a gradient must be float64; the others are passed along.
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
/// [`Error::Unsuitable`] if there is nothing to check or an input is not float64, [`Error::Tested`]
/// with what the function returned.
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
        return Err(Error::Unsuitable {
            problem:
                "no input requires a gradient: call `set_requires_grad(true)` on those to check"
                    .to_owned(),
        });
    }
    for index in &wanted {
        let kind = inputs[*index].kind();
        if kind != Kind::Double {
            return Err(Error::Unsuitable {
                problem: format!(
                    "input {index} is {kind:?}: finite differences need float64 (Kind::Double)"
                ),
            });
        }
    }
    let outputs = run(function, inputs)?;
    let checked: Vec<&Tensor> = wanted.iter().map(|index| &inputs[*index]).collect();
    let differentiable = |output: &Tensor| output.requires_grad() && output.is_floating_point();
    if !outputs.iter().any(differentiable) {
        return Err(Error::Unsuitable {
            problem: "no output depends on an input that requires a gradient".to_owned(),
        });
    }
    let mut by_differences = Vec::new();
    for index in &wanted {
        by_differences.push(numerical(function, inputs, *index, options.eps)?);
    }
    for (o, output) in outputs.iter().enumerate() {
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
        if first.numel() == 0 {
            continue;
        }
        let difference = f64::try_from(first.f_sub(&second)?.f_abs()?.f_max()?)?;
        // A NaN is a difference too.
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

/// Compares second gradients with finite differences of the first (`torch.autograd.gradgradcheck`).
///
/// The gradients of the outputs are drawn from a normal distribution.
///
/// # Errors
/// As for [`gradcheck`], with the inputs counted first and the gradients of the outputs after them;
/// a function without double backward is refused by libtorch ([`Error::Sys`] or [`Error::Tested`]).
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
