use overdrive_sys::autocast;
use tch::Tensor;

use crate::moe::ExpertLoad;
use crate::norm::Norm;
use crate::rms_norm::RmsNorm;
use crate::{Logits, Result};

/// The residual stream, and the output of the last block, which is added by the next norm in the same pass.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) x: Tensor,
    pub(super) delta: Option<Tensor>,
    /// The load of the experts of the blocks so far.
    pub(super) load: Option<ExpertLoad>,
}

impl Stream {
    pub(super) fn new(x: Tensor) -> Stream {
        Stream {
            x,
            delta: None,
            load: None,
        }
    }

    /// Makes a stream to which the output `delta` of a block is still to be added.
    pub(super) fn with_delta(x: Tensor, delta: Tensor) -> Stream {
        Stream {
            x,
            delta: Some(delta),
            load: None,
        }
    }

    /// Returns the normalised sum, which is the sum if there is no norm, and the sum.
    pub(super) fn normalised(
        self,
        norm: Option<&RmsNorm>,
        fused: bool,
    ) -> Result<(Tensor, Tensor)> {
        match (norm, self.delta) {
            (None, None) => Ok((self.x.shallow_clone(), self.x)),
            (None, Some(delta)) => {
                let sum = self.x.f_add(&delta)?;
                Ok((sum.shallow_clone(), sum))
            }
            (Some(norm), None) => Ok((norm.forward_for(self.x.kind(), &self.x, fused)?, self.x)),
            // The sum and its norm are one pass over the stream.
            (Some(norm), Some(delta)) => norm.forward_sum(&self.x, &delta, fused),
        }
    }

    /// Returns the normalised sum after the last layer.
    pub(super) fn finished(self, norm: &Norm, fused: bool) -> Result<Tensor> {
        match norm {
            Norm::Rms(norm) => Ok(self.normalised(Some(norm), fused)?.0),
            Norm::Layer(norm) => norm.forward(&self.sum()?),
        }
    }

    pub(super) fn sum(&self) -> Result<Tensor> {
        match &self.delta {
            None => Ok(self.x.shallow_clone()),
            Some(delta) => Ok(self.x.f_add(delta)?),
        }
    }

    /// Selects the positions whose logits are computed.
    pub(super) fn select(self, logits: Logits<'_>) -> Result<Stream> {
        Ok(Stream {
            x: logits.select(&self.x)?,
            delta: self.delta.map(|delta| logits.select(&delta)).transpose()?,
            load: self.load,
        })
    }
}

/// Returns `x` in the dtype of the autocast region, if there is one.
pub(super) fn in_dtype_of_autocast(x: Tensor) -> Result<Tensor> {
    match autocast::state(x.device()) {
        Ok(state) if state.enabled => Ok(x.f_to_kind(state.dtype)?),
        // Devices without autocast, too.
        _ => Ok(x),
    }
}
