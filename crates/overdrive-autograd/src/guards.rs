//! Guards for the grad and inference modes of the current thread. A mode ends with its scope, also by a
//! panic.

use overdrive_sys::engine;

use crate::Result;

pub use overdrive_sys::engine::{is_grad_enabled, is_inference, is_inference_mode_enabled};
pub use overdrive_sys::saved_tensors::{BackwardOnThisThread, backward_stays_on_this_thread};

/// A guard that disables gradient recording on this thread while it lives (`torch.no_grad`).
///
/// Unlike `tch::no_grad`, it restores the mode after a panic too.
///
/// ```
/// use overdrive_autograd::{is_grad_enabled, NoGradGuard};
///
/// {
///     let _no_grad = NoGradGuard::new();
///     assert!(!is_grad_enabled());
/// }
/// assert!(is_grad_enabled());
/// ```
///
/// The mode is thread-local, so the guard cannot be sent to another thread:
///
/// ```compile_fail
/// let guard = overdrive_autograd::NoGradGuard::new();
/// std::thread::spawn(move || drop(guard));
/// ```
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct NoGradGuard(#[allow(dead_code, reason = "held for its destructor")] engine::GradMode);

impl NoGradGuard {
    /// Disables recording.
    #[allow(
        clippy::new_without_default,
        reason = "a guard has an effect, which `default()` would hide"
    )]
    pub fn new() -> Self {
        Self(engine::GradMode::new(false))
    }
}

/// Runs `body` without gradient recording.
pub fn no_grad<T>(body: impl FnOnce() -> T) -> T {
    let _no_grad = NoGradGuard::new();
    body()
}

/// A guard that enables gradient recording on this thread while it lives, also inside no-grad
/// (`torch.enable_grad`).
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct EnableGradGuard(
    #[allow(dead_code, reason = "held for its destructor")] engine::GradMode,
);

impl EnableGradGuard {
    /// Enables recording.
    #[allow(
        clippy::new_without_default,
        reason = "a guard has an effect, which `default()` would hide"
    )]
    pub fn new() -> Self {
        Self(engine::GradMode::new(true))
    }
}

/// A guard that keeps this thread in inference mode while it lives (`torch.inference_mode`): operators
/// are not recorded and new tensors have no version counters, which makes each operator cheaper. Tensors
/// created in this mode cannot be saved for backward.
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct InferenceModeGuard(
    #[allow(dead_code, reason = "held for its destructor")] engine::InferenceMode,
);

impl InferenceModeGuard {
    /// Enters inference mode.
    ///
    /// # Errors
    /// [`overdrive_sys::Error::OutOfMemory`].
    pub fn new() -> Result<Self> {
        Ok(Self(engine::InferenceMode::new(true)?))
    }

    /// Leaves inference mode for the lifetime of the guard, for training inside an inference scope.
    ///
    /// # Errors
    /// [`overdrive_sys::Error::OutOfMemory`].
    pub fn normal_mode() -> Result<Self> {
        Ok(Self(engine::InferenceMode::new(false)?))
    }
}
