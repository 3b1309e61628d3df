//! Compares results and gradients of an operation on the device with float64 on the CPU.

use std::cell::{OnceCell, RefCell};

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;

/// The dtypes in which operations are compared.
pub(crate) const KINDS: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];

/// Returns the tolerance of ‖out − ref‖ / ‖ref‖: four times the unit roundoff of bf16 (2⁻⁸) and f16 (2⁻¹¹), for the
/// rounding of intermediate results; in f32 1e-5, for sums of thousands of products in another order.
pub(crate) fn tolerance(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => 4.0 / 256.0,
        Kind::Half => 4.0 / 2048.0,
        _ => 1e-5,
    }
}

/// Returns the name of a dtype as it is in the report.
pub(crate) fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Float => "f32",
        Kind::BFloat16 => "bf16",
        Kind::Half => "f16",
        Kind::Double => "f64",
        _ => "other",
    }
}

/// A random input of an operation.
#[derive(Debug, Clone)]
pub(crate) struct Input {
    shape: Vec<i64>,
    scale: f64,
    shift: f64,
    has_gradient: bool,
}

/// Returns an input of normally distributed values that requires a gradient.
pub(crate) fn leaf(shape: &[i64]) -> Input {
    Input {
        shape: shape.to_vec(),
        scale: 1.0,
        shift: 0.0,
        has_gradient: true,
    }
}

/// Returns an input of normally distributed values without a gradient.
pub(crate) fn constant(shape: &[i64]) -> Input {
    Input {
        has_gradient: false,
        ..leaf(shape)
    }
}

impl Input {
    /// Multiplies the values.
    #[must_use]
    pub(crate) fn times(self, scale: f64) -> Self {
        Self { scale, ..self }
    }

    /// Adds to the values.
    #[must_use]
    pub(crate) fn plus(self, shift: f64) -> Self {
        Self { shift, ..self }
    }
}

/// The values of inputs, drawn for the first comparison and shared by all comparisons.
#[derive(Debug)]
pub(crate) struct Drawn<'a> {
    inputs: &'a [Input],
    seed: i64,
    values: OnceCell<Vec<Tensor>>,
}

impl<'a> Drawn<'a> {
    /// Returns the values of the inputs of `name`, the same in every run.
    pub(crate) fn new(name: &str, inputs: &'a [Input]) -> Self {
        Self {
            inputs,
            seed: seed_of(name),
            values: OnceCell::new(),
        }
    }

    fn values(&self) -> Result<&[Tensor]> {
        if let Some(values) = self.values.get() {
            return Ok(values);
        }
        tch::manual_seed(self.seed);
        // In f32, which is drawn in half the time of f64: the values are rounded to the dtype of the comparison anyway.
        let draw = |input: &Input| -> Result<Tensor> {
            let values = Tensor::f_randn(&input.shape, (Kind::Float, Device::Cpu))?;
            Ok(values
                .f_mul_scalar(input.scale)?
                .f_add_scalar(input.shift)?)
        };
        let values = self.inputs.iter().map(draw).collect::<Result<_>>()?;
        Ok(self.values.get_or_init(|| values))
    }
}

fn seed_of(name: &str) -> i64 {
    name.bytes().fold(7, |hash: i64, byte| {
        (hash * 31 + i64::from(byte)) % 1_000_003
    })
}

/// The run of an operation: on the device in the dtype that is compared, or on the CPU in float64.
#[derive(Debug)]
pub(crate) struct Run {
    /// The device of the inputs.
    pub(crate) device: Device,
    /// The dtype of the inputs.
    pub(crate) kind: Kind,
    /// `true` for the reference.
    pub(crate) is_reference: bool,
    remark: RefCell<String>,
}

impl Run {
    /// Adds a remark to the check, such as the implementation that ran.
    pub(crate) fn note(&self, remark: &str) {
        remark.clone_into(&mut self.remark.borrow_mut());
    }

    /// Returns constants on the device and in the dtype of the run.
    pub(crate) fn tensor(&self, values: &Tensor) -> Result<Tensor> {
        Ok(values.f_to_kind(self.kind)?.f_to_device(self.device)?)
    }

    /// Runs the operation and its backward with `directions` as the gradients of the outputs, which the first run draws.
    fn outcomes(
        &self,
        drawn: &[Tensor],
        inputs: &[Input],
        directions: &mut Vec<Tensor>,
        operation: &Operation,
    ) -> Result<Outcomes> {
        let tensors: Vec<Tensor> = drawn
            .iter()
            .zip(inputs)
            .map(|(values, input)| {
                let tensor = self.tensor(values)?.f_detach()?;
                Ok(tensor.f_set_requires_grad(input.has_gradient)?)
            })
            .collect::<Result<_>>()?;
        let outputs = operation(self, &tensors)?;
        ensure!(!outputs.is_empty(), "the operation returned nothing");
        if directions.is_empty() {
            for output in &outputs {
                let values = Tensor::f_randn(output.size(), (Kind::Double, Device::Cpu))?;
                // bf16 has the fewest digits, so that every run takes the same values.
                directions.push(values.f_to_kind(Kind::BFloat16)?.f_to_kind(Kind::Double)?);
            }
        }
        let mut loss: Option<Tensor> = None;
        for (output, direction) in outputs.iter().zip(directions.iter()) {
            if output.requires_grad() {
                let direction = direction
                    .f_to_kind(output.f_kind()?)?
                    .f_to_device(self.device)?;
                let sum = (output.f_mul(&direction)?).f_sum(Kind::Double)?;
                loss = Some(match loss {
                    Some(other) => other.f_add(&sum)?,
                    None => sum,
                });
            }
        }
        if let Some(loss) = loss {
            loss.f_backward()?;
        }
        let mut gradients = Vec::new();
        for (tensor, input) in tensors.iter().zip(inputs) {
            if input.has_gradient {
                let gradient = tensor.f_grad()?;
                ensure!(
                    gradient.defined(),
                    "input {} has no gradient",
                    gradients.len()
                );
                gradients.push(to_host(&gradient)?);
            }
        }
        Ok(Outcomes {
            outputs: outputs.iter().map(to_host).collect::<Result<_>>()?,
            gradients,
            remark: self.remark.take(),
        })
    }
}

/// An operation on the tensors of a run.
type Operation<'a> = dyn Fn(&Run, &[Tensor]) -> Result<Vec<Tensor>> + 'a;

/// The outputs and the gradients of a run, on the CPU in float64.
struct Outcomes {
    outputs: Vec<Tensor>,
    gradients: Vec<Tensor>,
    remark: String,
}

impl Context {
    /// Checks an operation in each of [`KINDS`]: its outputs, and the gradients of the inputs that have one.
    pub(crate) fn parity(
        &mut self,
        name: &str,
        inputs: &[Input],
        operation: impl Fn(&Run, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<()> {
        self.parity_in(name, &KINDS, inputs, operation)
    }

    /// As [`Context::parity`], in these dtypes.
    pub(crate) fn parity_in(
        &mut self,
        name: &str,
        kinds: &[Kind],
        inputs: &[Input],
        operation: impl Fn(&Run, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<()> {
        self.parity_of(name, kinds, &Drawn::new(name, inputs), operation)
    }

    /// As [`Context::parity_in`], with values that several operations share.
    pub(crate) fn parity_of(
        &mut self,
        name: &str,
        kinds: &[Kind],
        drawn: &Drawn<'_>,
        operation: impl Fn(&Run, &[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<()> {
        let device = self.device();
        for &kind in kinds {
            self.check(format!("{name} {}", name_of(kind)), || {
                compared(name, device, kind, drawn, &operation)
            })?;
        }
        Ok(())
    }
}

fn compared(
    name: &str,
    device: Device,
    kind: Kind,
    drawn: &Drawn<'_>,
    operation: &Operation,
) -> Result<Finding> {
    let inputs = drawn.inputs;
    // Rounded first: the rounding of the inputs is no error of the operation.
    let drawn: Vec<Tensor> = drawn
        .values()?
        .iter()
        .map(|values| values.f_to_kind(kind)?.f_to_kind(Kind::Double))
        .collect::<Result<_, _>>()?;
    // For the directions of the gradients, whose values must not be those of an input.
    tch::manual_seed(seed_of(name) + 1_000_003);
    let mut directions = Vec::new();
    let mut run = |device, kind, is_reference| {
        let run = Run {
            device,
            kind,
            is_reference,
            remark: RefCell::default(),
        };
        run.outcomes(&drawn, inputs, &mut directions, operation)
    };
    let reference = run(Device::Cpu, Kind::Double, true);
    let reference = reference.context("the reference in f64 on the CPU")?;
    // The reference draws them in f64; both sides use the rounded values.
    let found = run(device, kind, false)?;
    let outputs = furthest(&found.outputs, &reference.outputs)?;
    let allowed = tolerance(kind);
    let mut right = outputs <= allowed;
    let mut finding = Finding::passed().with("output error", outputs);
    if !reference.gradients.is_empty() {
        let gradients = furthest(&found.gradients, &reference.gradients)?;
        right &= gradients <= allowed;
        finding = finding.with("gradient error", gradients);
    }
    let reason = if right { "" } else { "beyond the tolerance" };
    let verdict = Finding::judged(right, reason);
    Ok(Finding {
        outcome: verdict.outcome,
        ..finding
            .noting(reason)
            .noting(found.remark)
            .with("tolerance", allowed)
    })
}

/// Returns a copy of a tensor in memory of its own.
pub(crate) fn copied(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

fn to_host(tensor: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    let detached = tensor.f_detach()?.f_to_device(Device::Cpu)?;
    Ok(detached.f_to_kind(Kind::Double)?)
}

/// Returns the largest of the distances of the pairs.
pub(crate) fn furthest(found: &[Tensor], reference: &[Tensor]) -> Result<f64> {
    ensure!(
        found.len() == reference.len(),
        "there are {} results, but {} reference results",
        found.len(),
        reference.len()
    );
    let pairs = found.iter().zip(reference);
    let far = pairs.map(|(found, reference)| distance(found, reference));
    Ok(largest(far.collect::<Result<Vec<_>>>()?))
}

/// Returns the largest of the errors; NaN if one of them is, which `f64::max` would drop.
pub(crate) fn largest(errors: impl IntoIterator<Item = f64>) -> f64 {
    let errors = errors.into_iter();
    errors.fold(0.0, |most: f64, error| match error.is_nan() {
        true => error,
        false if most.is_nan() => most,
        false => most.max(error),
    })
}

/// Returns ‖found − reference‖ / ‖reference‖ in float64 on the CPU. Values that are infinite in both count as equal.
pub(crate) fn distance(found: &Tensor, reference: &Tensor) -> Result<f64> {
    ensure!(
        found.size() == reference.size(),
        "the shape is {:?}, but the shape of the reference is {:?}",
        found.size(),
        reference.size()
    );
    let (found, reference) = (to_host(found)?, to_host(reference)?);
    let same = found.f_eq_tensor(&reference)?;
    let zero = Tensor::f_zeros([1], (Kind::Double, Device::Cpu))?;
    let difference = zero.f_where_self(&same, &found.f_sub(&reference)?)?;
    let base = zero.f_where_self(&reference.f_isinf()?, &reference)?;
    let norm = |tensor: &Tensor| {
        tensor
            .f_square()?
            .f_sum(Kind::Double)?
            .f_sqrt()?
            .f_double_value(&[])
    };
    let (difference, base) = (norm(&difference)?, norm(&base)?);
    Ok(if base > 0.0 {
        difference / base
    } else {
        difference
    })
}

#[cfg(test)]
mod tests {
    use super::largest;

    #[test]
    fn an_error_that_is_not_a_number_is_the_largest_wherever_it_stands() {
        assert_eq!(largest([0.5, 2.0, 1.0]), 2.0);
        assert_eq!(largest([]), 0.0);
        for errors in [
            [f64::NAN, 1.0, 2.0],
            [1.0, f64::NAN, 2.0],
            [1.0, 2.0, f64::NAN],
        ] {
            assert!(largest(errors).is_nan(), "{errors:?}");
        }
    }
}
