use overdrive_sys::transfer::{CopyEvent, copy_async, empty_pinned, to_host};
use tch::Tensor;

use crate::Result;

/// A tensor that is being copied to the host. Work that is launched on the device after [`begin`](HostCopy::begin)
/// does not delay the copy.
#[derive(Debug)]
pub(crate) struct HostCopy {
    host: Tensor,
    /// The source, which is kept until it has been copied, and the event that marks the end of the copy. `None` if the
    /// copy is done; on devices other than CUDA it is done from the start.
    pending: Option<(Tensor, CopyEvent)>,
}

impl HostCopy {
    /// Begins to copy a tensor of 32-bit integers; nothing may overwrite the tensor during the copy.
    ///
    /// # Errors
    /// An error of libtorch.
    pub(crate) fn begin(source: Tensor) -> Result<HostCopy> {
        if !source.device().is_cuda() {
            let host = to_host(&source)?;
            return Ok(HostCopy {
                host,
                pending: None,
            });
        }
        let host = empty_pinned(&source.size(), source.f_kind()?)?;
        let event = copy_async(&source, &host)?;
        Ok(HostCopy {
            host,
            pending: Some((source, event)),
        })
    }

    /// Waits for the copy, and returns its elements.
    ///
    /// # Errors
    /// An error of the device.
    pub(crate) fn words(self) -> Result<Vec<i32>> {
        if let Some((_source, event)) = &self.pending {
            event.wait()?;
        }
        Ok(Vec::<i32>::try_from(self.host.f_flatten(0, -1)?)?)
    }
}
