//! Hooks on the gradients of tensors.

use std::ffi::c_void;
use std::ptr;

use tch::Tensor;

use crate::callback::{self, CallbackResult};
use crate::error::{Result, check};
use crate::exclusive::Exclusive;
use crate::ffi::{self, RawTensor};
use crate::function::{handle, into_handle};

// Exclusive, because hooks are `FnMut` and two backward passes may call one at the same time.
type TensorHook = Exclusive<dyn FnMut(&Tensor) -> CallbackResult<Option<Tensor>> + Send>;

const RECURSION: &str = "a hook ran a backward pass that calls the hook again: run it on a detached copy of the \
                         tensor, or after the hook";

/// A registered hook. Dropping this handle leaves the hook in place; [`remove`](Self::remove) removes it.
#[derive(Debug)]
pub struct Hook {
    raw: *mut ffi::RawHook,
}

// SAFETY: the handle is a weak pointer and a number; removing a hook locks the list that it changes.
unsafe impl Send for Hook {}

impl Hook {
    /// Removes the hook, which may be running. Has no effect if its tensor has been freed.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] if libtorch throws.
    pub fn remove(self) -> Result<()> {
        let raw = self.raw;
        // `od_hook_remove` frees the handle, which `Drop` would do again.
        std::mem::forget(self);
        // SAFETY: owned by `self`, given to the shim once.
        check(unsafe { ffi::od_hook_remove(raw) }, "removing a hook")
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; the hook itself is its tensor's.
        unsafe { ffi::od_hook_free(self.raw) }
    }
}

/// Calls `hook` with the gradient of `tensor` each time it is computed. A tensor that the hook returns
/// replaces the gradient.
///
/// # Errors
/// [`crate::Error::Torch`] if the tensor does not require a gradient.
pub fn register<F>(tensor: &Tensor, hook: F) -> Result<Hook>
where
    F: FnMut(&Tensor) -> CallbackResult<Option<Tensor>> + Send + 'static,
{
    let boxed: Box<TensorHook> = Box::new(Exclusive::new(hook));
    let mut raw = ptr::null_mut();
    // SAFETY: the tensor is alive during the call; the closure is the shim's from here on.
    let status = unsafe {
        ffi::od_hook_register(
            handle(tensor),
            callback::into_raw_closure(boxed),
            call_hook,
            &raw mut raw,
        )
    };
    check(status, "registering a hook")?;
    Ok(Hook { raw })
}

/// Calls `hook` with the leaf `tensor` each time a backward pass has added to its gradient.
///
/// # Errors
/// [`crate::Error::Torch`] if the tensor is not a leaf that requires a gradient.
pub fn register_post_accumulate<F>(tensor: &Tensor, mut hook: F) -> Result<Hook>
where
    F: FnMut(&Tensor) -> CallbackResult<()> + Send + 'static,
{
    let boxed: Box<TensorHook> = Box::new(Exclusive::new(move |leaf: &Tensor| {
        hook(leaf)?;
        Ok(None)
    }));
    let mut raw = ptr::null_mut();
    // One callback serves both kinds of hook: this kind never returns a replacement.
    // SAFETY: as in `register`.
    let status = unsafe {
        ffi::od_hook_register_post_accumulate(
            handle(tensor),
            callback::into_raw_closure(boxed),
            call_hook,
            &raw mut raw,
        )
    };
    check(status, "registering a post-accumulate hook")?;
    Ok(Hook { raw })
}

unsafe extern "C" fn call_hook(
    closure: *mut c_void,
    tensor: RawTensor,
    replacement: *mut RawTensor,
) -> ffi::RawFailure {
    callback::catch_failure(|| {
        // SAFETY: the closure that one of the functions above made, which the shim keeps alive during the call, also
        // if the hook is removed; the tensor is borrowed for the call and cloned shallowly.
        let (hook, tensor) = unsafe {
            (
                &*closure.cast::<Box<TensorHook>>(),
                Tensor::clone_from_ptr(tensor.cast()),
            )
        };
        if let Some(gradient) = hook.with(RECURSION, |hook| hook(&tensor))? {
            // SAFETY: `replacement` points to one handle, which the shim owns from here on.
            unsafe { *replacement = into_handle(gradient) };
        }
        Ok(())
    })
}
