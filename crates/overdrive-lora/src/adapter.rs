use std::sync::{Arc, Mutex};

use overdrive_nn::Linear;
use tch::Tensor;

use crate::LoraConfig;
use crate::dora::RowNorms;
use crate::layer_adapters::adapters_of;

/// A low-rank update of one linear layer's weight, `scale · B · A`; with DoRA also the magnitudes of its rows.
///
/// The tensors are the trained parameters: an optimizer updates them in place.
#[derive(Debug)]
pub struct LoraAdapter {
    pub(crate) config: Arc<LoraConfig>,
    pub(crate) alpha: f64,
    pub(crate) scale: f64,
    pub(crate) a: Tensor,
    pub(crate) b: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) magnitude: Option<Tensor>,
    /// The row norms of the updated weight for DoRA, cached until one of the tensors changes.
    pub(crate) row_norms: Mutex<Option<RowNorms>>,
}

/// Returns the adapter `name` of one layer, if it has one.
pub fn lora_adapter<'l>(linear: &'l Linear, name: &str) -> Option<&'l LoraAdapter> {
    adapters_of(linear)?.get(name)
}

impl LoraAdapter {
    /// Returns A, `(r, I)`.
    pub fn a(&self) -> &Tensor {
        &self.a
    }

    /// Returns B, `(O, r)`.
    pub fn b(&self) -> &Tensor {
        &self.b
    }

    /// Returns the bias `(O,)` of B, which `lora_bias` adds before the scale.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Returns the magnitude `(O,)` of `use_dora`: the learned norm of each row of the updated weight.
    pub fn magnitude(&self) -> Option<&Tensor> {
        self.magnitude.as_ref()
    }

    /// Returns the rank r.
    pub fn rank(&self) -> i64 {
        self.a.size().first().copied().unwrap_or(0)
    }

    /// Returns the alpha of this layer: the configuration's, or that of its `alpha_pattern`.
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// Returns the factor of `B · A`: `alpha / r`, with `use_rslora` `alpha / √r`, times the factor given to
    /// [`set_adapter_scale`](crate::set_adapter_scale).
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Returns the configuration that the adapter was created from.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// Replaces the configuration by that of the file that the adapter was loaded from, which has the same shape.
    pub(crate) fn keep_config(&mut self, config: &LoraConfig) {
        // If the configurations are equal, all layers keep sharing one `Arc`.
        if *self.config != *config {
            self.config = Arc::new(config.clone());
        }
    }

    /// Returns the tensors with PEFT's names (`lora_A`, `lora_B`, `lora_magnitude_vector`) and the suffix after
    /// the adapter's name (`weight`, `bias`).
    pub(crate) fn tensors(&self) -> Vec<(&'static str, &'static str, &Tensor)> {
        let mut tensors = vec![("lora_A", "weight", &self.a), ("lora_B", "weight", &self.b)];
        tensors.extend(self.bias.as_ref().map(|bias| ("lora_B", "bias", bias)));
        let magnitude = self.magnitude.as_ref();
        tensors.extend(magnitude.map(|magnitude| ("lora_magnitude_vector", "weight", magnitude)));
        tensors
    }
}
