use serde_json::{Map, Value, json};

use super::fields::{Fields, bad, ids_to_json};
use super::sizes::{self, check_layers, check_size};
use crate::activation_names::activation_named;
use crate::{Error, Result};

/// The configuration of T5, T5 v1.1 and Flan-T5, with the keys of its `config.json`. Defaults are those of
/// transformers' `T5Config`.
#[derive(Debug, Clone, PartialEq)]
pub struct T5Config {
    /// The number of tokens in the vocabulary; default 32128.
    pub vocab_size: i64,
    /// The width of the hidden states; default 512.
    pub d_model: i64,
    /// The number of channels of a head; default 64. All heads together need not have the width of the model.
    pub d_kv: i64,
    /// The inner width of the feed-forward blocks; default 2048.
    pub d_ff: i64,
    /// The number of layers of the encoder; default 6.
    pub num_layers: i64,
    /// The number of layers of the decoder; default `None`, as many as the encoder has.
    pub num_decoder_layers: Option<i64>,
    /// The number of heads; default 8.
    pub num_heads: i64,
    /// The number of buckets of relative positions; default 32.
    pub relative_attention_num_buckets: i64,
    /// The distance from which on all positions share a bucket; default 128.
    pub relative_attention_max_distance: i64,
    /// All dropouts in training; default 0.1.
    pub dropout_rate: f64,
    /// The number that norms add to the variance; default 1e-6.
    pub layer_norm_epsilon: f64,
    /// The factor of all standard deviations of random weights; default 1.
    pub initializer_factor: f64,
    /// The feed-forward block: an activation such as `relu`, or `gated-` and one. `gated-gelu` means the tanh
    /// approximation. Default `"relu"`.
    pub feed_forward_proj: String,
    /// If `true`, the head is the embedding; default `true`.
    pub tie_word_embeddings: bool,
    /// If `true`, hidden states are multiplied by `d_model^-0.5` before the head; default `true`. transformers
    /// derives it from `tie_word_embeddings`, which its version 5 then sets to `true`.
    pub scale_decoder_outputs: bool,
    /// The token that the decoder begins with; default `None`. Every published T5 has 0, the padding.
    pub decoder_start_token_id: Option<i64>,
    /// The ids of the end-of-sequence tokens; default 1.
    pub eos_token_id: Vec<i64>,
    /// The id of padding; default 0.
    pub pad_token_id: Option<i64>,
    /// The keys that this crate does not know; they are written back unchanged.
    pub extra: Map<String, Value>,
}

impl Default for T5Config {
    fn default() -> Self {
        T5Config {
            vocab_size: 32128,
            d_model: 512,
            d_kv: 64,
            d_ff: 2048,
            num_layers: 6,
            num_decoder_layers: None,
            num_heads: 8,
            relative_attention_num_buckets: 32,
            relative_attention_max_distance: 128,
            dropout_rate: 0.1,
            layer_norm_epsilon: 1e-6,
            initializer_factor: 1.0,
            feed_forward_proj: "relu".to_owned(),
            tie_word_embeddings: true,
            scale_decoder_outputs: true,
            decoder_start_token_id: None,
            eos_token_id: vec![1],
            pad_token_id: Some(0),
            extra: Map::new(),
        }
    }
}

impl T5Config {
    /// Returns the number of layers of the decoder.
    pub fn decoder_layers(&self) -> i64 {
        self.num_decoder_layers.unwrap_or(self.num_layers)
    }

    /// Returns the name of the activation, and `true` if the feed-forward block is gated.
    pub(crate) fn feed_forward(&self) -> (&str, bool) {
        match self.feed_forward_proj.as_str() {
            // The name is older than the exact gelu; transformers keeps its meaning.
            "gated-gelu" => ("gelu_new", true),
            other => match other.strip_prefix("gated-") {
                Some(activation) => (activation, true),
                None => (other, false),
            },
        }
    }

    /// Returns the width of all heads together.
    pub(crate) fn inner(&self) -> i64 {
        self.num_heads.saturating_mul(self.d_kv)
    }

    pub(super) fn read(mut fields: Fields) -> Result<T5Config> {
        let mut config = T5Config::default();
        fields.positive("vocab_size", &mut config.vocab_size)?;
        fields.positive("d_model", &mut config.d_model)?;
        fields.positive("d_kv", &mut config.d_kv)?;
        fields.positive("d_ff", &mut config.d_ff)?;
        fields.layers("num_layers", &mut config.num_layers)?;
        config.num_decoder_layers = fields.optional_positive("num_decoder_layers")?;
        fields.positive("num_heads", &mut config.num_heads)?;
        let buckets = &mut config.relative_attention_num_buckets;
        fields.positive("relative_attention_num_buckets", buckets)?;
        let distance = &mut config.relative_attention_max_distance;
        fields.positive("relative_attention_max_distance", distance)?;
        fields.number("dropout_rate", &mut config.dropout_rate)?;
        fields.number("layer_norm_epsilon", &mut config.layer_norm_epsilon)?;
        fields.number("initializer_factor", &mut config.initializer_factor)?;
        if let Some(name) = fields.string("feed_forward_proj")? {
            config.feed_forward_proj = name;
        }
        fields.boolean("tie_word_embeddings", &mut config.tie_word_embeddings)?;
        config.scale_decoder_outputs = config.tie_word_embeddings;
        fields.boolean("scale_decoder_outputs", &mut config.scale_decoder_outputs)?;
        // transformers 5 writes `true` for a model that it read with `false`; the weights show whether there is a
        // head, see `CheckpointConfig::may_be_missing`.
        config.tie_word_embeddings &= config.scale_decoder_outputs;
        // Derived from `feed_forward_proj`.
        let _ = (fields.take("dense_act_fn"), fields.take("is_gated_act"));
        fields.token_id("decoder_start_token_id", &mut config.decoder_start_token_id)?;
        fields.token_ids("eos_token_id", &mut config.eos_token_id)?;
        fields.token_id("pad_token_id", &mut config.pad_token_id)?;
        config.extra = super::without_written_keys(fields.into_rest());
        Ok(config)
    }

    pub(super) fn write(&self) -> Map<String, Value> {
        let mut map = self.extra.clone();
        let own = json!({
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "is_encoder_decoder": true,
            "vocab_size": self.vocab_size,
            "d_model": self.d_model,
            "d_kv": self.d_kv,
            "d_ff": self.d_ff,
            "num_layers": self.num_layers,
            "num_decoder_layers": self.decoder_layers(),
            "num_heads": self.num_heads,
            "relative_attention_num_buckets": self.relative_attention_num_buckets,
            "relative_attention_max_distance": self.relative_attention_max_distance,
            "dropout_rate": self.dropout_rate,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "initializer_factor": self.initializer_factor,
            "feed_forward_proj": self.feed_forward_proj,
            "tie_word_embeddings": self.tie_word_embeddings,
            "scale_decoder_outputs": self.scale_decoder_outputs,
            "decoder_start_token_id": self.decoder_start_token_id,
            "eos_token_id": ids_to_json(&self.eos_token_id),
            "pad_token_id": self.pad_token_id,
        });
        if let Value::Object(entries) = own {
            map.extend(entries);
        }
        map
    }

    pub(super) fn validate(&self) -> Result<()> {
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("d_model", self.d_model),
            ("d_kv", self.d_kv),
            ("d_ff", self.d_ff),
            ("num_heads", self.num_heads),
            ("num_heads * d_kv", self.inner()),
        ] {
            check_size(key, value)?;
        }
        check_layers("num_layers", self.num_layers)?;
        check_layers("num_decoder_layers", self.decoder_layers())?;
        let [hidden, inner, ff, vocabulary, encoder, decoder] = [
            self.d_model,
            self.inner(),
            self.d_ff,
            self.vocab_size,
            self.num_layers,
            self.decoder_layers(),
        ]
        .map(i128::from);
        // Norms and biases are left out: they are far smaller.
        let (attention, feed_forward) = (4 * hidden * inner, 3 * hidden * ff);
        let parameters = 2 * hidden * vocabulary
            + encoder * (attention + feed_forward)
            + decoder * (2 * attention + feed_forward);
        sizes::check_parameters(parameters, "vocab_size, d_model, d_kv, num_heads or d_ff")?;
        self.validate_buckets()?;
        // Below 1: dropout divides the kept elements by `1 - p`.
        if !(0.0..1.0).contains(&self.dropout_rate) {
            return Err(bad(
                "dropout_rate",
                &self.dropout_rate.into(),
                "at least 0 and below 1",
            ));
        }
        activation_named("feed_forward_proj", self.feed_forward().0)
            .map(drop)
            .map_err(|_| {
                Error::unsupported(
                    "feed_forward_proj",
                    format!("{:?}", self.feed_forward_proj),
                    "relu, gelu, gelu_new, silu, and these after gated-",
                )
            })
    }

    /// Checks that the buckets of both directions have exact and logarithmic ones.
    fn validate_buckets(&self) -> Result<()> {
        let buckets = self.relative_attention_num_buckets;
        // The encoder halves the buckets for the two directions, and half of those are exact.
        if !(4..=1 << 20).contains(&buckets) {
            let expected = "an integer in 4..=1048576";
            return Err(bad(
                "relative_attention_num_buckets",
                &buckets.into(),
                expected,
            ));
        }
        let distance = self.relative_attention_max_distance;
        if distance <= buckets / 2 {
            let expected = format!(
                "above {}, half of relative_attention_num_buckets",
                buckets / 2
            );
            return Err(bad(
                "relative_attention_max_distance",
                &distance.into(),
                &expected,
            ));
        }
        check_size("relative_attention_max_distance", distance)
    }
}
