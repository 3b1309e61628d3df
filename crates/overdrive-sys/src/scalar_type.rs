//! The dtypes of tensors as libtorch numbers them.

use std::ffi::CStr;
use std::fmt;

use tch::{Kind, Tensor};

use crate::device::{KINDS, scalar_code};
use crate::ffi;
use crate::function::handle;

/// The dtype of a tensor (`at::ScalarType`), with those that tch's [`Kind`] lacks.
///
/// libtorch has unsigned integers of 16, 32 and 64 bits and tch does not: `Tensor::kind` panics for such a tensor,
/// and `f_kind` fails. Code that handles tensors which operators save or return, such as the random state of flash
/// attention on a GPU, compares this type instead.
///
/// ```
/// use overdrive_sys::ScalarType;
/// use tch::{Device, Kind, Tensor};
///
/// let dtype = ScalarType::of(&Tensor::ones([2], (Kind::BFloat16, Device::Cpu)));
/// assert_eq!((dtype.kind(), dtype.bytes()), (Some(Kind::BFloat16), 2));
/// assert_eq!(dtype.to_string(), "BFloat16");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ScalarType {
    code: i32,
    bytes: usize,
}

impl ScalarType {
    /// Returns the dtype of a tensor.
    pub fn of(tensor: &Tensor) -> Self {
        let mut bytes = 0;
        // SAFETY: a valid handle; the shim writes the size.
        let code = unsafe { ffi::od_scalar_type(handle(tensor), &raw mut bytes) };
        Self { code, bytes }
    }

    /// Returns tch's name of the dtype; `None` if it has none.
    pub fn kind(self) -> Option<Kind> {
        let same = |kind: &Kind| scalar_code(*kind) == i64::from(self.code);
        KINDS.iter().copied().find(same)
    }

    /// Returns libtorch's number of the dtype, which operators take as an integer.
    pub fn code(self) -> i64 {
        self.code.into()
    }

    /// Returns the bytes of an element; 0 for an undefined tensor.
    pub fn bytes(self) -> usize {
        self.bytes
    }
}

impl From<Kind> for ScalarType {
    fn from(kind: Kind) -> Self {
        Self {
            // The numbers are below 30.
            code: scalar_code(kind) as i32,
            bytes: kind.elt_size_in_bytes(),
        }
    }
}

impl fmt::Display for ScalarType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(kind) = self.kind() {
            return write!(f, "{kind:?}");
        }
        // SAFETY: the shim returns a text that lives forever, also for a number that no dtype has.
        let name = unsafe { CStr::from_ptr(ffi::od_scalar_type_name(self.code)) };
        f.write_str(&name.to_string_lossy())
    }
}
