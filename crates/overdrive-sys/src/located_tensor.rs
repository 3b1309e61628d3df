use std::ffi::c_void;
use std::ops::Deref;
use std::ptr::NonNull;

use tch::{Device, Kind, Tensor};

use crate::ffi;
use crate::function::handle;
use crate::raw::{Element, elements, slice, slice_mut};

/// A tensor whose elements are borrowed repeatedly, such as a weight: on the CPU their address is found once.
///
/// [`slice()`] reads libtorch's description of a tensor, about six cache lines. A decoding step of a small model does
/// that for hundreds of tensors, after its weights have displaced those lines from the caches. This type reads a
/// single line: the current address of the storage.
///
/// In all other respects it is the tensor. If another handle gives the tensor a new storage (`set_data`) or another
/// shape, the elements remain those that were found first.
///
/// ```
/// use overdrive_sys::raw::LocatedTensor;
/// use tch::Tensor;
///
/// let weight = LocatedTensor::from(Tensor::from_slice(&[1.0_f32, 2.0]));
/// // SAFETY: nobody writes to the tensor.
/// assert_eq!(unsafe { weight.slice::<f32>()? }, [1.0, 2.0]);
/// # Ok::<(), overdrive_sys::Error>(())
/// ```
#[derive(Debug)]
pub struct LocatedTensor {
    tensor: Tensor,
    /// `None` for tensors that [`slice()`] does not read: on another device, not contiguous, of another dtype.
    // A line of memory of its own, so that weights do not grow by one for each tensor.
    place: Option<Box<Place>>,
}

impl LocatedTensor {
    /// Returns the dtype.
    pub fn kind(&self) -> Kind {
        match &self.place {
            Some(place) => place.kind,
            None => self.tensor.kind(),
        }
    }

    /// Returns the device.
    pub fn device(&self) -> Device {
        match &self.place {
            Some(_) => Device::Cpu,
            None => self.tensor.device(),
        }
    }

    /// Returns the elements as [`slice()`] does.
    ///
    /// # Errors
    /// As [`slice()`].
    ///
    /// # Safety
    /// As for [`slice()`].
    pub unsafe fn slice<T: Element>(&self) -> crate::Result<&[T]> {
        match self.found::<T>() {
            // SAFETY: `found` checked that the elements are still there, in a storage that lives as long as `self`;
            // the caller promises that nobody writes.
            Some((data, len)) => Ok(unsafe { std::slice::from_raw_parts(data.as_ptr(), len) }),
            // SAFETY: as this function.
            None => unsafe { slice(&self.tensor) },
        }
    }

    /// Returns the elements for writing as [`slice_mut()`] does.
    ///
    /// # Errors
    /// As [`slice()`].
    ///
    /// # Safety
    /// As for [`slice_mut()`].
    #[allow(
        clippy::mut_from_ref,
        reason = "a tensor is a handle: its elements are shared memory, for which the caller vouches"
    )]
    pub unsafe fn slice_mut<T: Element>(&self) -> crate::Result<&mut [T]> {
        match self.found::<T>() {
            // SAFETY: as in `slice`; the caller promises that nobody else touches the memory.
            Some((data, len)) => Ok(unsafe { std::slice::from_raw_parts_mut(data.as_ptr(), len) }),
            // SAFETY: as this function.
            None => unsafe { slice_mut(&self.tensor) },
        }
    }

    /// Returns the location of the elements, unless they are of another type or the storage has moved.
    fn found<T: Element>(&self) -> Option<(NonNull<T>, usize)> {
        let place = self.place.as_ref()?;
        (place.kind == T::KIND && place.is_current()).then(|| (place.elements.cast(), place.len))
    }
}

impl From<Tensor> for LocatedTensor {
    fn from(tensor: Tensor) -> Self {
        let place = Place::of(&tensor).map(Box::new);
        LocatedTensor { tensor, place }
    }
}

impl Deref for LocatedTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// The elements of a tensor, and the storage in which they were found.
#[derive(Debug)]
struct Place {
    kind: Kind,
    elements: NonNull<c_void>,
    len: usize,
    /// A handle to the storage.
    memory: NonNull<ffi::RawMemory>,
    address: *const c_void,
    bytes: usize,
}

// SAFETY: addresses, and a handle with an atomic count that is only read through.
unsafe impl Send for Place {}

impl Place {
    fn of(tensor: &Tensor) -> Option<Place> {
        if !tensor.defined() || tensor.device() != Device::Cpu {
            return None;
        }
        let kind = tensor.f_kind().ok()?;
        let (data, len) = elements_of(tensor, kind)?;
        // An empty tensor may have no address.
        let elements = NonNull::new(data)?;
        // SAFETY: a valid handle to a tensor that has a storage, since its elements were found.
        let memory = NonNull::new(unsafe { ffi::od_memory_of(handle(tensor)) })?;
        let mut place = Place {
            kind,
            elements,
            len,
            memory,
            address: std::ptr::null(),
            bytes: 0,
        };
        (place.address, place.bytes) = place.current();
        Some(place)
    }

    /// Returns the address and the bytes of the storage.
    fn current(&self) -> (*const c_void, usize) {
        let mut bytes = 0;
        // SAFETY: the handle lives as long as `self`; the shim writes the size.
        let address =
            unsafe { ffi::od_memory_address(self.memory.as_ptr().cast_const(), &raw mut bytes) };
        (address, bytes)
    }

    fn is_current(&self) -> bool {
        self.current() == (self.address, self.bytes)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_memory_free(self.memory.as_ptr()) }
    }
}

/// Returns the address of the first element and the number of elements, of tensors whose dtype is an [`Element`].
fn elements_of(tensor: &Tensor, kind: Kind) -> Option<(*mut c_void, usize)> {
    fn of<T: Element>(tensor: &Tensor) -> Option<(*mut c_void, usize)> {
        let (data, len) = elements::<T>(tensor).ok()?;
        Some((data.cast(), len))
    }
    match kind {
        Kind::Float => of::<f32>(tensor),
        Kind::Half => of::<half::f16>(tensor),
        Kind::BFloat16 => of::<half::bf16>(tensor),
        Kind::Uint8 => of::<u8>(tensor),
        Kind::Int8 => of::<i8>(tensor),
        Kind::Int => of::<i32>(tensor),
        _ => None,
    }
}
