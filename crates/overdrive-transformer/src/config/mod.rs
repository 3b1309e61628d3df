//! Configurations: the keys of Hugging Face's `config.json`.

mod bart;
mod block_norms;
mod delta_net;
mod experts;
mod family;
pub(crate) mod fields;
mod gpt2;
mod llama;
mod mla;
mod multimodal;
mod per_layer;
mod rope_scaling;
mod seq2seq;
mod sizes;
mod t5;
mod vision;

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use crate::encoder::EncoderFamily;
use crate::parameters::ParameterSpec;
use crate::{Error, Result};

pub use bart::BartConfig;
pub(crate) use block_norms::NormPosition;
pub use delta_net::DeltaNetConfig;
pub use experts::ExpertsConfig;
pub(crate) use family::layer_types;
pub use family::{LayerType, LlamaFamily};
pub(crate) use fields::{Fields, bad};
pub use gpt2::Gpt2Config;
pub use llama::LlamaConfig;
pub use mla::MlaConfig;
pub use per_layer::{AltUpConfig, PerLayerConfig};
pub use rope_scaling::{LongRope, RopeScaling, Yarn};
pub use seq2seq::Seq2SeqConfig;
pub(crate) use sizes::{check_layers, check_layers_of_files, check_parameters, check_size};
pub use t5::T5Config;
pub use vision::VisionConfig;

/// The architecture and sizes of a model, as in `config.json`.
///
/// It is serialised as that file. Keys that this crate does not know are kept and written back.
///
/// ```
/// use overdrive_transformer::ModelConfig;
/// let json = r#"{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}"#;
/// let config = ModelConfig::from_json(json)?;
/// assert_eq!(config.vocab_size(), 32000); // transformers' default
/// let error = ModelConfig::from_json(r#"{"model_type": "llama", "hidden_size": "64"}"#);
/// assert_eq!(
///     error.unwrap_err().to_string(),
///     "`hidden_size` is \"64\"; it must be a positive integer"
/// );
/// # Ok::<(), overdrive_transformer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
#[non_exhaustive]
#[allow(
    clippy::large_enum_variant,
    reason = "there is one a model; a box would only be in its users' way"
)]
pub enum ModelConfig {
    /// A decoder of the Llama family: any [`LlamaFamily`].
    Llama(LlamaConfig),
    /// GPT-2.
    Gpt2(Gpt2Config),
}

/// The types of multimodal models whose text alone is read; the families of that, of which the first is the default;
/// and `true` if transformers loads the folder as a whole for causal language modeling, `false` if it loads the text.
const MULTIMODAL: [(&str, &[LlamaFamily], bool); 6] = [
    ("gemma3", &[LlamaFamily::Gemma3], true),
    ("gemma3n", &[LlamaFamily::Gemma3n], true),
    ("gemma4", &[LlamaFamily::Gemma4], true),
    (
        "mistral3",
        &[LlamaFamily::Mistral, LlamaFamily::Ministral3],
        true,
    ),
    ("qwen3_5", &[LlamaFamily::Qwen35], false),
    ("qwen3_5_moe", &[LlamaFamily::Qwen35Moe], false),
];

/// The types of multimodal models that are read with their vision towers.
const WITH_VISION: [(&str, LlamaFamily); 2] = [
    ("qwen3_vl", LlamaFamily::Qwen3Vl),
    ("qwen3_vl_moe", LlamaFamily::Qwen3VlMoe),
];

/// Returns the supported values of `model_type`; for a model that is not a decoder, also the Rust type that reads it.
fn supported(model_type: Option<&str>) -> String {
    let names: Vec<&str> = LlamaFamily::of_folders()
        .map(LlamaFamily::model_type)
        .chain(MULTIMODAL.map(|(name, ..)| name))
        .chain(WITH_VISION.map(|(name, _)| name))
        .chain(["gpt2"])
        .collect();
    let names = names.join(", ");
    match model_type {
        Some(name) if Seq2SeqConfig::is_model_type(name) => {
            format!("{names}; use Seq2SeqLm for models of type {name}")
        }
        Some(name) if EncoderFamily::from_model_type(name).is_some() => {
            format!(
                "{names}; use EncoderModel, MaskedLm or SequenceClassifier for models of type {name}"
            )
        }
        _ => names,
    }
}

impl ModelConfig {
    /// Reads `config.json` of a Hugging Face folder.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be read or parsed or a value is out of range,
    /// [`Error::Unsupported`] for what this crate does not implement.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<ModelConfig> {
        Ok(ModelConfig::read(dir.as_ref())?.0)
    }

    /// Reads the configuration of a folder, and returns `true` beside it if transformers loads the folder as a multimodal
    /// model with this one inside.
    pub(crate) fn read(dir: &Path) -> Result<(ModelConfig, bool)> {
        let fields = fields::read(dir)?;
        let model_type = fields.peek("model_type").and_then(Value::as_str);
        let is_multimodal = MULTIMODAL
            .iter()
            .any(|&(name, _, as_a_whole)| as_a_whole && model_type == Some(name));
        Ok((ModelConfig::from_fields(fields)?, is_multimodal))
    }

    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    /// As [`ModelConfig::from_dir`].
    pub fn from_json(text: &str) -> Result<ModelConfig> {
        ModelConfig::from_fields(fields::parse(text)?)
    }

    fn from_fields(mut fields: Fields) -> Result<ModelConfig> {
        let model_type = fields.string("model_type")?;
        let name = model_type.as_deref();
        let text = MULTIMODAL.iter().find(|(own, ..)| name == Some(own));
        let vision = WITH_VISION.iter().find(|(own, _)| name == Some(own));
        let config = if name == Some("gpt2") {
            ModelConfig::Gpt2(Gpt2Config::read(fields)?)
        } else if let Some((_, families, _)) = text {
            ModelConfig::Llama(multimodal::text(fields, families)?)
        } else if let Some((_, family)) = vision {
            ModelConfig::Llama(vision::read(fields, *family)?)
        } else if let Some(family) = name.and_then(LlamaFamily::from_name) {
            ModelConfig::Llama(LlamaConfig::read(family, fields)?)
        } else {
            let found = name.map_or("missing".to_owned(), |name| format!("{name:?}"));
            return Err(Error::unsupported("model_type", found, supported(name)));
        };
        config.validate()?;
        Ok(config)
    }

    /// Returns the object of `config.json`, in keys that transformers 4 and 5 read.
    pub fn to_json(&self) -> Map<String, Value> {
        match self {
            ModelConfig::Llama(config) => config.write(),
            ModelConfig::Gpt2(config) => config.write(),
        }
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// [`Error::Common`] with the key.
    pub fn validate(&self) -> Result<()> {
        match self {
            ModelConfig::Llama(config) => config.validate(),
            ModelConfig::Gpt2(config) => config.validate(),
        }
    }

    /// Returns every parameter of the model, in the order of transformers' `named_parameters`, without a tied
    /// head.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        match self {
            ModelConfig::Llama(config) => crate::llama::parameters(config),
            ModelConfig::Gpt2(config) => crate::gpt2::parameters(config),
        }
    }

    /// Returns the size of the vocabulary.
    pub fn vocab_size(&self) -> i64 {
        match self {
            ModelConfig::Llama(config) => config.vocab_size,
            ModelConfig::Gpt2(config) => config.vocab_size,
        }
    }

    /// Returns the largest number of positions that the model takes.
    pub fn max_position_embeddings(&self) -> i64 {
        self.context().0
    }

    /// Returns the largest number of positions with which the sequences of one forward pass do not affect one another.
    /// It is below [`max_position_embeddings`](Self::max_position_embeddings) for dynamic and LongRoPE scaling: beyond
    /// the original context, all sequences get the frequencies of the longest one.
    pub fn ragged_context(&self) -> i64 {
        self.ragged_limit().0
    }

    /// Returns [`ragged_context`](Self::ragged_context) and the key that sets it.
    pub(crate) fn ragged_limit(&self) -> (i64, &'static str) {
        match self {
            ModelConfig::Llama(config) => config.ragged_context(),
            ModelConfig::Gpt2(config) => (config.n_positions, "n_positions"),
        }
    }

    /// Returns the number of positions beyond which a generation rebuilds its cache with all tokens in one pass, so
    /// that all keys have the frequencies of long sequences: the original context of Phi-3 with LongRoPE. transformers
    /// does this only for Phi-3; in other families keys keep the frequencies with which they were written.
    pub fn cache_restart(&self) -> Option<i64> {
        match self {
            ModelConfig::Llama(config) => config.cache_restart(),
            ModelConfig::Gpt2(_) => None,
        }
    }

    /// Returns the vision tower and the tokens of images, if the model sees images.
    pub fn vision(&self) -> Option<&VisionConfig> {
        match self {
            ModelConfig::Llama(config) => config.vision.as_ref(),
            ModelConfig::Gpt2(_) => None,
        }
    }

    /// Returns the width of the hidden states.
    pub fn hidden_size(&self) -> i64 {
        match self {
            ModelConfig::Llama(config) => config.hidden_size,
            ModelConfig::Gpt2(config) => config.n_embd,
        }
    }

    /// Returns the number of query heads of a layer.
    pub fn num_attention_heads(&self) -> i64 {
        match self {
            ModelConfig::Llama(config) => config.num_attention_heads,
            ModelConfig::Gpt2(config) => config.n_head,
        }
    }

    /// Returns the number of key/value heads of a layer.
    pub fn num_key_value_heads(&self) -> i64 {
        match self {
            ModelConfig::Llama(config) => config.kv_heads(),
            ModelConfig::Gpt2(config) => config.n_head,
        }
    }

    /// Returns the number of channels of a head.
    pub fn head_dim(&self) -> i64 {
        match self {
            ModelConfig::Llama(config) => config.head_dim(),
            ModelConfig::Gpt2(config) => config.n_embd / config.n_head.max(1),
        }
    }

    /// Returns the number of bytes of the states of one sequence in all layers of linear attention, with activations of
    /// `kind`.
    pub(crate) fn state_bytes(&self, kind: Kind) -> u64 {
        match self {
            ModelConfig::Llama(config) => {
                let layers = 0..config.num_hidden_layers;
                let sizes = layers.filter_map(|layer| config.delta_net_of(layer));
                sizes.map(|sizes| sizes.state_bytes(kind)).sum()
            }
            ModelConfig::Gpt2(_) => 0,
        }
    }

    /// Returns `true` if the head shares the weight of the embedding.
    pub fn tie_word_embeddings(&self) -> bool {
        match self {
            ModelConfig::Llama(config) => config.tie_word_embeddings,
            ModelConfig::Gpt2(config) => config.tie_word_embeddings,
        }
    }

    /// Checks that the model predicts the next token.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model with bidirectional attention.
    pub(crate) fn check_causal(&self) -> Result<()> {
        match self {
            ModelConfig::Llama(config) if config.use_bidirectional_attention => {
                Err(Error::unsupported(
                    "use_bidirectional_attention",
                    "true",
                    "false, a model that predicts the next token; `EmbeddingModel` loads this one",
                ))
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn set_tied(&mut self, tied: bool) {
        match self {
            ModelConfig::Llama(config) => config.tie_word_embeddings = tied,
            ModelConfig::Gpt2(config) => config.tie_word_embeddings = tied,
        }
    }

    /// Returns the id of the beginning-of-sequence token.
    pub fn bos_token_id(&self) -> Option<i64> {
        match self {
            ModelConfig::Llama(config) => config.bos_token_id,
            ModelConfig::Gpt2(config) => config.bos_token_id,
        }
    }

    /// Returns the id of padding.
    pub fn pad_token_id(&self) -> Option<i64> {
        match self {
            ModelConfig::Llama(config) => config.pad_token_id,
            ModelConfig::Gpt2(config) => config.pad_token_id,
        }
    }

    /// Returns the ids of the end-of-sequence tokens; there may be none.
    pub fn eos_token_ids(&self) -> &[i64] {
        match self {
            ModelConfig::Llama(config) => &config.eos_token_id,
            ModelConfig::Gpt2(config) => &config.eos_token_id,
        }
    }

    /// Returns the context length and the key that sets it.
    pub(crate) fn context(&self) -> (i64, &'static str) {
        match self {
            ModelConfig::Llama(config) => (config.context(), "max_position_embeddings"),
            ModelConfig::Gpt2(config) => (config.n_positions, "n_positions"),
        }
    }

    /// Returns `true` if the head has a bias.
    pub(crate) fn head_bias(&self) -> bool {
        match self {
            ModelConfig::Llama(config) => config.head_bias(),
            ModelConfig::Gpt2(_) => false,
        }
    }

    /// Returns the bound of the logits.
    pub(crate) fn logit_softcap(&self) -> Option<f64> {
        match self {
            ModelConfig::Llama(config) => config.logit_softcap(),
            ModelConfig::Gpt2(_) => None,
        }
    }

    /// Returns the divisor of the logits.
    pub(crate) fn logit_divisor(&self) -> Option<f64> {
        match self {
            ModelConfig::Llama(config) => config.logit_divisor(),
            ModelConfig::Gpt2(_) => None,
        }
    }

    /// Returns the factor of the load-balancing loss of experts, if the loss has that term.
    pub(crate) fn aux_loss_coefficient(&self) -> Option<f64> {
        let experts = match self {
            ModelConfig::Llama(config) => config.experts.as_ref()?,
            ModelConfig::Gpt2(_) => return None,
        };
        experts
            .output_router_logits
            .then_some(experts.router_aux_loss_coef)
    }

    /// Returns the object of a new `generation_config.json`.
    pub(crate) fn generation_defaults(&self) -> Map<String, Value> {
        let (bos, eos, pad) = match self {
            ModelConfig::Llama(c) => (c.bos_token_id, &c.eos_token_id, c.pad_token_id),
            ModelConfig::Gpt2(c) => (c.bos_token_id, &c.eos_token_id, c.pad_token_id),
        };
        let mut map = Map::new();
        // transformers' mark of values that were derived from `config.json`.
        map.insert("_from_model_config".to_owned(), true.into());
        let ids = [
            ("bos_token_id", bos.map(Value::from)),
            ("pad_token_id", pad.map(Value::from)),
        ];
        let eos = ("eos_token_id", Some(fields::ids_to_json(eos)));
        for (key, value) in ids.into_iter().chain([eos]) {
            if let Some(value) = value.filter(|value| !value.is_null()) {
                map.insert(key.to_owned(), value);
            }
        }
        map
    }
}

impl TryFrom<Value> for ModelConfig {
    type Error = Error;

    fn try_from(value: Value) -> Result<ModelConfig> {
        ModelConfig::from_fields(fields::object(value)?)
    }
}

impl From<ModelConfig> for Value {
    fn from(config: ModelConfig) -> Value {
        Value::Object(config.to_json())
    }
}

impl From<LlamaConfig> for ModelConfig {
    fn from(config: LlamaConfig) -> ModelConfig {
        ModelConfig::Llama(config)
    }
}

impl From<Gpt2Config> for ModelConfig {
    fn from(config: Gpt2Config) -> ModelConfig {
        ModelConfig::Gpt2(config)
    }
}

/// Removes the keys that every save sets itself from the unknown ones.
pub(crate) fn without_written_keys(mut map: Map<String, Value>) -> Map<String, Value> {
    // A value of an older save would contradict the one that is written.
    for key in [
        "architectures",
        "torch_dtype",
        "dtype",
        "transformers_version",
    ] {
        map.remove(key);
    }
    map
}
