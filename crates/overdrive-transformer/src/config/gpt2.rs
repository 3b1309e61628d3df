use serde_json::{Map, Value, json};

use super::fields::{Fields, bad, ids_to_json};
use super::sizes::{self, check_layers, check_size};
use crate::activation_names::activation_named;
use crate::{Error, Result};

/// The configuration of GPT-2, with the keys of its `config.json`. Defaults are those of transformers'
/// `GPT2Config`, the 124M model.
#[derive(Debug, Clone, PartialEq)]
pub struct Gpt2Config {
    /// The number of tokens in the vocabulary; default 50257.
    pub vocab_size: i64,
    /// The context length in tokens; default 1024.
    pub n_positions: i64,
    /// The width of the hidden states; default 768.
    pub n_embd: i64,
    /// The number of layers; default 12.
    pub n_layer: i64,
    /// The number of heads; default 12.
    pub n_head: i64,
    /// The inner width of the feed-forward block; default `None`, `4 · n_embd`.
    pub n_inner: Option<i64>,
    /// The activation of the feed-forward block; default `"gelu_new"`.
    pub activation_function: String,
    /// The dropout of the outputs of attention and feed-forward blocks in training; default 0.1.
    pub resid_pdrop: f64,
    /// The dropout of the embeddings in training; default 0.1.
    pub embd_pdrop: f64,
    /// The dropout of attention weights in training; default 0.1.
    pub attn_pdrop: f64,
    /// The number that norms add to the variance; default 1e-5.
    pub layer_norm_epsilon: f64,
    /// The standard deviation of random weights; default 0.02.
    pub initializer_range: f64,
    /// If `true`, scores are divided by the root of the head's width; default `true`.
    pub scale_attn_weights: bool,
    /// If `true`, scores are divided by the number of the layer, too; default `false`.
    pub scale_attn_by_inverse_layer_idx: bool,
    /// If `true`, the head is the embedding; default `true`.
    pub tie_word_embeddings: bool,
    /// The id of the beginning-of-sequence token; default 50256.
    pub bos_token_id: Option<i64>,
    /// The ids of the end-of-sequence tokens; default 50256.
    pub eos_token_id: Vec<i64>,
    /// The id of padding; default none.
    pub pad_token_id: Option<i64>,
    /// The keys that this crate does not know; they are written back unchanged.
    pub extra: Map<String, Value>,
}

impl Default for Gpt2Config {
    fn default() -> Self {
        Gpt2Config {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: "gelu_new".to_owned(),
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            tie_word_embeddings: true,
            // `<|endoftext|>`, the last token of GPT-2's vocabulary.
            bos_token_id: Some(50256),
            eos_token_id: vec![50256],
            pad_token_id: None,
            extra: Map::new(),
        }
    }
}

impl Gpt2Config {
    /// Returns the inner width of the feed-forward block.
    pub fn inner(&self) -> i64 {
        self.n_inner.unwrap_or(self.n_embd.saturating_mul(4))
    }

    pub(super) fn read(mut fields: Fields) -> Result<Gpt2Config> {
        let mut config = Gpt2Config::default();
        fields.positive("vocab_size", &mut config.vocab_size)?;
        fields.positive("n_positions", &mut config.n_positions)?;
        fields.positive("n_embd", &mut config.n_embd)?;
        fields.layers("n_layer", &mut config.n_layer)?;
        fields.positive("n_head", &mut config.n_head)?;
        config.n_inner = fields.optional_positive("n_inner")?;
        if let Some(name) = fields.string("activation_function")? {
            config.activation_function = name;
        }
        fields.number("resid_pdrop", &mut config.resid_pdrop)?;
        fields.number("embd_pdrop", &mut config.embd_pdrop)?;
        fields.number("attn_pdrop", &mut config.attn_pdrop)?;
        fields.number("layer_norm_epsilon", &mut config.layer_norm_epsilon)?;
        fields.number("initializer_range", &mut config.initializer_range)?;
        fields.boolean("scale_attn_weights", &mut config.scale_attn_weights)?;
        fields.boolean(
            "scale_attn_by_inverse_layer_idx",
            &mut config.scale_attn_by_inverse_layer_idx,
        )?;
        fields.boolean("tie_word_embeddings", &mut config.tie_word_embeddings)?;
        let mut cross = false;
        fields.boolean("add_cross_attention", &mut cross)?;
        if cross {
            return Err(Error::unsupported(
                "add_cross_attention",
                "true",
                "false, a decoder without an encoder",
            ));
        }
        fields.token_id("bos_token_id", &mut config.bos_token_id)?;
        fields.token_ids("eos_token_id", &mut config.eos_token_id)?;
        fields.token_id("pad_token_id", &mut config.pad_token_id)?;
        config.extra = super::without_written_keys(fields.into_rest());
        Ok(config)
    }

    pub(super) fn write(&self) -> Map<String, Value> {
        let mut map = self.extra.clone();
        let own = json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_positions": self.n_positions,
            "n_embd": self.n_embd,
            "n_layer": self.n_layer,
            "n_head": self.n_head,
            "n_inner": self.n_inner,
            "activation_function": self.activation_function,
            "resid_pdrop": self.resid_pdrop,
            "embd_pdrop": self.embd_pdrop,
            "attn_pdrop": self.attn_pdrop,
            "layer_norm_epsilon": self.layer_norm_epsilon,
            "initializer_range": self.initializer_range,
            "scale_attn_weights": self.scale_attn_weights,
            "scale_attn_by_inverse_layer_idx": self.scale_attn_by_inverse_layer_idx,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
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
            ("n_positions", self.n_positions),
            ("n_embd", self.n_embd),
            ("n_head", self.n_head),
            ("n_inner", self.inner()),
        ] {
            check_size(key, value)?;
        }
        check_layers("n_layer", self.n_layer)?;
        let [hidden, inner, rows, layers] = [
            self.n_embd,
            self.inner(),
            2 * self.vocab_size + self.n_positions,
            self.n_layer,
        ]
        .map(i128::from);
        // Norms and biases are left out: they are far smaller.
        let parameters = hidden * (rows + layers * (4 * hidden + 2 * inner));
        sizes::check_parameters(parameters, "vocab_size, n_positions, n_embd or n_inner")?;
        if self.n_embd % self.n_head != 0 {
            let expected = format!("a multiple of n_head ({})", self.n_head);
            return Err(bad("n_embd", &self.n_embd.into(), &expected));
        }
        let dropouts = [
            ("resid_pdrop", self.resid_pdrop),
            ("embd_pdrop", self.embd_pdrop),
            ("attn_pdrop", self.attn_pdrop),
        ];
        for (key, p) in dropouts {
            // Below 1: dropout divides the kept elements by `1 - p`.
            if !(0.0..1.0).contains(&p) {
                return Err(bad(key, &p.into(), "at least 0 and below 1"));
            }
        }
        activation_named("activation_function", &self.activation_function).map(drop)
    }
}
