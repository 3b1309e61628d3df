use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::bart::BartConfig;
use super::fields::{self, Fields, ids_to_json};
use super::t5::T5Config;
use crate::checkpoint::CheckpointConfig;
use crate::parameters::ParameterSpec;
use crate::{Error, Result};

/// The architecture and sizes of an encoder-decoder model, as in `config.json`.
///
/// It is serialised as that file. Keys that this crate does not know are kept and written back.
///
/// ```
/// use overdrive_transformer::Seq2SeqConfig;
/// let config = Seq2SeqConfig::from_json(r#"{"model_type": "t5", "d_model": 64}"#)?;
/// assert_eq!(config.vocab_size(), 32128); // transformers' default
/// # Ok::<(), overdrive_transformer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
#[non_exhaustive]
pub enum Seq2SeqConfig {
    /// T5, T5 v1.1, Flan-T5.
    T5(T5Config),
    /// BART.
    Bart(BartConfig),
}

/// The values of `model_type`.
const MODEL_TYPES: [&str; 2] = ["t5", "bart"];

impl Seq2SeqConfig {
    /// Returns `true` if `model_type` of a `config.json` names an architecture of this type.
    pub fn is_model_type(model_type: &str) -> bool {
        MODEL_TYPES.contains(&model_type)
    }

    /// Reads `config.json` of a Hugging Face folder.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be read or parsed or a value is out of range,
    /// [`Error::Unsupported`] for what this crate does not implement.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Seq2SeqConfig> {
        Seq2SeqConfig::from_fields(fields::read(dir.as_ref())?)
    }

    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    /// As [`Seq2SeqConfig::from_dir`].
    pub fn from_json(text: &str) -> Result<Seq2SeqConfig> {
        Seq2SeqConfig::from_fields(fields::parse(text)?)
    }

    fn from_fields(mut fields: Fields) -> Result<Seq2SeqConfig> {
        let model_type = fields.string("model_type")?;
        let config = match model_type.as_deref() {
            Some("t5") => Seq2SeqConfig::T5(T5Config::read(fields)?),
            Some("bart") => Seq2SeqConfig::Bart(BartConfig::read(fields)?),
            other => {
                return Err(Error::unsupported(
                    "model_type",
                    other.map_or("missing".to_owned(), |name| format!("{name:?}")),
                    MODEL_TYPES.join(", "),
                ));
            }
        };
        config.validate()?;
        Ok(config)
    }

    /// Returns the object of `config.json`, in keys that transformers 4 and 5 read.
    pub fn to_json(&self) -> Map<String, Value> {
        match self {
            Seq2SeqConfig::T5(config) => config.write(),
            Seq2SeqConfig::Bart(config) => config.write(),
        }
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// [`Error::Common`] with the key.
    pub fn validate(&self) -> Result<()> {
        match self {
            Seq2SeqConfig::T5(config) => config.validate(),
            Seq2SeqConfig::Bart(config) => config.validate(),
        }
    }

    /// Returns every parameter of the model, in the order of transformers' `named_parameters`, without a tied
    /// head; BART's `final_logits_bias`, which is not trained, comes last.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        match self {
            Seq2SeqConfig::T5(config) => crate::seq2seq::t5::parameters(config),
            Seq2SeqConfig::Bart(config) => crate::seq2seq::bart::parameters(config),
        }
    }

    /// Returns the size of the vocabulary.
    pub fn vocab_size(&self) -> i64 {
        match self {
            Seq2SeqConfig::T5(config) => config.vocab_size,
            Seq2SeqConfig::Bart(config) => config.vocab_size,
        }
    }

    /// Returns the width of the hidden states.
    pub fn hidden_size(&self) -> i64 {
        match self {
            Seq2SeqConfig::T5(config) => config.d_model,
            Seq2SeqConfig::Bart(config) => config.d_model,
        }
    }

    /// Returns the number of layers of the decoder.
    pub fn decoder_layers(&self) -> i64 {
        match self {
            Seq2SeqConfig::T5(config) => config.decoder_layers(),
            Seq2SeqConfig::Bart(config) => config.decoder_layers,
        }
    }

    /// Returns the number of heads of the decoder.
    pub fn decoder_attention_heads(&self) -> i64 {
        match self {
            Seq2SeqConfig::T5(config) => config.num_heads,
            Seq2SeqConfig::Bart(config) => config.decoder_attention_heads,
        }
    }

    /// Returns the number of channels of a head of the decoder.
    pub fn decoder_head_dim(&self) -> i64 {
        match self {
            Seq2SeqConfig::T5(config) => config.d_kv,
            Seq2SeqConfig::Bart(config) => config.d_model / config.decoder_attention_heads.max(1),
        }
    }

    /// Returns the largest number of positions of the encoder and of the decoder; `None` for relative positions,
    /// which have no limit.
    pub fn max_position_embeddings(&self) -> Option<i64> {
        match self {
            Seq2SeqConfig::T5(_) => None,
            Seq2SeqConfig::Bart(config) => Some(config.max_position_embeddings),
        }
    }

    /// Returns `true` if the head shares the weight of the embedding.
    pub fn tie_word_embeddings(&self) -> bool {
        match self {
            Seq2SeqConfig::T5(config) => config.tie_word_embeddings,
            Seq2SeqConfig::Bart(config) => config.tie_word_embeddings,
        }
    }

    /// Returns the token that the decoder begins with: `decoder_start_token_id`, else `bos_token_id`, as in
    /// transformers.
    pub fn decoder_start_token_id(&self) -> Option<i64> {
        match self {
            Seq2SeqConfig::T5(config) => config.decoder_start_token_id,
            Seq2SeqConfig::Bart(config) => config.decoder_start_token_id.or(config.bos_token_id),
        }
    }

    /// Returns the id of padding.
    pub fn pad_token_id(&self) -> Option<i64> {
        match self {
            Seq2SeqConfig::T5(config) => config.pad_token_id,
            Seq2SeqConfig::Bart(config) => config.pad_token_id,
        }
    }

    /// Returns the ids of the end-of-sequence tokens; there may be none.
    pub fn eos_token_ids(&self) -> &[i64] {
        match self {
            Seq2SeqConfig::T5(config) => &config.eos_token_id,
            Seq2SeqConfig::Bart(config) => &config.eos_token_id,
        }
    }

    pub(crate) fn set_tied(&mut self, tied: bool) {
        match self {
            Seq2SeqConfig::T5(config) => config.tie_word_embeddings = tied,
            Seq2SeqConfig::Bart(config) => config.tie_word_embeddings = tied,
        }
    }

    /// Returns the object of a new `generation_config.json`.
    pub(crate) fn generation_defaults(&self) -> Map<String, Value> {
        let (bos, forced_eos): (_, &[i64]) = match self {
            Seq2SeqConfig::T5(_) => (None, &[]),
            Seq2SeqConfig::Bart(config) => (config.bos_token_id, &config.forced_eos_token_id),
        };
        let mut map = Map::new();
        // transformers' mark of values that were derived from `config.json`.
        map.insert("_from_model_config".to_owned(), true.into());
        for (key, value) in [
            ("bos_token_id", Value::from(bos)),
            (
                "decoder_start_token_id",
                Value::from(self.decoder_start_token_id()),
            ),
            ("eos_token_id", ids_to_json(self.eos_token_ids())),
            ("forced_eos_token_id", ids_to_json(forced_eos)),
            ("pad_token_id", Value::from(self.pad_token_id())),
        ] {
            if !value.is_null() {
                map.insert(key.to_owned(), value);
            }
        }
        map
    }
}

impl CheckpointConfig for Seq2SeqConfig {
    fn parameters(&self) -> Vec<ParameterSpec> {
        Seq2SeqConfig::parameters(self)
    }

    fn layers(&self) -> (&'static str, i64) {
        // The larger number is the one to check against the number of tensors.
        match self {
            Seq2SeqConfig::T5(c) if c.decoder_layers() > c.num_layers => {
                ("num_decoder_layers", c.decoder_layers())
            }
            Seq2SeqConfig::T5(c) => ("num_layers", c.num_layers),
            Seq2SeqConfig::Bart(c) if c.decoder_layers > c.encoder_layers => {
                ("decoder_layers", c.decoder_layers)
            }
            Seq2SeqConfig::Bart(c) => ("encoder_layers", c.encoder_layers),
        }
    }

    fn extra(&self) -> &Map<String, Value> {
        match self {
            Seq2SeqConfig::T5(config) => &config.extra,
            Seq2SeqConfig::Bart(config) => &config.extra,
        }
    }

    fn to_json(&self) -> Map<String, Value> {
        Seq2SeqConfig::to_json(self)
    }

    fn adjacent(&self) -> Vec<Vec<String>> {
        match self {
            Seq2SeqConfig::T5(config) => crate::seq2seq::t5::adjacent(config),
            Seq2SeqConfig::Bart(config) => crate::seq2seq::bart::adjacent(config),
        }
    }

    fn tied_head(&self) -> Option<&'static str> {
        self.tie_word_embeddings().then_some("lm_head")
    }

    fn untie_head(&mut self) {
        self.set_tied(false);
    }

    fn prefix(&self) -> &'static str {
        match self {
            Seq2SeqConfig::T5(_) => "",
            Seq2SeqConfig::Bart(_) => "model.",
        }
    }

    /// Gives the copies of the one embedding its name.
    fn parameter_name(&self, name: &str, prefixed: bool) -> Option<String> {
        let beside = name.starts_with("lm_head.") || name == "final_logits_bias";
        let bare = name.strip_prefix(self.prefix()).unwrap_or(name);
        if beside {
            return Some(name.to_owned());
        }
        if ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"].contains(&bare) {
            return Some(format!("{}shared.weight", self.prefix()));
        }
        Some(match prefixed {
            true => name.to_owned(),
            false => format!("{}{name}", self.prefix()),
        })
    }

    fn kind_of(&self, parameter: &ParameterSpec, kind: Kind) -> Kind {
        // transformers' `_keep_in_fp32_modules`: the sums of this projection overflow fp16.
        let wide = matches!(self, Seq2SeqConfig::T5(_)) && parameter.name.ends_with(".wo.weight");
        match kind {
            Kind::Half if wide => Kind::Float,
            kind => kind,
        }
    }

    fn may_be_missing(&self, parameter: &ParameterSpec) -> bool {
        match self {
            // Version 5 of transformers ties a head that the files do not hold, whatever the configuration says.
            Seq2SeqConfig::T5(_) => parameter.name == "lm_head.weight",
            Seq2SeqConfig::Bart(_) => parameter.name == "final_logits_bias",
        }
    }
}

impl TryFrom<Value> for Seq2SeqConfig {
    type Error = Error;

    fn try_from(value: Value) -> Result<Seq2SeqConfig> {
        Seq2SeqConfig::from_fields(fields::object(value)?)
    }
}

impl From<Seq2SeqConfig> for Value {
    fn from(config: Seq2SeqConfig) -> Value {
        Value::Object(config.to_json())
    }
}

impl From<T5Config> for Seq2SeqConfig {
    fn from(config: T5Config) -> Seq2SeqConfig {
        Seq2SeqConfig::T5(config)
    }
}

impl From<BartConfig> for Seq2SeqConfig {
    fn from(config: BartConfig) -> Seq2SeqConfig {
        Seq2SeqConfig::Bart(config)
    }
}
