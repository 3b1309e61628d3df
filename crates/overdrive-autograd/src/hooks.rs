use overdrive_sys::hook;
use tch::Tensor;

use crate::{FunctionResult, Result};

/// A registered hook. It stays when this is dropped; [`remove`](Self::remove) takes it away.
#[derive(Debug)]
pub struct HookHandle(hook::Hook);

impl HookHandle {
    /// Takes the hook away and drops its closure.
    ///
    /// # Errors
    /// [`crate::Error::Sys`] if libtorch refuses.
    pub fn remove(self) -> Result<()> {
        Ok(self.0.remove()?)
    }
}

/// Calls `hook` with the gradient of `tensor` each time one is computed (`Tensor.register_hook`).
/// Where it returns a tensor, that is the gradient from there on.
///
/// Hooks run in the order of their registration, each on what the one before it gave. An error or a
/// panic in one comes out of the backward pass. A hook must not capture its own tensor, or neither is
/// ever freed.
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
/// [`crate::Error::Sys`] if `tensor` needs no gradient.
pub fn register_hook<F>(tensor: &Tensor, hook: F) -> Result<HookHandle>
where
    F: FnMut(&Tensor) -> FunctionResult<Option<Tensor>> + Send + 'static,
{
    Ok(HookHandle(hook::register(tensor, hook)?))
}

/// Calls `hook` with the leaf each time a backward pass has added to its `grad`
/// (`Tensor.register_post_accumulate_grad_hook`): to step a parameter and free its gradient while
/// backward goes on, to reduce it over processes, to watch it.
///
/// # Errors
/// [`crate::Error::Sys`] if `tensor` is not a leaf that requires a gradient.
pub fn register_post_accumulate_grad_hook<F>(tensor: &Tensor, hook: F) -> Result<HookHandle>
where
    F: FnMut(&Tensor) -> FunctionResult<()> + Send + 'static,
{
    Ok(HookHandle(hook::register_post_accumulate(tensor, hook)?))
}
