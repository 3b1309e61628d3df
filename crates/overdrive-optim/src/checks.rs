//! What every optimizer asks of its parameters and gradients.

use std::collections::{BTreeSet, HashMap};

use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// Where and what a parameter was when its optimizer state was made.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Place {
    pub(crate) kind: Kind,
    pub(crate) device: Device,
    pub(crate) size: Vec<i64>,
}

impl Place {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self {
            kind: tensor.kind(),
            device: tensor.device(),
            size: tensor.size(),
        }
    }

    fn in_words(&self) -> String {
        format!("{:?} on {:?}", self.kind, self.device)
    }
}

/// The gradient of a parameter, `None` if it has none; an error if it cannot be applied. `state` is the
/// place of the parameter when its state was made, `None` if it has none yet.
pub(crate) fn gradient_of(
    name: &str,
    tensor: &Tensor,
    state: Option<&Place>,
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
    if gradient.is_sparse() {
        return Err(unfit(
            "sparse".into(),
            "dense (make the embedding with sparse: false)".into(),
        ));
    }
    let (now, of_gradient) = (Place::of(tensor), Place::of(&gradient));
    if (of_gradient.kind, of_gradient.device) != (now.kind, now.device) {
        return Err(unfit(of_gradient.in_words(), now.in_words()));
    }
    if let Some(state) = state {
        let moved = |now: String, state: String| Error::MovedParameter {
            name: name.to_owned(),
            now,
            state,
        };
        if (state.kind, state.device) != (now.kind, now.device) {
            return Err(moved(now.in_words(), state.in_words()));
        }
        // Kernels take the parameter's element count for all tensors.
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

/// A floating-point leaf.
pub(crate) fn check_leaf(name: &str, tensor: &Tensor) -> Result<()> {
    let kind = tensor.f_kind()?;
    if !matches!(
        kind,
        Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
    ) {
        return Err(Error::UnsupportedKind {
            name: name.to_owned(),
            kind,
        });
    }
    if !tensor.f_is_leaf()? {
        return Err(Error::NonLeafParameter {
            name: name.to_owned(),
        });
    }
    Ok(())
}

/// No name twice, no memory twice.
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

/// Whether equal offsets mean equal indices. Strides of dimensions of size 1 mean nothing.
pub(crate) fn same_layout(a: &Tensor, b: &Tensor) -> bool {
    let size = a.size();
    size == b.size()
        && size
            .iter()
            .zip(a.stride().iter().zip(b.stride()))
            .all(|(&length, (&a, b))| length <= 1 || a == b)
}

/// Bytes of a tensor's elements.
pub(crate) fn bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}

/// An option outside its range, as an error.
pub(crate) fn check_option(
    option: &'static str,
    value: impl std::fmt::Display,
    holds: bool,
    expected: &'static str,
) -> Result<()> {
    if holds {
        return Ok(());
    }
    Err(Error::InvalidOption {
        option,
        value: value.to_string(),
        expected,
    })
}

/// A finite number from 0: learning rates, decays and their like.
pub(crate) fn check_finite_from_zero(option: &'static str, value: f64) -> Result<()> {
    check_option(
        option,
        value,
        value >= 0.0 && value.is_finite(),
        "a finite number from 0",
    )
}

/// Two numbers from 0 to below 1.
pub(crate) fn check_betas(betas: (f64, f64)) -> Result<()> {
    for beta in [betas.0, betas.1] {
        check_option(
            "betas",
            beta,
            (0.0..1.0).contains(&beta),
            "two numbers from 0 to below 1",
        )?;
    }
    Ok(())
}
