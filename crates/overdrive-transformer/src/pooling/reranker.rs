use std::path::Path;

use serde_json::Value;
use tch::{Device, Tensor};

use super::embedding_model::is_encoder;
use super::modules::{read_config, read_json, steps};
use super::pool::{PoolingMode, ends};
use super::sequence::{Packed, TokenSequence};
use crate::{
    CausalLm, EncoderConfig, Error, ForwardInput, LoadOptions, Logits, Result, SequenceClassifier,
};

/// A model that scores a pair of texts, such as a query and a document.
///
/// It is an encoder that classifies sequences with one class (a cross-encoder), or a causal model that answers a
/// question with one of two tokens (Qwen3-Reranker): the score is then the probability of "yes" among the two.
///
/// ```no_run
/// // A folder of the Hub is needed.
/// use overdrive_transformer::{Reranker, TokenSequence};
/// # fn main() -> Result<(), overdrive_transformer::Error> {
/// let model = Reranker::from_pretrained("ms-marco-MiniLM-L6-v2", &Default::default())?;
/// let pair = TokenSequence::new(vec![101, 7592, 102, 2088, 102]).with_types(vec![0, 0, 0, 1, 1]);
/// let scores = model.scores(&[pair])?;
/// assert_eq!(scores.size(), [1]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Reranker {
    scorer: Scorer,
    /// If `true`, the score is the sigmoid of the logit.
    sigmoid: bool,
}

#[derive(Debug)]
enum Scorer {
    Classifier(Box<SequenceClassifier>),
    Answers {
        model: Box<CausalLm>,
        no: i64,
        yes: i64,
    },
}

impl Reranker {
    /// Reads the folder of a cross-encoder with one class, or of a causal model whose `modules.json` has a `LogitScore`
    /// module with the ids of its two answers. A score is the sigmoid of the logit, unless the folder's settings
    /// (`activation_fn` of sentence-transformers) say that it is the logit itself.
    ///
    /// # Errors
    /// As [`SequenceClassifier::from_pretrained`](crate::Encoder::from_pretrained) and [`CausalLm::from_pretrained`];
    /// [`Error::Unsupported`] for an encoder with several classes or without a trained classifier, for a causal model
    /// without answers, and for another activation.
    pub fn from_pretrained(dir: impl AsRef<Path>, options: &LoadOptions) -> Result<Reranker> {
        let dir = dir.as_ref();
        let steps = steps(dir)?.unwrap_or_default();
        let score = steps.iter().find(|(kind, _)| kind == "LogitScore");
        if let Some((_, folder)) = score {
            let config = read_config(folder)?;
            let id = |key: &str| {
                let value = config.get(key).unwrap_or(&Value::Null);
                value
                    .as_i64()
                    .ok_or_else(|| Error::unsupported(key, value, "the id of a token"))
            };
            let answers = [id("false_token_id")?, id("true_token_id")?];
            let model = CausalLm::from_pretrained(dir, options)?;
            return Reranker::with_answers(model, answers)?.with_activation_of(dir);
        }
        if !is_encoder(dir)? {
            return Err(Error::unsupported(
                "modules.json",
                "without a LogitScore module",
                "a causal model with the ids of its answers; `Reranker::with_answers` takes them",
            ));
        }
        let config = EncoderConfig::from_dir(dir)?;
        if config.num_labels() != 1 {
            return Err(Error::unsupported(
                "num_labels",
                config.num_labels(),
                "1, a score",
            ));
        }
        let model = SequenceClassifier::from_pretrained(dir, options)?;
        if !model.load_report().initialized.is_empty() {
            return Err(Error::unsupported(
                "architectures",
                "of a model without a classifier",
                "a model for sequence classification",
            ));
        }
        let reranker = Reranker {
            scorer: Scorer::Classifier(Box::new(model)),
            sigmoid: true,
        };
        reranker.with_activation_of(dir)
    }

    /// Makes a reranker of a causal model that answers a prompt with one of two tokens, with the ids of `[no, yes]`. The
    /// score is the probability of "yes" among the two.
    ///
    /// # Errors
    /// [`Error::Common`] for an id that the vocabulary does not have.
    pub fn with_answers(model: CausalLm, [no, yes]: [i64; 2]) -> Result<Reranker> {
        let size = model.config().vocab_size();
        for id in [no, yes] {
            if !(0..size).contains(&id) {
                let expected = format!("ids in 0..{size}");
                return Err(overdrive_core::Error::option("answers", id, expected).into());
            }
        }
        Ok(Reranker {
            scorer: Scorer::Answers {
                model: Box::new(model),
                no,
                yes,
            },
            sigmoid: true,
        })
    }

    /// Follows the settings that sentence-transformers writes for a cross-encoder.
    fn with_activation_of(mut self, dir: &Path) -> Result<Reranker> {
        let config = read_config(dir)?;
        let own = read_json(&dir.join("config_sentence_transformers.json"))?;
        let name = config
            .pointer("/sentence_transformers/activation_fn")
            // Versions before 4.
            .or(config.get("sbert_ce_default_activation_function"))
            .or(own.as_ref().and_then(|own| own.get("activation_fn")))
            .and_then(Value::as_str);
        let class = name.map(|name| name.rsplit('.').next().unwrap_or_default());
        self.sigmoid = match class {
            None | Some("Sigmoid") => true,
            Some("Identity") => false,
            Some(_) => {
                return Err(Error::unsupported(
                    "activation_fn",
                    format!("{:?}", name.unwrap_or_default()),
                    "Sigmoid, Identity",
                ));
            }
        };
        Ok(self)
    }

    /// Computes the score of each sequence, `(N,)`, in fp32: a pair of texts for a cross-encoder, or a prompt for a
    /// causal model. The sequences are computed as one row without padding.
    ///
    /// # Errors
    /// [`Error::ContextExceeded`] for a sequence longer than [`max_length`](Reranker::max_length), [`Error::Common`] for a
    /// sequence without tokens, and errors of libtorch.
    pub fn scores(&self, sequences: &[TokenSequence]) -> Result<Tensor> {
        let packed = Packed::new(sequences, self.limit(), self.device())?;
        let logits = match &self.scorer {
            Scorer::Classifier(model) => {
                let logits = model.forward(packed.encoder_input(model))?;
                logits.f_squeeze_dim(1)?.f_to_kind(tch::Kind::Float)?
            }
            Scorer::Answers { model, no, yes } => {
                let last = ends(&packed.lengths, PoolingMode::LastToken, self.device())?;
                let input = ForwardInput::new(&packed.ids)
                    .with_sequences(&packed.lengths)
                    .with_logits(Logits::At(&last));
                let logits = model.forward(input)?.f_squeeze_dim(0)?;
                let logits = logits.f_to_kind(tch::Kind::Float)?;
                // The softmax over two logits is the sigmoid of their difference.
                logits.f_select(1, *yes)?.f_sub(&logits.f_select(1, *no)?)?
            }
        };
        match self.sigmoid {
            true => Ok(logits.f_sigmoid()?),
            false => Ok(logits),
        }
    }

    /// Returns `true` if a sequence is a prompt for a causal model, and `false` if it is a pair of texts.
    pub fn takes_prompts(&self) -> bool {
        matches!(self.scorer, Scorer::Answers { .. })
    }

    /// Returns the largest number of tokens of a sequence.
    pub fn max_length(&self) -> i64 {
        self.limit().0
    }

    /// Returns the largest number of tokens of a sequence and the key of the configuration that sets it.
    fn limit(&self) -> (i64, &'static str) {
        match &self.scorer {
            Scorer::Classifier(model) => (model.config().context(), "max_position_embeddings"),
            Scorer::Answers { model, .. } => model.config().ragged_limit(),
        }
    }

    /// Returns the number of tokens in the vocabulary.
    pub fn vocab_size(&self) -> i64 {
        match &self.scorer {
            Scorer::Classifier(model) => model.config().vocab_size,
            Scorer::Answers { model, .. } => model.config().vocab_size(),
        }
    }

    fn device(&self) -> Device {
        match &self.scorer {
            Scorer::Classifier(model) => model.device(),
            Scorer::Answers { model, .. } => model.device(),
        }
    }
}
