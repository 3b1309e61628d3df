//! Checks of parameters and gradients that all optimizers share.

use std::collections::{BTreeSet, HashMap};

use overdrive_core::{check_fraction, check_non_negative};
use overdrive_sys::raw::host_value;
use overdrive_sys::storage::memory_overlaps;
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// The dtype, device and shape of a tensor.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TensorSpec {
    pub(crate) kind: Kind,
    pub(crate) device: Device,
    pub(crate) size: Vec<i64>,
}

impl TensorSpec {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self {
            kind: tensor.kind(),
            device: tensor.device(),
            size: tensor.size(),
        }
    }

    fn describe(&self) -> String {
        format!("{:?} on {:?}", self.kind, self.device)
    }
}

/// Returns the gradient of a parameter, or `None` if it has none; an error if it cannot be applied.
/// `state` is the specification of the parameter when its state was created, `None` if it has no state
/// yet.
pub(crate) fn gradient_of(
    name: &str,
    tensor: &Tensor,
    state: Option<&TensorSpec>,
) -> Result<Option<Tensor>> {
    let gradient = tensor.f_grad()?;
    if !gradient.defined() {
        return Ok(None);
    }
    let unfit = |found: String, expected: String| Error::UnfitGradient {
        name: name.to_owned(),
        found,
        expected,
    };
    // Kernels need the memory of a dense tensor.
    if gradient.is_sparse() {
        return Err(sparse_gradient(name.to_owned()));
    }
    let (now, of_gradient) = (TensorSpec::of(tensor), TensorSpec::of(&gradient));
    if (of_gradient.kind, of_gradient.device) != (now.kind, now.device) {
        return Err(unfit(of_gradient.describe(), now.describe()));
    }
    if let Some(state) = state {
        let moved = |now: String, state: String| Error::MovedParameter {
            name: name.to_owned(),
            now,
            state,
        };
        if (state.kind, state.device) != (now.kind, now.device) {
            return Err(moved(now.describe(), state.describe()));
        }
        // Kernels use the parameter's element count for all tensors, so a smaller state would be read out
        // of bounds.
        if state.size != now.size {
            return Err(moved(
                format!("{:?}", now.size),
                format!("{:?}", state.size),
            ));
        }
    }
    if of_gradient.size != now.size {
        return Err(unfit(
            format!("{:?}", of_gradient.size),
            format!("{:?}", now.size),
        ));
    }
    Ok(Some(gradient))
}

/// Returns the error of a sparse gradient, which no kernel here reads.
pub(crate) fn sparse_gradient(name: String) -> Error {
    Error::UnfitGradient {
        name,
        found: "sparse".to_owned(),
        expected: "dense (create the embedding with sparse: false)".to_owned(),
    }
}

/// Checks that a parameter can be written: that it is dense, and that no two of its elements are the same memory.
pub(crate) fn check_writable(name: &str, tensor: &Tensor) -> Result<()> {
    let unwritable = |problem| {
        Err(Error::UnwritableParameter {
            name: name.to_owned(),
            problem,
        })
    };
    if !tensor.defined() {
        return unwritable("undefined");
    }
    // Other layouts have no strides.
    if tensor.is_sparse() || tensor.is_mkldnn() {
        return unwritable("not dense");
    }
    let mut dimensions = tensor.size().into_iter().zip(tensor.stride());
    match dimensions.any(|(length, stride)| length > 1 && stride == 0) {
        true => unwritable("expanded, so several of its elements are the same memory"),
        false => Ok(()),
    }
}

/// Checks that a parameter is a dense floating-point leaf of the graph.
pub(crate) fn check_leaf(name: &str, tensor: &Tensor) -> Result<()> {
    check_writable(name, tensor)?;
    let kind = tensor.f_kind()?;
    if !matches!(
        kind,
        Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
    ) {
        return Err(unsupported_kind(name, kind));
    }
    if !tensor.f_is_leaf()? {
        return Err(Error::NonLeafParameter {
            name: name.to_owned(),
        });
    }
    Ok(())
}

/// Returns the error of a parameter that is not floating-point.
pub(crate) fn unsupported_kind(name: &str, kind: Kind) -> Error {
    let expected = "a floating-point parameter (Float, Double, Half or BFloat16); exclude this one";
    overdrive_core::Error::dtype(name.to_owned(), kind, expected).into()
}

/// Checks that names are unique and that no two parameters share memory.
pub(crate) fn check_distinct<'a>(
    parameters: impl Iterator<Item = (&'a str, &'a Tensor)>,
) -> Result<()> {
    let mut names = BTreeSet::new();
    let mut memory: HashMap<usize, &str> = HashMap::new();
    for (name, tensor) in parameters {
        if !names.insert(name) {
            return Err(Error::DuplicateParameter {
                name: name.to_string(),
            });
        }
        // Empty tensors may all have a null pointer.
        if tensor.numel() == 0 {
            continue;
        }
        if let Some(first) = memory.insert(tensor.data_ptr() as usize, name) {
            return Err(Error::SharedParameter {
                first: first.to_string(),
                second: name.to_string(),
            });
        }
    }
    Ok(())
}

/// Checks that a step does not write the same memory as two tensors, and returns the gradient: a copy if it shares
/// memory with what the step writes. Kernels hold slices of all of them at the same time.
pub(crate) fn disjoint(
    name: &str,
    parameter: &Tensor,
    gradient: Tensor,
    state: &[(&'static str, &Tensor)],
) -> Result<Tensor> {
    let shared = |with: &Tensor| state.iter().find(|(_, part)| memory_overlaps(part, with));
    if let Some(&(part, _)) = shared(parameter) {
        return Err(Error::SharedState {
            name: name.to_owned(),
            part,
        });
    }
    // A parameter may be its own gradient, on any device.
    let same = gradient.data_ptr() == parameter.data_ptr();
    if same || memory_overlaps(&gradient, parameter) || shared(&gradient).is_some() {
        return Ok(gradient.f_add_scalar(0.0)?);
    }
    Ok(gradient)
}

/// Returns `true` if equal memory offsets mean equal indices. The strides of dimensions of size 1 are
/// arbitrary.
pub(crate) fn same_layout(a: &Tensor, b: &Tensor) -> bool {
    let size = a.size();
    size == b.size()
        && size
            .iter()
            .zip(a.stride().iter().zip(b.stride()))
            .all(|(&length, (&a, b))| length <= 1 || a == b)
}

/// Returns the value of a step count, which is on the CPU and read without an operator.
pub(crate) fn step_count(step: &Tensor) -> Result<f64> {
    match host_value(step) {
        Some(count) => Ok(count),
        None => Ok(step.f_double_value(&[])?),
    }
}

/// Returns the bytes of a tensor's elements.
pub(crate) fn bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

/// Checks the options that all variants of Adam have.
pub(crate) fn check_adam_options(
    learning_rate: f64,
    weight_decay: f64,
    eps: f64,
    betas: (f64, f64),
) -> Result<()> {
    check_rates(learning_rate, weight_decay)?;
    check_non_negative("eps", eps)?;
    check_betas(betas)
}

/// Checks a learning rate and a weight decay.
pub(crate) fn check_rates(learning_rate: f64, weight_decay: f64) -> Result<()> {
    check_non_negative("learning_rate", learning_rate)?;
    check_non_negative("weight_decay", weight_decay)?;
    Ok(())
}

/// Checks that both betas are in `[0, 1)`.
pub(crate) fn check_betas(betas: (f64, f64)) -> Result<()> {
    check_fraction("betas.0", betas.0)?;
    check_fraction("betas.1", betas.1)?;
    Ok(())
}
