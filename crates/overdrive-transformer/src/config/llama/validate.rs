//! The checks of a Llama's configuration.

use super::LlamaConfig;
use crate::activation_names::activation_named;
use crate::config::experts::ExpertsConfig;
use crate::config::fields::bad;
use crate::config::sizes::{self, check_layers, check_size};
use crate::{LlamaFamily, Result, RopeScaling};

impl LlamaConfig {
    pub(in crate::config) fn validate(&self) -> Result<()> {
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("max_position_embeddings", self.max_position_embeddings),
            ("head_dim", self.head_dim()),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
            ("no_rope_layer_interval", self.no_rope_layer_interval),
        ] {
            check_size(key, value)?;
        }
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        self.check_experts()?;
        self.check_parameters()?;
        let heads = self.num_attention_heads;
        self.check_parts()?;
        let of_heads = self.mla.is_none();
        if of_heads && self.head_dim.is_none() && self.hidden_size % heads != 0 {
            let expected =
                format!("a multiple of num_attention_heads ({heads}), unless head_dim is set");
            return Err(bad("hidden_size", &self.hidden_size.into(), &expected));
        }
        if heads % self.kv_heads() != 0 {
            let expected = format!("a divisor of num_attention_heads ({heads})");
            return Err(bad(
                "num_key_value_heads",
                &self.kv_heads().into(),
                &expected,
            ));
        }
        if of_heads && self.head_dim() % 2 != 0 {
            let expected = "even, as rotary positions rotate pairs of channels";
            return Err(bad("head_dim", &self.head_dim().into(), expected));
        }
        self.check_rotary_dim()?;
        let beta = self.llama_4_scaling_beta;
        if !(beta >= 0.0 && beta.is_finite()) {
            return Err(bad(
                "llama_4_scaling_beta",
                &beta.into(),
                "a number of at least 0",
            ));
        }
        if beta != 0.0 && self.query_scaling().is_none() {
            let expected = "0 without rope_type yarn, whose original context it starts from";
            return Err(bad("llama_4_scaling_beta", &beta.into(), expected));
        }
        for (key, dropout) in [
            ("attention_dropout", self.attention_dropout),
            ("resid_pdrop", self.resid_pdrop),
            ("embd_pdrop", self.embd_pdrop),
        ] {
            // Below 1: dropout divides the kept elements by `1 - p`.
            if !(0.0..1.0).contains(&dropout) {
                return Err(bad(key, &dropout.into(), "at least 0 and below 1"));
            }
        }
        if let Some(types) = &self.layer_types
            && types.len() as i64 != self.num_hidden_layers
        {
            let expected = format!(
                "a list of num_hidden_layers ({}) names",
                self.num_hidden_layers
            );
            return Err(bad(
                "layer_types",
                &format!("{} names", types.len()).into(),
                &expected,
            ));
        }
        if let Some(layers) = &self.no_rope_layers
            && (layers.len() as i64) < self.num_hidden_layers
        {
            let expected = format!(
                "a list with a number for each of num_hidden_layers ({})",
                self.num_hidden_layers
            );
            let found = format!("{} numbers", layers.len());
            return Err(bad("no_rope_layers", &found.into(), &expected));
        }
        for (key, value) in [
            ("query_pre_attn_scalar", Some(self.query_pre_attn_scalar)),
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("embedding_multiplier", Some(self.embedding_multiplier)),
            ("attention_multiplier", Some(self.attention_multiplier)),
            ("residual_multiplier", Some(self.residual_multiplier)),
            ("logits_scaling", Some(self.logits_scaling)),
            ("rope_theta", Some(self.rope_theta)),
            ("rope_local_base_freq", Some(self.rope_local_base_freq)),
        ] {
            if value.is_some_and(|value| value <= 0.0) {
                return Err(bad(key, &value.into(), "a positive number"));
            }
        }
        if let Some(own) = &self.per_layer {
            own.validate(self)?;
        }
        let rotated = self.rotary_dim();
        self.rope_scaling
            .validate("rope_scaling", self.global_rotary_dim())?;
        let local = "rope_parameters.sliding_attention";
        self.rope_local_scaling.validate(local, rotated)?;
        activation_named(self.activation_key(), &self.hidden_act).map(drop)
    }

    fn check_rotary_dim(&self) -> Result<()> {
        let (part, rotated) = (self.partial_rotary_factor, self.rotary_dim());
        if part > 0.0 && part <= 1.0 && rotated >= 2 && rotated % 2 == 0 {
            return Ok(());
        }
        let expected = format!(
            "above 0 and at most 1, with an even number of rotated channels of the head's {}",
            self.head_dim()
        );
        Err(bad("partial_rotary_factor", &part.into(), &expected))
    }

    /// Checks that the parts are set that the family has, and no others, and the values in them.
    fn check_parts(&self) -> Result<()> {
        let family = self.family;
        for (key, is_set, is_needed) in [
            ("mla", self.mla.is_some(), family.is_deepseek()),
            ("delta_net", self.delta_net.is_some(), family.is_hybrid()),
            (
                "per_layer",
                self.per_layer.is_some(),
                family.is_newest_gemma(),
            ),
            ("vision", self.vision.is_some(), family.is_qwen3_vl()),
        ] {
            self.check_presence(key, is_set, is_needed)?;
        }
        if let Some(mla) = &self.mla {
            self.check_heads_of_mla()?;
            mla.validate(family)?;
        }
        if let Some(delta_net) = &self.delta_net {
            self.check_layers_with_keys()?;
            delta_net.validate()?;
        }
        if let Some(vision) = &self.vision {
            vision.validate(self.hidden_size, self.head_dim(), self.num_hidden_layers)?;
            if self.rope_scaling != RopeScaling::Default {
                let expected = "of type default for a model with images";
                return Err(bad("rope_scaling", &self.rope_scaling.to_json(), expected));
            }
        }
        Ok(())
    }

    fn check_presence(&self, key: &str, is_set: bool, is_needed: bool) -> Result<()> {
        let (found, expected) = match (is_set, is_needed) {
            (true, false) => ("set", "`None`"),
            (false, true) => ("missing", "set"),
            _ => return Ok(()),
        };
        let family = self.family.model_type();
        let expected = format!("{expected} for the family {family}; start from `LlamaConfig::of`");
        Err(bad(key, &found.into(), &expected))
    }

    fn check_heads_of_mla(&self) -> Result<()> {
        let heads = self.num_attention_heads;
        let kv_heads = self.num_key_value_heads.unwrap_or(heads);
        if kv_heads == heads {
            return Ok(());
        }
        let expected =
            format!("num_attention_heads ({heads}), as multi-head latent attention has no groups");
        Err(bad("num_key_value_heads", &kv_heads.into(), &expected))
    }

    /// Checks that one layer at least has keys and values, from which a cache takes the number of its tokens.
    fn check_layers_with_keys(&self) -> Result<()> {
        let mut layers = 0..self.num_hidden_layers;
        if !layers.all(|layer| self.is_linear(layer)) {
            return Ok(());
        }
        let found = "linear_attention alone".into();
        let expected = "full_attention for one layer at least";
        Err(bad("layer_types", &found, expected))
    }

    fn check_experts(&self) -> Result<()> {
        let needed = ExpertsConfig::of(self.family).is_some();
        let may_have = needed || self.family == LlamaFamily::Gemma4;
        if !may_have || needed {
            self.check_presence("experts", self.experts.is_some(), needed)?;
        }
        let Some(experts) = &self.experts else {
            return Ok(());
        };
        experts.validate(self.family, self.num_hidden_layers)?;
        if self.mlp_bias {
            let expected = "false for a mixture of experts";
            return Err(bad("mlp_bias", &true.into(), expected));
        }
        Ok(())
    }

    /// Checks that the weights of these checked sizes can be counted. Norms and biases are left out: they are far
    /// smaller.
    fn check_parameters(&self) -> Result<()> {
        let [hidden, inner, vocabulary, layers] = [
            self.hidden_size,
            self.intermediate_size,
            self.vocab_size,
            self.num_hidden_layers,
        ]
        .map(i128::from);
        let heads = i128::from(self.num_attention_heads) + i128::from(self.kv_heads());
        let delta_net = self.delta_net.as_ref().map_or(0, |sizes| {
            i128::from(sizes.mixed_width()) + 2 * i128::from(sizes.value_width())
        });
        let attention = match &self.mla {
            None if self.gates_attention() => {
                let queries = i128::from(self.num_attention_heads) * i128::from(self.head_dim());
                (2 * heads * i128::from(self.head_dim()) + queries).max(2 * delta_net)
            }
            None => 2 * heads * i128::from(self.head_dim()),
            // At least as many as there are, for ranks up to the hidden size.
            Some(mla) => {
                let (head, rank) = (
                    mla.qk_head_dim() + mla.v_head_dim,
                    mla.q_lora_rank.unwrap_or(0),
                );
                3 * heads * i128::from(head) + i128::from(rank) + i128::from(mla.cached_dim())
            }
        };
        // At least as many as there are: a layer has experts or one block.
        let experts = self.experts.as_ref().map_or(0, |experts| {
            let shared = experts.shared_width().unwrap_or(0);
            let inner = i128::from(self.expert_intermediate_size());
            i128::from(experts.num_experts) * inner + i128::from(shared)
        });
        let inner = inner.max(experts);
        // At least as many as there are, for both kinds of layers.
        let (attention, inner, extra) = match &self.per_layer {
            None => (attention, inner, 0),
            Some(own) => {
                let head = i128::from(own.global_head_dim.unwrap_or(0));
                let input = i128::from(own.hidden_size_per_layer_input);
                let table = i128::from(own.vocab_size_per_layer_input) * layers * input;
                let altup = own.altup.as_ref().map_or(0, |altup| {
                    let (streams, rank) = (altup.altup_num_inputs, altup.laurel_rank);
                    let streams = i128::from(streams);
                    hidden * (2 * streams * hidden + layers * (2 * i128::from(rank) + streams))
                });
                let global = 2 * 2 * i128::from(self.num_attention_heads) * head;
                (
                    attention.max(global),
                    2 * inner,
                    table + 3 * layers * input * hidden + altup,
                )
            }
        };
        let parameters = hidden * (2 * vocabulary + layers * (attention + 3 * inner)) + extra;
        let keys = "vocab_size, hidden_size, intermediate_size, num_attention_heads or head_dim";
        sizes::check_parameters(parameters, keys)
    }
}
