//! What can go wrong between Rust and libtorch.

use std::ffi::{CStr, c_char};

use crate::{callback, ffi};

/// An error of the shim or of libtorch behind it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An allocation failed, on the device or against a limit that was set.
    #[error("{operation}: {message}")]
    OutOfMemory {
        /// What was being done.
        operation: String,
        /// libtorch's message.
        message: String,
    },
    /// There is no such operator in the loaded libtorch.
    #[error("{operation}: {message}")]
    NotFound {
        /// What was being done.
        operation: String,
        /// What was looked for.
        message: String,
    },
    /// An argument does not fit what it was given to.
    #[error("{operation}: {message}")]
    BadArgument {
        /// What was being done.
        operation: String,
        /// The argument, what was expected and what was given.
        message: String,
    },
    /// libtorch refused: its own message.
    #[error("{operation}: {message}")]
    Torch {
        /// What was being done.
        operation: String,
        /// libtorch's message.
        message: String,
    },
    /// A Rust callback that libtorch called (a backward, a hook) returned this error.
    #[error("{operation}: {source}")]
    Callback {
        /// What was being done.
        operation: String,
        /// The error, as the callback returned it.
        source: crate::callback::CallbackError,
    },
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of a call into libtorch.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Whether memory ran out, on any device: what a smaller batch would cure.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Callback { source, .. } => is_out_of_memory(&**source),
            Self::Tch(error) => says_out_of_memory(&error.to_string()),
            _ => false,
        }
    }
}

/// Whether `error`, or an error that it came from, says that memory ran out.
///
/// tch has only the text of a C++ exception, and an error type that passes another one through
/// (`#[error(transparent)]`) hides it from `source`, so texts are looked at too.
///
/// ```
/// let error = tch::TchError::Torch("CUDA out of memory. Tried to allocate 20.00 MiB.".into());
/// assert!(overdrive_sys::is_out_of_memory(&error));
/// ```
pub fn is_out_of_memory(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let known = error.downcast_ref::<Error>();
        if known.is_some_and(Error::is_out_of_memory) || says_out_of_memory(&error.to_string()) {
            return true;
        }
        next = error.source();
    }
    false
}

/// The words of libtorch's allocators: CUDA's (and ours), the plain CPU one's, and cuBLAS's and
/// cuDNN's own.
fn says_out_of_memory(message: &str) -> bool {
    const WORDS: [&str; 4] = [
        "out of memory",
        "DefaultCPUAllocator: can't allocate memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ];
    WORDS.iter().any(|words| message.contains(words))
}

/// Turns a status of the shim into a result, and frees it. A panic of a callback goes on from here.
pub(crate) fn check(status: *mut ffi::Status, operation: &str) -> Result<()> {
    if status.is_null() {
        return Ok(());
    }
    // SAFETY: a status that is not null is valid until `od_status_free`, which is called once, here;
    // its message is a C string that lives as long.
    let (kind, message, failure) = unsafe {
        let kind = ffi::od_status_kind(status);
        let failure = callback::failure(ffi::od_status_payload(status));
        let message = CStr::from_ptr(ffi::od_status_message(status))
            .to_string_lossy()
            .into_owned();
        ffi::od_status_free(status);
        (kind, message, failure)
    };
    let operation = operation.to_owned();
    Err(match kind {
        ffi::RUST => match failure {
            Some(callback::Failure::Error(source)) => Error::Callback { operation, source },
            Some(callback::Failure::Panic(payload)) => std::panic::resume_unwind(payload),
            // Taken by an earlier call that the same exception reached.
            None => Error::Torch { operation, message },
        },
        ffi::OUT_OF_MEMORY => Error::OutOfMemory { operation, message },
        ffi::NOT_FOUND => Error::NotFound { operation, message },
        ffi::BAD_ARGUMENT => Error::BadArgument { operation, message },
        _ => Error::Torch { operation, message },
    })
}

/// Takes a string that the shim allocated.
///
/// # Safety
/// `text` came out of a shim function that succeeded, and is not used again.
pub(crate) unsafe fn take_string(text: *mut c_char) -> String {
    // SAFETY: the caller's promise; strings of the shim end in a zero and are freed here, once.
    unsafe {
        let owned = CStr::from_ptr(text).to_string_lossy().into_owned();
        ffi::od_string_free(text);
        owned
    }
}
