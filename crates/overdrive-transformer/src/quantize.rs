use std::collections::HashMap;

use overdrive_nn::{AdapterHost, LinearWeight};
use overdrive_quantization::{Activations, QuantizedWeight, Scheme, adjacent, skips_modules};
use tch::{Kind, TchError, Tensor};

use crate::causal_lm::CausalLm;
use crate::checkpoint::CheckpointConfig;
use crate::model_parts::{ModelParts, Pack};
use crate::parameters::ParameterRole;
use crate::{ParameterSpec, Result};

/// The weights of a model that are quantized, and their schemes.
///
/// Norms, biases, tables of positions and the routers of experts are never quantized.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct QuantizeOptions {
    /// The scheme of the linear layers in the blocks.
    pub scheme: Scheme,
    /// The scheme of the head; default `None`: it stays dense. A tied head and the embedding become one
    /// quantized table, whose rows are dequantized when they are looked up.
    pub head: Option<Scheme>,
    /// The layers that stay dense, in the form of transformers' `llm_int8_skip_modules` ([`skips_modules`]): the
    /// beginnings of names up to a dot, the ends of names, or regular expressions. Default: none.
    pub skip_modules: Vec<String>,
}

impl QuantizeOptions {
    /// Quantizes all linear layers of the blocks with `scheme`; the head stays dense.
    pub fn new(scheme: Scheme) -> Self {
        QuantizeOptions {
            scheme,
            head: None,
            skip_modules: Vec::new(),
        }
    }

    /// Also quantizes the head with `scheme`, and the embedding if it is tied to the head.
    pub fn with_head(mut self, scheme: Scheme) -> Self {
        self.head = Some(scheme);
        self
    }

    /// Keeps the layers `names` dense.
    pub fn with_skip_modules(mut self, names: &[&str]) -> Self {
        self.skip_modules = names.iter().map(|name| (*name).to_owned()).collect();
        self
    }

    /// Returns the scheme of a parameter, or `None` if it stays dense. `tied` is `true` if the head is the
    /// embedding.
    ///
    /// # Errors
    /// [`Error::Quantization`](crate::Error::Quantization) for an entry of `skip_modules` that is not a regular
    /// expression.
    pub(crate) fn scheme_of(&self, spec: &ParameterSpec, tied: bool) -> Result<Option<Scheme>> {
        if skips_modules(&self.skip_modules, spec.module())? {
            return Ok(None);
        }
        Ok(match spec.role {
            ParameterRole::Linear | ParameterRole::Conv1d => Some(self.scheme),
            ParameterRole::Head => self.head,
            ParameterRole::Embedding if tied => self.head,
            ParameterRole::Embedding
            | ParameterRole::Router
            | ParameterRole::Expansion
            | ParameterRole::LayerInputs
            | ParameterRole::Other => None,
        })
    }
}

impl CausalLm {
    /// Quantizes the model in place, layer by layer: each dense weight is freed as soon as it is quantized.
    /// To load a checkpoint without holding all dense weights in memory, see
    /// [`LoadOptions::quantization`](crate::LoadOptions::quantization).
    ///
    /// # Errors
    /// [`Error::Quantization`](crate::Error::Quantization) for a weight that does not fit the scheme or is not
    /// finite; [`overdrive_nn::Error::InUse`] while a graph needs the weights.
    pub fn quantize(&mut self, options: &QuantizeOptions) -> Result<()> {
        self.quantize_with(options, &mut |_, weight, scheme| {
            QuantizedWeight::quantize(weight, scheme)
        })
    }

    /// Quantizes the model by `pack`, which receives the name of a layer (`lm_head` for a tied head), its
    /// weight `(O, I)` in fp32 and its scheme. Calibration uses it, see
    /// [`quantize_calibrated`](overdrive_quantization::quantize_calibrated).
    ///
    /// # Errors
    /// As [`CausalLm::quantize`], and those of `pack`.
    pub fn quantize_with(&mut self, options: &QuantizeOptions, pack: Pack<'_>) -> Result<()> {
        self.quantize_layers(options, pack)?;
        match self.device().is_cuda() {
            true => self.join_quantized(),
            false => Ok(()),
        }
    }

    /// Moves quantized weights that one matmul can compute next to one another in memory, one group after another.
    fn join_quantized(&mut self) -> Result<()> {
        let groups = self.config().adjacent();
        let group_of: HashMap<&str, &Vec<String>> = groups
            .iter()
            .flat_map(|group| group.iter().map(move |name| (name, group)))
            .filter_map(|(name, group)| Some((name.strip_suffix(".weight")?, group)))
            .collect();
        let mut weights = HashMap::new();
        self.visit_linears(&mut |name, linear| {
            if let LinearWeight::Quantized(weight) = linear.weight()
                && group_of.contains_key(name)
            {
                weights.insert(name.to_owned(), weight.shallow_clone());
            }
            Ok(())
        })?;
        self.visit_linears(&mut |name, linear| {
            if let Some(group) = group_of.get(name) {
                // Nothing after the first layer of the group, which has taken its weight.
                join_quantized(&mut weights, std::slice::from_ref(*group))?;
                if let Some(weight) = weights.remove(name) {
                    linear.move_weight(LinearWeight::Quantized(weight))?;
                }
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Makes every quantized weight dense again, in the dtype of the other parameters. Layers keep their
    /// adapters. A head that is tied by the configuration but was quantized apart from the embedding, or had an
    /// adapter merged into it, becomes a parameter `lm_head.weight`, and `tie_word_embeddings` becomes false.
    ///
    /// # Errors
    /// An error of libtorch when memory runs out; [`overdrive_nn::Error::InUse`] while a graph needs the
    /// weights.
    pub fn dequantize(&mut self) -> Result<()> {
        self.dequantize_layers()
    }

    /// Sets the dtype of the activations in matrix products with quantized weights, where the scheme leaves a choice:
    /// [`Activations::Float`] leaves them unquantized, at the cost of speed.
    ///
    /// # Errors
    /// [`Error::Nn`](crate::Error::Nn) where the scheme of a weight does not allow it, and while a graph needs the
    /// weights.
    pub fn set_activations(&mut self, activations: Activations) -> Result<()> {
        self.visit_linears(&mut |_, linear| {
            if let LinearWeight::Quantized(weight) = linear.weight() {
                let weight = weight.shallow_clone().with_activations(activations)?;
                let _same = linear.replace_weight(LinearWeight::Quantized(weight))?;
            }
            Ok(())
        })?;
        Ok(())
    }
}

/// Moves the weights of each of the `groups` of parameters next to one another in memory, if all of them are quantized and
/// one weight can stand for them.
pub(crate) fn join_quantized(
    weights: &mut HashMap<String, QuantizedWeight>,
    groups: &[Vec<String>],
) -> overdrive_quantization::Result<()> {
    for group in groups {
        let names = group.iter().filter_map(|name| name.strip_suffix(".weight"));
        let own = names.clone().map(|name| weights.get(name));
        let Some(own) = own.collect::<Option<Vec<_>>>() else {
            continue;
        };
        if let Some(views) = adjacent(&own)? {
            for (name, view) in names.zip(views) {
                weights.insert(name.to_owned(), view);
            }
        }
    }
    Ok(())
}

/// Quantizes the dense weight of `spec` with a row for each output, whatever its layout.
pub(crate) fn quantize_parameter(
    dense: &Tensor,
    spec: &ParameterSpec,
    scheme: Scheme,
) -> Result<QuantizedWeight> {
    Ok(QuantizedWeight::quantize(&as_rows(dense, spec)?, scheme)?)
}

/// Returns the weight of `spec` in fp32 with a row for each output, whatever its layout.
pub(crate) fn as_rows(
    dense: &Tensor,
    spec: &ParameterSpec,
) -> std::result::Result<Tensor, TchError> {
    let dense = match spec.role {
        ParameterRole::Conv1d => dense.f_tr()?.f_contiguous()?,
        _ => dense.shallow_clone(),
    };
    dense.f_to_kind(Kind::Float)
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;
    use crate::{ForwardInput, InitOptions, LlamaConfig, Logits};

    #[test]
    fn a_model_whose_weights_are_joined_computes_the_same() {
        let config = LlamaConfig {
            vocab_size: 64,
            hidden_size: 64,
            intermediate_size: 96,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: Some(2),
            max_position_embeddings: 32,
            attention_bias: true,
            ..LlamaConfig::default()
        };
        let ids = Tensor::arange(7, (Kind::Int64, Device::Cpu)).unsqueeze(0);
        for (scheme, is_moved) in [("int4-g32", true), ("int8", true), ("nf4", false)] {
            let mut model = CausalLm::new(&config.clone().into(), &InitOptions::default()).unwrap();
            let mut options = QuantizeOptions::new(scheme.parse().unwrap());
            // A group that stays apart.
            options.skip_modules = vec!["layers.1.mlp.up_proj".to_owned()];
            model.quantize(&options).unwrap();
            let logits = |model: &CausalLm| {
                let input = ForwardInput::new(&ids).with_logits(Logits::All);
                tch::no_grad(|| model.forward(input).unwrap())
            };
            let handles = |model: &mut CausalLm| {
                let mut weights = Vec::new();
                model
                    .visit_linears(&mut |name, linear| {
                        if let LinearWeight::Quantized(weight) = linear.weight() {
                            weights.push((name.to_owned(), weight.shallow_clone()));
                        }
                        Ok(())
                    })
                    .unwrap();
                weights
            };
            let (before, expected) = (handles(&mut model), logits(&model));
            model.join_quantized().unwrap();
            assert_eq!(logits(&model), expected, "{scheme}");
            for ((name, old), (_, new)) in before.iter().zip(handles(&mut model)) {
                let is_joint = ["q_proj", "k_proj", "v_proj"]
                    .iter()
                    .any(|end| name.ends_with(end))
                    || name.ends_with("layers.0.mlp.gate_proj")
                    || name.ends_with("layers.0.mlp.up_proj");
                let moved = !old.shares_storage_with(&new);
                assert_eq!(moved, is_joint && is_moved, "{scheme}: {name}");
            }
        }
    }
}
