//! The errors of this crate.

use tch::{Device, Kind, Tensor};

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of range, or a tensor has the wrong shape, dtype or device.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// The offsets or slots of packed sequences do not fit the tokens or the pool of states, or the pool cannot be updated.
    #[error("`{argument}`: {problem}")]
    Sequences {
        /// The name of the argument.
        argument: &'static str,
        /// The mistake, and the values that are allowed.
        problem: String,
    },

    /// libtorch refused an operation that tch binds.
    #[error(transparent)]
    Tch(#[from] tch::TchError),

    /// libtorch refused an operation that goes through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// A GPU kernel or the CUDA driver failed.
    #[error(transparent)]
    Gpu(#[from] overdrive_gpu::Error),

    /// The autograd function of a kernel failed.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),
}

/// Returns the error of a tensor of the wrong shape.
pub(crate) fn wrong_shape(
    name: &'static str,
    tensor: &Tensor,
    expected: impl Into<String>,
) -> Error {
    let expected: String = expected.into();
    overdrive_core::Error::shape(name, tensor.size(), expected).into()
}

/// Checks the shape of a tensor.
pub(crate) fn check_shape(
    name: &'static str,
    tensor: &Tensor,
    expected: &[i64],
    letters: &str,
) -> Result<()> {
    match tensor.size() == expected {
        true => Ok(()),
        false => Err(wrong_shape(
            name,
            tensor,
            format!("{letters} = {expected:?}"),
        )),
    }
}

/// Checks that a tensor is floating-point.
pub(crate) fn check_floating(name: &'static str, tensor: &Tensor) -> Result<()> {
    let kind = tensor.kind();
    let floating = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
    match floating.contains(&kind) {
        true => Ok(()),
        false => {
            let expected = "Float, Double, Half or BFloat16; convert it with `to_kind`";
            Err(overdrive_core::Error::dtype(name, kind, expected).into())
        }
    }
}

/// Checks the dtype of a state.
pub(crate) fn check_kind(
    name: &'static str,
    tensor: &Tensor,
    kind: Kind,
    reason: &str,
) -> Result<()> {
    match tensor.kind() == kind {
        true => Ok(()),
        false => {
            let expected = format!("{kind:?}{reason}");
            Err(overdrive_core::Error::dtype(name, tensor.kind(), expected).into())
        }
    }
}

/// Checks that a tensor is on a device, that of the tensor `other`.
pub(crate) fn check_device(
    name: &'static str,
    tensor: &Tensor,
    other: &str,
    device: Device,
) -> Result<()> {
    match tensor.device() == device {
        true => Ok(()),
        false => {
            let expected = format!("on {device:?}, as `{other}` is; move one of the two");
            Err(overdrive_core::Error::device(name, tensor.device(), expected).into())
        }
    }
}

/// Checks that a pool of states is contiguous.
pub(crate) fn check_contiguous(states: &Tensor) -> Result<()> {
    match states.is_contiguous() {
        true => Ok(()),
        false => Err(Error::Sequences {
            argument: "states",
            problem: format!(
                "it has strides {:?}; a pool must be contiguous to be updated in place",
                states.stride()
            ),
        }),
    }
}
