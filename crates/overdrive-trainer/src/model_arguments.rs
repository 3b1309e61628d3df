//! The shape of the model.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Result;
use crate::validate::invalid;

/// The shape of a Llama to train from scratch, under the keys of Hugging Face's `LlamaConfig`.
///
/// The defaults are those of the `tiny` preset, not of Llama 2. `vocab_size` and the length of the
/// context belong to the data and stand in [`TrainingArguments`](crate::TrainingArguments).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelArguments {
    /// The architecture; `llama` is the only one that is trained from scratch.
    pub model_type: String,
    /// Features of a token between the layers. Default 256.
    pub hidden_size: u64,
    /// Features inside the feed-forward part. Default 688.
    pub intermediate_size: u64,
    /// Decoder layers. Default 6.
    pub num_hidden_layers: u64,
    /// Query heads. Default 4.
    pub num_attention_heads: u64,
    /// Key and value heads; fewer than query heads is grouped-query attention. Default: as many.
    pub num_key_value_heads: Option<u64>,
    /// Features a head. Default: `hidden_size / num_attention_heads`.
    pub head_dim: Option<u64>,
    /// Positions that the model may be used with; at least `context_length`, which is the default.
    pub max_position_embeddings: Option<u64>,
    /// Base of the rotary positions. Default 10000.
    pub rope_theta: f64,
    /// What is added under the root of RMSNorm. Default 1e-6.
    pub rms_norm_eps: f64,
    /// Standard deviation of the initial weights. Default 0.02.
    pub initializer_range: f64,
    /// Whether the output layer uses the embeddings' weights. Default true.
    pub tie_word_embeddings: bool,
    /// Whether the attention's projections have biases. Default false.
    pub attention_bias: bool,
    /// Whether the feed-forward projections have biases. Default false.
    pub mlp_bias: bool,
}

impl Default for ModelArguments {
    fn default() -> Self {
        Self {
            model_type: "llama".to_owned(),
            hidden_size: 256,
            intermediate_size: 688,
            num_hidden_layers: 6,
            num_attention_heads: 4,
            num_key_value_heads: None,
            head_dim: None,
            max_position_embeddings: None,
            rope_theta: 10_000.0,
            rms_norm_eps: 1e-6,
            initializer_range: 0.02,
            tie_word_embeddings: true,
            attention_bias: false,
            mlp_bias: false,
        }
    }
}

impl ModelArguments {
    /// Key and value heads, the default resolved.
    pub fn key_value_heads(&self) -> u64 {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Features a head, the default resolved.
    pub fn head_features(&self) -> u64 {
        self.head_dim
            .unwrap_or_else(|| self.hidden_size / self.num_attention_heads.max(1))
    }

    /// The exact number of weights with a vocabulary of `vocab_size` tokens.
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
        let hidden = self.hidden_size;
        let queries = self.num_attention_heads * self.head_features();
        let keys = self.key_value_heads() * self.head_features();
        let attention = hidden * (2 * queries + 2 * keys);
        let attention_bias = queries + 2 * keys + hidden;
        let mlp = 3 * hidden * self.intermediate_size;
        let mlp_bias = 2 * self.intermediate_size + hidden;
        let norms = 2 * hidden;
        let layer = attention
            + u64::from(self.attention_bias) * attention_bias
            + mlp
            + u64::from(self.mlp_bias) * mlp_bias
            + norms;
        let embeddings = vocab_size * hidden * if self.tie_word_embeddings { 1 } else { 2 };
        embeddings + self.num_hidden_layers * layer + hidden
    }

    /// The `config.json` of this model as Hugging Face writes it.
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

    /// Checks that a model of this shape can be built. The ranges of the single numbers are checked by
    /// [`TrainingArguments::validate`](crate::TrainingArguments::validate).
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) with the key.
    pub(crate) fn validate(&self, context_length: u64) -> Result<()> {
        if self.model_type != "llama" {
            return invalid(
                "model.model_type",
                format!("`{}`", self.model_type),
                "only a Llama is trained from scratch",
                "write `llama` or leave the key out",
            );
        }
        let heads = self.num_attention_heads;
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(heads) {
            return invalid(
                "model.hidden_size",
                self.hidden_size,
                format!("it does not split into {heads} heads"),
                "give a multiple of `num_attention_heads`, or `head_dim`",
            );
        }
        if !self.head_features().is_multiple_of(2) || self.head_features() == 0 {
            return invalid(
                "model.head_dim",
                self.head_features(),
                "rotary positions rotate pairs of features",
                "give an even number, or change `hidden_size` or `num_attention_heads`",
            );
        }
        if !heads.is_multiple_of(self.key_value_heads()) {
            return invalid(
                "model.num_key_value_heads",
                self.key_value_heads(),
                format!("{heads} query heads cannot share them evenly"),
                "give a divisor of `num_attention_heads`",
            );
        }
        let positions = self.max_position_embeddings.unwrap_or(context_length);
        if positions < context_length {
            return invalid(
                "model.max_position_embeddings",
                positions,
                format!("the context has {context_length} tokens"),
                "raise it to `context_length` or leave it out",
            );
        }
        Ok(())
    }
}
