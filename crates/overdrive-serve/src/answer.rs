//! The answer to a request, whole or as server-sent events.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream::unfold;
use overdrive_generation::{Completion, PromptLogprobs, TokenLogprobs};
use serde_json::{Value, json};

use crate::api_error::{ApiError, ApiResult, json_response};
use crate::job::{Job, Step};

/// The type of an answer in server-sent events.
pub(crate) const EVENT_STREAM: &str = "text/event-stream; charset=utf-8";

/// The form of the answers of one route.
pub(crate) trait Answer: Send + 'static {
    /// Returns the first fields of an answer and of each of its chunks: id, object, time and model.
    fn head(&self, is_chunk: bool) -> Value;

    /// Returns the choice of a whole answer.
    fn choice(&self, choice: usize, completion: Completion) -> Value;

    /// Returns the choices of the chunks before the first token.
    fn begin(&mut self, choices: usize) -> Vec<Value>;

    /// Returns the choices of the chunks of a prompt that has been read for its log-probabilities.
    fn prompt(&mut self, _prompt: usize, _logprobs: &PromptLogprobs) -> Vec<Value> {
        Vec::new()
    }

    /// Returns the choice of the chunk of a token; `None` if no text is ready yet.
    fn token(
        &mut self,
        choice: usize,
        id: i64,
        text: &str,
        logprobs: Option<TokenLogprobs>,
    ) -> Option<Value>;

    /// Returns the choices of the last chunks of a choice.
    fn end(&mut self, choice: usize, completion: Completion) -> Vec<Value>;
}

/// Waits for all choices and returns them in one answer.
pub(crate) async fn whole(mut job: Job, answer: impl Answer) -> ApiResult<Response> {
    let mut choices = vec![Value::Null; job.choices()];
    while let Some(step) = job.next().await {
        if let Step::Finished { choice, completion } = step?
            && let Some(place) = choices.get_mut(choice)
        {
            *place = answer.choice(choice, completion);
        }
    }
    let mut value = answer.head(false);
    value["choices"] = choices.into();
    value["usage"] = job.usage();
    Ok(json_response(StatusCode::OK, &value))
}

/// Returns the answer as server-sent events, which begin with the first token.
pub(crate) async fn stream(
    job: Job,
    answer: impl Answer,
    include_usage: bool,
) -> ApiResult<Response> {
    let events = Chunks {
        head: answer.head(true),
        answer,
        include_usage,
        text: String::new(),
    };
    stream_events(job, events).await
}

/// The events of a stream.
pub(crate) trait Events: Send + 'static {
    /// Writes the events before the first step.
    fn begin(&mut self, job: &Job);

    /// Writes the events of a step.
    fn step(&mut self, step: Step);

    /// Writes the last events.
    fn finish(&mut self, job: &Job);

    /// Writes the error as the last event, because the status has already been sent.
    fn fail(&mut self, error: &ApiError);

    /// Returns the text that has been written since the last call.
    fn take_text(&mut self) -> String;
}

/// Sends server-sent events, which begin with the first token.
pub(crate) async fn stream_events(mut job: Job, mut events: impl Events) -> ApiResult<Response> {
    job.begin().await?;
    events.begin(&job);
    let state = Some((job, events));
    // The body owns the job: when the client disconnects, both are dropped.
    let body = unfold(state, |state| async move {
        let (mut job, mut events) = state?;
        loop {
            let goes_on = match job.next().await {
                Some(Ok(step)) => {
                    events.step(step);
                    true
                }
                Some(Err(error)) => {
                    events.fail(&error);
                    false
                }
                None => {
                    events.finish(&job);
                    false
                }
            };
            let text = events.take_text();
            if !goes_on || !text.is_empty() {
                return Some((
                    Ok::<_, std::convert::Infallible>(text),
                    goes_on.then_some((job, events)),
                ));
            }
        }
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(EVENT_STREAM)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    Ok((headers, Body::from_stream(body)).into_response())
}

/// The events of a stream of chunks, each of which has the next tokens of a choice.
struct Chunks<A> {
    answer: A,
    head: Value,
    include_usage: bool,
    /// The events that have not been sent.
    text: String,
}

impl<A: Answer> Events for Chunks<A> {
    fn begin(&mut self, job: &Job) {
        let choices = self.answer.begin(job.choices());
        self.push_all(choices);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Prompt { prompt, logprobs } => {
                let chunks = self.answer.prompt(prompt, &logprobs);
                self.push_all(chunks);
            }
            Step::Token {
                choice,
                id,
                text,
                logprobs,
            } => {
                let chunk = self.answer.token(choice, id, &text, logprobs);
                self.push_all(chunk.into_iter().collect());
            }
            Step::Finished { choice, completion } => {
                let chunks = self.answer.end(choice, completion);
                self.push_all(chunks);
            }
        }
    }

    fn finish(&mut self, job: &Job) {
        if self.include_usage {
            let mut chunk = self.head.clone();
            chunk["choices"] = json!([]);
            chunk["usage"] = job.usage();
            self.push(&chunk);
        }
        self.text.push_str("data: [DONE]\n\n");
    }

    fn fail(&mut self, error: &ApiError) {
        self.push(&error.body());
        self.text.push_str("data: [DONE]\n\n");
    }

    fn take_text(&mut self) -> String {
        std::mem::take(&mut self.text)
    }
}

impl<A: Answer> Chunks<A> {
    fn push_all(&mut self, choices: Vec<Value>) {
        for choice in choices {
            let mut chunk = self.head.clone();
            chunk["choices"] = json!([choice]);
            if self.include_usage {
                chunk["usage"] = Value::Null;
            }
            self.push(&chunk);
        }
    }

    fn push(&mut self, value: &Value) {
        // JSON has no line break outside a string, and escapes those inside.
        self.text.push_str(&format!("data: {value}\n\n"));
    }
}
