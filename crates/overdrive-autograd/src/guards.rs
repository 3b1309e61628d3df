//! Modes of this thread that end with a scope, also when it ends by a panic.

use overdrive_sys::engine;

use crate::Result;

pub use overdrive_sys::engine::{is_grad_enabled, is_inference, is_inference_mode_enabled};

/// No gradient recording on this thread while it lives (`torch.no_grad`).
///
/// Unlike `tch::no_grad`, a panic inside leaves the mode as it was before.
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
/// The mode is the thread's, so the guard cannot leave it:
///
/// ```compile_fail
/// let guard = overdrive_autograd::NoGradGuard::new();
/// std::thread::spawn(move || drop(guard));
/// ```
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct NoGradGuard(#[allow(dead_code, reason = "held for its end")] engine::GradMode);

impl NoGradGuard {
    /// Stops recording from here on.
    #[allow(clippy::new_without_default, reason = "a guard is made on purpose")]
    pub fn new() -> Self {
        Self(engine::GradMode::new(false))
    }
}

/// Runs `body` without gradient recording.
pub fn no_grad<T>(body: impl FnOnce() -> T) -> T {
    let _no_grad = NoGradGuard::new();
    body()
}

/// Gradient recording on this thread while it lives, also inside no-grad (`torch.enable_grad`).
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct EnableGradGuard(#[allow(dead_code, reason = "held for its end")] engine::GradMode);

impl EnableGradGuard {
    /// Records from here on.
    #[allow(clippy::new_without_default, reason = "a guard is made on purpose")]
    pub fn new() -> Self {
        Self(engine::GradMode::new(true))
    }
}

/// Inference mode on this thread while it lives (`torch.inference_mode`): no recording, no version
/// counters, less work for each operator. Tensors made inside can never be saved for backward.
#[derive(Debug)]
#[must_use = "the mode ends when the guard is dropped"]
pub struct InferenceModeGuard(
    #[allow(dead_code, reason = "held for its end")] engine::InferenceMode,
);

impl InferenceModeGuard {
    /// Enters inference mode.
    ///
    /// # Errors
    /// [`overdrive_sys::Error::OutOfMemory`].
    pub fn new() -> Result<Self> {
        Ok(Self(engine::InferenceMode::new(true)?))
    }

    /// Leaves inference mode for the guard's life, for a piece of training inside.
    ///
    /// # Errors
    /// [`overdrive_sys::Error::OutOfMemory`].
    pub fn normal_mode() -> Result<Self> {
        Ok(Self(engine::InferenceMode::new(false)?))
    }
}
