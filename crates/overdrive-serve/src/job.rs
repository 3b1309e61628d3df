//! The generation of the answers to one HTTP request.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use axum::http::StatusCode;
use overdrive_generation::{
    Completion, Error, Event, FinishReason, PromptLogprobs, Request, Ticket, TokenLogprobs,
};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::api_error::{ApiError, ApiResult};
use crate::shared::Shared;

/// The engine requests that answer one HTTP request, one for each prompt. Dropping the job, as happens when the
/// client disconnects, cancels them.
#[derive(Debug)]
pub(crate) struct Job {
    // Declared before the seats, so that it is dropped first: a free seat has no request.
    tickets: Vec<Ticket>,
    // Unbounded, so that the engine never waits for a client: there are at most `max_tokens` events per sequence.
    events: UnboundedReceiver<(usize, Event)>,
    /// The first step, if it was awaited before the answer began.
    first: Option<ApiResult<Step>>,
    /// The number of requests that have not ended.
    open: usize,
    /// The continuations of each prompt.
    n: usize,
    prompt_tokens: usize,
    /// The tokens of prompts that were in the cache, of the requests that have ended.
    cached_tokens: usize,
    completion_tokens: usize,
    started: Instant,
    has_token: bool,
    shared: Arc<Shared>,
    _seats: Arc<Seats>,
}

/// The seats of the sequences that have not ended.
#[derive(Debug)]
struct Seats(Mutex<OwnedSemaphorePermit>);

impl Seats {
    fn give_back(&self, count: usize) {
        let mut seats = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(seats.split(count));
    }
}

/// One event of a job.
#[derive(Debug)]
pub(crate) enum Step {
    /// Prompt `prompt` has been read, and its log-probabilities were asked for.
    Prompt {
        prompt: usize,
        logprobs: PromptLogprobs,
    },
    /// Choice `choice` has one more token.
    Token {
        choice: usize,
        id: i64,
        text: String,
        logprobs: Option<TokenLogprobs>,
    },
    /// Choice `choice` has ended.
    Finished {
        choice: usize,
        completion: Completion,
    },
}

impl Job {
    /// Submits a request for each prompt, all with the same `n`.
    pub(crate) fn submit(
        shared: &Arc<Shared>,
        requests: Vec<Request>,
        seats: OwnedSemaphorePermit,
        started: Instant,
    ) -> ApiResult<Job> {
        let (sender, events) = unbounded_channel();
        let seats = Arc::new(Seats(Mutex::new(seats)));
        let n = requests
            .first()
            .map_or(1, |one| one.config.num_return_sequences);
        let prompt_tokens = requests.iter().map(|one| one.prompt.len()).sum();
        let mut tickets = Vec::with_capacity(requests.len());
        for (prompt, request) in requests.into_iter().enumerate() {
            let sender = sender.clone();
            // Weak: dropping the job, as happens when the client disconnects, frees all of its seats.
            let seats = Arc::downgrade(&seats);
            let mut open = n;
            let ticket = shared.engine()?.submit_with(request, move |event| {
                // A seat is freed when its sequence ends, even if the client reads the answer later.
                let ended = match &event {
                    Event::Finished { .. } => 1,
                    Event::Failed { .. } => open,
                    _ => 0,
                };
                open -= ended;
                if let Some(seats) = seats.upgrade() {
                    seats.give_back(ended);
                }
                // A receiver that is gone has cancelled the request by its ticket.
                let _gone = sender.send((prompt, event));
            })?;
            tickets.push(ticket);
        }
        shared.metrics.prompt(prompt_tokens);
        Ok(Job {
            open: tickets.len(),
            tickets,
            events,
            first: None,
            n,
            prompt_tokens,
            cached_tokens: 0,
            completion_tokens: 0,
            started,
            has_token: false,
            shared: Arc::clone(shared),
            _seats: seats,
        })
    }

    /// Waits for the first step, so that an error before it is returned with its own status and not in a stream.
    pub(crate) async fn begin(&mut self) -> ApiResult<()> {
        match self.next().await {
            Some(Err(error)) => Err(error),
            first => {
                self.first = first;
                Ok(())
            }
        }
    }

    /// Returns the next step; `None` after the last. After an error there is nothing more.
    pub(crate) async fn next(&mut self) -> Option<ApiResult<Step>> {
        if let Some(first) = self.first.take() {
            return Some(first);
        }
        if self.open == 0 {
            return None;
        }
        let Some((prompt, event)) = self.events.recv().await else {
            // The engine has dropped its side before the last event.
            self.open = 0;
            return Some(Err(Error::EngineStopped.into()));
        };
        let step = self.step(prompt, event);
        if step.is_err() {
            self.open = 0;
            self.tickets.clear();
        }
        Some(step)
    }

    fn step(&mut self, prompt: usize, event: Event) -> ApiResult<Step> {
        if event.is_last() {
            self.open -= 1;
            if self.open == 0 {
                self.shared.metrics.whole_request(self.started.elapsed());
            }
        }
        match event {
            Event::Prompt { logprobs, .. } => Ok(Step::Prompt { prompt, logprobs }),
            Event::Token {
                sample,
                id,
                text,
                logprobs,
                ..
            } => {
                self.completion_tokens += 1;
                if !std::mem::replace(&mut self.has_token, true) {
                    self.shared.metrics.first_token(self.started.elapsed());
                }
                Ok(Step::Token {
                    choice: prompt * self.n + sample,
                    id,
                    text,
                    logprobs,
                })
            }
            Event::Finished {
                sample, completion, ..
            } => match completion.finish_reason {
                FinishReason::TimeLimit => Err(self.late()),
                _ => {
                    // The samples of a request share its prompt, which is counted once.
                    if sample == 0 {
                        self.cached_tokens += completion.cached_tokens;
                    }
                    Ok(Step::Finished {
                        choice: prompt * self.n + sample,
                        completion,
                    })
                }
            },
            Event::Failed { error, .. } => Err(error.into()),
            other => Err(ApiError::internal(format!(
                "internal error: unknown event {other:?}"
            ))),
        }
    }

    fn late(&self) -> ApiError {
        let limit = self.shared.options.max_time.as_secs_f64();
        let message = format!(
            "the request was not answered within {limit} seconds (`max_time`); lower max_tokens, or try again later"
        );
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "max_time", message)
    }

    /// Returns the number of choices.
    pub(crate) fn choices(&self) -> usize {
        self.n * self.tickets.len()
    }

    /// Returns the numbers of tokens of the prompts and of the answers so far.
    pub(crate) fn tokens(&self) -> (usize, usize) {
        (self.prompt_tokens, self.completion_tokens)
    }

    /// Returns the number of tokens of the prompts that were in the cache, once their requests have ended.
    pub(crate) fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// Returns the tokens so far, as OpenAI's `usage`.
    pub(crate) fn usage(&self) -> serde_json::Value {
        serde_json::json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        })
    }
}

/// Returns OpenAI's name of a finish reason.
pub(crate) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length | FinishReason::ContextFull => "length",
        _ => "stop",
    }
}
