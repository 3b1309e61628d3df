use overdrive_core::Error;
use overdrive_fused::Activation;
use overdrive_nn::{Embedding, Linear, LinearWeight};
use tch::{Kind, Reduction, Tensor};

use super::config::{EncoderConfig, EncoderFamily, ProblemType};
use super::input::Arrangement;
use super::model::Encoder;
use super::parameters::head_names;
use super::{BaseHead, ClassifierHead, EncoderInput, HeadKind, MaskedLmHead};
use crate::Result;
use crate::activation_names::{DenseActivation, activation_named};
use crate::gpt2::dropped;
use crate::layer_norm::LayerNorm;
use crate::loss::{IGNORE_INDEX, LabelShift, LossOutput, causal_lm_loss};
use crate::parameters::ParameterMap;
use crate::pooling::{Pooling, PoolingMode, pooled};

/// An encoder that predicts masked tokens: `BertForMaskedLM`, `RobertaForMaskedLM`, `ModernBertForMaskedLM`.
///
/// ```
/// use overdrive_transformer::{EncoderConfig, EncoderFamily, EncoderInput, InitOptions, MaskedLm};
/// use tch::Tensor;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut config = EncoderConfig::new(EncoderFamily::Bert);
/// (config.vocab_size, config.hidden_size, config.intermediate_size) = (100, 32, 64);
/// (config.num_hidden_layers, config.num_attention_heads) = (2, 4);
/// let model = MaskedLm::new(&config, &InitOptions { seed: 1, ..Default::default() })?;
/// model.set_requires_grad(true)?;
///
/// let ids = Tensor::from_slice(&[2_i64, 17, 4, 9, 3]).view([1, 5]); // 4 is [MASK]
/// let labels = Tensor::from_slice(&[-100_i64, -100, 23, -100, -100]).view([1, 5]);
/// let loss = model.loss(EncoderInput::new(&ids), &labels)?;
/// assert_eq!(loss.tokens()?, 1);
/// loss.mean()?.f_backward()?;
/// # Ok(())
/// # }
/// ```
pub type MaskedLm = Encoder<MaskedLmHead>;

/// An encoder that classifies sequences: `BertForSequenceClassification`, `RobertaForSequenceClassification`,
/// `ModernBertForSequenceClassification`.
pub type SequenceClassifier = Encoder<ClassifierHead>;

/// An encoder without a head, except for the pooler of BERT and RoBERTa, for embeddings: `BertModel`, `RobertaModel`,
/// `ModernBertModel`.
pub type EncoderModel = Encoder<BaseHead>;

/// The layers after the backbone: `output(norm(activation(dense(x))))`; each head has some of them.
#[derive(Debug)]
pub(super) struct Head {
    dense: Option<Linear>,
    activation: DenseActivation,
    norm: Option<LayerNorm>,
    output: Option<Linear>,
}

impl Head {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        config: &EncoderConfig,
        kind: HeadKind,
        embedding: &Embedding,
    ) -> Result<Head> {
        let names = head_names(config.family, kind);
        let dense = names
            .dense
            .map(|name| parameters.take_linear(name, config.classifier_bias));
        let eps = config.layer_norm_eps;
        let norm = names
            .norm
            .map(|name| LayerNorm::take(parameters, name, config.norm_bias, eps));
        let activation = match (config.family, kind) {
            (EncoderFamily::ModernBert, _) => {
                let name = &config.classifier_activation;
                DenseActivation::Named(activation_named("classifier_activation", name)?)
            }
            (EncoderFamily::Bert, HeadKind::MaskedLm) => {
                DenseActivation::Named(activation_named("hidden_act", &config.hidden_act)?)
            }
            // RoBERTa's is fixed.
            (_, HeadKind::MaskedLm) => DenseActivation::Named(Activation::Gelu),
            _ => DenseActivation::Tanh,
        };
        let tied = kind == HeadKind::MaskedLm && config.tie_word_embeddings;
        let output = match names.output {
            None => None,
            Some(name) if tied => {
                let weight = match parameters.take_quantized(name) {
                    // A quantized output layer has a weight of its own even where the dense one is tied.
                    Some(quantized) => LinearWeight::Quantized(quantized),
                    None => embedding.as_linear_weight(),
                };
                let own = format!("{name}.bias");
                let bias = config
                    .decoder_bias
                    .then(|| parameters.take(names.output_bias.unwrap_or(&own)));
                Some(Linear::new(weight, bias.transpose()?)?.with_name(name))
            }
            Some(name) => {
                let bias = kind == HeadKind::Classifier || config.decoder_bias;
                Some(parameters.take_linear(name, bias)?)
            }
        };
        Ok(Head {
            dense: dense.transpose()?,
            activation,
            norm: norm.transpose()?,
            output: output.map(Linear::without_fp8),
        })
    }

    /// Computes `norm(activation(dense(x)))`.
    fn transform(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let Some(dense) = &self.dense else {
            return Ok(x.shallow_clone());
        };
        let x = dense.forward_with(x, fused)?;
        let x = self.activation.apply(&x)?;
        match &self.norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }

    fn output(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        match &self.output {
            Some(output) => Ok(output.forward_with(x, fused)?),
            None => Ok(x.shallow_clone()),
        }
    }

    pub(super) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.dense.iter().chain(&self.output)
    }

    pub(super) fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.dense.iter_mut().chain(&mut self.output)
    }

    pub(super) fn norm_mut(&mut self) -> Option<&mut LayerNorm> {
        self.norm.as_mut()
    }
}

impl MaskedLm {
    /// Computes the logits `(B, T, V)`; those of padding are zeros.
    ///
    /// # Errors
    /// As [`Encoder::hidden_states`].
    pub fn forward(&self, input: EncoderInput<'_>) -> Result<Tensor> {
        let (rows, hidden) = self.computed(input)?;
        rows.padded(self.logits(&hidden)?)
    }

    /// Computes the summed cross-entropy of the positions whose label in `labels (B, T)`, i64, is not
    /// [`IGNORE_INDEX`](crate::IGNORE_INDEX), and their number. [`LossOutput::mean`] is transformers' loss. Logits
    /// are computed for these positions only, and labels of padding are not counted.
    ///
    /// # Errors
    /// As [`Encoder::hidden_states`]; [`Error::Common`](crate::Error::Common) for labels of another shape or dtype.
    pub fn loss(&self, input: EncoderInput<'_>, labels: &Tensor) -> Result<LossOutput> {
        if labels.size() != input.input_ids.size() {
            let expected = format!("{:?}, as input_ids", input.input_ids.size());
            return Err(Error::shape("labels", labels.size(), expected).into());
        }
        if labels.kind() != Kind::Int64 {
            return Err(Error::dtype("labels", labels.kind(), "Int64").into());
        }
        let (rows, hidden) = self.computed(input)?;
        let mut labels = labels.f_reshape([-1])?;
        if let Arrangement::Unpadded { indices, .. } = &rows.arrangement {
            labels = labels.f_index_select(0, indices)?;
        }
        let counted = labels.f_ne(IGNORE_INDEX)?.f_nonzero()?.f_squeeze_dim(1)?;
        if counted.size()[0] == 0 {
            // A sum that depends on the model, so that a backward pass works and gives zeros.
            let sum = hidden.f_sum(Kind::Float)?.f_mul_scalar(0.0)?;
            let count = Tensor::f_zeros([], (Kind::Int64, labels.device()))?;
            return Ok(LossOutput {
                sum,
                count,
                aux_loss: None,
            });
        }
        let hidden = hidden.f_flatten(0, 1)?.f_index_select(0, &counted)?;
        let logits = self.logits(&hidden)?.f_unsqueeze(0)?;
        let labels = labels.f_index_select(0, &counted)?.f_unsqueeze(0)?;
        causal_lm_loss(&logits, &labels, LabelShift::Shifted)
    }

    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let fused = self.execution.fused_kernels;
        let x = self.head.transform(hidden, fused)?;
        self.head.output(&x, fused)
    }
}

impl SequenceClassifier {
    /// Computes the logits of each sequence, `(B, num_labels)`; of packed sequences `(N, num_labels)`.
    ///
    /// The state of the first token is the first one that is not padding.
    ///
    /// # Errors
    /// As [`Encoder::hidden_states`].
    pub fn forward(&self, input: EncoderInput<'_>) -> Result<Tensor> {
        let (rows, hidden) = self.computed(input)?;
        let config = self.config();
        let mode = match config.is_modern() {
            true => config.classifier_pooling,
            false => PoolingMode::Cls,
        };
        let (fused, p) = (self.execution.fused_kernels, self.classifier_dropout());
        let mut x = pooled(&hidden, rows.sequences(), mode)?;
        if config.family.is_roberta() {
            x = dropped(x, p)?;
        }
        let x = dropped(self.head.transform(&x, fused)?, p)?;
        self.head.output(&x, fused)
    }

    /// Computes the summed loss of the sequences and the number of its terms; [`LossOutput::mean`] is
    /// transformers' loss.
    ///
    /// The configuration's [`ProblemType`] selects the loss. If it has none, one class means regression, i64 labels
    /// `(B,)` mean single-label and float labels `(B, num_labels)` multi-label classification. Labels of
    /// [`IGNORE_INDEX`](crate::IGNORE_INDEX) are not counted.
    ///
    /// # Errors
    /// As [`Encoder::hidden_states`]; [`Error::Common`](crate::Error::Common) for labels of another shape or dtype.
    pub fn loss(&self, input: EncoderInput<'_>, labels: &Tensor) -> Result<LossOutput> {
        self.loss_of_logits(&self.forward(input)?, labels)
    }

    /// Computes the loss of logits `(B, num_labels)`, as [`SequenceClassifier::loss`] does.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for labels of another shape or dtype, and libtorch's error for a
    /// class outside of `0..num_labels`.
    pub fn loss_of_logits(&self, logits: &Tensor, labels: &Tensor) -> Result<LossOutput> {
        let logits = match logits.kind() {
            Kind::Half | Kind::BFloat16 => logits.f_to_kind(Kind::Float)?,
            _ => logits.shallow_clone(),
        };
        let (sequences, classes) = (logits.size()[0], self.config().num_labels());
        let integers = labels.kind() == Kind::Int64;
        let problem = self
            .config()
            .problem_type
            .unwrap_or(match (classes, integers) {
                (1, _) => ProblemType::Regression,
                (_, true) => ProblemType::SingleLabel,
                (_, false) => ProblemType::MultiLabel,
            });
        let single = problem == ProblemType::SingleLabel;
        let of_each = labels.size() == [sequences] && (single || classes == 1);
        if !of_each && (single || labels.size() != [sequences, classes]) {
            let expected = match single {
                true => format!("({sequences},), a class for each sequence"),
                false => format!("({sequences}, {classes}), a value for each class"),
            };
            return Err(Error::shape("labels", labels.size(), expected).into());
        }
        if single != integers {
            let expected = match single {
                true => "Int64, the classes",
                false => "a floating-point dtype",
            };
            // Integers as the values of a regression are what a file of labels gives.
            if single || problem == ProblemType::MultiLabel {
                return Err(Error::dtype("labels", labels.kind(), expected).into());
            }
        }
        if single {
            let logits = logits.f_unsqueeze(0)?;
            return causal_lm_loss(&logits, &labels.f_unsqueeze(0)?, LabelShift::Shifted);
        }
        let labels = labels.f_to_kind(logits.kind())?.f_reshape(logits.size())?;
        let sum = match problem {
            ProblemType::MultiLabel => logits.f_binary_cross_entropy_with_logits(
                &labels,
                None::<&Tensor>,
                None::<&Tensor>,
                Reduction::Sum,
            )?,
            _ => logits.f_mse_loss(&labels, Reduction::Sum)?,
        };
        let count = Tensor::f_full([], labels.numel() as i64, (Kind::Int64, labels.device()))?;
        Ok(LossOutput {
            sum,
            count,
            aux_loss: None,
        })
    }
}

impl EncoderModel {
    /// Computes transformers' `pooler_output (B, C)`: `tanh(dense(x))` of the first token. Returns `None` for
    /// ModernBERT, which has no pooler.
    ///
    /// # Errors
    /// As [`Encoder::hidden_states`].
    pub fn pooler_output(&self, input: EncoderInput<'_>) -> Result<Option<Tensor>> {
        if self.config().is_modern() {
            return Ok(None);
        }
        let (rows, hidden) = self.computed(input)?;
        let first = pooled(&hidden, rows.sequences(), PoolingMode::Cls)?;
        Ok(Some(
            self.head.transform(&first, self.execution.fused_kernels)?,
        ))
    }

    /// Computes an embedding of each sequence, `(B, C)`; of packed sequences `(N, C)`.
    ///
    /// ```
    /// use overdrive_transformer::{
    ///     EncoderConfig, EncoderFamily, EncoderInput, EncoderModel, InitOptions, Pooling,
    /// };
    /// use tch::Tensor;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut config = EncoderConfig::new(EncoderFamily::Roberta);
    /// (config.vocab_size, config.hidden_size, config.intermediate_size) = (100, 32, 64);
    /// (config.num_hidden_layers, config.num_attention_heads) = (2, 4);
    /// let model = EncoderModel::new(&config, &InitOptions::default())?;
    /// let ids = Tensor::from_slice(&[0_i64, 5, 6, 2, 0, 7, 2, 1]).view([2, 4]);
    /// let mask = ids.ne(1);
    /// let input = EncoderInput::new(&ids).with_attention_mask(&mask);
    /// let embeddings = model.embed(input, &Pooling::default().with_normalize(true))?;
    /// assert_eq!(embeddings.size(), [2, 32]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Encoder::hidden_states`].
    pub fn embed(&self, input: EncoderInput<'_>, pooling: &Pooling) -> Result<Tensor> {
        let (rows, hidden) = self.computed(input)?;
        let vectors = pooled(&hidden, rows.sequences(), pooling.mode)?;
        match pooling.normalize {
            true => pooling.normalized(&vectors),
            false => Ok(vectors),
        }
    }
}
