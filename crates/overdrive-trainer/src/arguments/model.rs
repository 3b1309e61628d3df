//! The shape of the model.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::key::Range::{AtLeast, Positive};
use super::key::options;
use crate::Result;
use crate::error::refuse;

options! {
    /// The shape of a Llama model to train from scratch, under the keys of Hugging Face's `LlamaConfig`.
    ///
    /// The defaults are those of the `tiny` preset, not of Llama 2. `vocab_size` and `context_length` depend on
    /// the data and are keys of [`TrainingArguments`](crate::TrainingArguments).
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub struct ModelArguments, keys MODEL in "model." {
        "Model" => {
            /// The architecture; only llama can be trained from scratch.
            model_type: String = "llama".to_owned() => TRAIN("NAME");
            /// The size of the hidden states. Default 256.
            hidden_size: u64 = 256 => TRAIN("N", range: AtLeast(1));
            /// The size of the feed-forward layers. Default 688.
            intermediate_size: u64 = 688 => TRAIN("N", range: AtLeast(1));
            /// The number of decoder layers. Default 6.
            num_hidden_layers: u64 = 6 => TRAIN("N", range: AtLeast(1));
            /// The number of query heads. Default 4.
            num_attention_heads: u64 = 4 => TRAIN("N", range: AtLeast(1));
            /// The number of key and value heads; fewer than query heads for grouped-query attention. Default: the
            /// number of query heads.
            num_key_value_heads: Option<u64> = None => TRAIN("N", range: AtLeast(1));
            /// The size of a head. Default: hidden size / query heads.
            head_dim: Option<u64> = None =>
                TRAIN("N", range: AtLeast(2),
                    instead: "give an even number, or change `hidden_size` or `num_attention_heads`");
            /// The maximum sequence length of the model, at least the context length. Default: the context length.
            max_position_embeddings: Option<u64> = None => TRAIN("N", range: AtLeast(1));
            /// The base of the rotary position embeddings. Default 10000.
            rope_theta: f64 = 10_000.0 => TRAIN("X", range: Positive);
            /// The epsilon of RMSNorm. Default 1e-6.
            rms_norm_eps: f64 = 1e-6 => TRAIN("X", range: Positive);
            /// The standard deviation of the initial weights. Default 0.02.
            initializer_range: f64 = 0.02 => TRAIN("X", range: Positive);
            /// If `true`, share the weights of the embedding with the output layer. Default `true`.
            tie_word_embeddings: bool = true => TRAIN("");
            /// If `true`, add biases to the attention projections. Default `false`.
            attention_bias: bool = false => TRAIN("");
            /// If `true`, add biases to the feed-forward projections. Default `false`.
            mlp_bias: bool = false => TRAIN("");
        }
    }
}

impl ModelArguments {
    /// Returns the number of key and value heads, with the default applied.
    pub fn key_value_heads(&self) -> u64 {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Returns the size of a head, with the default applied.
    pub fn head_features(&self) -> u64 {
        self.head_dim
            .unwrap_or_else(|| self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Returns the exact number of parameters with a vocabulary of `vocab_size` tokens.
    ///
    /// ```
    /// use overdrive_trainer::ModelArguments;
    ///
    /// let tied = ModelArguments::default();
    /// assert_eq!(tied.parameters(4096), 5_795_072);
    /// let untied = ModelArguments { tie_word_embeddings: false, ..tied };
    /// assert_eq!(untied.parameters(4096), 5_795_072 + 4096 * 256);
    /// ```
    pub fn parameters(&self, vocab_size: u64) -> u64 {
        // Sizes beyond the range of their keys, which `validate` refuses, are clamped, so that 128 bits suffice.
        let size = |size: u64| u128::from(size.min(i32::MAX.unsigned_abs().into()));
        let (hidden, inner) = (size(self.hidden_size), size(self.intermediate_size));
        let features = size(self.head_features());
        let queries = size(self.num_attention_heads) * features;
        let keys = size(self.key_value_heads()) * features;
        // The projections of query and output, and of key and value.
        let attention = 2 * (queries + keys) * hidden
            + u128::from(self.attention_bias) * (queries + 2 * keys + hidden);
        // Gate, up and down.
        let mlp = 3 * hidden * inner + u128::from(self.mlp_bias) * (2 * inner + hidden);
        let norms = 2 * hidden;
        // Tied weights are stored once.
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        let layers = size(self.num_hidden_layers) * (attention + mlp + norms);
        let all = tables * u128::from(vocab_size) * hidden + layers + hidden;
        u64::try_from(all).unwrap_or(u64::MAX)
    }

    /// Returns the `config.json` of this model in Hugging Face's format.
    pub fn to_hugging_face(&self, vocab_size: u64, context_length: u64) -> Value {
        json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.key_value_heads(),
            // Written even if it is the default: readers derive it in different ways.
            "head_dim": self.head_features(),
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings.unwrap_or(context_length),
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "attention_dropout": 0.0,
        })
    }

    /// Checks that a model of this shape can be built. The ranges of single keys are checked by
    /// [`TrainingArguments::validate`](crate::TrainingArguments::validate).
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the key.
    pub(crate) fn validate(&self, vocab_size: u64, context_length: u64) -> Result<()> {
        const MAX_LAYERS: u64 = 1 << 16;
        let (heads, kv_heads) = (self.num_attention_heads, self.key_value_heads());
        let (layers, features) = (self.num_hidden_layers, self.head_features());
        let divides = self.hidden_size.is_multiple_of(heads) || self.head_dim.is_some();
        // libtorch counts bytes in 63 bits, and a parameter has up to eight.
        let (parameters, most) = (self.parameters(vocab_size), i64::MAX.unsigned_abs() / 8);
        let positions = self.max_position_embeddings.unwrap_or(context_length);
        #[rustfmt::skip]
        refuse(&[
            (self.model_type != "llama", "model.model_type", &self.model_type,
                "`llama`, the only architecture that can be trained from scratch"),
            (!divides, "model.hidden_size", &self.hidden_size,
                &format!("a multiple of `num_attention_heads` ({heads}), unless `head_dim` is set")),
            (!features.is_multiple_of(2) || features == 0, "model.head_dim", &features,
                "even, because rotary embeddings rotate pairs of features; give an even number, or change `hidden_size` or `num_attention_heads`"),
            (!heads.is_multiple_of(kv_heads), "model.num_key_value_heads", &kv_heads,
                &format!("a divisor of `num_attention_heads` ({heads})")),
            (layers > MAX_LAYERS, "model.num_hidden_layers", &layers, &format!("at most {MAX_LAYERS}")),
            (parameters > most, "model", &format!("of {parameters} parameters"),
                &format!("of at most {most} parameters; make `hidden_size` or `intermediate_size` smaller")),
            (positions < context_length, "model.max_position_embeddings", &positions,
                &format!("at least `context_length` ({context_length}); raise it or leave it out")),
        ])?;
        Ok(())
    }
}
