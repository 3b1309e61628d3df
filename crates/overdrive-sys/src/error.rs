//! The errors of calls from Rust into libtorch.

use std::ffi::{CStr, c_char};

use crate::{callback, ffi};

/// An error of the shim or of libtorch behind it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An allocation failed, on the device or against a limit that was set.
    #[error("{operation}: {message}")]
    OutOfMemory {
        /// The operation that failed.
        operation: String,
        /// libtorch's message.
        message: String,
    },
    /// The loaded libtorch has no operator, constant or device of this name.
    #[error("{operation}: {message}")]
    NotFound {
        /// The operation that failed.
        operation: String,
        /// The name that was looked up.
        message: String,
    },
    /// An argument does not fit the schema of an operator or the state of a handle.
    #[error("{operation}: {message}")]
    BadArgument {
        /// The operation that failed.
        operation: String,
        /// The argument, the expected value and the given one.
        message: String,
    },
    /// libtorch threw an exception.
    #[error("{operation}: {message}")]
    Torch {
        /// The operation that failed.
        operation: String,
        /// libtorch's message.
        message: String,
    },
    /// A Rust callback that libtorch called (a backward function, a hook) returned an error.
    #[error("{operation}: {source}")]
    Callback {
        /// The operation that failed.
        operation: String,
        /// The error, as the callback returned it.
        source: crate::callback::CallbackError,
    },
    /// An option out of its range, or a tensor of the wrong shape, dtype or device.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// Returns the text of an error without the lines in which libtorch says where in C++ it was raised. The frames below them
/// are there only with `TORCH_SHOW_CPP_STACKTRACES=1` in the environment, as in PyTorch; then they are kept.
///
/// ```
/// let text = "shape '[7]' is invalid\nException raised from infer_size at /src/shape.h:59 (most recent call first):\n";
/// assert_eq!(overdrive_sys::without_backtrace(text), "shape '[7]' is invalid");
/// ```
pub fn without_backtrace(text: &str) -> String {
    if text.contains("\nframe #") {
        return text.to_owned();
    }
    let kept = text
        .lines()
        .filter(|line| !line.starts_with("Exception raised from "));
    kept.collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

/// The result of a call into libtorch.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns `true` if memory ran out on any device, so that a smaller batch may help.
    pub fn is_out_of_memory(&self) -> bool {
        match self {
            Self::OutOfMemory { .. } => true,
            Self::Callback { source, .. } => is_out_of_memory(&**source),
            Self::Tch(error) => says_out_of_memory(&error.to_string()),
            _ => false,
        }
    }
}

/// Returns `true` if `error`, or one of its sources, says that memory ran out.
///
/// The types of errors are not enough: tch keeps only the text of a C++ exception, and an error that wraps
/// another one with `#[error(transparent)]` hides it from `source`. So the messages are searched too.
///
/// ```
/// let error = tch::TchError::Torch("CUDA out of memory. Tried to allocate 20.00 MiB.".into());
/// assert!(overdrive_sys::is_out_of_memory(&error));
/// ```
pub fn is_out_of_memory(error: &(dyn std::error::Error + 'static)) -> bool {
    // The chain of sources, because callers wrap libtorch's errors in their own.
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

/// Searches for the messages of libtorch's allocators (CUDA's and Overdrive's CPU allocator, then libtorch's
/// own CPU allocator), of cuBLAS and of cuDNN. cuDNN also reports a lack of memory for its workspace as
/// "not supported", which Accelerate's `should_reduce_batch_size` takes for one too.
fn says_out_of_memory(message: &str) -> bool {
    const WORDS: [&str; 5] = [
        "out of memory",
        "DefaultCPUAllocator: can't allocate memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_NOT_SUPPORTED",
    ];
    WORDS.iter().any(|words| message.contains(words))
}

/// Converts a status of the shim into a result and frees it. A panic of a callback resumes here.
pub(crate) fn check(status: *mut ffi::Status, operation: &str) -> Result<()> {
    if status.is_null() {
        return Ok(());
    }
    // The message is copied before the status that owns it is freed.
    // SAFETY: a status that is not null is valid until `od_status_free`, which is called once, here;
    // its message is a C string that lives as long.
    let (kind, message, failure) = unsafe {
        let kind = ffi::od_status_kind(status);
        let failure = callback::take_failure(ffi::od_status_payload(status));
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
            // The payload is taken once, but libtorch may rethrow the same exception to several callers.
            None => Error::Torch { operation, message },
        },
        ffi::OUT_OF_MEMORY => Error::OutOfMemory { operation, message },
        ffi::NOT_FOUND => Error::NotFound { operation, message },
        ffi::BAD_ARGUMENT => Error::BadArgument { operation, message },
        _ => Error::Torch { operation, message },
    })
}

/// Copies a string that the shim allocated, and frees it.
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
