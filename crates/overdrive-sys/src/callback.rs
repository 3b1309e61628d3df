//! Rust closures that libtorch calls, and how their errors and panics come back.

use std::any::Any;
use std::error::Error as StdError;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use crate::ffi::{RawClosure, RawFailure};

/// The error that a callback may return: any that can cross threads, because libtorch runs backward on
/// threads of its own on a GPU.
pub type CallbackError = Box<dyn StdError + Send + Sync>;

/// The result of a callback.
pub type CallbackResult<T> = std::result::Result<T, CallbackError>;

/// What a callback ended with, other than success.
pub(crate) enum Failure {
    Error(CallbackError),
    Panic(Box<dyn Any + Send>),
}

/// A failure on its way through C++: the message for whoever cannot take the value out.
struct Carried {
    message: String,
    failure: Mutex<Option<Failure>>,
}

/// Runs `body` so that neither an error nor a panic unwinds into C++.
pub(crate) fn contain(body: impl FnOnce() -> CallbackResult<()>) -> RawFailure {
    // The closure's state is not looked at again by code that would mind a broken invariant: libtorch
    // hands the panic on to the caller, who unwinds.
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return success(),
        Ok(Err(error)) => Failure::Error(error),
        Err(payload) => Failure::Panic(payload),
    };
    let message = match &failure {
        Failure::Error(error) => error.to_string(),
        Failure::Panic(payload) => format!("panicked: {}", panic_text(&**payload)),
    };
    let carried = Arc::new(Carried {
        message,
        failure: Mutex::new(Some(failure)),
    });
    RawFailure {
        message: carried.message.as_ptr().cast(),
        message_len: carried.message.len(),
        payload: Arc::into_raw(carried).cast_mut().cast(),
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
    // SAFETY: C++ calls this once for each payload that `contain` gave out.
    unsafe { drop(Arc::from_raw(payload.cast::<Carried>().cast_const())) }
}

/// Takes the failure out of a status's payload, unless someone did before.
///
/// # Safety
/// `payload` is null or came from [`contain`] and is alive.
pub(crate) unsafe fn failure(payload: *mut c_void) -> Option<Failure> {
    if payload.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let carried = unsafe { &*payload.cast::<Carried>().cast_const() };
    carried
        .failure
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .take()
}

/// What a panic said.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    if let Some(text) = payload.downcast_ref::<&'static str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "(a value that is not text)"
    }
}

/// Hands a value to C++, which drops it once.
pub(crate) fn closure<T: Send>(value: T) -> RawClosure {
    unsafe extern "C" fn drop_box<T>(value: *mut c_void) {
        // A panic in a destructor has nobody to go to; it must not unwind into C++ either.
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
