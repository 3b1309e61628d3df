//! Reading a Llama's configuration from config.json, and writing it.

use super::LlamaConfig;
use crate::config::delta_net::DeltaNetConfig;
use crate::config::experts::ExpertsConfig;
use crate::config::family::{LayerType, LlamaFamily, layer_types};
use crate::config::fields::{self, Fields, bad, ids_to_json};
use crate::config::rope_scaling::RopeScaling;
use crate::config::{vision, without_written_keys};
use crate::{Error, Result};
use serde_json::{Map, Value, json};

impl LlamaConfig {
    pub(in crate::config) fn read(family: LlamaFamily, mut fields: Fields) -> Result<LlamaConfig> {
        let mut config = LlamaConfig::of(family);
        fields.positive("vocab_size", &mut config.vocab_size)?;
        fields.positive("hidden_size", &mut config.hidden_size)?;
        if let Some(own) = &mut config.per_layer {
            own.read_inner_widths(&mut fields)?;
        }
        fields.positive(config.inner_width_key(), &mut config.intermediate_size)?;
        fields.layers("num_hidden_layers", &mut config.num_hidden_layers)?;
        fields.positive("num_attention_heads", &mut config.num_attention_heads)?;
        // In transformers an absent key is the family's default, and null is "as many as queries".
        if let Some(value) = fields.take_nullable("num_key_value_heads") {
            let key = "num_key_value_heads";
            config.num_key_value_heads = value
                .map(|value| fields::positive(key, &value))
                .transpose()?;
        }
        config.head_dim = fields.optional_positive("head_dim")?.or(config.head_dim);
        if let Some(name) = config.read_activation(&mut fields)? {
            config.hidden_act = name;
        }
        fields.positive(
            "max_position_embeddings",
            &mut config.max_position_embeddings,
        )?;
        fields.number("initializer_range", &mut config.initializer_range)?;
        // transformers reads it for every family.
        let mut is_causal = true;
        fields.boolean("is_causal", &mut is_causal)?;
        if !is_causal {
            return Err(Error::unsupported(
                "is_causal",
                "false",
                "true, tokens that attend to those before them",
            ));
        }
        fields.number(config.norm_eps_key(), &mut config.rms_norm_eps)?;
        fields.boolean("tie_word_embeddings", &mut config.tie_word_embeddings)?;
        config.read_rope(&mut fields)?;
        fields.boolean(config.attention_bias_key(), &mut config.attention_bias)?;
        fields.boolean("mlp_bias", &mut config.mlp_bias)?;
        fields.number("attention_dropout", &mut config.attention_dropout)?;
        if family.is_phi() {
            fields.number("resid_pdrop", &mut config.resid_pdrop)?;
            fields.number("embd_pdrop", &mut config.embd_pdrop)?;
        }
        if family == LlamaFamily::Phi {
            fields.boolean("qk_layernorm", &mut config.qk_layernorm)?;
        }
        // An absent key is the family's default, and null is no window.
        if let Some(value) = fields.take_nullable("sliding_window") {
            let key = "sliding_window";
            // Qwen2-MoE has 0 for no window.
            let none = |value: &Value| family == LlamaFamily::Qwen2Moe && value.as_i64() == Some(0);
            config.sliding_window = value
                .filter(|value| !none(value))
                .map(|value| fields::positive(key, &value))
                .transpose()?;
        }
        fields.boolean("use_sliding_window", &mut config.use_sliding_window)?;
        if let Some(value) = fields.take("max_window_layers") {
            config.max_window_layers = value
                .as_i64()
                .filter(|&n| n >= 0)
                .ok_or_else(|| bad("max_window_layers", &value, "an integer of at least 0"))?;
        }
        if family == LlamaFamily::GraniteMoeHybrid {
            config.read_granite4(&mut fields)?;
        }
        config.layer_types = fields
            .take("layer_types")
            .map(|value| layer_types(&value, family.layer_types()))
            .transpose()?;
        if let Some(delta_net) = &mut config.delta_net {
            delta_net.read(&mut fields)?;
            if config.layer_types.is_none() {
                let types = DeltaNetConfig::layer_types(&mut fields, config.num_hidden_layers)?;
                config.layer_types = Some(types);
            }
        }
        if family.is_granite() {
            fields.number("embedding_multiplier", &mut config.embedding_multiplier)?;
            fields.number("attention_multiplier", &mut config.attention_multiplier)?;
            fields.number("residual_multiplier", &mut config.residual_multiplier)?;
            fields.number("logits_scaling", &mut config.logits_scaling)?;
        }
        if family == LlamaFamily::SmolLm3 {
            config.read_rotary_layers(&mut fields)?;
        }
        if family == LlamaFamily::Gemma4 {
            config.experts = ExpertsConfig::read_gemma4(&mut fields)?;
        } else if let Some(experts) = &mut config.experts {
            experts.read(family, &mut fields)?;
        }
        if let Some(mla) = &mut config.mla {
            mla.read(family, &mut fields)?;
            // As in transformers, it is the number of rotated channels, whatever the file says.
            config.head_dim = None;
        }
        if family.is_gemma() {
            config.read_gemma(&mut fields)?;
        }
        if let Some(mut own) = config.per_layer.take() {
            let layers = 0..config.num_hidden_layers;
            let without_window: Vec<i64> = layers.filter(|&layer| !config.slides(layer)).collect();
            own.read(&mut fields, &without_window)?;
            config.per_layer = Some(own);
        }
        fields.token_id("bos_token_id", &mut config.bos_token_id)?;
        fields.token_ids("eos_token_id", &mut config.eos_token_id)?;
        fields.token_id("pad_token_id", &mut config.pad_token_id)?;
        config.extra = without_written_keys(fields.into_rest());
        Ok(config)
    }

    fn read_rotary_layers(&mut self, fields: &mut Fields) -> Result<()> {
        let interval = &mut self.no_rope_layer_interval;
        fields.positive("no_rope_layer_interval", interval)?;
        let Some(value) = fields.take("no_rope_layers") else {
            return Ok(());
        };
        let with_rotary = |layer: &Value| match layer.as_i64() {
            Some(0) => Some(false),
            Some(1) => Some(true),
            _ => None,
        };
        let layers = value
            .as_array()
            .map(|layers| layers.iter().map(with_rotary));
        self.no_rope_layers = layers.and_then(Iterator::collect);
        if self.no_rope_layers.is_none() {
            let expected =
                "a list with 0 for each layer without rotary positions, and 1 for the others";
            return Err(bad("no_rope_layers", &value, expected));
        }
        Ok(())
    }

    /// Checks that a Granite 4 has neither Mamba layers nor experts, and reads whether it has rotary positions.
    fn read_granite4(&mut self, fields: &mut Fields) -> Result<()> {
        let experts = fields.take("num_local_experts").unwrap_or(json!(8));
        if experts.as_i64() != Some(0) {
            let supported = "0, a Granite 4 without experts";
            return Err(Error::unsupported("num_local_experts", &experts, supported));
        }
        // transformers 4 has other names for the types, and without any, all layers are Mamba's.
        let types = ["layer_types", "layers_block_type"].map(|key| fields.take(key));
        let types = types.into_iter().flatten().next().unwrap_or_default();
        let is_attention = |layer: &Value| {
            let name = layer.as_str();
            name == Some("attention") || name == Some(LayerType::Full.name())
        };
        let listed = types.as_array();
        if !listed.is_some_and(|layers| layers.iter().all(is_attention)) {
            let supported =
                "a list of \"attention\" or \"full_attention\", a Granite 4 without Mamba layers";
            return Err(Error::unsupported("layer_types", &types, supported));
        }
        let count = listed.map_or(0, Vec::len);
        fields.put("layer_types", vec![LayerType::Full.name(); count].into());
        if fields.string("position_embedding_type")?.as_deref() != Some("rope") {
            self.no_rope_layers = Some(vec![false; count]);
        }
        Ok(())
    }

    /// Returns the key of [`LlamaConfig::intermediate_size`].
    fn inner_width_key(&self) -> &'static str {
        match self.family {
            LlamaFamily::GraniteMoeHybrid => "shared_intermediate_size",
            _ => "intermediate_size",
        }
    }

    fn read_activation(&self, fields: &mut Fields) -> Result<Option<String>> {
        let given = fields.string(self.activation_key())?;
        if self.family != LlamaFamily::Gemma {
            return Ok(given);
        }
        // transformers 4 has both keys and prefers `hidden_activation`; transformers 5 has `hidden_act` alone.
        let name = given.or(fields.string("hidden_act")?);
        // The first files say `gelu` where the model was trained with the approximation.
        let approximation = || "gelu_pytorch_tanh".to_owned();
        Ok(name.map(|name| {
            if name == "gelu" {
                approximation()
            } else {
                name
            }
        }))
    }

    fn read_rope(&mut self, fields: &mut Fields) -> Result<()> {
        let (context, theta) = (self.max_position_embeddings, &mut self.rope_theta);
        let part = &mut self.partial_rotary_factor;
        if matches!(self.family, LlamaFamily::Gemma3 | LlamaFamily::Gemma3n) {
            fields.number("rope_local_base_freq", &mut self.rope_local_base_freq)?;
        }
        if self.family == LlamaFamily::Gemma4 {
            if let Some(parameters) = fields.take("rope_parameters") {
                // The keys beside it, which are those of older models, change nothing in transformers.
                let alone = Map::from_iter([("rope_parameters".to_owned(), parameters)]);
                let thetas = [theta, &mut self.rope_local_base_freq];
                [self.rope_scaling, self.rope_local_scaling] =
                    RopeScaling::read_by_layer(&mut Fields::new(alone), context, thetas, part)?;
            }
        } else if matches!(
            self.family,
            LlamaFamily::Gemma3 | LlamaFamily::Gemma3n | LlamaFamily::Olmo3
        ) {
            let thetas = [theta, &mut self.rope_local_base_freq];
            [self.rope_scaling, self.rope_local_scaling] =
                RopeScaling::read_by_layer(fields, context, thetas, part)?;
        } else if matches!(self.family, LlamaFamily::GptOss | LlamaFamily::Ministral3)
            && fields.peek("rope_scaling").is_none()
            && fields.peek("rope_parameters").is_none()
        {
            // The default scaling of the family.
            fields.number("rope_theta", theta)?;
        } else {
            if self.family == LlamaFamily::Ministral3 {
                self.llama_4_scaling_beta = scaling_beta(fields)?;
            }
            let of_phi3 = self.family == LlamaFamily::Phi3;
            self.rope_scaling = RopeScaling::read(fields, context, theta, part, of_phi3)?;
        }
        // transformers cannot compute it for the others either.
        if self.partial_rotary_factor != 1.0 && !self.family.rotates_partially() {
            return Err(Error::unsupported(
                "partial_rotary_factor",
                self.partial_rotary_factor,
                "1.0, the rotation of whole heads",
            ));
        }
        Ok(())
    }

    /// Returns the key of [`LlamaConfig::attention_bias`].
    fn attention_bias_key(&self) -> &'static str {
        match self.family {
            LlamaFamily::Qwen2Moe => "qkv_bias",
            _ => "attention_bias",
        }
    }

    /// Returns the key of [`LlamaConfig::rms_norm_eps`].
    fn norm_eps_key(&self) -> &'static str {
        match self.family {
            LlamaFamily::Phi => "layer_norm_eps",
            _ => "rms_norm_eps",
        }
    }

    fn read_gemma(&mut self, fields: &mut Fields) -> Result<()> {
        if self.per_layer.is_none() {
            fields.number("query_pre_attn_scalar", &mut self.query_pre_attn_scalar)?;
        }
        // An absent key is the family's default, and null is no bound.
        for (key, slot) in [
            ("attn_logit_softcapping", &mut self.attn_logit_softcapping),
            ("final_logit_softcapping", &mut self.final_logit_softcapping),
        ] {
            if let Some(value) = fields.take_nullable(key) {
                *slot = value.map(|value| fields::number(key, &value)).transpose()?;
            }
        }
        if self.family == LlamaFamily::Gemma4 {
            // Its key is a name.
            return Ok(());
        }
        let key = "use_bidirectional_attention";
        fields.boolean(key, &mut self.use_bidirectional_attention)?;
        if self.use_bidirectional_attention && self.family != LlamaFamily::Gemma3 {
            return Err(Error::unsupported(
                key,
                "true",
                "false; only Gemma 3 attends in both directions",
            ));
        }
        // Files that are older than `layer_types` have a period instead.
        if let Some(pattern) = fields.optional_positive("sliding_window_pattern")?
            && self.family == LlamaFamily::Gemma3
            && self.layer_types.is_none()
        {
            let of_layer = |layer| match (layer + 1) % pattern {
                0 => LayerType::Full,
                _ => LayerType::Sliding,
            };
            self.layer_types = Some((0..self.num_hidden_layers).map(of_layer).collect());
        }
        Ok(())
    }

    /// Returns the key of [`LlamaConfig::hidden_act`].
    pub(super) fn activation_key(&self) -> &'static str {
        match self.family.is_gemma() {
            true => "hidden_activation",
            false => "hidden_act",
        }
    }

    pub(in crate::config) fn write(&self) -> Map<String, Value> {
        let mut map = self.extra.clone();
        // Implied sizes are written out, as another reader may have other defaults for them.
        let own = json!({
            "architectures": [self.family.architecture()],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            self.inner_width_key(): self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.kv_heads(),
            "head_dim": self.head_dim(),
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_dropout": self.attention_dropout,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": ids_to_json(&self.eos_token_id),
            "pad_token_id": self.pad_token_id,
        });
        let windows = json!({
            "sliding_window": self.sliding_window,
            "use_sliding_window": self.use_sliding_window,
            "max_window_layers": self.max_window_layers,
        });
        let member = match self.family {
            LlamaFamily::Llama => {
                json!({"attention_bias": self.attention_bias, "mlp_bias": self.mlp_bias})
            }
            LlamaFamily::Mistral | LlamaFamily::Ministral3 | LlamaFamily::Mixtral => {
                json!({"sliding_window": self.sliding_window})
            }
            LlamaFamily::Qwen2 => windows,
            LlamaFamily::SmolLm3 => {
                let rotary = |layer| i64::from(self.has_rotary(layer));
                let layers: Vec<i64> = (0..self.num_hidden_layers).map(rotary).collect();
                json!({
                    "attention_bias": self.attention_bias,
                    "mlp_bias": self.mlp_bias,
                    "sliding_window": self.sliding_window,
                    "use_sliding_window": self.use_sliding_window,
                    "no_rope_layers": layers,
                    "no_rope_layer_interval": self.no_rope_layer_interval,
                })
            }
            LlamaFamily::Qwen3Vl | LlamaFamily::Qwen3VlMoe => {
                json!({"attention_bias": self.attention_bias})
            }
            LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe | LlamaFamily::Qwen2Moe => {
                let key = self.attention_bias_key();
                map.insert(key.to_owned(), self.attention_bias.into());
                windows
            }
            LlamaFamily::Phi => json!({
                "resid_pdrop": self.resid_pdrop,
                "embd_pdrop": self.embd_pdrop,
                "partial_rotary_factor": self.partial_rotary_factor,
                "qk_layernorm": self.qk_layernorm,
            }),
            LlamaFamily::Phi3 => json!({
                "resid_pdrop": self.resid_pdrop,
                "embd_pdrop": self.embd_pdrop,
                "partial_rotary_factor": self.partial_rotary_factor,
                "sliding_window": self.sliding_window,
            }),
            LlamaFamily::Gemma => json!({
                "attention_bias": self.attention_bias,
                // The key of transformers 5; 4 prefers the other one.
                "hidden_act": self.hidden_act,
            }),
            LlamaFamily::Granite => json!({
                "attention_bias": self.attention_bias,
                "mlp_bias": self.mlp_bias,
                "embedding_multiplier": self.embedding_multiplier,
                "attention_multiplier": self.attention_multiplier,
                "residual_multiplier": self.residual_multiplier,
                "logits_scaling": self.logits_scaling,
            }),
            LlamaFamily::DeepseekV2 | LlamaFamily::DeepseekV3 => {
                json!({"attention_bias": self.attention_bias})
            }
            LlamaFamily::Qwen3Next | LlamaFamily::Qwen35 | LlamaFamily::Qwen35Moe => {
                let kind = |layer| match self.is_linear(layer) {
                    true => LayerType::Linear.name(),
                    false => LayerType::Full.name(),
                };
                json!({
                    "attention_bias": self.attention_bias,
                    "partial_rotary_factor": self.partial_rotary_factor,
                    "layer_types": (0..self.num_hidden_layers).map(kind).collect::<Vec<_>>(),
                })
            }
            LlamaFamily::GraniteMoeHybrid => json!({
                "attention_bias": self.attention_bias,
                "embedding_multiplier": self.embedding_multiplier,
                "attention_multiplier": self.attention_multiplier,
                "residual_multiplier": self.residual_multiplier,
                "logits_scaling": self.logits_scaling,
                "num_local_experts": 0,
                "position_embedding_type": self.has_rotary(0).then_some("rope"),
                "layer_types": (0..self.num_hidden_layers)
                    .map(|_| LayerType::Full.name())
                    .collect::<Vec<_>>(),
            }),
            LlamaFamily::Glm4 => json!({
                "attention_bias": self.attention_bias,
                "partial_rotary_factor": self.partial_rotary_factor,
            }),
            LlamaFamily::GptOss => json!({
                "attention_bias": self.attention_bias,
                "sliding_window": self.sliding_window,
            }),
            LlamaFamily::Olmo2 => json!({"attention_bias": self.attention_bias}),
            LlamaFamily::Olmo3 => json!({
                "attention_bias": self.attention_bias,
                "sliding_window": self.sliding_window,
            }),
            LlamaFamily::Gemma2 | LlamaFamily::Gemma3 => json!({
                "attention_bias": self.attention_bias,
                "sliding_window": self.sliding_window,
                "query_pre_attn_scalar": whole(self.query_pre_attn_scalar),
                "attn_logit_softcapping": self.attn_logit_softcapping,
                "final_logit_softcapping": self.final_logit_softcapping,
            }),
            // Written below.
            LlamaFamily::Gemma3n | LlamaFamily::Gemma4 => Value::Null,
        };
        if self.use_bidirectional_attention {
            map.insert("use_bidirectional_attention".to_owned(), true.into());
        }
        for object in [own, member] {
            if let Value::Object(entries) = object {
                map.extend(entries);
            }
        }
        if let Some(own) = &self.per_layer {
            own.write(self, &mut map);
        }
        if let Some(experts) = &self.experts {
            experts.write(self.family, &mut map);
        }
        if let Some(delta_net) = &self.delta_net {
            delta_net.write(&mut map);
        }
        if self.family == LlamaFamily::Qwen35Moe {
            // All layers have experts, and transformers has no such key.
            map.remove(self.inner_width_key());
        }
        if let Some(mla) = &self.mla {
            let heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
            map.insert("num_key_value_heads".to_owned(), heads.into());
            map.insert("head_dim".to_owned(), mla.qk_rope_head_dim.into());
            mla.write(self.family, &mut map);
        }
        if let Some(types) = &self.layer_types {
            let names: Vec<_> = types.iter().map(|kind| kind.name()).collect();
            map.insert("layer_types".to_owned(), names.into());
        }
        let activation = self.hidden_act.as_str().into();
        map.insert(self.activation_key().to_owned(), activation);
        map.insert(self.norm_eps_key().to_owned(), self.rms_norm_eps.into());
        self.write_rope(&mut map);
        match &self.vision {
            Some(vision) => vision::write(vision, map, self.family),
            None => map,
        }
    }

    fn write_rope(&self, map: &mut Map<String, Value>) {
        let scales_locally = self.rope_local_scaling != RopeScaling::Default;
        let by_layer = match self.family {
            // transformers 4 has no key for the scaling of sliding layers.
            LlamaFamily::Gemma3 | LlamaFamily::Gemma3n => scales_locally,
            LlamaFamily::Gemma4 => true,
            // `rope_theta` is the base of all layers in transformers 4, and of full layers in 5, where that of
            // sliding ones is then the default.
            LlamaFamily::Olmo3 => {
                scales_locally || [self.rope_theta, self.rope_local_base_freq] != [5e5; 2]
            }
            _ => false,
        };
        if by_layer {
            // The form of transformers 5.
            let object = |scaling: &RopeScaling, theta: f64| {
                let mut value = match scaling {
                    RopeScaling::Default => json!({"rope_type": "default"}),
                    scaled => scaled.to_json(),
                };
                value["rope_theta"] = theta.into();
                value
            };
            let both = json!({
                "full_attention": object(&self.rope_scaling, self.rope_theta),
                "sliding_attention": object(&self.rope_local_scaling, self.rope_local_base_freq),
            });
            map.insert("rope_parameters".to_owned(), both);
            return;
        }
        if matches!(self.family, LlamaFamily::Gemma3 | LlamaFamily::Gemma3n) {
            let theta = self.rope_local_base_freq.into();
            map.insert("rope_local_base_freq".to_owned(), theta);
        }
        if let (LlamaFamily::Phi3, RopeScaling::LongRope(long)) = (self.family, &self.rope_scaling)
        {
            // Phi-3 has it beside the scaling, and reads 4096 if it is not there.
            let original = long.original_max_position_embeddings.into();
            map.insert("original_max_position_embeddings".to_owned(), original);
        }
        self.rope_scaling.write(self.rope_theta, map);
        let has_default = matches!(self.family, LlamaFamily::GptOss | LlamaFamily::Ministral3);
        if has_default && self.rope_scaling == RopeScaling::Default {
            // Without a scaling, transformers takes the default one of the family.
            map.insert("rope_scaling".to_owned(), json!({"rope_type": "default"}));
        }
        if self.family == LlamaFamily::Ministral3 {
            map["rope_scaling"]["llama_4_scaling_beta"] = self.llama_4_scaling_beta.into();
        }
    }
}

/// Reads the factor of queries of a Ministral 3 beside its scaling of positions; 0 if it is not there.
fn scaling_beta(fields: &Fields) -> Result<f64> {
    for key in ["rope_scaling", "rope_parameters"] {
        if let Some(value) = fields
            .peek(key)
            .and_then(|all| all.get("llama_4_scaling_beta"))
        {
            return fields::number(&format!("{key}.llama_4_scaling_beta"), value);
        }
    }
    Ok(0.0)
}

/// Writes a whole number as an integer, which transformers requires.
fn whole(number: f64) -> Value {
    // Below 2^53 every whole f64 is an exact integer.
    if number.fract() == 0.0 && number.abs() < 1e15 {
        return (number as i64).into();
    }
    number.into()
}
