//! Rust closures that libtorch calls, and the way of their errors and panics back to Rust.

use std::any::Any;
use std::error::Error as StdError;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use overdrive_core::panic_text;

use crate::ffi::{RawClosure, RawFailure};

/// The error of a callback. It must be able to cross threads, because libtorch runs the backward pass of
/// a GPU on threads of its own.
pub type CallbackError = Box<dyn StdError + Send + Sync>;

/// The result of a callback.
pub type CallbackResult<T> = std::result::Result<T, CallbackError>;

/// The failure of a callback.
pub(crate) enum Failure {
    Error(CallbackError),
    Panic(Box<dyn Any + Send>),
}

/// A failure on its way through C++. The message is for callers that cannot take the value out, such as tch.
struct FailurePayload {
    message: String,
    failure: Mutex<Option<Failure>>,
}

/// Runs `body` and converts an error or a panic into a value, because neither may unwind into C++.
pub(crate) fn catch_failure(body: impl FnOnce() -> CallbackResult<()>) -> RawFailure {
    // `AssertUnwindSafe`: libtorch passes the panic on to the caller of the backward pass, which unwinds, so
    // nothing uses the state that the closure left behind.
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return success(),
        Ok(Err(error)) => Failure::Error(error),
        Err(payload) => Failure::Panic(payload),
    };
    let message = match &failure {
        Failure::Error(error) => error.to_string(),
        Failure::Panic(payload) => format!("panicked: {}", panic_text(&**payload)),
    };
    let shared = Arc::new(FailurePayload {
        message,
        failure: Mutex::new(Some(failure)),
    });
    RawFailure {
        // The pointer stays valid when the `Arc` moves: the text lies on the heap behind it.
        message: shared.message.as_ptr().cast(),
        message_len: shared.message.len(),
        payload: Arc::into_raw(shared).cast_mut().cast(),
        release,
    }
}

fn success() -> RawFailure {
    RawFailure {
        payload: ptr::null_mut(),
        message: ptr::null(),
        message_len: 0,
        release,
    }
}

unsafe extern "C" fn release(payload: *mut c_void) {
    // SAFETY: C++ calls this once for each payload that `catch_failure` returned.
    unsafe { drop(Arc::from_raw(payload.cast::<FailurePayload>().cast_const())) }
}

/// Takes the failure out of a status's payload; returns `None` if it was taken before.
///
/// # Safety
/// `payload` is null, or was returned by [`catch_failure`] and has not been released.
pub(crate) unsafe fn take_failure(payload: *mut c_void) -> Option<Failure> {
    if payload.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let shared = unsafe { &*payload.cast::<FailurePayload>().cast_const() };
    shared
        .failure
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take()
}

/// Moves a value to C++, which drops it once.
pub(crate) fn into_raw_closure<T: Send>(value: T) -> RawClosure {
    unsafe extern "C" fn drop_box<T>(value: *mut c_void) {
        // C++ destructors cannot report a panic, and it must not unwind into C++.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: made by `Box::into_raw` of the same type, dropped once by C++.
            unsafe { drop(Box::from_raw(value.cast::<T>())) }
        }));
    }
    RawClosure {
        self_: Box::into_raw(Box::new(value)).cast(),
        drop: drop_box::<T>,
    }
}
