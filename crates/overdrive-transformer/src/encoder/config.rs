use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::HeadKind;
use super::parameters::architecture;
use crate::activation_names::activation_named;
use crate::config::{Fields, LayerType, bad, check_layers, check_parameters, check_size, fields};
use crate::{Error, PoolingMode, Result};

/// The family of an encoder, by its `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum EncoderFamily {
    /// `bert`: learned positions, norms after attention and the feed-forward block.
    #[default]
    Bert,
    /// `roberta`: as BERT, with positions that start after the id of padding and skip padding.
    Roberta,
    /// `xlm-roberta`: RoBERTa under another name, with a vocabulary of many languages (BGE-M3, multilingual E5).
    XlmRoberta,
    /// `modernbert`: rotary positions, norms before attention and the gated feed-forward block, a window in most
    /// layers, no biases.
    ModernBert,
}

impl EncoderFamily {
    /// Every family.
    pub const ALL: [Self; 4] = [
        Self::Bert,
        Self::Roberta,
        Self::XlmRoberta,
        Self::ModernBert,
    ];

    /// Returns the `model_type` of transformers.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Bert => "bert",
            Self::Roberta => "roberta",
            Self::XlmRoberta => "xlm-roberta",
            Self::ModernBert => "modernbert",
        }
    }

    /// Returns `true` for RoBERTa under both of its names.
    pub(crate) fn is_roberta(self) -> bool {
        matches!(self, Self::Roberta | Self::XlmRoberta)
    }

    /// Returns the family of a `model_type`, or `None` if it is not a supported encoder.
    pub fn from_model_type(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|family| family.model_type() == name)
    }
}

/// The loss of a sequence classifier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProblemType {
    /// `regression`: the mean squared error; labels are floats.
    Regression,
    /// `single_label_classification`: the cross-entropy; labels are classes, i64.
    SingleLabel,
    /// `multi_label_classification`: the binary cross-entropy of each class; labels are floats in 0..=1.
    MultiLabel,
}

impl ProblemType {
    /// Every type.
    pub const ALL: [Self; 3] = [Self::Regression, Self::SingleLabel, Self::MultiLabel];

    /// Returns the name in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Regression => "regression",
            Self::SingleLabel => "single_label_classification",
            Self::MultiLabel => "multi_label_classification",
        }
    }
}

/// The configuration of a bidirectional encoder: the keys of `config.json` of BERT, RoBERTa, XLM-RoBERTa
/// and ModernBERT.
///
/// Keys that differ in name only are one field. [`EncoderConfig::new`] has the defaults of each family, which are
/// those of transformers.
///
/// ```
/// use overdrive_transformer::{EncoderConfig, EncoderFamily};
/// let config = EncoderConfig::from_json(r#"{"model_type": "modernbert", "num_hidden_layers": 4}"#)?;
/// assert_eq!(config.family, EncoderFamily::ModernBert);
/// assert_eq!(config.hidden_size, 768);
/// let error = EncoderConfig::from_json(r#"{"model_type": "bert", "is_decoder": true}"#).unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "`is_decoder` is true, which is not supported; supported: false, an encoder"
/// );
/// # Ok::<(), overdrive_transformer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Value", into = "Value")]
#[non_exhaustive]
pub struct EncoderConfig {
    /// The family.
    pub family: EncoderFamily,
    /// The number of tokens in the vocabulary.
    pub vocab_size: i64,
    /// The width of the hidden states.
    pub hidden_size: i64,
    /// The number of layers.
    pub num_hidden_layers: i64,
    /// The number of attention heads of a layer.
    pub num_attention_heads: i64,
    /// The inner width of the feed-forward block; ModernBERT's first matmul has twice as many outputs.
    pub intermediate_size: i64,
    /// The largest number of positions; RoBERTa uses `pad_token_id + 1` of them for other purposes.
    pub max_position_embeddings: i64,
    /// The number of token types; not in ModernBERT. Default 2.
    pub type_vocab_size: i64,
    /// The activation of the feed-forward block: `hidden_act`, in ModernBERT `hidden_activation`.
    pub hidden_act: String,
    /// The number that norms add to the variance: `layer_norm_eps`, in ModernBERT `norm_eps`.
    pub layer_norm_eps: f64,
    /// The standard deviation of random weights.
    pub initializer_range: f64,
    /// The bound of random weights of ModernBERT, in standard deviations.
    pub initializer_cutoff_factor: f64,
    /// The dropout of attention weights in training: `attention_probs_dropout_prob`, in ModernBERT
    /// `attention_dropout`, where it is applied to the output of attention, too.
    pub attention_dropout: f64,
    /// The dropout of embeddings and of the outputs of attention and feed-forward blocks in training
    /// (`hidden_dropout_prob`); not in ModernBERT.
    pub hidden_dropout: f64,
    /// The dropout of ModernBERT's embeddings in training.
    pub embedding_dropout: f64,
    /// The dropout inside ModernBERT's feed-forward block in training.
    pub mlp_dropout: f64,
    /// The dropout before the classifier in training; `None`: that of the hidden states.
    pub classifier_dropout: Option<f64>,
    /// If `true`, ModernBERT's norms have a bias.
    pub norm_bias: bool,
    /// If `true`, ModernBERT's attention projections have a bias.
    pub attention_bias: bool,
    /// If `true`, ModernBERT's feed-forward projections have a bias.
    pub mlp_bias: bool,
    /// If `true`, the output layer of ModernBERT's masked language model has a bias.
    pub decoder_bias: bool,
    /// If `true`, the dense layer of ModernBERT's heads has a bias.
    pub classifier_bias: bool,
    /// The activation of ModernBERT's heads.
    pub classifier_activation: String,
    /// The token states that ModernBERT's classifier pools, those of the first token or the mean; default: the first.
    pub classifier_pooling: PoolingMode,
    /// The attention type of each layer of ModernBERT; empty: every third layer is full, from the first.
    pub layer_types: Vec<LayerType>,
    /// The window of ModernBERT's sliding layers: a token sees `local_attention / 2` tokens on each side.
    pub local_attention: i64,
    /// The rotary base of ModernBERT's full layers.
    pub global_rope_theta: f64,
    /// The rotary base of ModernBERT's sliding layers.
    pub local_rope_theta: f64,
    /// The id of padding.
    pub pad_token_id: Option<i64>,
    /// If `true`, the output layer of the masked language model is the embedding.
    pub tie_word_embeddings: bool,
    /// The names of the classes, of which there are `num_labels`.
    pub id2label: Vec<String>,
    /// The loss of the classifier; `None`: by the number of classes and the dtype of the labels.
    pub problem_type: Option<ProblemType>,
    /// The keys that this crate does not use; they are written back unchanged.
    pub extra: Map<String, Value>,
}

impl EncoderConfig {
    /// Returns the default configuration of the family's class in transformers: the base model.
    pub fn new(family: EncoderFamily) -> EncoderConfig {
        let modern = family == EncoderFamily::ModernBert;
        let (vocab_size, pad) = match family {
            EncoderFamily::Bert => (30_522, 0),
            EncoderFamily::Roberta => (50_265, 1),
            EncoderFamily::XlmRoberta => (30_522, 1),
            EncoderFamily::ModernBert => (50_368, 50_283),
        };
        EncoderConfig {
            family,
            vocab_size,
            hidden_size: 768,
            num_hidden_layers: if modern { 22 } else { 12 },
            num_attention_heads: 12,
            intermediate_size: if modern { 1152 } else { 3072 },
            max_position_embeddings: if modern { 8192 } else { 512 },
            type_vocab_size: 2,
            hidden_act: "gelu".to_owned(),
            layer_norm_eps: if modern { 1e-5 } else { 1e-12 },
            initializer_range: 0.02,
            initializer_cutoff_factor: 2.0,
            attention_dropout: if modern { 0.0 } else { 0.1 },
            hidden_dropout: if modern { 0.0 } else { 0.1 },
            embedding_dropout: 0.0,
            mlp_dropout: 0.0,
            classifier_dropout: modern.then_some(0.0),
            norm_bias: !modern,
            attention_bias: !modern,
            mlp_bias: !modern,
            decoder_bias: true,
            classifier_bias: !modern,
            classifier_activation: "gelu".to_owned(),
            classifier_pooling: PoolingMode::Cls,
            layer_types: Vec::new(),
            local_attention: 128,
            global_rope_theta: 160_000.0,
            local_rope_theta: 10_000.0,
            pad_token_id: Some(pad),
            tie_word_embeddings: true,
            id2label: default_labels(2),
            problem_type: None,
            extra: Map::new(),
        }
    }

    /// Reads `config.json` of a Hugging Face folder.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be read or parsed or a value is out of range, [`Error::Unsupported`]
    /// for what this crate does not implement.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<EncoderConfig> {
        EncoderConfig::from_fields(fields::read(dir.as_ref())?)
    }

    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    /// As [`EncoderConfig::from_dir`].
    pub fn from_json(text: &str) -> Result<EncoderConfig> {
        EncoderConfig::from_fields(fields::parse(text)?)
    }

    /// Returns the object of `config.json` of a model without a head, in keys that transformers 4 and 5 read.
    pub fn to_json(&self) -> Map<String, Value> {
        super::config_json::write(self, architecture(self.family, HeadKind::Base))
    }

    fn from_fields(mut fields: Fields) -> Result<EncoderConfig> {
        let model_type = fields.string("model_type")?;
        let family = model_type
            .as_deref()
            .and_then(EncoderFamily::from_model_type);
        let Some(family) = family else {
            return Err(Error::unsupported(
                "model_type",
                model_type.map_or("missing".to_owned(), |name| format!("{name:?}")),
                EncoderFamily::ALL.map(EncoderFamily::model_type).join(", "),
            ));
        };
        let config = super::config_json::read(family, fields)?;
        config.validate()?;
        Ok(config)
    }

    /// Returns the number of classes.
    pub fn num_labels(&self) -> i64 {
        self.id2label.len() as i64
    }

    /// Names the classes `labels`.
    pub fn with_labels(mut self, labels: &[impl AsRef<str>]) -> EncoderConfig {
        self.id2label = labels
            .iter()
            .map(|label| label.as_ref().to_owned())
            .collect();
        self
    }

    /// Returns the number of channels of a head.
    pub fn head_dim(&self) -> i64 {
        self.hidden_size / self.num_attention_heads.max(1)
    }

    /// Returns the largest number of tokens in a sequence.
    pub fn context(&self) -> i64 {
        self.max_position_embeddings - self.first_position()
    }

    /// Returns the position of the first token: RoBERTa counts from the one after the id of padding.
    pub(crate) fn first_position(&self) -> i64 {
        match self.family.is_roberta() {
            true => self.pad_token_id.unwrap_or(0) + 1,
            false => 0,
        }
    }

    /// Returns `true` for ModernBERT.
    pub(crate) fn is_modern(&self) -> bool {
        self.family == EncoderFamily::ModernBert
    }

    /// Returns the attention type of a layer.
    pub fn layer_type(&self, layer: i64) -> LayerType {
        let given = usize::try_from(layer)
            .ok()
            .and_then(|layer| self.layer_types.get(layer));
        match given {
            _ if !self.is_modern() => LayerType::Full,
            Some(&given) => given,
            None if layer % 3 == 0 => LayerType::Full,
            None => LayerType::Sliding,
        }
    }

    /// Returns the dropout before the classifier.
    pub(crate) fn dropout_of_classifier(&self) -> f64 {
        self.classifier_dropout.unwrap_or(self.hidden_dropout)
    }

    /// Checks that the sizes fit together.
    ///
    /// # Errors
    /// [`Error::Common`] with the key.
    pub fn validate(&self) -> Result<()> {
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.type_vocab_size),
            ("local_attention", self.local_attention),
        ] {
            check_size(key, value)?;
        }
        check_layers("num_hidden_layers", self.num_hidden_layers)?;
        if self.id2label.is_empty() {
            return Err(bad("num_labels", &0.into(), "a positive integer"));
        }
        if self.classifier_pooling == PoolingMode::LastToken {
            let found = "last token".into();
            return Err(bad("classifier_pooling", &found, "cls or mean"));
        }
        self.check_total()?;
        if self.hidden_size % self.num_attention_heads != 0 {
            let expected = format!(
                "a multiple of num_attention_heads ({})",
                self.num_attention_heads
            );
            return Err(bad("hidden_size", &self.hidden_size.into(), &expected));
        }
        let head_dim = self.head_dim();
        if self.is_modern() && head_dim % 2 != 0 {
            let expected =
                format!("a size with even heads for rotary positions (heads have {head_dim})");
            return Err(bad("hidden_size", &self.hidden_size.into(), &expected));
        }
        self.check_padding()?;
        self.check_numbers()?;
        let layers = self.num_hidden_layers;
        if self.layer_types.contains(&LayerType::Linear) {
            let found = LayerType::Linear.name().into();
            return Err(bad(
                "layer_types",
                &found,
                "a list of full_attention, sliding_attention",
            ));
        }
        if !self.layer_types.is_empty() && self.layer_types.len() as i64 != layers {
            let expected = format!("one type for each of {layers} layers");
            return Err(bad(
                "layer_types",
                &self.layer_types.len().into(),
                &expected,
            ));
        }
        let [act, head] = match self.is_modern() {
            true => ["hidden_activation", "classifier_activation"],
            false => ["hidden_act", "hidden_act"],
        };
        activation_named(act, &self.hidden_act)?;
        activation_named(head, &self.classifier_activation).map(drop)
    }

    fn check_total(&self) -> Result<()> {
        let [hidden, inner, layers, vocabulary, positions, types, labels] = [
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.vocab_size,
            self.max_position_embeddings,
            self.type_vocab_size,
            self.num_labels(),
        ]
        .map(i128::from);
        let rows = 2 * vocabulary + positions + types + labels;
        let parameters = hidden * (rows + 2 * hidden + layers * (4 * hidden + 3 * inner));
        check_parameters(
            parameters,
            "vocab_size, hidden_size, intermediate_size or max_position_embeddings",
        )
    }

    fn check_padding(&self) -> Result<()> {
        let Some(pad) = self.pad_token_id else {
            if self.family.is_roberta() {
                let expected = "a token id: RoBERTa's positions begin after it";
                return Err(bad("pad_token_id", &Value::Null, expected));
            }
            return Ok(());
        };
        if !(0..self.vocab_size).contains(&pad) {
            let expected = format!("in 0..{}, the vocabulary", self.vocab_size);
            return Err(bad("pad_token_id", &pad.into(), &expected));
        }
        if self.context() < 1 {
            let expected = format!("more than {} (RoBERTa's positions begin there)", pad + 1);
            let found = self.max_position_embeddings.into();
            return Err(bad("max_position_embeddings", &found, &expected));
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<()> {
        let dropouts = [
            ("attention_dropout", self.attention_dropout),
            ("hidden_dropout_prob", self.hidden_dropout),
            ("embedding_dropout", self.embedding_dropout),
            ("mlp_dropout", self.mlp_dropout),
            ("classifier_dropout", self.dropout_of_classifier()),
        ];
        for (key, p) in dropouts {
            // Below 1: dropout divides the kept elements by `1 - p`.
            if !(0.0..1.0).contains(&p) {
                return Err(bad(key, &p.into(), "at least 0 and below 1"));
            }
        }
        for (key, theta) in [
            ("global_rope_theta", self.global_rope_theta),
            ("local_rope_theta", self.local_rope_theta),
        ] {
            if !(theta > 0.0 && theta.is_finite()) {
                return Err(bad(key, &theta.into(), "positive"));
            }
        }
        let cutoff = self.initializer_cutoff_factor;
        // Values beyond the bound are drawn again: below 0.1, of a hundred draws less than eight are kept.
        if cutoff.is_nan() || cutoff < 0.1 {
            return Err(bad(
                "initializer_cutoff_factor",
                &cutoff.into(),
                "at least 0.1",
            ));
        }
        Ok(())
    }
}

/// Returns transformers' names of `count` classes without names.
pub(super) fn default_labels(count: i64) -> Vec<String> {
    (0..count).map(|index| format!("LABEL_{index}")).collect()
}

impl TryFrom<Value> for EncoderConfig {
    type Error = Error;

    fn try_from(value: Value) -> Result<EncoderConfig> {
        EncoderConfig::from_fields(fields::object(value)?)
    }
}

impl From<EncoderConfig> for Value {
    fn from(config: EncoderConfig) -> Value {
        Value::Object(config.to_json())
    }
}
