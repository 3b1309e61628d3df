//! Overdrive's own kernels as named operators of libtorch's dispatcher.
//!
//! A [dispatch mode](crate::dispatch_mode) sees the operators that go through libtorch's dispatcher.
//! Overdrive's own matrix product and attention do not, so selective checkpointing could not keep their
//! results. [`call`] runs such a kernel as an operator with a name.

use std::ffi::{CStr, c_void};

use tch::Tensor;

use crate::callback::{self, CallbackError, CallbackResult};
use crate::dispatch_mode;
use crate::error::{Result, check};
use crate::ffi::{self, RawTensor};
use crate::function::{handle, into_handle, push_tensor};

/// The named operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedOperator {
    /// `overdrive::mm`, a matrix product.
    Mm,
    /// `overdrive::attention`, the forward pass of attention.
    Attention,
}

impl NamedOperator {
    fn c_name(self) -> &'static CStr {
        match self {
            Self::Mm => c"overdrive::mm",
            Self::Attention => c"overdrive::attention",
        }
    }
}

/// Runs `body` as the operator `name`. The results of `body` must depend on `inputs` alone, because a mode on
/// this thread may return stored results instead of running it.
///
/// The call is not recorded for backward; it is meant for the forward of a [function](crate::function).
///
/// # Errors
/// The error of `body` or of a mode, as [`crate::Error::Callback`].
pub fn call<F>(name: NamedOperator, inputs: &[&Tensor], body: F) -> Result<Vec<Tensor>>
where
    F: FnOnce() -> CallbackResult<Vec<Tensor>>,
{
    // Without a mode nobody sees the call: skips the microsecond of the dispatcher.
    if !dispatch_mode::has_modes() {
        return body().map_err(|source| crate::Error::Callback {
            operation: name.c_name().to_string_lossy().into_owned(),
            source,
        });
    }
    let inputs: Vec<RawTensor> = inputs.iter().map(|tensor| handle(tensor)).collect();
    // C++ holds a pointer and cannot consume the closure; `run` takes it out of the option.
    let mut body = Some(body);
    let raw = ffi::RawNamedBody {
        self_: (&raw mut body).cast(),
        run: run::<F>,
    };
    let mut results: Vec<Tensor> = Vec::new();
    // SAFETY: all pointers are to locals that outlive the call; `run` is of the type of `body`, and
    // `push_tensor` of that of `results`.
    let status = unsafe {
        ffi::od_named_call(
            name.c_name().as_ptr(),
            inputs.as_ptr(),
            inputs.len(),
            &raw const raw,
            (&raw mut results).cast(),
            push_tensor,
        )
    };
    check(status, &name.c_name().to_string_lossy())?;
    Ok(results)
}

unsafe extern "C" fn run<F>(
    body: *mut c_void,
    into: *mut c_void,
    push: ffi::RawPush,
) -> ffi::RawFailure
where
    F: FnOnce() -> CallbackResult<Vec<Tensor>>,
{
    callback::catch_failure(|| {
        // SAFETY: `call` passes a pointer to its own `Option<F>`, alive during the call.
        let body = unsafe { &mut *body.cast::<Option<F>>() };
        let body = body
            .take()
            .ok_or_else(|| CallbackError::from("an operator ran twice in one call"))?;
        for tensor in body()? {
            // SAFETY: `push` owns the handle from here on.
            unsafe { push(into, into_handle(tensor)) };
        }
        Ok(())
    })
}
