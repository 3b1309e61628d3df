use std::sync::Arc;

use tch::Tensor;

use crate::LoraConfig;

/// A low-rank change of one linear map: `scale · B · A`, and with DoRA the magnitudes of its rows.
///
/// The tensors are the trained parameters themselves: an optimizer updates them in place.
#[derive(Debug)]
pub struct Adapter {
    pub(crate) config: Arc<LoraConfig>,
    pub(crate) alpha: f64,
    pub(crate) scale: f64,
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) magnitude: Option<Tensor>,
}

impl Adapter {
    /// `(r, I)`.
    pub fn a(&self) -> &Tensor {
        &self.a
    }

    /// `(O, r)`.
    pub fn b(&self) -> &Tensor {
        &self.b
    }

    /// `(O,)`, with `lora_bias`: added after B, before the scale.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// `(O,)`, with `use_dora`: the length of each row of the changed weight.
    pub fn magnitude(&self) -> Option<&Tensor> {
        self.magnitude.as_ref()
    }

    /// r.
    pub fn rank(&self) -> i64 {
        self.a.size().first().copied().unwrap_or(0)
    }

    /// Alpha of this map: the configuration's, or that of its pattern.
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// What the product is multiplied by: `alpha / r`, with `use_rslora` `alpha / √r`, times what
    /// [`AdaptedLinear::set_scale`](crate::AdaptedLinear::set_scale) was given.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The configuration that it was made from.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Goes by another configuration of the same shape: that of the file it was loaded from.
    pub(crate) fn keep_config(&mut self, config: &LoraConfig) {
        if *self.config != *config {
            self.config = Arc::new(config.clone());
        }
    }

    /// Its tensors with PEFT's names for them: `lora_A`, `lora_B`, `lora_magnitude_vector`, and what
    /// follows the adapter's name (`weight`, `bias`).
    pub(crate) fn tensors(&self) -> Vec<(&'static str, &'static str, &Tensor)> {
        let mut tensors = vec![("lora_A", "weight", &self.a), ("lora_B", "weight", &self.b)];
        tensors.extend(self.bias.as_ref().map(|bias| ("lora_B", "bias", bias)));
        let magnitude = self.magnitude.as_ref();
        tensors.extend(magnitude.map(|magnitude| ("lora_magnitude_vector", "weight", magnitude)));
        tensors
    }
}
