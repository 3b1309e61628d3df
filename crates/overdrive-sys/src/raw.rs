//! The elements of CPU tensors as slices, for kernels that are written in Rust.

use std::ffi::c_void;
use std::num::NonZeroUsize;

use half::{bf16, f16};
use tch::{Device, Kind, Tensor};

use crate::ScalarType;
use crate::error::{Error, Result, check};
use crate::ffi;
use crate::function::handle;

pub use crate::located_tensor::LocatedTensor;

const OPERATION: &str = "reading the elements of a tensor";

// Sealed: an implementation with the wrong `KIND` would reinterpret memory.
mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be the element of a tensor.
pub trait Element: Copy + Send + Sync + sealed::Sealed + 'static {
    /// The dtype of such a tensor.
    const KIND: Kind;
}

macro_rules! elements {
    ($($type:ty => $kind:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const KIND: Kind = Kind::$kind;
        }
    )*};
}

elements! {
    f32 => Float, f64 => Double, f16 => Half, bf16 => BFloat16,
    u8 => Uint8, i8 => Int8, i16 => Int16, i32 => Int, i64 => Int64, BoolByte => Bool,
}

/// An element of a mask. libtorch writes 0 or 1, but a mask may be a view of other bytes, which Rust's `bool` must not
/// hold.
#[derive(Debug, Clone, Copy)]
#[repr(transparent)]
pub struct BoolByte(u8);

impl BoolByte {
    /// Returns `true` for every byte but 0, as libtorch does.
    #[inline(always)]
    pub const fn get(self) -> bool {
        self.0 != 0
    }
}

impl From<bool> for BoolByte {
    fn from(value: bool) -> Self {
        Self(value.into())
    }
}

/// Returns the elements of a contiguous CPU tensor.
///
/// # Errors
/// [`Error::BadArgument`] if the tensor has another dtype, is not on the CPU or is not contiguous, if its memory does
/// not hold its values (a lazily negated or conjugated view), or if it does not lie in its storage, which another
/// tensor may have shrunk.
///
/// # Safety
/// Nobody writes to the tensor's memory or resizes its storage, through this or any other tensor that shares it, while
/// the slice lives.
pub unsafe fn slice<T: Element>(tensor: &Tensor) -> Result<&[T]> {
    let (pointer, len) = elements::<T>(tensor)?;
    // An empty tensor may have a null pointer, which no slice may have.
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: `elements` found `len` elements of `T` at the pointer, which live as long as the tensor; the caller
    // promises that nobody writes.
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// Returns the elements of a contiguous CPU tensor for writing.
///
/// # Errors
/// As [`slice()`].
///
/// # Safety
/// Nobody else reads or writes the tensor's memory or resizes its storage, through this or any other tensor that
/// shares it, while the slice lives.
#[allow(
    clippy::mut_from_ref,
    reason = "a tensor is a handle: its elements are shared memory, for which the caller vouches"
)]
pub unsafe fn slice_mut<T: Element>(tensor: &Tensor) -> Result<&mut [T]> {
    let (pointer, len) = elements::<T>(tensor)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `slice`; the caller promises that nobody else touches the memory.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer, len) })
}

/// Returns the value of a float CPU tensor of one element, which is read from its memory without an operator;
/// `None` for any other tensor. Where this returns a value, reading it waits for no device.
pub fn host_value(tensor: &Tensor) -> Option<f64> {
    let is_host = tensor.defined() && tensor.device() == Device::Cpu && !tensor.is_sparse();
    if !is_host || tensor.numel() != 1 {
        return None;
    }
    // SAFETY: the element is copied at once; another thread that writes to it races with libtorch's own
    // operators as well.
    unsafe {
        match tensor.f_kind() {
            Ok(Kind::Float) => slice::<f32>(tensor).ok()?.first().map(|&x| x.into()),
            Ok(Kind::Double) => slice::<f64>(tensor).ok()?.first().copied(),
            _ => None,
        }
    }
}

/// Returns the address of the first element of a CPU tensor of any strides and dtype. All its elements lie in its
/// storage, with strides that are not negative, until the storage is resized.
///
/// # Errors
/// As [`slice()`], but for dtype and strides.
pub fn address(tensor: &Tensor) -> Result<*mut u8> {
    let (data, _) = checked_elements(tensor, ScalarType::of(tensor), false)?;
    Ok(data.cast())
}

/// Returns the address at which the data of a tensor on any device begins, to compare it with others; `None` for an
/// empty tensor and for one without a storage (a sparse one).
pub fn data_address(tensor: &Tensor) -> Option<NonZeroUsize> {
    // SAFETY: a valid handle.
    NonZeroUsize::new(unsafe { ffi::od_data_address(handle(tensor)) } as usize)
}

pub(crate) fn elements<T: Element>(tensor: &Tensor) -> Result<(*mut T, usize)> {
    let (data, count) = checked_elements(tensor, ScalarType::from(T::KIND), true)?;
    Ok((data.cast(), count))
}

fn checked_elements(
    tensor: &Tensor,
    dtype: ScalarType,
    contiguous: bool,
) -> Result<(*mut c_void, usize)> {
    let (mut data, mut count) = (std::ptr::null_mut(), ffi::OTHER_KIND);
    // SAFETY: a valid handle; the shim writes the two results.
    let status = unsafe {
        ffi::od_cpu_elements(
            handle(tensor),
            dtype.code(),
            i32::from(contiguous),
            &raw mut data,
            &raw mut count,
        )
    };
    check(status, OPERATION)?;
    // Negative counts are reasons. They are explained here and not by the shim, so that the common case is one
    // foreign call.
    if let Ok(count) = usize::try_from(count) {
        return Ok((data, count));
    }
    let problem = match count {
        _ if tensor.device() != Device::Cpu => format!("it is on {:?}", tensor.device()),
        ffi::SPARSE => "it is sparse".to_owned(),
        _ if ScalarType::of(tensor) != dtype => {
            format!("its dtype is {}", ScalarType::of(tensor))
        }
        ffi::OTHER_KIND => format!("it has strides {:?}", tensor.stride()),
        ffi::LAZY => "it is a negated or conjugated view (`resolve_neg` copies it)".to_owned(),
        _ => "its elements do not lie in its storage, which was shrunk, or it has none".to_owned(),
    };
    let layout = if contiguous { "a contiguous" } else { "a" };
    Err(Error::BadArgument {
        operation: OPERATION.to_owned(),
        message: format!(
            "expected {layout} {dtype} tensor on the CPU; {problem}, its shape is {:?}",
            tensor.size()
        ),
    })
}
