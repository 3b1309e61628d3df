//! `/v1/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request as HttpRequest, State};
use axum::response::Response;
use overdrive_generation::{Completion, PromptLogprobs, Request, TextStream, TokenLogprobs};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::{Answer, stream, whole};
use crate::api_error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::job::{Job, finish_reason};
use crate::logprobs::completion_object;
use crate::sampling::{MAX_LOGPROBS, Sampling};
use crate::shared::{Shared, blocking, now};
use crate::tools::response_format;

/// OpenAI's and vLLM's default of `max_tokens`.
const DEFAULT_TOKENS: usize = 16;

/// One prompt or several, as text or as token ids.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum Prompts {
    Text(String),
    Texts(Vec<String>),
    Ids(Vec<i64>),
    ManyIds(Vec<Vec<i64>>),
}

/// A prompt, with its text if it was given as one.
pub(crate) type Prompt = (Option<String>, Vec<i64>);

impl Prompts {
    /// Takes the prompts from a field.
    pub(crate) fn take(fields: &mut Fields, name: &str) -> ApiResult<Prompts> {
        let value: Value = fields.require(name)?;
        serde_json::from_value(value).map_err(|_| {
            let expected =
                "a string, a list of strings, a list of token ids, or a list of such lists";
            ApiError::field(name, format!("`{name}` must be {expected}"))
        })
    }

    /// Puts `before` in front of each text; lists of token ids stay as they are.
    pub(crate) fn after(self, before: &str) -> Prompts {
        let join = |text: String| format!("{before}{text}");
        match self {
            Prompts::Text(text) => Prompts::Text(join(text)),
            Prompts::Texts(texts) => Prompts::Texts(texts.into_iter().map(join).collect()),
            ids => ids,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Prompts::Text(_) | Prompts::Ids(_) => 1,
            Prompts::Texts(texts) => texts.len(),
            Prompts::ManyIds(lists) => lists.len(),
        }
    }

    /// Encodes the prompts, with the special tokens that the tokenizer adds.
    pub(crate) fn encode(self, shared: &Shared, special: bool) -> ApiResult<Vec<Prompt>> {
        let text = |text: String| -> ApiResult<Prompt> {
            let encoding = shared.model.tokenizer.encode(text.as_str(), special);
            let encoding = encoding.map_err(overdrive_generation::Error::Tokenizer)?;
            let ids = encoding.get_ids().iter().map(|&id| i64::from(id)).collect();
            Ok((Some(text), ids))
        };
        match self {
            Prompts::Text(one) => Ok(vec![text(one)?]),
            Prompts::Texts(many) => many.into_iter().map(text).collect(),
            Prompts::Ids(ids) => Ok(vec![(None, ids)]),
            Prompts::ManyIds(lists) => Ok(lists.into_iter().map(|ids| (None, ids)).collect()),
        }
    }
}

pub(crate) async fn completions(
    State(shared): State<Arc<Shared>>,
    request: HttpRequest,
) -> ApiResult<Response> {
    let started = Instant::now();
    let mut fields = Fields::read(request, &shared.options).await?;
    let model = shared.choose_model(fields.take("model")?)?;
    shared.engine()?;
    fields.refuse(&["suffix"])?;
    let mut sampling = Sampling::take(&mut fields, &shared)?;
    sampling.max_tokens = fields.take("max_tokens")?;
    let n = sampling.config.num_return_sequences;
    if let Some(best_of) = fields.take::<usize>("best_of")?
        && best_of != n
    {
        return Err(ApiError::range("best_of", best_of, "equal to n"));
    }
    let echo = fields.take("echo")?.unwrap_or(false);
    let logprobs: Option<usize> = fields.take("logprobs")?;
    if let Some(count) = logprobs.filter(|count| *count > MAX_LOGPROBS) {
        let expected = format!("from 0 to {MAX_LOGPROBS}");
        return Err(ApiError::range("logprobs", count, &expected));
    }
    sampling.config.logprobs = logprobs;
    sampling.may_be_empty = echo;
    let special = fields.take("add_special_tokens")?.unwrap_or(true);
    let schema = response_format(&mut fields)?;
    let prompts = Prompts::take(&mut fields, "prompt")?;
    if prompts.len() == 0 {
        let expected = "a list with at least one prompt";
        return Err(ApiError::range("prompt", "[]", expected));
    }
    let seats = shared.seats("prompt", prompts.len().saturating_mul(n))?;

    let (include_usage, is_stream) = (sampling.include_usage, sampling.stream);
    let preparing = Arc::clone(&shared);
    let adapter = model.adapter;
    let (seats, (requests, echoes)) = blocking(seats, move || {
        let shared = &preparing;
        let constraint = schema.map(|schema| schema.constraint(shared)).transpose()?;
        let mut requests = Vec::new();
        let mut echoes = Vec::new();
        for (text, ids) in prompts.encode(shared, special)? {
            let config = sampling.for_prompt("prompt", ids.len(), Some(DEFAULT_TOKENS), shared)?;
            echoes.push(match echo {
                true => Some(Echo::new(shared, text, &ids)?),
                false => None,
            });
            let mut request = Request::new(ids, config);
            request.adapter = adapter.clone();
            request.prompt_logprobs = logprobs.filter(|_| echo);
            if let Some(constraint) = &constraint {
                request = request.with_constraint(constraint.fork());
            }
            requests.push(request);
        }
        Ok((requests, echoes))
    })
    .await?;
    let answer = Text {
        id: shared.id("cmpl"),
        created: now(),
        offsets: vec![0; echoes.len() * n],
        has_logprobs: logprobs.is_some(),
        pending: vec![Vec::new(); echoes.len() * n],
        echoes,
        n,
        model: model.name,
        shared: Arc::clone(&shared),
    };
    let job = Job::submit(&shared, requests, seats, started)?;
    match is_stream {
        true => stream(job, answer, include_usage).await,
        false => whole(job, answer).await,
    }
}

/// A prompt that its answers begin with.
struct Echo {
    text: String,
    ids: Vec<i64>,
}

impl Echo {
    fn new(shared: &Shared, text: Option<String>, ids: &[i64]) -> ApiResult<Echo> {
        let text = match text {
            Some(text) => text,
            None => {
                // Ids outside this range are refused when the request is submitted.
                let known = ids.iter().filter_map(|&id| u32::try_from(id).ok());
                let known: Vec<u32> = known.collect();
                TextStream::decode(&shared.model.tokenizer, &known, true)?
            }
        };
        Ok(Echo {
            text,
            ids: ids.to_vec(),
        })
    }

    /// Returns the tokens with their log-probabilities.
    fn tokens<'a>(
        &'a self,
        logprobs: &'a PromptLogprobs,
    ) -> impl Iterator<Item = (i64, Option<&'a TokenLogprobs>)> {
        let logprobs = logprobs.iter().map(Option::as_ref);
        self.ids.iter().copied().zip(logprobs)
    }
}

/// The answers of `/v1/completions`.
struct Text {
    id: String,
    created: u64,
    model: Arc<str>,
    n: usize,
    /// The echo of each prompt, if it is asked for.
    echoes: Vec<Option<Echo>>,
    has_logprobs: bool,
    /// The characters of each choice's tokens so far.
    offsets: Vec<usize>,
    /// The tokens whose text is still held back, for each choice of a stream.
    pending: Vec<Vec<(i64, TokenLogprobs)>>,
    shared: Arc<Shared>,
}

impl Text {
    /// Returns the log-probabilities of the tokens since the last chunk.
    fn take_logprobs(&mut self, choice: usize) -> Value {
        if !self.has_logprobs {
            return Value::Null;
        }
        let tokens = std::mem::take(&mut self.pending[choice]);
        let tokens = tokens.iter().map(|(id, one)| (*id, Some(one)));
        completion_object(&self.shared, tokens, &mut self.offsets[choice])
    }
}

impl Answer for Text {
    fn head(&self, _is_chunk: bool) -> Value {
        json!({"id": self.id, "object": "text_completion", "created": self.created, "model": *self.model})
    }

    fn choice(&self, choice: usize, completion: Completion) -> Value {
        let echo = self.echoes[choice / self.n].as_ref();
        let mut text = echo.map(|echo| echo.text.clone()).unwrap_or_default();
        text.push_str(&completion.text.unwrap_or_default());
        let logprobs = completion.logprobs.as_ref().map(|all| {
            let read = echo.zip(completion.prompt_logprobs.as_ref());
            let read = read.into_iter().flat_map(|(echo, all)| echo.tokens(all));
            let new = completion.tokens.iter().copied().zip(all.iter().map(Some));
            completion_object(&self.shared, read.chain(new), &mut 0)
        });
        let reason = finish_reason(completion.finish_reason);
        json!({"text": text, "index": choice, "logprobs": logprobs, "finish_reason": reason})
    }

    fn begin(&mut self, choices: usize) -> Vec<Value> {
        let echo = |choice: usize| {
            let text = &self.echoes[choice / self.n].as_ref()?.text;
            Some(json!({"text": text, "index": choice, "logprobs": null, "finish_reason": null}))
        };
        match self.has_logprobs {
            // The text of a prompt comes with its log-probabilities.
            true => Vec::new(),
            false => (0..choices).filter_map(echo).collect(),
        }
    }

    fn prompt(&mut self, prompt: usize, logprobs: &PromptLogprobs) -> Vec<Value> {
        let Some(echo) = &self.echoes[prompt] else {
            return Vec::new();
        };
        let own = prompt * self.n..(prompt + 1) * self.n;
        let chunk = |choice: usize| {
            let offset = &mut self.offsets[choice];
            let logprobs = completion_object(&self.shared, echo.tokens(logprobs), offset);
            json!({"text": echo.text, "index": choice, "logprobs": logprobs, "finish_reason": null})
        };
        own.map(chunk).collect()
    }

    fn token(
        &mut self,
        choice: usize,
        id: i64,
        text: &str,
        logprobs: Option<TokenLogprobs>,
    ) -> Option<Value> {
        self.pending[choice].extend(logprobs.map(|one| (id, one)));
        if text.is_empty() {
            return None;
        }
        let logprobs = self.take_logprobs(choice);
        Some(json!({"text": text, "index": choice, "logprobs": logprobs, "finish_reason": null}))
    }

    fn end(&mut self, choice: usize, completion: Completion) -> Vec<Value> {
        let logprobs = match self.pending[choice].is_empty() {
            true => Value::Null,
            false => self.take_logprobs(choice),
        };
        let reason = finish_reason(completion.finish_reason);
        vec![json!({"text": "", "index": choice, "logprobs": logprobs, "finish_reason": reason})]
    }
}
