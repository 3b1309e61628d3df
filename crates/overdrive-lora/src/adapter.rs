use std::sync::{Arc, Mutex};

use overdrive_core::Error;
use tch::Tensor;

use crate::dora::RowNorms;
use crate::{LoraConfig, Result};

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

impl LoraAdapter {
    /// Creates an adapter from existing tensors: `a (r, I)`, `b (O, r)`, `bias (O,)`, `magnitude (O,)`, of the
    /// same floating-point dtype and on the same device. They are shared, not copied. The rank is that of `a`;
    /// alpha and scale come from `config`.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for shapes, dtypes or devices that do not match.
    pub fn new(
        config: Arc<LoraConfig>,
        a: Tensor,
        b: Tensor,
        bias: Option<Tensor>,
        magnitude: Option<Tensor>,
    ) -> Result<LoraAdapter> {
        let (&[rank, _], &[outputs, rank_of_b]) = (a.size().as_slice(), b.size().as_slice()) else {
            let wrong = if a.dim() == 2 {
                ("B", b, "(O, r)")
            } else {
                ("A", a, "(r, I)")
            };
            return Err(Error::shape(wrong.0, wrong.1.size(), wrong.2).into());
        };
        // The scale is `alpha / r`.
        if rank < 1 {
            return Err(Error::shape("A", a.size(), "(r, I) with r at least 1").into());
        }
        if rank != rank_of_b {
            let expected = format!("(O, {rank}), with the rank of A");
            return Err(Error::shape("B", b.size(), expected).into());
        }
        for (name, tensor) in [("bias of B", &bias), ("magnitude", &magnitude)] {
            if let Some(tensor) = tensor.as_ref().filter(|tensor| tensor.size() != [outputs]) {
                return Err(Error::shape(name, tensor.size(), format!("({outputs},)")).into());
            }
        }
        if !a.is_floating_point() {
            return Err(Error::dtype("A", a.kind(), "a floating-point dtype").into());
        }
        // The forward pass takes its dtype and device from A alone.
        let others = [
            ("B", Some(&b)),
            ("bias of B", bias.as_ref()),
            ("magnitude", magnitude.as_ref()),
        ];
        for (name, tensor) in others {
            let Some(tensor) = tensor else { continue };
            if tensor.kind() != a.kind() {
                let expected = format!("{:?}, as A is", a.kind());
                return Err(Error::dtype(name, tensor.kind(), expected).into());
            }
            if tensor.device() != a.device() {
                let expected = format!("on {:?}, as A is", a.device());
                return Err(Error::device(name, tensor.device(), expected).into());
            }
        }
        Ok(LoraAdapter {
            alpha: config.lora_alpha,
            scale: config.scale_of(rank, config.lora_alpha),
            config,
            a,
            b,
            bias,
            magnitude,
            row_norms: Mutex::default(),
        })
    }

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
    /// [`set_adapter_scale`](crate::LoraLinear::set_adapter_scale).
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
