//! The elements of CPU tensors as slices, for kernels that are written in Rust.

use half::{bf16, f16};
use tch::{Device, Kind, Tensor};

use crate::device::scalar_code;
use crate::error::{Error, Result, check};
use crate::ffi;
use crate::function::handle;

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
    u8 => Uint8, i8 => Int8, i16 => Int16, i32 => Int, i64 => Int64, bool => Bool,
}

/// Returns the elements of a contiguous CPU tensor.
///
/// # Errors
/// [`Error::BadArgument`] if the tensor has another dtype, is not on the CPU or is not contiguous.
///
/// # Safety
/// Nobody writes to the tensor's memory, through this or any other tensor that shares it, while the
/// slice lives.
pub unsafe fn slice<T: Element>(tensor: &Tensor) -> Result<&[T]> {
    let (pointer, len) = elements::<T>(tensor)?;
    // An empty tensor may have a null pointer, which no slice may have.
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: `elements` found `len` elements of `T` at the pointer, which live as long as the tensor;
    // the caller vouches that nobody writes.
    Ok(unsafe { std::slice::from_raw_parts(pointer, len) })
}

/// Returns the elements of a contiguous CPU tensor for writing.
///
/// # Errors
/// As [`slice()`].
///
/// # Safety
/// Nobody else reads or writes the tensor's memory, through this or any other tensor that shares it,
/// while the slice lives.
#[allow(
    clippy::mut_from_ref,
    reason = "a tensor is a handle: its elements are shared memory, for which the caller vouches"
)]
pub unsafe fn slice_mut<T: Element>(tensor: &Tensor) -> Result<&mut [T]> {
    let (pointer, len) = elements::<T>(tensor)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `slice`; the caller vouches that nobody else touches the memory.
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
        match tensor.kind() {
            Kind::Float => slice::<f32>(tensor).ok()?.first().map(|&x| x.into()),
            Kind::Double => slice::<f64>(tensor).ok()?.first().copied(),
            _ => None,
        }
    }
}

fn elements<T: Element>(tensor: &Tensor) -> Result<(*mut T, usize)> {
    let (mut data, mut count) = (std::ptr::null_mut(), -1);
    // SAFETY: a valid handle; the shim writes the two results.
    let status = unsafe {
        ffi::od_cpu_elements(
            handle(tensor),
            scalar_code(T::KIND),
            &raw mut data,
            &raw mut count,
        )
    };
    check(status, OPERATION)?;
    // -1 and -2 are errors. The reasons are looked up here and not by the shim, so that the common case
    // is one foreign call.
    if let Ok(count) = usize::try_from(count) {
        return Ok((data.cast(), count));
    }
    let problem = if tensor.device() != Device::Cpu {
        format!("it is on {:?}", tensor.device())
    } else if tensor.kind() != T::KIND {
        format!("its dtype is {:?}", tensor.kind())
    } else if count == -1 {
        format!("it has strides {:?}", tensor.stride())
    } else {
        "it is sparse".to_owned()
    };
    Err(Error::BadArgument {
        operation: OPERATION.to_owned(),
        message: format!(
            "expected a contiguous {:?} tensor on the CPU; {problem}, its shape is {:?}",
            T::KIND,
            tensor.size()
        ),
    })
}
