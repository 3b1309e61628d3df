use serde_json::{Map, Value, json};

use super::fields::{Fields, bad, ids_to_json};
use super::rope_scaling::RopeScaling;
use crate::activation::activation_named;
use crate::{Error, Result};

/// Which member of the family a [`LlamaConfig`] is; they differ in biases, norms and windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LlamaFamily {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Mistral: every layer may have a sliding window.
    Mistral,
    /// Qwen2: biases on query, key and value.
    Qwen2,
    /// Qwen3: queries and keys are normalised head by head.
    Qwen3,
}

impl LlamaFamily {
    /// The `model_type` of transformers.
    pub fn model_type(self) -> &'static str {
        match self {
            LlamaFamily::Llama => "llama",
            LlamaFamily::Mistral => "mistral",
            LlamaFamily::Qwen2 => "qwen2",
            LlamaFamily::Qwen3 => "qwen3",
        }
    }

    /// The class that transformers loads it with.
    pub fn architecture(self) -> &'static str {
        match self {
            LlamaFamily::Llama => "LlamaForCausalLM",
            LlamaFamily::Mistral => "MistralForCausalLM",
            LlamaFamily::Qwen2 => "Qwen2ForCausalLM",
            LlamaFamily::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    pub(super) fn from_name(model_type: &str) -> Option<LlamaFamily> {
        [
            LlamaFamily::Llama,
            LlamaFamily::Mistral,
            LlamaFamily::Qwen2,
            LlamaFamily::Qwen3,
        ]
        .into_iter()
        .find(|family| family.model_type() == model_type)
    }
}

/// Whether a layer sees all earlier tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerType {
    /// `full_attention`.
    Full,
    /// `sliding_attention`: the last [`LlamaConfig::sliding_window`] tokens.
    Sliding,
}

impl LayerType {
    fn name(self) -> &'static str {
        match self {
            LayerType::Full => "full_attention",
            LayerType::Sliding => "sliding_attention",
        }
    }
}

/// A decoder of the Llama family, in the keys of its `config.json`. Defaults are those of
/// transformers' `LlamaConfig`, and [`LlamaConfig::of`] gives those of the other members.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// `model_type`; default Llama.
    pub family: LlamaFamily,
    /// Tokens in the vocabulary; default 32000.
    pub vocab_size: i64,
    /// Width of the hidden states; default 4096.
    pub hidden_size: i64,
    /// Width inside the feed-forward block; default 11008.
    pub intermediate_size: i64,
    /// Layers; default 32.
    pub num_hidden_layers: i64,
    /// Heads of the queries; default 32.
    pub num_attention_heads: i64,
    /// Heads of keys and values; default `None`, as many as queries.
    pub num_key_value_heads: Option<i64>,
    /// Channels a head; default `None`, `hidden_size / num_attention_heads`.
    pub head_dim: Option<i64>,
    /// Non-linearity of the feed-forward block; default `"silu"`.
    pub hidden_act: String,
    /// Context in tokens; default 2048.
    pub max_position_embeddings: i64,
    /// Standard deviation of random weights; default 0.02.
    pub initializer_range: f64,
    /// Added to the mean square; default 1e-6.
    pub rms_norm_eps: f64,
    /// Whether the head is the embedding; default false.
    pub tie_word_embeddings: bool,
    /// Base of the rotary frequencies; default 10000.
    pub rope_theta: f64,
    /// How rotary positions are stretched; default not.
    pub rope_scaling: RopeScaling,
    /// Biases on query, key, value and output (Llama and Qwen3); default false.
    pub attention_bias: bool,
    /// Biases in the feed-forward block (Llama); default false.
    pub mlp_bias: bool,
    /// Dropout of attention weights in training; default 0.
    pub attention_dropout: f64,
    /// Tokens a sliding layer sees, itself included (Mistral, Qwen2, Qwen3); default `None`.
    pub sliding_window: Option<i64>,
    /// Whether Qwen's windows are in effect; default false.
    pub use_sliding_window: bool,
    /// The first of Qwen's layers that slides; default 28.
    pub max_window_layers: i64,
    /// Which of Qwen's layers slide; default `None`, those from `max_window_layers` on.
    pub layer_types: Option<Vec<LayerType>>,
    /// The id that begins a text; default 1.
    pub bos_token_id: Option<i64>,
    /// The ids that end a text; default 2.
    pub eos_token_id: Vec<i64>,
    /// The id of padding; default none.
    pub pad_token_id: Option<i64>,
    /// Keys that mean nothing to this crate; written back as they were.
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
            rope_scaling: RopeScaling::Default,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            sliding_window: None,
            use_sliding_window: false,
            max_window_layers: 28,
            layer_types: None,
            bos_token_id: Some(1),
            eos_token_id: vec![2],
            pad_token_id: None,
            extra: Map::new(),
        }
    }
}

impl LlamaConfig {
    /// The defaults of transformers for `family`.
    pub fn of(family: LlamaFamily) -> LlamaConfig {
        let llama = LlamaConfig {
            family,
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
            LlamaFamily::Qwen2 | LlamaFamily::Qwen3 => LlamaConfig {
                vocab_size: 151_936,
                intermediate_size: 22016,
                num_key_value_heads: Some(32),
                head_dim: (family == LlamaFamily::Qwen3).then_some(128),
                max_position_embeddings: 32768,
                sliding_window: Some(4096),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
        }
    }

    /// Channels a head.
    pub fn head_dim(&self) -> i64 {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> i64 {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Whether query, key and value have biases.
    pub(crate) fn qkv_bias(&self) -> bool {
        match self.family {
            LlamaFamily::Qwen2 => true,
            LlamaFamily::Llama | LlamaFamily::Qwen3 => self.attention_bias,
            LlamaFamily::Mistral => false,
        }
    }

    /// Whether the output projection of attention has a bias.
    pub(crate) fn output_bias(&self) -> bool {
        self.qkv_bias() && self.family != LlamaFamily::Qwen2
    }

    pub(crate) fn qk_norm(&self) -> bool {
        self.family == LlamaFamily::Qwen3
    }

    /// How many tokens layer `layer` sees, or `None` for all.
    pub(crate) fn window(&self, layer: i64) -> Option<i64> {
        let slides = match self.family {
            LlamaFamily::Llama => false,
            LlamaFamily::Mistral => true,
            LlamaFamily::Qwen2 | LlamaFamily::Qwen3 => {
                self.use_sliding_window
                    && match &self.layer_types {
                        Some(types) => {
                            types.get(layer.unsigned_abs() as usize) == Some(&LayerType::Sliding)
                        }
                        None => layer >= self.max_window_layers,
                    }
            }
        };
        self.sliding_window.filter(|_| slides)
    }

    pub(super) fn read(family: LlamaFamily, mut fields: Fields) -> Result<LlamaConfig> {
        let mut config = LlamaConfig::of(family);
        fields.positive("vocab_size", &mut config.vocab_size)?;
        fields.positive("hidden_size", &mut config.hidden_size)?;
        fields.positive("intermediate_size", &mut config.intermediate_size)?;
        fields.positive("num_hidden_layers", &mut config.num_hidden_layers)?;
        fields.positive("num_attention_heads", &mut config.num_attention_heads)?;
        // transformers: absent is the family's default, null is "as many as queries".
        if let Some(value) = fields.take_nullable("num_key_value_heads") {
            let key = "num_key_value_heads";
            config.num_key_value_heads = value
                .map(|value| super::fields::positive(key, &value))
                .transpose()?;
        }
        config.head_dim = fields.optional_positive("head_dim")?.or(config.head_dim);
        if let Some(name) = fields.string("hidden_act")? {
            config.hidden_act = name;
        }
        fields.positive(
            "max_position_embeddings",
            &mut config.max_position_embeddings,
        )?;
        fields.number("initializer_range", &mut config.initializer_range)?;
        fields.number("rms_norm_eps", &mut config.rms_norm_eps)?;
        fields.boolean("tie_word_embeddings", &mut config.tie_word_embeddings)?;
        config.rope_scaling = RopeScaling::read(
            &mut fields,
            config.max_position_embeddings,
            &mut config.rope_theta,
        )?;
        fields.boolean("attention_bias", &mut config.attention_bias)?;
        fields.boolean("mlp_bias", &mut config.mlp_bias)?;
        fields.number("attention_dropout", &mut config.attention_dropout)?;
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
        fields.token_id("bos_token_id", &mut config.bos_token_id)?;
        fields.token_ids("eos_token_id", &mut config.eos_token_id)?;
        fields.token_id("pad_token_id", &mut config.pad_token_id)?;
        config.extra = super::without_written_keys(fields.into_rest());
        Ok(config)
    }

    pub(super) fn write(&self) -> Map<String, Value> {
        let mut map = self.extra.clone();
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
            "hidden_act": self.hidden_act,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": self.initializer_range,
            "rms_norm_eps": self.rms_norm_eps,
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
            LlamaFamily::Mistral => json!({"sliding_window": self.sliding_window}),
            LlamaFamily::Qwen2 => windows,
            LlamaFamily::Qwen3 => {
                map.insert("attention_bias".to_owned(), self.attention_bias.into());
                windows
            }
        };
        for object in [own, member] {
            if let Value::Object(entries) = object {
                map.extend(entries);
            }
        }
        if let Some(types) = &self.layer_types {
            let names: Vec<_> = types.iter().map(|kind| kind.name()).collect();
            map.insert("layer_types".to_owned(), names.into());
        }
        self.rope_scaling.write(self.rope_theta, &mut map);
        map
    }

    pub(super) fn validate(&self) -> Result<()> {
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("max_position_embeddings", self.max_position_embeddings),
            ("head_dim", self.head_dim()),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ] {
            if value <= 0 {
                return Err(bad(key, &value.into(), "a positive integer"));
            }
        }
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
            let expected = "even, as rotary positions turn pairs of channels";
            return Err(bad("head_dim", &self.head_dim().into(), expected));
        }
        if !(0.0..1.0).contains(&self.attention_dropout) {
            return Err(bad(
                "attention_dropout",
                &self.attention_dropout.into(),
                "in 0..1",
            ));
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
        activation_named("hidden_act", &self.hidden_act).map(drop)
    }
}

fn layer_types(value: &Value) -> Result<Vec<LayerType>> {
    let names = value
        .as_array()
        .ok_or_else(|| bad("layer_types", value, "a list of names"))?;
    names
        .iter()
        .map(|name| {
            [LayerType::Full, LayerType::Sliding]
                .into_iter()
                .find(|kind| name.as_str() == Some(kind.name()))
                .ok_or_else(|| Error::Unsupported {
                    key: "layer_types".to_owned(),
                    found: name.to_string(),
                    supported: "full_attention, sliding_attention".to_owned(),
                })
        })
        .collect()
}
