//! Continuous batching: many requests over one model and one paged cache.

mod assistant;
mod block_allocator;
mod config;
#[expect(
    clippy::module_inception,
    reason = "the file holds the type of that name"
)]
mod engine;
mod flight;
mod handle;
mod model;
mod prompt_logprobs;
mod request;
mod sample;
mod scheduler;
mod statistics;
mod step_images;
mod step_logits;

pub use config::EngineConfig;
pub use engine::Engine;
pub use handle::{EngineHandle, Events, Ticket};
pub use model::{EngineModel, RaggedStep, StepAdapters};
pub(crate) use request::Completions;
pub use request::{Completion, Event, Outcome, PromptLogprobs, Request, RequestId};
pub use statistics::{EngineStatistics, Latency};
