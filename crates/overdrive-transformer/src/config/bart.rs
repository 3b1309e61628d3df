use serde_json::{Map, Value, json};

use super::fields::{Fields, bad, ids_to_json};
use super::sizes::{self, check_layers, check_size};
use crate::Result;
use crate::activation_names::activation_named;

/// The configuration of BART, with the keys of its `config.json`. Defaults are those of transformers'
/// `BartConfig`, BART large.
#[derive(Debug, Clone, PartialEq)]
pub struct BartConfig {
    /// The number of tokens in the vocabulary; default 50265.
    pub vocab_size: i64,
    /// The context length of encoder and decoder in tokens; default 1024.
    pub max_position_embeddings: i64,
    /// The width of the hidden states; default 1024.
    pub d_model: i64,
    /// The number of layers of the encoder; default 12.
    pub encoder_layers: i64,
    /// The inner width of the encoder's feed-forward blocks; default 4096.
    pub encoder_ffn_dim: i64,
    /// The number of heads of the encoder; default 16.
    pub encoder_attention_heads: i64,
    /// The number of layers of the decoder; default 12.
    pub decoder_layers: i64,
    /// The inner width of the decoder's feed-forward blocks; default 4096.
    pub decoder_ffn_dim: i64,
    /// The number of heads of the decoder; default 16.
    pub decoder_attention_heads: i64,
    /// The probability that training skips a layer of the encoder; default 0.
    pub encoder_layerdrop: f64,
    /// The probability that training skips a layer of the decoder; default 0.
    pub decoder_layerdrop: f64,
    /// The activation of the feed-forward blocks; default `"gelu"`.
    pub activation_function: String,
    /// The dropout of embeddings and of the outputs of attention and feed-forward blocks in training; default 0.1.
    pub dropout: f64,
    /// The dropout of attention weights in training; default 0.
    pub attention_dropout: f64,
    /// The dropout inside the feed-forward blocks in training; default 0.
    pub activation_dropout: f64,
    /// The standard deviation of random weights; default 0.02.
    pub init_std: f64,
    /// If `true`, token embeddings are multiplied by the root of `d_model`; default `false`.
    pub scale_embedding: bool,
    /// If `true`, the head is the embedding; default `true`.
    pub tie_word_embeddings: bool,
    /// The token that the decoder begins with; default 2.
    pub decoder_start_token_id: Option<i64>,
    /// The id of the beginning-of-sequence token; default 0.
    pub bos_token_id: Option<i64>,
    /// The ids of the end-of-sequence tokens; default 2.
    pub eos_token_id: Vec<i64>,
    /// The id of padding; default 1.
    pub pad_token_id: Option<i64>,
    /// The ids of which one must be the last at the length limit; default 2.
    pub forced_eos_token_id: Vec<i64>,
    /// The keys that this crate does not know; they are written back unchanged.
    pub extra: Map<String, Value>,
}

impl Default for BartConfig {
    fn default() -> Self {
        BartConfig {
            vocab_size: 50265,
            max_position_embeddings: 1024,
            d_model: 1024,
            encoder_layers: 12,
            encoder_ffn_dim: 4096,
            encoder_attention_heads: 16,
            decoder_layers: 12,
            decoder_ffn_dim: 4096,
            decoder_attention_heads: 16,
            encoder_layerdrop: 0.0,
            decoder_layerdrop: 0.0,
            activation_function: "gelu".to_owned(),
            dropout: 0.1,
            attention_dropout: 0.0,
            activation_dropout: 0.0,
            init_std: 0.02,
            scale_embedding: false,
            tie_word_embeddings: true,
            decoder_start_token_id: Some(2),
            bos_token_id: Some(0),
            eos_token_id: vec![2],
            pad_token_id: Some(1),
            forced_eos_token_id: vec![2],
            extra: Map::new(),
        }
    }
}

impl BartConfig {
    pub(super) fn read(mut fields: Fields) -> Result<BartConfig> {
        let mut config = BartConfig::default();
        fields.positive("vocab_size", &mut config.vocab_size)?;
        let context = &mut config.max_position_embeddings;
        fields.positive("max_position_embeddings", context)?;
        fields.positive("d_model", &mut config.d_model)?;
        fields.layers("encoder_layers", &mut config.encoder_layers)?;
        fields.positive("encoder_ffn_dim", &mut config.encoder_ffn_dim)?;
        let heads = &mut config.encoder_attention_heads;
        fields.positive("encoder_attention_heads", heads)?;
        fields.layers("decoder_layers", &mut config.decoder_layers)?;
        fields.positive("decoder_ffn_dim", &mut config.decoder_ffn_dim)?;
        let heads = &mut config.decoder_attention_heads;
        fields.positive("decoder_attention_heads", heads)?;
        fields.number("encoder_layerdrop", &mut config.encoder_layerdrop)?;
        fields.number("decoder_layerdrop", &mut config.decoder_layerdrop)?;
        if let Some(name) = fields.string("activation_function")? {
            config.activation_function = name;
        }
        fields.number("dropout", &mut config.dropout)?;
        fields.number("attention_dropout", &mut config.attention_dropout)?;
        fields.number("activation_dropout", &mut config.activation_dropout)?;
        fields.number("init_std", &mut config.init_std)?;
        fields.boolean("scale_embedding", &mut config.scale_embedding)?;
        fields.boolean("tie_word_embeddings", &mut config.tie_word_embeddings)?;
        fields.token_id("decoder_start_token_id", &mut config.decoder_start_token_id)?;
        fields.token_id("bos_token_id", &mut config.bos_token_id)?;
        fields.token_ids("eos_token_id", &mut config.eos_token_id)?;
        fields.token_id("pad_token_id", &mut config.pad_token_id)?;
        fields.token_ids("forced_eos_token_id", &mut config.forced_eos_token_id)?;
        config.extra = super::without_written_keys(fields.into_rest());
        Ok(config)
    }

    pub(super) fn write(&self) -> Map<String, Value> {
        let mut map = self.extra.clone();
        let own = json!({
            "architectures": ["BartForConditionalGeneration"],
            "model_type": "bart",
            "is_encoder_decoder": true,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "d_model": self.d_model,
            "encoder_layers": self.encoder_layers,
            "encoder_ffn_dim": self.encoder_ffn_dim,
            "encoder_attention_heads": self.encoder_attention_heads,
            "decoder_layers": self.decoder_layers,
            "decoder_ffn_dim": self.decoder_ffn_dim,
            "decoder_attention_heads": self.decoder_attention_heads,
            "encoder_layerdrop": self.encoder_layerdrop,
            "decoder_layerdrop": self.decoder_layerdrop,
            "activation_function": self.activation_function,
            "dropout": self.dropout,
            "attention_dropout": self.attention_dropout,
            "activation_dropout": self.activation_dropout,
            "init_std": self.init_std,
            "scale_embedding": self.scale_embedding,
            "tie_word_embeddings": self.tie_word_embeddings,
            "decoder_start_token_id": self.decoder_start_token_id,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": ids_to_json(&self.eos_token_id),
            "pad_token_id": self.pad_token_id,
            "forced_eos_token_id": ids_to_json(&self.forced_eos_token_id),
        });
        if let Value::Object(entries) = own {
            map.extend(entries);
        }
        map
    }

    pub(super) fn validate(&self) -> Result<()> {
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("d_model", self.d_model),
            ("encoder_ffn_dim", self.encoder_ffn_dim),
            ("encoder_attention_heads", self.encoder_attention_heads),
            ("decoder_ffn_dim", self.decoder_ffn_dim),
            ("decoder_attention_heads", self.decoder_attention_heads),
        ] {
            check_size(key, value)?;
        }
        check_layers("encoder_layers", self.encoder_layers)?;
        check_layers("decoder_layers", self.decoder_layers)?;
        let [hidden, rows, encoder, encoder_ff, decoder, decoder_ff] = [
            self.d_model,
            2 * self.vocab_size + 2 * self.max_position_embeddings,
            self.encoder_layers,
            self.encoder_ffn_dim,
            self.decoder_layers,
            self.decoder_ffn_dim,
        ]
        .map(i128::from);
        // Norms and biases are left out: they are far smaller.
        let parameters = hidden
            * (rows
                + encoder * (4 * hidden + 2 * encoder_ff)
                + decoder * (8 * hidden + 2 * decoder_ff));
        let keys = "vocab_size, max_position_embeddings, d_model or the ffn_dims";
        sizes::check_parameters(parameters, keys)?;
        for (key, heads) in [
            ("encoder_attention_heads", self.encoder_attention_heads),
            ("decoder_attention_heads", self.decoder_attention_heads),
        ] {
            if self.d_model % heads != 0 {
                let expected = format!("a divisor of d_model ({})", self.d_model);
                return Err(bad(key, &heads.into(), &expected));
            }
        }
        for (key, p) in [
            ("dropout", self.dropout),
            ("attention_dropout", self.attention_dropout),
            ("activation_dropout", self.activation_dropout),
            ("encoder_layerdrop", self.encoder_layerdrop),
            ("decoder_layerdrop", self.decoder_layerdrop),
        ] {
            // Below 1: dropout divides the kept elements by `1 - p`.
            if !(0.0..1.0).contains(&p) {
                return Err(bad(key, &p.into(), "at least 0 and below 1"));
            }
        }
        activation_named("activation_function", &self.activation_function).map(drop)
    }
}
