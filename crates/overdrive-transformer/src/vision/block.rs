use overdrive_fused::Activation;
use overdrive_nn::Linear;
use tch::Tensor;

use super::tower::EPS;
use crate::activation_names::activation_named;
use crate::attend::{AttendOptions, attend};
use crate::config::VisionConfig;
use crate::layer_norm::LayerNorm;
use crate::mask::Mask;
use crate::parameters::ParameterMap;
use crate::rope::Rotation;
use crate::{Execution, Result};

/// A layer of the tower: attention among the patches of an image, and a feed-forward block.
#[derive(Debug)]
pub(super) struct Block {
    norms: [LayerNorm; 2],
    qkv: Linear,
    output: Linear,
    inner: Linear,
    outer: Linear,
    activation: Activation,
    heads: i64,
}

impl Block {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        name: &str,
        config: &VisionConfig,
    ) -> Result<Block> {
        let mut norm =
            |part: &str| LayerNorm::take(parameters, &format!("{name}.{part}"), true, EPS);
        let norms = [norm("norm1")?, norm("norm2")?];
        let mut linear = |part: &str| parameters.take_linear(&format!("{name}.{part}"), true);
        Ok(Block {
            norms,
            qkv: linear("attn.qkv")?,
            output: linear("attn.proj")?,
            inner: linear("mlp.linear_fc1")?,
            outer: linear("mlp.linear_fc2")?,
            activation: activation_named("vision_config.hidden_act", &config.hidden_act)?,
            heads: config.num_heads,
        })
    }

    /// Computes the patches `x (1, N, C)` of images, each of which attends to its own image by `mask`.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        rotation: &Rotation,
        mask: &Mask,
        execution: &Execution,
    ) -> Result<Tensor> {
        let fused = execution.fused_kernels;
        let qkv = self.qkv.forward_with(&self.norms[0].forward(x)?, fused)?;
        let qkv = qkv.f_unflatten(-1, [3, self.heads, -1])?;
        let part = |index: i64| qkv.f_select(2, index);
        let (query, key) = (rotation.apply(&part(0)?)?, rotation.apply(&part(1)?)?);
        let by_head = |part: &Tensor| part.f_transpose(1, 2);
        let (query, key, value) = (by_head(&query)?, by_head(&key)?, by_head(&part(2)?)?);
        let options = AttendOptions::plain(execution.attention, 0.0);
        let mixed = attend(&query, &key, &value, mask, &options)?;
        let x = x.f_add(&self.output.forward_with(&mixed, fused)?)?;
        let inner = self
            .inner
            .forward_with(&self.norms[1].forward(&x)?, fused)?;
        let inner = self.activation.apply(&inner)?;
        Ok(x.f_add(&self.outer.forward_with(&inner, fused)?)?)
    }
}
