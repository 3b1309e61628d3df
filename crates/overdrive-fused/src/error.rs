use tch::{Device, Kind, Tensor};

use crate::tensors::is_floating;

/// An error of a fused function.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is outside its range, or a tensor has a shape, dtype or device that the function cannot take.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// A label is neither a class nor the label to ignore.
    #[error(
        "{function}: the label of row {row} is {label}; it must be in 0..{classes}, or {ignore_index} for an ignored row"
    )]
    Label {
        /// The name of the function.
        function: &'static str,
        /// The first row (of the flattened labels) that has such a label.
        row: usize,
        /// The label.
        label: i64,
        /// The number of classes.
        classes: i64,
        /// The label that marks rows to ignore.
        ignore_index: i64,
    },
    /// A second backward pass needs buffers that the first one has overwritten.
    #[error(
        "{function}: a second backward pass needs buffers that the first one has overwritten; set {option} in the options"
    )]
    BackwardAgain {
        /// The name of the function.
        function: &'static str,
        /// The option to set, and its value.
        option: &'static str,
    },
    /// An error of the graph, or of a function in it.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),
    /// An error of the GPU kernels.
    #[error(transparent)]
    Gpu(#[from] overdrive_gpu::Error),
    /// An error of libtorch through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns the name of an argument in an error.
fn argument(function: &str, name: &str) -> String {
    format!("{name} of {function}")
}

/// Returns the error for an argument of the wrong shape.
pub(crate) fn wrong_shape(
    function: &str,
    name: &str,
    tensor: &Tensor,
    expected: impl Into<String>,
) -> Error {
    let expected: String = expected.into();
    overdrive_core::Error::shape(argument(function, name), tensor.size(), expected).into()
}

/// Returns the error for an argument of the wrong dtype.
pub(crate) fn wrong_dtype(function: &str, name: &str, kind: Kind, expected: &'static str) -> Error {
    overdrive_core::Error::dtype(argument(function, name), kind, expected).into()
}

/// Checks that an argument has a floating-point dtype.
pub(crate) fn check_floating(function: &str, name: &str, tensor: &Tensor) -> Result<()> {
    match is_floating(tensor.kind()) {
        true => Ok(()),
        false => Err(wrong_dtype(
            function,
            name,
            tensor.kind(),
            "Float, Double, Half or BFloat16",
        )),
    }
}

/// Checks that an argument is on the device of another one.
pub(crate) fn check_device(
    function: &str,
    (name, device): (&str, Device),
    (other, expected): (&str, Device),
) -> Result<()> {
    match device == expected {
        true => Ok(()),
        false => {
            let expected = format!("on {expected:?}, as `{other}` is; move one of the two");
            Err(overdrive_core::Error::device(argument(function, name), device, expected).into())
        }
    }
}
