//! Collectives that have been started and may not be complete.

use overdrive_sys::c10d::Work;
use tch::Tensor;

use crate::{ProcessGroup, Result};

/// A collective that was started and may not be complete (`torch.distributed.Work`).
#[derive(Debug)]
#[must_use = "the result may be read only after `wait`"]
pub struct Pending {
    pub(crate) group: ProcessGroup,
    pub(crate) work: Option<Work>,
    /// The operations on the result, in this order.
    pub(crate) finish: Vec<Finish>,
}

/// An operation on the result of a collective.
#[derive(Debug)]
pub(crate) enum Finish {
    CopyBack { from: Tensor, to: Tensor },
    Divide { tensor: Tensor, by: i64 },
}

impl Pending {
    /// Blocks until the collective is complete.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) with the rank at fault.
    pub fn wait(mut self) -> Result<()> {
        if let Some(work) = self.work.take() {
            work.wait(None).map_err(|error| self.group.error(error))?;
        }
        // In-place operations on a leaf that requires a gradient are an error under autograd.
        let _no_grad = tch::no_grad_guard();
        for finish in self.finish.drain(..) {
            match finish {
                Finish::CopyBack { from, mut to } => to.f_copy_(&from)?,
                Finish::Divide { mut tensor, by } => {
                    let _ = if tensor.is_floating_point() {
                        tensor.f_div_scalar_(by)?
                    } else {
                        // In-place true division of an integer tensor is an error in libtorch.
                        tensor.f_div_scalar_mode_(by, "trunc")?
                    };
                }
            }
        }
        Ok(())
    }

    /// Returns `true` if the collective has ended, with or without an error.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        self.work.as_ref().is_none_or(Work::is_completed)
    }
}

/// Returns a contiguous tensor for the result and, if it is a copy, the operation that writes it to `tensor`.
pub(crate) fn contiguous(tensor: &Tensor) -> Result<(Tensor, Option<Finish>)> {
    let detached = tensor.f_detach()?;
    if detached.is_contiguous() {
        return Ok((detached, None));
    }
    let from = detached.f_contiguous()?;
    let copy_back = Finish::CopyBack {
        from: from.shallow_clone(),
        to: detached,
    };
    Ok((from, Some(copy_back)))
}
