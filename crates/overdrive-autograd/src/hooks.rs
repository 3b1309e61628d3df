//! Hooks on gradients.

use overdrive_sys::hook;
use tch::Tensor;

use crate::{FunctionResult, Result};

/// A registered hook. Dropping this handle leaves the hook in place; [`remove`](Self::remove) removes it.
#[derive(Debug)]
pub struct HookHandle(hook::Hook);

impl HookHandle {
    /// Removes the hook and drops its closure.
    ///
    /// # Errors
    /// [`crate::Error::Sys`] if libtorch throws.
    pub fn remove(self) -> Result<()> {
        Ok(self.0.remove()?)
    }
}

/// Calls `hook` with the gradient of `tensor` each time it is computed (`Tensor.register_hook`). A tensor
/// that the hook returns replaces the gradient.
///
/// Hooks run in the order of their registration, each on the result of the previous one. The backward
/// pass returns the error of a hook, and resumes its panic. A hook may remove itself or another hook, which
/// takes effect with the next pass. A backward pass that it runs through its own tensor returns an error. A hook
/// must not capture its own tensor, or neither is ever freed.
///
/// ```
/// use overdrive_autograd::register_hook;
///
/// let x = tch::Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let handle = register_hook(&x, |gradient| Ok(Some(gradient.f_clamp(-1.0, 1.0)?)))?;
/// (&x * 100.0).sum(None).backward();
/// assert_eq!(x.grad().double_value(&[0]), 1.0);
/// handle.remove()?;
/// # Ok::<(), overdrive_autograd::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Sys`] if `tensor` does not require a gradient.
pub fn register_hook<F>(tensor: &Tensor, hook: F) -> Result<HookHandle>
where
    F: FnMut(&Tensor) -> FunctionResult<Option<Tensor>> + Send + 'static,
{
    Ok(HookHandle(hook::register(tensor, hook)?))
}

/// Calls `hook` with the leaf each time a backward pass has accumulated into its `grad`
/// (`Tensor.register_post_accumulate_grad_hook`). Such a hook can step a parameter and free its gradient
/// while backward continues, or reduce the gradient over processes. It may compute gradients of its leaf
/// by [`grad`](crate::grad); a backward pass that accumulates into the leaf returns an error inside the hook.
///
/// # Errors
/// [`crate::Error::Sys`] if `tensor` is not a leaf that requires a gradient.
pub fn register_post_accumulate_grad_hook<F>(tensor: &Tensor, hook: F) -> Result<HookHandle>
where
    F: FnMut(&Tensor) -> FunctionResult<()> + Send + 'static,
{
    Ok(HookHandle(hook::register_post_accumulate(tensor, hook)?))
}
