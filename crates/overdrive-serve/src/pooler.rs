//! A model of embeddings or scores, and the thread that owns it.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use overdrive_core::{check_option, text};
use overdrive_generation::Tokenizer;
use overdrive_transformer::{
    CausalLm, EmbeddingModel, LoadOptions, PoolingTask, Reranker, TokenSequence,
};
use serde_json::Value;
use tch::{Device, Kind, Tensor};
use tokio::sync::oneshot;

use crate::api_error::{ApiError, ApiResult};
use crate::text_format::TextFormat;
use crate::{Error, Result};

/// The number of tokens after which no further sequence joins a batch: enough for a GPU, and a bound of its memory.
const BATCH_TOKENS: usize = 8192;

/// A model that maps each sequence to a vector or a score, and that generates no text, with its tokenizer and the form in
/// which it reads texts.
#[derive(Debug)]
pub struct PoolingModel {
    pub(crate) weights: Weights,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) format: TextFormat,
}

#[derive(Debug)]
pub(crate) enum Weights {
    /// Embeddings, for `/v1/embeddings`.
    Embedding(EmbeddingModel),
    /// Scores of pairs, for `/v1/rerank` and `/v1/score`.
    Reranker(Reranker),
}

impl PoolingModel {
    /// Reads the folder or the GGUF file of a model for `task`. `tokenizer` is that of the model; its truncation and padding
    /// are ignored.
    ///
    /// Prompts are read from the folder's `config_sentence_transformers.json`, and the form of pairs of a causal reranker
    /// (`LogitScore`) from its chat template. A causal model without a `LogitScore` module answers with the tokens that
    /// `classifier_from_token` of its `config.json` lists, or else with "no" and "yes", as Qwen3-Reranker does.
    ///
    /// # Errors
    /// As [`EmbeddingModel::from_pretrained`] and [`Reranker::from_pretrained`]; a file of the folder that cannot be read or
    /// parsed; an [option](overdrive_core::Error::InvalidOption) for an answer that is not one token, for a chat template
    /// without the roles `query` and `document`, and for a model whose embeddings are of chats; [`Error::NotReranker`] for a
    /// causal model without the tokens "no" and "yes".
    pub fn from_pretrained(
        dir: impl AsRef<Path>,
        task: PoolingTask,
        tokenizer: Arc<Tokenizer>,
        options: &LoadOptions,
    ) -> Result<PoolingModel> {
        let dir = dir.as_ref();
        let format = TextFormat::of(dir)?;
        let weights = Weights::from_pretrained(dir, task, &tokenizer, options)?;
        Ok(PoolingModel {
            weights,
            tokenizer,
            format,
        })
    }
}

impl Weights {
    fn from_pretrained(
        dir: &Path,
        task: PoolingTask,
        tokenizer: &Tokenizer,
        options: &LoadOptions,
    ) -> Result<Weights> {
        let failed = overdrive_generation::Error::from;
        if task == PoolingTask::Embed {
            let model = EmbeddingModel::from_pretrained(dir, options).map_err(failed)?;
            return Ok(Weights::Embedding(model));
        }
        let own = PoolingTask::of(dir).map_err(failed)? == Some(PoolingTask::Score);
        if own {
            let model = Reranker::from_pretrained(dir, options).map_err(failed)?;
            return Ok(Weights::Reranker(model));
        }
        let path = dir.join("config.json");
        let config = match dir.is_file() {
            // A GGUF file.
            true => Ok(Value::Null),
            false => serde_json::from_str(&text::read(&path)?),
        };
        let config = config.map_err(overdrive_core::Error::parse("JSON", path))?;
        let key = "classifier_from_token";
        let answer = |index: usize, default: &'static str| -> Result<i64> {
            let named = config.get(key).and_then(|names| names.get(index)?.as_str());
            let id = tokenizer.token_to_id(named.unwrap_or(default));
            if let Some(name) = named {
                let expected = "[NO, YES], two tokens of the vocabulary";
                check_option(id.is_some(), key, format!("{name:?}"), expected)?;
            }
            id.map(i64::from).ok_or_else(|| Error::NotReranker {
                path: dir.to_owned(),
                token: default,
            })
        };
        let answers = [answer(0, "no")?, answer(1, "yes")?];
        let model = CausalLm::from_pretrained(dir, options).map_err(failed)?;
        let model = Reranker::with_answers(model, answers).map_err(failed)?;
        Ok(Weights::Reranker(model))
    }
}

/// A result whose error is its message, which several clients get.
type Outcome<T> = std::result::Result<T, String>;

/// One sequence and the receiver of its vector, or of its score as a vector of one element.
struct Job {
    sequence: TokenSequence,
    reply: oneshot::Sender<Outcome<Vec<f32>>>,
}

/// A handle on the thread, which computes the sequences that wait as one batch.
#[derive(Debug)]
pub(crate) struct Pooler {
    // `None` only while the pooler is dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// The form of a reranker's inputs; `None` for embeddings.
    pub(crate) reranker: Option<Inputs>,
    pub(crate) vocab_size: usize,
    pub(crate) max_length: usize,
    /// The number of elements of a vector.
    pub(crate) dimension: usize,
    /// If `true`, embeddings have a norm of 1.
    pub(crate) normalized: bool,
}

/// The form in which a reranker reads a query and a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Inputs {
    /// A pair of texts with the special tokens of the tokenizer.
    Pairs,
    /// The prompt of Qwen3-Reranker.
    Prompts,
}

impl Pooler {
    pub(crate) fn spawn(model: Weights) -> Result<Pooler> {
        let size = |size: i64| usize::try_from(size).unwrap_or(0);
        let (jobs, received) = channel();
        let mut pooler = match &model {
            Weights::Embedding(model) => Pooler {
                jobs: Some(jobs),
                thread: None,
                reranker: None,
                vocab_size: size(model.vocab_size()),
                max_length: size(model.max_length()),
                dimension: size(model.dimension()),
                normalized: model.pooling().normalize,
            },
            Weights::Reranker(model) => Pooler {
                jobs: Some(jobs),
                thread: None,
                reranker: Some(match model.takes_prompts() {
                    true => Inputs::Prompts,
                    false => Inputs::Pairs,
                }),
                vocab_size: size(model.vocab_size()),
                max_length: size(model.max_length()),
                dimension: 1,
                normalized: false,
            },
        };
        let thread = std::thread::Builder::new().name("overdrive-pooler".to_owned());
        let thread = thread.spawn(move || run(&model, &received));
        pooler.thread = Some(thread.map_err(|source| Error::System {
            action: "start the thread of the model",
            source,
        })?);
        Ok(pooler)
    }

    /// Returns `true` while the thread takes jobs.
    pub(crate) fn is_running(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// Computes the vectors of the sequences, in their order. Those that have not begun are dropped with the future, as
    /// happens when the client disconnects.
    pub(crate) async fn compute(&self, sequences: Vec<TokenSequence>) -> ApiResult<Vec<Vec<f32>>> {
        let stopped = || ApiError::from(overdrive_generation::Error::EngineStopped);
        let jobs = self.jobs.as_ref().ok_or_else(stopped)?;
        let mut replies = Vec::with_capacity(sequences.len());
        for sequence in sequences {
            let (reply, receiver) = oneshot::channel();
            let job = Job { sequence, reply };
            jobs.send(job).map_err(|_| stopped())?;
            replies.push(receiver);
        }
        let mut vectors = Vec::with_capacity(replies.len());
        for reply in replies {
            let vector = reply.await.map_err(|_| stopped())?;
            vectors.push(vector.map_err(ApiError::internal)?);
        }
        Ok(vectors)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // Its panic is on stderr.
            let _ended = thread.join();
        }
    }
}

/// Computes jobs until there is no sender.
fn run(model: &Weights, jobs: &Receiver<Job>) {
    let _no_grad = tch::no_grad_guard();
    while let Ok(first) = jobs.recv() {
        let mut tokens = first.sequence.ids.len();
        let mut batch = vec![first];
        while tokens < BATCH_TOKENS
            && let Ok(job) = jobs.try_recv()
        {
            tokens += job.sequence.ids.len();
            batch.push(job);
        }
        // A client that has disconnected costs nothing.
        batch.retain(|job| !job.reply.is_closed());
        if batch.is_empty() {
            continue;
        }
        let (sequences, replies): (Vec<_>, Vec<_>) = batch
            .into_iter()
            .map(|job| (job.sequence, job.reply))
            .unzip();
        let vectors = match values(model, &sequences) {
            Ok(values) => rows(&values, replies.len()),
            Err(error) => vec![Err(error); replies.len()],
        };
        for (reply, vector) in replies.into_iter().zip(vectors) {
            let _gone = reply.send(vector);
        }
    }
}

/// Computes the vectors of the sequences, one after another.
fn values(model: &Weights, sequences: &[TokenSequence]) -> Outcome<Vec<f32>> {
    let rows = match model {
        Weights::Embedding(model) => model.embed(sequences),
        Weights::Reranker(model) => model.scores(sequences),
    };
    let rows = rows.map_err(|error| error.to_string())?;
    let flat = |rows: &Tensor| -> std::result::Result<Vec<f32>, tch::TchError> {
        let rows = rows.f_to_device(Device::Cpu)?.f_to_kind(Kind::Float)?;
        Vec::try_from(&rows.f_flatten(0, -1)?.f_contiguous()?)
    };
    flat(&rows).map_err(|error| error.to_string())
}

/// Divides values into `count` rows; one that is not finite is an error of its sequence alone.
fn rows(values: &[f32], count: usize) -> Vec<Outcome<Vec<f32>>> {
    let width = (values.len() / count).max(1);
    let row = |row: &[f32]| match row.iter().all(|value| value.is_finite()) {
        true => Ok(row.to_vec()),
        false => Err(
            "the model computed numbers that are not finite; is its dtype too narrow?".to_owned(),
        ),
    };
    values.chunks(width).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_that_is_not_finite_is_an_error_of_its_own() {
        let rows = rows(&[1.0, 2.0, f32::NAN, 4.0, 5.0, 6.0], 3);
        assert_eq!(rows[0], Ok(vec![1.0, 2.0]));
        assert!(rows[1].as_ref().unwrap_err().contains("not finite"));
        assert_eq!(rows[2], Ok(vec![5.0, 6.0]));
    }
}
