use serde_json::{Map, Value, json};

use super::experts::ExpertsConfig;
use super::family::{LayerType, LlamaFamily, layer_types};
use super::fields::{Fields, bad, ids_to_json};
use super::rope_scaling::RopeScaling;
use super::sizes::{self, check_layers, check_size};
use crate::activation::activation_named;
use crate::{Error, Result};

/// The configuration of a decoder of the Llama family, with the keys of its `config.json`. Defaults are those
/// of transformers' `LlamaConfig`; [`LlamaConfig::of`] returns those of the other members.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// The member of the family (`model_type`); default Llama.
    pub family: LlamaFamily,
    /// The number of tokens in the vocabulary; default 32000.
    pub vocab_size: i64,
    /// The width of the hidden states; default 4096.
    pub hidden_size: i64,
    /// The inner width of the feed-forward block; default 11008.
    pub intermediate_size: i64,
    /// The number of layers; default 32.
    pub num_hidden_layers: i64,
    /// The number of query heads; default 32.
    pub num_attention_heads: i64,
    /// The number of key/value heads; default `None`, as many as query heads.
    pub num_key_value_heads: Option<i64>,
    /// The number of channels of a head; default `None`, `hidden_size / num_attention_heads`.
    pub head_dim: Option<i64>,
    /// The activation of the feed-forward block; default `"silu"`. Gemma calls it `hidden_activation`; in
    /// Gemma 1 `"gelu"` means the tanh approximation under either key.
    pub hidden_act: String,
    /// The context length in tokens; default 2048.
    pub max_position_embeddings: i64,
    /// The standard deviation of random weights; default 0.02.
    pub initializer_range: f64,
    /// The number that norms add to the mean square; default 1e-6. Phi-2 calls it `layer_norm_eps`.
    pub rms_norm_eps: f64,
    /// If `true`, the head is the embedding; default `false`.
    pub tie_word_embeddings: bool,
    /// The base of the rotary frequencies; default 10000.
    pub rope_theta: f64,
    /// The part of a head's channels, from the first one on, that is rotated (Phi-2 and Phi-3); default 1.
    pub partial_rotary_factor: f64,
    /// The rope scaling; default none.
    pub rope_scaling: RopeScaling,
    /// The base of the rotary frequencies of Gemma 3's sliding layers; default 10000.
    pub rope_local_base_freq: f64,
    /// The rope scaling of Gemma 3's sliding layers; default none.
    pub rope_local_scaling: RopeScaling,
    /// If `true`, query, key, value and output projections have biases (Llama, Qwen3 and Gemma); default
    /// `false`.
    pub attention_bias: bool,
    /// If `true`, the feed-forward block has biases (Llama); default `false`.
    pub mlp_bias: bool,
    /// The dropout of attention weights in training; default 0.
    pub attention_dropout: f64,
    /// The dropout of what attention and the feed-forward block add to the residual stream, in training (Phi-2
    /// and Phi-3); default 0.
    pub resid_pdrop: f64,
    /// The dropout of embeddings in training (Phi-2); default 0. Phi-3 has the key and no such dropout, as in
    /// transformers.
    pub embd_pdrop: f64,
    /// If `true`, queries and keys are normalised head by head (Phi-2); default `false`.
    pub qk_layernorm: bool,
    /// The number of tokens that a sliding layer attends to, its own included (all but Llama); default `None`.
    pub sliding_window: Option<i64>,
    /// If `true`, Qwen's windows are in effect; default `false`.
    pub use_sliding_window: bool,
    /// The first of Qwen's layers with a window; default 28.
    pub max_window_layers: i64,
    /// The attention types of Qwen's and Gemma's layers; default `None`: Qwen's slide from `max_window_layers`
    /// on, all of Gemma 2's except every second, all of Gemma 3's except every sixth.
    pub layer_types: Option<Vec<LayerType>>,
    /// The number that replaces the head's width in Gemma's scale of scores, one over its root; default 256.
    pub query_pre_attn_scalar: f64,
    /// The bound `c` of Gemma 2's scores, `c · tanh(score / c)`; default `None`.
    pub attn_logit_softcapping: Option<f64>,
    /// The bound of Gemma's logits, likewise; default `None`.
    pub final_logit_softcapping: Option<f64>,
    /// The mixture of experts, which Mixtral and Qwen3-MoE must have and no other family may; default `None`.
    pub experts: Option<ExpertsConfig>,
    /// The id of the beginning-of-sequence token; default 1.
    pub bos_token_id: Option<i64>,
    /// The ids of the end-of-sequence tokens; default 2.
    pub eos_token_id: Vec<i64>,
    /// The id of padding; default none.
    pub pad_token_id: Option<i64>,
    /// The keys that this crate does not know; they are written back unchanged.
    pub extra: Map<String, Value>,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        LlamaConfig {
            family: LlamaFamily::Llama,
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: 11008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: None,
            head_dim: None,
            hidden_act: "silu".to_owned(),
            max_position_embeddings: 2048,
            initializer_range: 0.02,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            rope_theta: 10000.0,
            partial_rotary_factor: 1.0,
            rope_scaling: RopeScaling::Default,
            rope_local_base_freq: 10000.0,
            rope_local_scaling: RopeScaling::Default,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            resid_pdrop: 0.0,
            embd_pdrop: 0.0,
            qk_layernorm: false,
            sliding_window: None,
            use_sliding_window: false,
            max_window_layers: 28,
            layer_types: None,
            query_pre_attn_scalar: 256.0,
            attn_logit_softcapping: None,
            final_logit_softcapping: None,
            experts: None,
            bos_token_id: Some(1),
            eos_token_id: vec![2],
            pad_token_id: None,
            extra: Map::new(),
        }
    }
}

impl LlamaConfig {
    /// Returns the defaults of transformers for `family`.
    pub fn of(family: LlamaFamily) -> LlamaConfig {
        let llama = LlamaConfig {
            family,
            experts: ExpertsConfig::of(family),
            ..LlamaConfig::default()
        };
        match family {
            LlamaFamily::Llama => llama,
            LlamaFamily::Mistral => LlamaConfig {
                intermediate_size: 14336,
                num_key_value_heads: Some(8),
                max_position_embeddings: 4096 * 32,
                sliding_window: Some(4096),
                ..llama
            },
            LlamaFamily::Mixtral => LlamaConfig {
                intermediate_size: 14336,
                num_key_value_heads: Some(8),
                max_position_embeddings: 4096 * 32,
                rms_norm_eps: 1e-5,
                rope_theta: 1e6,
                ..llama
            },
            LlamaFamily::Qwen3Moe => LlamaConfig {
                vocab_size: 151_936,
                hidden_size: 2048,
                intermediate_size: 6144,
                num_hidden_layers: 24,
                num_key_value_heads: Some(4),
                max_position_embeddings: 32768,
                sliding_window: Some(4096),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
            LlamaFamily::Qwen2 | LlamaFamily::Qwen3 => LlamaConfig {
                vocab_size: 151_936,
                intermediate_size: 22016,
                num_key_value_heads: Some(32),
                // Qwen3 fixes the width of a head, whatever the hidden size.
                head_dim: (family == LlamaFamily::Qwen3).then_some(128),
                max_position_embeddings: 32768,
                sliding_window: Some(4096),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
            LlamaFamily::Phi => LlamaConfig {
                vocab_size: 51200,
                hidden_size: 2048,
                intermediate_size: 8192,
                num_hidden_layers: 24,
                hidden_act: "gelu_new".to_owned(),
                rms_norm_eps: 1e-5,
                partial_rotary_factor: 0.5,
                ..llama
            },
            LlamaFamily::Phi3 => LlamaConfig {
                vocab_size: 32064,
                hidden_size: 3072,
                intermediate_size: 8192,
                max_position_embeddings: 4096,
                rms_norm_eps: 1e-5,
                eos_token_id: vec![32000],
                pad_token_id: Some(32000),
                ..llama
            },
            LlamaFamily::Gemma => LlamaConfig {
                vocab_size: 256_000,
                hidden_size: 3072,
                intermediate_size: 24576,
                num_hidden_layers: 28,
                num_attention_heads: 16,
                num_key_value_heads: Some(16),
                head_dim: Some(256),
                hidden_act: "gelu_pytorch_tanh".to_owned(),
                max_position_embeddings: 8192,
                tie_word_embeddings: true,
                bos_token_id: Some(2),
                eos_token_id: vec![1],
                pad_token_id: Some(0),
                ..llama
            },
            LlamaFamily::Gemma2 | LlamaFamily::Gemma3 => {
                let second = family == LlamaFamily::Gemma2;
                LlamaConfig {
                    vocab_size: if second { 256_000 } else { 262_208 },
                    hidden_size: 2304,
                    intermediate_size: 9216,
                    num_hidden_layers: 26,
                    num_attention_heads: 8,
                    num_key_value_heads: Some(4),
                    head_dim: Some(256),
                    hidden_act: "gelu_pytorch_tanh".to_owned(),
                    max_position_embeddings: if second { 8192 } else { 131_072 },
                    rope_theta: if second { 1e4 } else { 1e6 },
                    tie_word_embeddings: true,
                    sliding_window: Some(4096),
                    attn_logit_softcapping: second.then_some(50.0),
                    final_logit_softcapping: second.then_some(30.0),
                    bos_token_id: Some(2),
                    eos_token_id: vec![1],
                    pad_token_id: Some(0),
                    ..llama
                }
            }
        }
    }

    /// Returns the number of channels of a head.
    pub fn head_dim(&self) -> i64 {
        // `max(1)`: this runs in `validate`, too, before the heads are known to be positive.
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Returns the number of a head's channels that are rotated.
    pub(crate) fn rotary_dim(&self) -> i64 {
        // Rounded down, as in transformers.
        (self.head_dim() as f64 * self.partial_rotary_factor) as i64
    }

    /// Returns the number of key/value heads.
    pub fn kv_heads(&self) -> i64 {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Returns the largest number of positions that the model takes. A rope scaling that starts at
    /// `max_position_embeddings`, or has the factor by which the original context was extended, raises it.
    pub(crate) fn context(&self) -> i64 {
        let given = self.max_position_embeddings;
        match &self.rope_scaling {
            RopeScaling::Dynamic { factor } => given.max((given as f64 * factor) as i64),
            RopeScaling::Yarn(yarn) => {
                let original = yarn.original_max_position_embeddings as f64;
                given.max((original * yarn.factor) as i64)
            }
            _ => given,
        }
    }

    /// Returns the number of positions up to which no frequency depends on the length of a forward pass.
    pub(crate) fn ragged_context(&self) -> i64 {
        let fixed = |scaling: &RopeScaling| match scaling {
            RopeScaling::Dynamic { .. } => self.max_position_embeddings,
            RopeScaling::LongRope(long) => long.original_max_position_embeddings,
            _ => i64::MAX,
        };
        let local = fixed(&self.rope_local_scaling);
        self.context().min(fixed(&self.rope_scaling)).min(local)
    }

    /// Returns the number of positions beyond which a generation starts its cache again.
    pub(crate) fn cache_restart(&self) -> Option<i64> {
        match (self.family, &self.rope_scaling) {
            (LlamaFamily::Phi3, RopeScaling::LongRope(long)) => {
                Some(long.original_max_position_embeddings)
            }
            _ => None,
        }
    }

    /// Returns `true` if query, key and value projections have biases.
    pub(crate) fn qkv_bias(&self) -> bool {
        match self.family {
            // transformers hard-codes both; their files have no key for it.
            LlamaFamily::Qwen2 | LlamaFamily::Phi => true,
            LlamaFamily::Mistral | LlamaFamily::Mixtral | LlamaFamily::Phi3 => false,
            _ => self.attention_bias,
        }
    }

    /// Returns `true` if the output projection of attention has a bias.
    pub(crate) fn output_bias(&self) -> bool {
        self.qkv_bias() && self.family != LlamaFamily::Qwen2
    }

    pub(crate) fn qk_norm(&self) -> bool {
        match self.family {
            LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe | LlamaFamily::Gemma3 => true,
            LlamaFamily::Phi => self.qk_layernorm,
            _ => false,
        }
    }

    /// Returns `true` if query, key and value are one layer, and gate and up another one.
    pub(crate) fn fused_projections(&self) -> bool {
        self.family == LlamaFamily::Phi3
    }

    /// Returns `true` if the head has a bias.
    pub(crate) fn head_bias(&self) -> bool {
        self.family == LlamaFamily::Phi
    }

    /// Returns `true` if norms multiply by `1 + weight`.
    pub(crate) fn norm_adds_one(&self) -> bool {
        self.family.is_gemma()
    }

    /// Returns `true` if norms follow attention and the feed-forward block, too.
    pub(crate) fn output_norms(&self) -> bool {
        self.family.is_later_gemma()
    }

    /// Returns the factor of the embedding.
    pub(crate) fn embedding_scale(&self) -> Option<f64> {
        self.family
            .is_gemma()
            .then(|| (self.hidden_size as f64).sqrt())
    }

    /// Returns the factor of the scores; `None` is one over the root of the head's width.
    pub(crate) fn attention_scale(&self) -> Option<f64> {
        let scale = 1.0 / self.query_pre_attn_scalar.sqrt();
        self.family.is_later_gemma().then_some(scale)
    }

    /// Returns the bound of scores. transformers reads it for Gemma 3 as well, and does not use it there.
    pub(crate) fn attention_softcap(&self) -> Option<f64> {
        let second = self.family == LlamaFamily::Gemma2;
        self.attn_logit_softcapping.filter(|_| second)
    }

    /// Returns the bound of logits.
    pub(crate) fn logit_softcap(&self) -> Option<f64> {
        let gemma = self.family.is_later_gemma();
        self.final_logit_softcapping.filter(|_| gemma)
    }

    /// Returns `true` if layer `layer` has the rotary frequencies of sliding layers.
    pub(crate) fn rotates_locally(&self, layer: i64) -> bool {
        self.family == LlamaFamily::Gemma3 && self.slides(layer)
    }

    /// Returns the number of tokens that layer `layer` attends to, or `None` for all.
    pub(crate) fn window(&self, layer: i64) -> Option<i64> {
        self.sliding_window.filter(|_| self.slides(layer))
    }

    /// Returns `true` if layer `layer` is of the sliding type.
    fn slides(&self, layer: i64) -> bool {
        let listed = || {
            let types = self.layer_types.as_ref()?;
            Some(types.get(layer.unsigned_abs() as usize) == Some(&LayerType::Sliding))
        };
        match self.family {
            LlamaFamily::Llama | LlamaFamily::Phi | LlamaFamily::Gemma => false,
            LlamaFamily::Mistral | LlamaFamily::Mixtral | LlamaFamily::Phi3 => true,
            // All of its layers or none, whatever the file lists.
            LlamaFamily::Qwen3Moe => self.use_sliding_window,
            LlamaFamily::Qwen2 | LlamaFamily::Qwen3 => {
                self.use_sliding_window && listed().unwrap_or(layer >= self.max_window_layers)
            }
            LlamaFamily::Gemma2 => listed().unwrap_or((layer + 1) % 2 != 0),
            LlamaFamily::Gemma3 => listed().unwrap_or((layer + 1) % 6 != 0),
        }
    }

    pub(super) fn read(family: LlamaFamily, mut fields: Fields) -> Result<LlamaConfig> {
        let mut config = LlamaConfig::of(family);
        fields.positive("vocab_size", &mut config.vocab_size)?;
        fields.positive("hidden_size", &mut config.hidden_size)?;
        fields.positive("intermediate_size", &mut config.intermediate_size)?;
        fields.layers("num_hidden_layers", &mut config.num_hidden_layers)?;
        fields.positive("num_attention_heads", &mut config.num_attention_heads)?;
        // In transformers an absent key is the family's default, and null is "as many as queries".
        if let Some(value) = fields.take_nullable("num_key_value_heads") {
            let key = "num_key_value_heads";
            config.num_key_value_heads = value
                .map(|value| super::fields::positive(key, &value))
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
        fields.number(config.norm_eps_key(), &mut config.rms_norm_eps)?;
        fields.boolean("tie_word_embeddings", &mut config.tie_word_embeddings)?;
        config.read_rope(&mut fields)?;
        fields.boolean("attention_bias", &mut config.attention_bias)?;
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
            config.sliding_window = value
                .map(|value| super::fields::positive(key, &value))
                .transpose()?;
        }
        fields.boolean("use_sliding_window", &mut config.use_sliding_window)?;
        if let Some(value) = fields.take("max_window_layers") {
            config.max_window_layers = value
                .as_i64()
                .filter(|&n| n >= 0)
                .ok_or_else(|| bad("max_window_layers", &value, "an integer of at least 0"))?;
        }
        config.layer_types = fields
            .take("layer_types")
            .map(|value| layer_types(&value))
            .transpose()?;
        if let Some(experts) = &mut config.experts {
            experts.read(family, &mut fields)?;
        }
        if family.is_gemma() {
            config.read_gemma(&mut fields)?;
        }
        fields.token_id("bos_token_id", &mut config.bos_token_id)?;
        fields.token_ids("eos_token_id", &mut config.eos_token_id)?;
        fields.token_id("pad_token_id", &mut config.pad_token_id)?;
        config.extra = super::without_written_keys(fields.into_rest());
        Ok(config)
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
        if self.family == LlamaFamily::Gemma3 {
            let thetas = [theta, &mut self.rope_local_base_freq];
            [self.rope_scaling, self.rope_local_scaling] =
                RopeScaling::read_by_layer(fields, context, thetas, part)?;
        } else {
            let of_phi3 = self.family == LlamaFamily::Phi3;
            self.rope_scaling = RopeScaling::read(fields, context, theta, part, of_phi3)?;
        }
        // transformers cannot compute it for the others either.
        if self.partial_rotary_factor != 1.0 && !self.family.is_phi() {
            return Err(Error::Unsupported {
                key: "partial_rotary_factor".to_owned(),
                found: self.partial_rotary_factor.to_string(),
                supported: "1.0, the rotation of whole heads".to_owned(),
            });
        }
        Ok(())
    }

    /// Returns the key of [`LlamaConfig::rms_norm_eps`].
    fn norm_eps_key(&self) -> &'static str {
        match self.family {
            LlamaFamily::Phi => "layer_norm_eps",
            _ => "rms_norm_eps",
        }
    }

    fn read_gemma(&mut self, fields: &mut Fields) -> Result<()> {
        fields.number("query_pre_attn_scalar", &mut self.query_pre_attn_scalar)?;
        // An absent key is the family's default, and null is no bound.
        for (key, slot) in [
            ("attn_logit_softcapping", &mut self.attn_logit_softcapping),
            ("final_logit_softcapping", &mut self.final_logit_softcapping),
        ] {
            if let Some(value) = fields.take_nullable(key) {
                *slot = value
                    .map(|value| super::fields::number(key, &value))
                    .transpose()?;
            }
        }
        let mut both_ways = false;
        fields.boolean("use_bidirectional_attention", &mut both_ways)?;
        if both_ways {
            return Err(Error::Unsupported {
                key: "use_bidirectional_attention".to_owned(),
                found: "true".to_owned(),
                supported: "false, a model that predicts the next token".to_owned(),
            });
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
    fn activation_key(&self) -> &'static str {
        match self.family.is_gemma() {
            true => "hidden_activation",
            false => "hidden_act",
        }
    }

    pub(super) fn write(&self) -> Map<String, Value> {
        let mut map = self.extra.clone();
        // Implied sizes are written out, as another reader may have other defaults for them.
        let own = json!({
            "architectures": [self.family.architecture()],
            "model_type": self.family.model_type(),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
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
            LlamaFamily::Mistral | LlamaFamily::Mixtral => {
                json!({"sliding_window": self.sliding_window})
            }
            LlamaFamily::Qwen2 => windows,
            LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe => {
                map.insert("attention_bias".to_owned(), self.attention_bias.into());
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
            LlamaFamily::Gemma2 | LlamaFamily::Gemma3 => json!({
                "attention_bias": self.attention_bias,
                "sliding_window": self.sliding_window,
                "query_pre_attn_scalar": whole(self.query_pre_attn_scalar),
                "attn_logit_softcapping": self.attn_logit_softcapping,
                "final_logit_softcapping": self.final_logit_softcapping,
            }),
        };
        for object in [own, member] {
            if let Value::Object(entries) = object {
                map.extend(entries);
            }
        }
        if let Some(experts) = &self.experts {
            experts.write(self.family, &mut map);
        }
        if let Some(types) = &self.layer_types {
            let names: Vec<_> = types.iter().map(|kind| kind.name()).collect();
            map.insert("layer_types".to_owned(), names.into());
        }
        let activation = self.hidden_act.as_str().into();
        map.insert(self.activation_key().to_owned(), activation);
        map.insert(self.norm_eps_key().to_owned(), self.rms_norm_eps.into());
        self.write_rope(&mut map);
        map
    }

    fn write_rope(&self, map: &mut Map<String, Value>) {
        if self.family == LlamaFamily::Gemma3 {
            if self.rope_local_scaling != RopeScaling::Default {
                // transformers 4 has no key for it; this is the form of transformers 5.
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
                    "sliding_attention":
                        object(&self.rope_local_scaling, self.rope_local_base_freq),
                });
                map.insert("rope_parameters".to_owned(), both);
                return;
            }
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
    }

    pub(super) fn validate(&self) -> Result<()> {
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("max_position_embeddings", self.max_position_embeddings),
            ("head_dim", self.head_dim()),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ] {
            check_size(key, value)?;
        }
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        self.check_experts()?;
        self.check_parameters()?;
        let heads = self.num_attention_heads;
        if self.head_dim.is_none() && self.hidden_size % heads != 0 {
            let expected =
                format!("a multiple of num_attention_heads ({heads}), or head_dim given");
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
        if self.head_dim() % 2 != 0 {
            let expected = "even, as rotary positions rotate pairs of channels";
            return Err(bad("head_dim", &self.head_dim().into(), expected));
        }
        self.check_rotary_dim()?;
        for (key, dropout) in [
            ("attention_dropout", self.attention_dropout),
            ("resid_pdrop", self.resid_pdrop),
            ("embd_pdrop", self.embd_pdrop),
        ] {
            // Below 1: dropout divides the kept elements by `1 - p`.
            if !(0.0..1.0).contains(&dropout) {
                return Err(bad(key, &dropout.into(), "in 0..1"));
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
        for (key, value) in [
            ("query_pre_attn_scalar", Some(self.query_pre_attn_scalar)),
            ("attn_logit_softcapping", self.attn_logit_softcapping),
            ("final_logit_softcapping", self.final_logit_softcapping),
            ("rope_theta", Some(self.rope_theta)),
            ("rope_local_base_freq", Some(self.rope_local_base_freq)),
        ] {
            if value.is_some_and(|value| value <= 0.0) {
                return Err(bad(key, &value.into(), "a positive number"));
            }
        }
        let rotated = self.rotary_dim();
        self.rope_scaling.validate("rope_scaling", rotated)?;
        let local = "rope_parameters.sliding_attention";
        self.rope_local_scaling.validate(local, rotated)?;
        activation_named(self.activation_key(), &self.hidden_act).map(drop)
    }
}

impl LlamaConfig {
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

    /// Returns the mixture of experts of layer `layer`, or `None` if the layer has one feed-forward block.
    pub(crate) fn experts_of(&self, layer: i64) -> Option<&ExpertsConfig> {
        self.experts
            .as_ref()
            .filter(|experts| experts.is_sparse(layer))
    }

    /// Returns the inner width of an expert, or of the feed-forward block of a family without experts.
    pub fn expert_intermediate_size(&self) -> i64 {
        match &self.experts {
            Some(experts) if self.family == LlamaFamily::Qwen3Moe => experts.moe_intermediate_size,
            _ => self.intermediate_size,
        }
    }

    fn check_experts(&self) -> Result<()> {
        let needed = ExpertsConfig::of(self.family).is_some();
        let Some(experts) = self.experts.as_ref().filter(|_| needed) else {
            if needed == self.experts.is_some() {
                return Ok(());
            }
            let found = if needed { "missing" } else { "given" };
            let expected = format!(
                "{} for the family {}; start from `LlamaConfig::of`",
                if needed { "given" } else { "`None`" },
                self.family.model_type()
            );
            return Err(bad("experts", &found.into(), &expected));
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
        let attention = 2 * heads * i128::from(self.head_dim());
        // At least as many as there are: a layer has experts or one block.
        let experts = self.experts.as_ref().map_or(0, |experts| {
            i128::from(experts.num_experts) * i128::from(self.expert_intermediate_size())
        });
        let inner = inner.max(experts);
        let parameters = hidden * (2 * vocabulary + layers * (attention + 3 * inner));
        let keys = "vocab_size, hidden_size, intermediate_size, num_attention_heads or head_dim";
        sizes::check_parameters(parameters, keys)
    }
}

/// Writes a whole number as an integer, which transformers requires.
fn whole(number: f64) -> Value {
    // Below 2^53 every whole f64 is an exact integer.
    if number.fract() == 0.0 && number.abs() < 1e15 {
        return (number as i64).into();
    }
    number.into()
}
