use overdrive_core::Error as Common;
use overdrive_quantization::{GgufFile, GgufValue};

use crate::config::{
    ExpertsConfig, LayerType, LlamaConfig, LlamaFamily, ModelConfig, RopeScaling, check_layers,
};
use crate::{Error, Result};

/// The supported values of `general.architecture`, for messages.
const SUPPORTED: &str = "llama, qwen2, qwen3, qwen3moe, phi2, phi3, gemma, gemma2, gemma3, gemma3n, gemma4, smollm3, \
    olmo2, granite, granitehybrid, glm4, qwen2moe, qwen3next, qwen35, qwen35moe, gpt-oss, mistral3, qwen3vl, qwen3vlmoe, deepseek2, gemma-embedding";
/// The number of layers of the Gemma 2 and Gemma 3 models whose queries are scaled by hidden_size /
/// num_attention_heads and not by the width of a head, for which GGUF has no key.
pub(super) const LARGEST_GEMMAS: [(LlamaFamily, i64); 2] =
    [(LlamaFamily::Gemma2, 46), (LlamaFamily::Gemma3, 62)];

impl ModelConfig {
    /// Reads the configuration from the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for an architecture that this crate does not implement,
    /// [`Error::Common`] with the key that is missing or wrong.
    pub fn from_gguf(file: &GgufFile) -> Result<ModelConfig> {
        let architecture = file
            .value("general.architecture")
            .and_then(GgufValue::as_str);
        let family = match architecture {
            Some("llama") => LlamaFamily::Llama,
            Some("qwen2") => LlamaFamily::Qwen2,
            // The vision tower lies in another file; on text, both are one model.
            Some("qwen3" | "qwen3vl") => LlamaFamily::Qwen3,
            Some("phi2") => LlamaFamily::Phi,
            Some("phi3") => LlamaFamily::Phi3,
            Some("gemma") => LlamaFamily::Gemma,
            Some("gemma2") => LlamaFamily::Gemma2,
            Some("gemma3" | "gemma-embedding") => LlamaFamily::Gemma3,
            Some("gemma3n") => LlamaFamily::Gemma3n,
            Some("gemma4") => LlamaFamily::Gemma4,
            Some("qwen3moe" | "qwen3vlmoe") => LlamaFamily::Qwen3Moe,
            Some("smollm3") => LlamaFamily::SmolLm3,
            Some("olmo2") => LlamaFamily::Olmo2,
            // Older converters write a Granite 4 without Mamba layers as a hybrid; its numbers are those of Granite 3.
            Some("granite" | "granitehybrid") => LlamaFamily::Granite,
            Some("glm4") => LlamaFamily::Glm4,
            Some("qwen2moe") => LlamaFamily::Qwen2Moe,
            Some("qwen3next") => LlamaFamily::Qwen3Next,
            Some("qwen35") => LlamaFamily::Qwen35,
            Some("qwen35moe") => LlamaFamily::Qwen35Moe,
            Some("gpt-oss") => LlamaFamily::GptOss,
            Some("mistral3") => LlamaFamily::Ministral3,
            // Which of the two is told below.
            Some("deepseek2") => LlamaFamily::DeepseekV2,
            other => {
                return Err(Error::unsupported(
                    "general.architecture",
                    other.map_or("missing".to_owned(), |name| format!("{name:?}")),
                    SUPPORTED,
                ));
            }
        };
        let keys = Keys {
            file,
            architecture: architecture.unwrap_or_default(),
        };
        let family = match family {
            LlamaFamily::DeepseekV2 => keys.deepseek_family()?,
            other => other,
        };
        let config = ModelConfig::Llama(keys.config(family)?);
        config.validate()?;
        Ok(config)
    }
}

/// The metadata of one architecture.
pub(super) struct Keys<'a> {
    pub(super) file: &'a GgufFile,
    pub(super) architecture: &'a str,
}

impl Keys<'_> {
    fn config(&self, family: LlamaFamily) -> Result<LlamaConfig> {
        let family = self.family_with_experts(family)?;
        if family == LlamaFamily::Granite {
            self.without_mamba()?;
        }
        let defaults = LlamaConfig::of(family);
        let heads = self.required("attention.head_count")?;
        let hidden_size = self.required("embedding_length")?;
        // In Gemma 4, the other key is that of layers without a window.
        let local = match family {
            LlamaFamily::Gemma4 => self.integer("attention.key_length_swa")?,
            _ => None,
        };
        let head_dim = match local.or(self.integer("attention.key_length")?) {
            Some(given) => given,
            None => hidden_size / heads,
        };
        let same = |key: &str| -> Result<()> {
            match self.integer(key)? {
                Some(other) if other != head_dim => Err(Error::unsupported(
                    self.key(key),
                    other,
                    format!("{head_dim}, the length of keys"),
                )),
                _ => Ok(()),
            }
        };
        // Attention has one width for keys and values, and rotates whole heads, except in Phi and GLM-4, and in families
        // with keys of their own.
        let has_own_sizes = family == LlamaFamily::Gemma4 || family.is_deepseek();
        if !has_own_sizes {
            same("attention.value_length")?;
        }
        let mut partial_rotary_factor = 1.0;
        if family.rotates_partially() {
            let rotated = self.integer("rope.dimension_count")?.unwrap_or(head_dim);
            partial_rotary_factor = rotated as f64 / head_dim as f64;
        } else if !has_own_sizes {
            same("rope.dimension_count")?;
        }
        let (norm_eps, own_biases) = match family {
            LlamaFamily::Phi => ("attention.layer_norm_epsilon", true),
            _ => ("attention.layer_norm_rms_epsilon", false),
        };
        // Layers that predict further tokens, which are not read, lie behind the others.
        let further = self.integer("nextn_predict_layers")?.unwrap_or(0);
        let layers = self.required("block_count")?.saturating_sub(further);
        check_layers(&self.key("block_count"), layers)?;
        let has = |name: &str| self.file.tensor(name).is_some();
        let mut config = LlamaConfig {
            vocab_size: self.vocabulary()?,
            hidden_size,
            intermediate_size: match family.is_newest_gemma() {
                true => self.largest("feed_forward_length")?,
                // All of its layers have experts.
                false if family == LlamaFamily::Qwen35Moe => defaults.intermediate_size,
                false => self.required("feed_forward_length")?,
            },
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: match family {
                // Read below, as it may differ from layer to layer.
                LlamaFamily::Gemma4 => Some(heads),
                _ => self.integer("attention.head_count_kv")?.or(Some(heads)),
            },
            head_dim: Some(head_dim),
            max_position_embeddings: self.required("context_length")?,
            rms_norm_eps: self.required_number(norm_eps)?,
            // A GGUF file has no key for it: a tied head is one that is not stored.
            tie_word_embeddings: !has("output.weight"),
            rope_theta: self
                .number("rope.freq_base")?
                .unwrap_or(defaults.rope_theta),
            partial_rotary_factor,
            // Qwen2 always has a bias of queries, which does not stand for this key.
            attention_bias: !own_biases
                && (has("blk.0.attn_output.bias")
                    || family != LlamaFamily::Qwen2 && has("blk.0.attn_q.bias")),
            mlp_bias: !own_biases && has("blk.0.ffn_down.bias"),
            // Files of Phi-4 have 0 for no window.
            sliding_window: self
                .integer("attention.sliding_window")?
                .filter(|&window| window != 0),
            // llama.cpp does not implement Qwen's windows, and files have no key for them.
            use_sliding_window: false,
            use_bidirectional_attention: self.architecture == "gemma-embedding",
            bos_token_id: self.token("bos_token_id")?,
            eos_token_id: super::end_of_text::end_of_text_tokens(self.file)?,
            pad_token_id: self.token("padding_token_id")?,
            ..defaults
        };
        // Mistral's files have the architecture `llama`, and OLMo 3's `olmo2`; only their windows differ.
        if config.sliding_window.is_some() {
            config.family = match family {
                LlamaFamily::Llama => LlamaFamily::Mistral,
                LlamaFamily::Olmo2 => LlamaFamily::Olmo3,
                other => other,
            };
        }
        if config.family == LlamaFamily::Olmo3 {
            config.rope_local_base_freq = config.rope_theta;
        }
        if config.family != LlamaFamily::Gemma4 {
            config.rope_scaling = self.rope_scaling(&config)?;
        }
        self.experts(&mut config)?;
        self.delta_net(&mut config)?;
        self.deepseek(&mut config)?;
        if config.family.is_later_gemma() {
            self.gemma(&mut config)?;
        }
        self.newest_gemma(&mut config)?;
        if config.family == LlamaFamily::Granite {
            self.granite(&mut config)?;
        }
        if config.family == LlamaFamily::Ministral3 {
            self.ministral(&mut config)?;
        }
        if config.family == LlamaFamily::Olmo3 {
            self.sliding_layers(&mut config)?;
        }
        Ok(config)
    }

    /// Returns the family, which is Mixtral for a Llama with experts.
    fn family_with_experts(&self, family: LlamaFamily) -> Result<LlamaFamily> {
        let experts = self.integer("expert_count")?.unwrap_or(0);
        match family {
            _ if LlamaConfig::of(family).experts.is_some() => Ok(family),
            LlamaFamily::Gemma4 => Ok(family),
            LlamaFamily::Llama if experts > 0 => Ok(LlamaFamily::Mixtral),
            _ if experts > 0 => Err(Error::unsupported(
                self.key("expert_count"),
                experts,
                "0; only files of llama, gemma4, gpt-oss, deepseek2, qwen2moe, qwen3moe, qwen3next and qwen35moe may have experts",
            )),
            _ => Ok(family),
        }
    }

    fn experts(&self, config: &mut LlamaConfig) -> Result<()> {
        if config.family == LlamaFamily::Gemma4 && self.integer("expert_count")?.unwrap_or(0) > 0 {
            config.experts = Some(ExpertsConfig::gemma4());
        }
        let Some(experts) = &mut config.experts else {
            return Ok(());
        };
        experts.num_experts = self.required("expert_count")?;
        experts.num_experts_per_tok = self.required("expert_used_count")?;
        // llama.cpp divides the weights by their sum in all architectures but qwen2moe; its files have no key for it.
        experts.norm_topk_prob = config.family != LlamaFamily::Qwen2Moe;
        if let Some(shared) = &mut experts.shared_expert_intermediate_size {
            let given = self.integer("expert_shared_feed_forward_length")?;
            *shared = given.unwrap_or(config.intermediate_size);
        }
        match config.family {
            LlamaFamily::Mixtral => {}
            LlamaFamily::GptOss => {
                config.intermediate_size = self.required("expert_feed_forward_length")?;
            }
            _ => experts.moe_intermediate_size = self.required("expert_feed_forward_length")?,
        }
        Ok(())
    }

    /// Checks that a Granite 4 has no Mamba layers, which have no heads of keys in a file.
    fn without_mamba(&self) -> Result<()> {
        let name = "attention.head_count_kv";
        let heads = self.value(name).and_then(GgufValue::as_i64s);
        match heads.unwrap_or_default().contains(&0) {
            false => Ok(()),
            true => Err(Error::unsupported(
                self.key(name),
                "0 for some layers",
                "a positive number for each, a Granite 4 without Mamba layers",
            )),
        }
    }

    /// Reads the factors of Granite. As in llama.cpp, 0 stands for none of those that may be missing.
    fn granite(&self, config: &mut LlamaConfig) -> Result<()> {
        let factor = |key: &str, default: f64| -> Result<f64> {
            let given = self.number(key)?.filter(|&factor| factor != 0.0);
            Ok(given.unwrap_or(default))
        };
        config.logits_scaling = self.required_number("logit_scale")?;
        config.embedding_multiplier = factor("embedding_scale", 1.0)?;
        config.residual_multiplier = factor("residual_scale", 1.0)?;
        let usual = (config.head_dim() as f64).sqrt().recip();
        config.attention_multiplier = factor("attention.scale", usual)?;
        // llama.cpp takes it as the switch of rotary positions.
        let key = "rope.scaling.finetuned";
        match self.value(key) {
            Some(GgufValue::Bool(false)) => Err(self.wrong(key, "true or missing")),
            _ => Ok(()),
        }
    }

    /// Reads the factor of the queries of Ministral 3, which Mistral Small does not have.
    fn ministral(&self, config: &mut LlamaConfig) -> Result<()> {
        let scale = self.number("attention.temperature_scale")?;
        config.llama_4_scaling_beta = scale.unwrap_or(0.0);
        if scale.is_none() && config.rope_scaling == RopeScaling::Default {
            config.family = LlamaFamily::Mistral;
        }
        Ok(())
    }

    fn gemma(&self, config: &mut LlamaConfig) -> Result<()> {
        // Gemma 3 has norms of queries and keys in place of the bounds, whatever its file holds.
        let bounded = config.family == LlamaFamily::Gemma2;
        let bound = |key, default: Option<f64>| -> Result<Option<f64>> {
            Ok(self.number(key)?.or(default).filter(|_| bounded))
        };
        config.attn_logit_softcapping =
            bound("attn_logit_softcapping", config.attn_logit_softcapping)?;
        config.final_logit_softcapping =
            bound("final_logit_softcapping", config.final_logit_softcapping)?;
        let largest = (config.family, config.num_hidden_layers);
        config.query_pre_attn_scalar = match LARGEST_GEMMAS.contains(&largest) {
            true => config.hidden_size as f64 / config.num_attention_heads as f64,
            false => config.head_dim() as f64,
        };
        self.sliding_layers(config)
    }

    /// Reads which layers slide, and the base of their rotary frequencies.
    pub(super) fn sliding_layers(&self, config: &mut LlamaConfig) -> Result<()> {
        if let Some(local) = self.number("rope.freq_base_swa")? {
            config.rope_local_base_freq = local;
        }
        let is_full = |layer, every| (layer + 1) % every == 0;
        config.layer_types = self.layer_types(config.num_hidden_layers, is_full)?;
        Ok(())
    }

    /// Returns the types of layers that the pattern of windows says: a list, or a period of which `is_full` chooses the
    /// layers without a window.
    pub(super) fn layer_types(
        &self,
        layers: i64,
        is_full: fn(i64, i64) -> bool,
    ) -> Result<Option<Vec<LayerType>>> {
        let key = "attention.sliding_window_pattern";
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let of = |slides: bool| match slides {
            true => LayerType::Sliding,
            false => LayerType::Full,
        };
        let every = value.as_i64().filter(|&every| every > 0);
        match (value.as_bools(), every) {
            (Some(slide), _) => Ok(Some(slide.iter().map(|&slides| of(slides)).collect())),
            (None, Some(every)) => {
                let types = (0..layers).map(|layer| of(!is_full(layer, every)));
                Ok(Some(types.collect()))
            }
            _ => Err(self.wrong(key, "a positive integer or a list of booleans")),
        }
    }

    pub(super) fn vocabulary(&self) -> Result<i64> {
        // The rows of the table, which may be padded beyond the tokens of the vocabulary.
        let table = self.file.tensor("token_embd.weight");
        match table.and_then(|table| table.shape().first().copied()) {
            Some(tokens) => Ok(tokens),
            None => self.required("vocab_size"),
        }
    }

    pub(super) fn token(&self, name: &str) -> Result<Option<i64>> {
        let key = format!("tokenizer.ggml.{name}");
        match self.file.value(&key) {
            None => Ok(None),
            Some(value) => value
                .as_i64()
                .map(Some)
                .ok_or_else(|| Common::option(key, format!("{value:?}"), "a token id").into()),
        }
    }

    pub(super) fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    pub(super) fn value(&self, name: &str) -> Option<&GgufValue> {
        self.file.value(&self.key(name))
    }

    /// Returns an integer, or the common value of a list with one for each layer.
    pub(super) fn integer(&self, name: &str) -> Result<Option<i64>> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        // llama.cpp writes a list where its converter expects layers that differ.
        let all = value.as_i64s().unwrap_or_default();
        let common = all.first().filter(|first| all.iter().all(|n| n == *first));
        value
            .as_i64()
            .or(common.copied())
            .map(Some)
            .ok_or_else(|| self.wrong(name, "an integer, the same for every layer"))
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.value(name) {
            None => Ok(None),
            Some(GgufValue::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.wrong(name, "true or false")),
        }
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(name) else {
            return Ok(None);
        };
        let number = value.as_f64().filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| self.wrong(name, "a number"))
    }

    /// Checks that a number, if the file has it, is the one that is implemented.
    pub(super) fn only(&self, name: &str, implemented: f64) -> Result<()> {
        match self.number(name)? {
            Some(found) if found != implemented => Err(Error::unsupported(
                self.key(name),
                found,
                implemented.to_string(),
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn required(&self, name: &str) -> Result<i64> {
        let value = self.integer(name)?.filter(|&value| value > 0);
        value.ok_or_else(|| self.wrong(name, "a positive integer"))
    }

    pub(super) fn required_number(&self, name: &str) -> Result<f64> {
        self.number(name)?
            .ok_or_else(|| self.wrong(name, "a number"))
    }

    pub(super) fn wrong(&self, name: &str, expected: &str) -> Error {
        let found = self.value(name);
        let found = found.map_or("missing".to_owned(), |value| format!("{value:?}"));
        Common::option(self.key(name), found, expected.to_owned()).into()
    }
}
