//! Collectives under way.

use overdrive_sys::c10d::Work;
use tch::Tensor;

use crate::{ProcessGroup, Result};

/// A collective under way.
#[derive(Debug)]
#[must_use = "what it writes may be read only after `wait`"]
pub struct Pending {
    pub(crate) group: ProcessGroup,
    pub(crate) work: Option<Work>,
    /// What is done with the result, in this order.
    pub(crate) after: Vec<After>,
}

#[derive(Debug)]
pub(crate) enum After {
    CopyBack { from: Tensor, to: Tensor },
    Divide { tensor: Tensor, by: i64 },
}

impl Pending {
    /// Waits until it is done.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) naming the rank at fault.
    pub fn wait(mut self) -> Result<()> {
        if let Some(work) = self.work.take() {
            work.wait(None).map_err(|error| self.group.error(error))?;
        }
        let _no_grad = tch::no_grad_guard();
        for after in self.after.drain(..) {
            match after {
                After::CopyBack { from, mut to } => to.f_copy_(&from)?,
                After::Divide { mut tensor, by } => {
                    let _ = if tensor.is_floating_point() {
                        tensor.f_div_scalar_(by)?
                    } else {
                        tensor.f_div_scalar_mode_(by, "trunc")?
                    };
                }
            }
        }
        Ok(())
    }

    /// Whether it has ended, well or not.
    #[must_use]
    pub fn is_completed(&self) -> bool {
        self.work.as_ref().is_none_or(Work::is_completed)
    }
}

/// A contiguous tensor to write to, and how its values get to `tensor` if that is another one.
pub(crate) fn contiguous(tensor: &Tensor) -> Result<(Tensor, Option<After>)> {
    let detached = tensor.f_detach()?;
    if detached.is_contiguous() {
        return Ok((detached, None));
    }
    let from = detached.f_contiguous()?;
    let after = After::CopyBack {
        from: from.shallow_clone(),
        to: detached,
    };
    Ok((from, Some(after)))
}
