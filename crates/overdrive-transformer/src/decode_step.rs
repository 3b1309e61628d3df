//! The forward pass for a few tokens over a cache, on rows of f32 in slices.
//!
//! On tensors, each operator checks its arguments, is dispatched and allocates a new tensor, which takes a few percent
//! of a decoding step of a small model. Here the operators of a block run on buffers that are reused from step to step.
//! The kernels are those of the tensor operators, so the results are the same, but for the softmax of the routers of
//! experts and the gate of gpt-oss: there libtorch's exponential rounds differently.

use overdrive_fused::rows;
use overdrive_sys::{autocast, engine};
use tch::{Device, Kind, Tensor};

use crate::input::ForwardInput;
use crate::{Execution, Result};

/// The largest number of tokens (in all rows of a batch) for such a pass. With more tokens, operators are split among
/// threads, and the overhead of calls is a small part of the time.
const MAX_TOKENS: i64 = 16;

/// Returns `true` if a forward pass of these tokens, embedded as `x`, runs on slices.
pub(crate) fn applies(
    input: &ForwardInput<'_>,
    x: &Tensor,
    execution: &Execution,
    training: bool,
) -> bool {
    let few = input.input_ids.numel() as i64 <= MAX_TOKENS;
    let autocast = autocast::state(Device::Cpu).is_ok_and(|state| state.enabled);
    few && execution.fused_decoding
        && execution.fused_kernels
        && !training
        && input.cache.is_some()
        && input.images.is_none()
        && x.device() == Device::Cpu
        && x.kind() == Kind::Float
        && !engine::is_grad_enabled()
        && !autocast
}

/// The buffers of a pass, kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct DecodeBuffers {
    /// The residual stream.
    pub(crate) x: Vec<f32>,
    /// The residual stream after the next addition.
    pub(crate) sum: Vec<f32>,
    /// The output of the last block, which the next norm adds.
    pub(crate) delta: Vec<f32>,
    pub(crate) normalised: Vec<f32>,
    /// The results of a joint matmul.
    pub(crate) joint: Vec<f32>,
    /// The input of the last matmul of a feed-forward block.
    pub(crate) inner: Vec<f32>,
    /// `true` if no layer needed operators on tensors in the last pass.
    pub(crate) on_slices: bool,
}

impl DecodeBuffers {
    /// Takes the embedded tokens `x (B, T, C)`.
    pub(crate) fn begin(&mut self, x: &Tensor) -> Result<()> {
        let x = x.f_contiguous()?;
        let x = rows::elements(&x)?;
        self.x.clear();
        self.x.extend_from_slice(x);
        for buffer in [&mut self.sum, &mut self.delta, &mut self.normalised] {
            buffer.resize(x.len(), 0.0);
        }
        Ok(())
    }

    /// Returns the stream, and the output of the last block, as tensors of `size`.
    pub(crate) fn finish(&self, size: &[i64]) -> Result<(Tensor, Tensor)> {
        let tensor = |buffer: &[f32]| Tensor::f_from_slice(buffer)?.f_view(size);
        Ok((tensor(&self.x)?, tensor(&self.delta)?))
    }
}
