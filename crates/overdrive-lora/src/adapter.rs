use std::sync::{Arc, Mutex};

use tch::Tensor;

use crate::dora::Lengths;
use crate::{Error, LoraConfig, Result};

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
    /// With DoRA: what was computed from the tensors as they are now.
    pub(crate) lengths: Mutex<Option<Lengths>>,
}

impl Adapter {
    /// Of tensors from anywhere: `a (r, I)`, `b (O, r)`, `bias (O,)`, `magnitude (O,)`, of one floating kind
    /// and device. They are shared, not copied. The rank is that of `a`, alpha and scale come from
    /// `config`.
    ///
    /// # Errors
    /// [`Error::BadInput`] for shapes or kinds that do not fit one another.
    pub fn new(
        config: Arc<LoraConfig>,
        a: Tensor,
        b: Tensor,
        bias: Option<Tensor>,
        magnitude: Option<Tensor>,
    ) -> Result<Adapter> {
        let (sizes, expected) = (
            (a.size(), b.size()),
            "(r, I) and (O, r) with r of at least 1",
        );
        let (&[rank, _], &[outputs, rank_of_b]) = (sizes.0.as_slice(), sizes.1.as_slice()) else {
            return Err(bad(
                "A and B",
                format!("{:?} and {:?}", sizes.0, sizes.1),
                expected,
            ));
        };
        if rank != rank_of_b || rank < 1 {
            return Err(bad(
                "A and B",
                format!("{:?} and {:?}", sizes.0, sizes.1),
                expected,
            ));
        }
        for (name, tensor) in [("the bias of B", &bias), ("the magnitude", &magnitude)] {
            if let Some(tensor) = tensor.as_ref().filter(|tensor| tensor.size() != [outputs]) {
                return Err(bad(name, format!("{:?}", tensor.size()), "(O,)"));
            }
        }
        let others = [Some(&b), bias.as_ref(), magnitude.as_ref()];
        let differs = |other: &&Tensor| other.kind() != a.kind() || other.device() != a.device();
        if !a.is_floating_point() || others.into_iter().flatten().any(|other| differs(&other)) {
            let found = format!(
                "A of {:?} on {:?}, B of {:?} on {:?}",
                a.kind(),
                a.device(),
                b.kind(),
                b.device()
            );
            return Err(bad(
                "the adapter",
                found,
                "tensors of one floating kind on one device",
            ));
        }
        Ok(Adapter {
            alpha: config.lora_alpha,
            scale: config.scale_of(rank, config.lora_alpha),
            config,
            a,
            b,
            bias,
            magnitude,
            lengths: Mutex::default(),
        })
    }

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

fn bad(name: &str, found: String, expected: &str) -> Error {
    Error::BadInput {
        name: name.to_owned(),
        found,
        expected: expected.to_owned(),
    }
}
