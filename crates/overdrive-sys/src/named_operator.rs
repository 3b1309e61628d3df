//! Kernels of ours that modes see as operators.
//!
//! A [dispatch mode](crate::dispatch_mode) sees what goes through libtorch's dispatcher. A product or
//! an attention of Overdrive's own does not, so selective checkpointing could not keep its result;
//! [`call`] sends it there under a name.

use std::ffi::{CStr, c_void};

use tch::Tensor;

use crate::callback::{self, CallbackError, CallbackResult};
use crate::dispatch_mode;
use crate::error::{Result, check};
use crate::ffi::{self, RawTensor};
use crate::function::{handle, into_handle};

/// The operators there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedOperator {
    /// `overdrive::mm`: matrix products.
    Mm,
    /// `overdrive::attention`: attention forward.
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

/// Runs `body`, whose results depend on `inputs` alone, as the operator `name`: a mode on this thread
/// sees it, and may answer in its place. Where there is no mode, `body` just runs.
///
/// Not recorded for backward: for use inside the forward of a [function](crate::function).
///
/// # Errors
/// What `body` or a mode returned, as [`crate::Error::Callback`].
pub fn call<F>(name: NamedOperator, inputs: &[&Tensor], body: F) -> Result<Vec<Tensor>>
where
    F: FnOnce() -> CallbackResult<Vec<Tensor>>,
{
    if !dispatch_mode::has_modes() {
        return body().map_err(|source| crate::Error::Callback {
            operation: name.c_name().to_string_lossy().into_owned(),
            source,
        });
    }
    let inputs: Vec<RawTensor> = inputs.iter().map(|tensor| handle(tensor)).collect();
    let mut body = Some(body);
    let raw = ffi::RawNamedBody {
        self_: (&raw mut body).cast(),
        run: run::<F>,
    };
    let mut results: Vec<Tensor> = Vec::new();
    // SAFETY: all pointers are to locals that outlive the call; `run` is of the type of `body`, and
    // `take` of that of `results`.
    let status = unsafe {
        ffi::od_named_call(
            name.c_name().as_ptr(),
            inputs.as_ptr(),
            inputs.len(),
            &raw const raw,
            (&raw mut results).cast(),
            take,
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
    callback::contain(|| {
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

unsafe extern "C" fn take(into: *mut c_void, owned: RawTensor) {
    // SAFETY: `into` is the vector of `call`, the handle a new one.
    unsafe { (*into.cast::<Vec<Tensor>>()).push(Tensor::from_ptr(owned.cast())) }
}
