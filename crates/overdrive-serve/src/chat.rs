//! `/v1/chat/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request as HttpRequest, State};
use axum::response::Response;
use overdrive_generation::{ChatTemplate, ChatTemplateOptions, Completion, Request, TokenLogprobs};
use serde_json::{Value, json};

use crate::answer::{Answer, stream, whole};
use crate::api_error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::job::{Job, finish_reason};
use crate::logprobs::chat_entry;
use crate::messages::{self, Conversation};
use crate::sampling::{MAX_LOGPROBS, Sampling};
use crate::shared::{Shared, blocking, now};
use crate::tools::{Schema, ToolCall, ToolReader, Tools, response_format};

pub(crate) async fn chat_completions(
    State(shared): State<Arc<Shared>>,
    request: HttpRequest,
) -> ApiResult<Response> {
    let started = Instant::now();
    let mut fields = Fields::read(request, &shared.options).await?;
    let model = shared.choose_model(fields.take("model")?)?;
    shared.engine()?;
    let template = template(&shared, "messages")?;
    fields.refuse(&[
        "functions",
        "function_call",
        "audio",
        "chat_template",
        "echo",
    ])?;
    let mut sampling = Sampling::take(&mut fields, &shared)?;
    let newer: Option<usize> = fields.take("max_completion_tokens")?;
    let older: Option<usize> = fields.take("max_tokens")?;
    sampling.max_tokens = newer.or(older);
    let has_logprobs = fields.take("logprobs")?.unwrap_or(false);
    sampling.config.logprobs = match (has_logprobs, fields.take::<usize>("top_logprobs")?) {
        (false, Some(count)) if count > 0 => {
            let message = "`top_logprobs` is set and `logprobs` is not; set both or neither";
            return Err(ApiError::field("top_logprobs", message));
        }
        (false, _) => None,
        (true, Some(count)) if count > MAX_LOGPROBS => {
            let expected = format!("from 0 to {MAX_LOGPROBS}");
            return Err(ApiError::range("top_logprobs", count, &expected));
        }
        (true, count) => Some(count.unwrap_or(0)),
    };
    let conversation = messages::take(&mut fields, "messages", template, &shared)?;
    let format = response_format(&mut fields)?;
    let (tools, forced) = Tools::take(&mut fields, template)?;
    if format.is_some() && forced.is_some() {
        let message =
            "`response_format` cannot be combined with a `tool_choice` that requires a call";
        return Err(ApiError::field("tool_choice", message));
    }
    let options = template_options(&mut fields, tools.as_ref())?;
    let n = sampling.config.num_return_sequences;
    let (include_usage, is_stream) = (sampling.include_usage, sampling.stream);
    let turn = Turn {
        field: "messages",
        conversation,
        options,
        schema: forced.or(format),
        adapter: model.adapter,
    };
    let job = turn.submit(&shared, sampling, started).await?;
    let choice = || Choice {
        reader: tools.clone().map(ToolReader::new),
        pending: Vec::new(),
    };
    let answer = Chat {
        id: shared.id("chatcmpl"),
        created: now(),
        model: model.name,
        has_logprobs,
        choices: (0..n).map(|_| choice()).collect(),
        tools: tools.clone(),
        shared: Arc::clone(&shared),
    };
    match is_stream {
        true => stream(job, answer, include_usage).await,
        false => whole(job, answer).await,
    }
}

/// Returns the model's chat template, which the request needs for its field `param`.
pub(crate) fn template<'a>(shared: &'a Shared, param: &str) -> ApiResult<&'a ChatTemplate> {
    shared.model.template.as_ref().ok_or_else(|| {
        let message =
            "this model has no chat template; it may be a base model: use /v1/completions";
        ApiError::field(param, message)
    })
}

/// A conversation that the model continues with its next message.
pub(crate) struct Turn {
    /// The field that the messages come from.
    pub(crate) field: &'static str,
    pub(crate) conversation: Conversation,
    pub(crate) options: ChatTemplateOptions,
    /// The schema that the message must fit.
    pub(crate) schema: Option<Schema>,
    pub(crate) adapter: Option<Arc<str>>,
}

impl Turn {
    pub(crate) async fn submit(
        self,
        shared: &Arc<Shared>,
        sampling: Sampling,
        started: Instant,
    ) -> ApiResult<Job> {
        let seats = shared.seats("n", sampling.config.num_return_sequences)?;
        let preparing = Arc::clone(shared);
        let (seats, request) = blocking(seats, move || {
            let shared = &*preparing;
            let template = template(shared, self.field)?;
            let Conversation { messages, images } = self.conversation;
            let prompt = template.encode(&shared.model.tokenizer, &messages, &self.options);
            let prompt = prompt.map_err(|error| match ApiError::from(error) {
                error if error.names("messages") => error.with_param(self.field),
                error => error,
            })?;
            let prompt = shared.expand_images(self.field, prompt, &images)?;
            let default = shared.model.config.max_new_tokens;
            let config = sampling.for_prompt(self.field, prompt.len(), default, shared)?;
            let images = shared.decode_images(self.field, &images)?;
            let mut request = Request::new(prompt, config).with_images(images);
            request.adapter = self.adapter;
            Ok(match self.schema {
                Some(schema) => request.with_constraint(schema.constraint(shared)?),
                None => request,
            })
        })
        .await?;
        Job::submit(shared, vec![request], seats, started)
    }
}

/// Takes the options of the template, under vLLM's names.
pub(crate) fn template_options(
    fields: &mut Fields,
    tools: Option<&Tools>,
) -> ApiResult<ChatTemplateOptions> {
    let documents = fields.take("documents")?;
    let variables = fields.take("chat_template_kwargs")?.unwrap_or_default();
    let is_open = fields.take("continue_final_message")?.unwrap_or(false);
    let prompt: Option<bool> = fields.take("add_generation_prompt")?;
    if is_open && prompt == Some(true) {
        let message =
            "`continue_final_message` and `add_generation_prompt` are both true; set only one";
        return Err(ApiError::field("continue_final_message", message));
    }
    Ok(ChatTemplateOptions {
        add_generation_prompt: prompt.unwrap_or(!is_open),
        continue_final_message: is_open,
        tools: tools.map(|tools| tools.list.clone()),
        documents,
        variables,
        template: None,
    })
}

/// The answers of `/v1/chat/completions`.
struct Chat {
    id: String,
    created: u64,
    model: Arc<str>,
    has_logprobs: bool,
    tools: Option<Tools>,
    choices: Vec<Choice>,
    shared: Arc<Shared>,
}

/// A choice of a stream.
struct Choice {
    reader: Option<ToolReader>,
    /// The log-probabilities of the tokens whose text is still held back.
    pending: Vec<Value>,
}

impl Chat {
    fn calls(&self, calls: Vec<ToolCall>) -> Vec<Value> {
        let call = |call: ToolCall| {
            let function = json!({"name": call.name, "arguments": call.arguments});
            json!({"id": self.shared.call_id(), "type": "function", "function": function})
        };
        calls.into_iter().map(call).collect()
    }

    fn chunk(
        &self,
        choice: usize,
        delta: Value,
        logprobs: Vec<Value>,
        reason: Option<&str>,
    ) -> Value {
        let logprobs = match self.has_logprobs && !logprobs.is_empty() {
            true => json!({"content": logprobs, "refusal": null}),
            false => Value::Null,
        };
        json!({"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": reason})
    }
}

impl Answer for Chat {
    fn head(&self, is_chunk: bool) -> Value {
        let object = match is_chunk {
            true => "chat.completion.chunk",
            false => "chat.completion",
        };
        json!({"id": self.id, "object": object, "created": self.created, "model": *self.model})
    }

    fn choice(&self, choice: usize, completion: Completion) -> Value {
        let text = completion.text.unwrap_or_default();
        let (text, calls) = match &self.tools {
            None => (text, Vec::new()),
            Some(tools) => {
                let mut reader = ToolReader::new(tools.clone());
                let shown = reader.push(&text);
                let (rest, calls) = reader.finish();
                (shown + &rest, calls)
            }
        };
        let has_calls = !calls.is_empty();
        let mut message = json!({"role": "assistant", "content": text, "refusal": null});
        let mut reason = finish_reason(completion.finish_reason);
        if has_calls {
            reason = "tool_calls";
            message["tool_calls"] = self.calls(calls).into();
            if text.is_empty() {
                message["content"] = Value::Null;
            }
        }
        let logprobs = completion.logprobs.as_ref().map(|all| {
            let tokens = completion.tokens.iter().zip(all);
            let entries: Vec<Value> = tokens
                .map(|(id, one)| chat_entry(&self.shared, *id, one))
                .collect();
            json!({"content": entries, "refusal": null})
        });
        json!({"index": choice, "message": message, "logprobs": logprobs, "finish_reason": reason})
    }

    fn begin(&mut self, choices: usize) -> Vec<Value> {
        let delta = || json!({"role": "assistant", "content": ""});
        (0..choices)
            .map(|choice| self.chunk(choice, delta(), Vec::new(), None))
            .collect()
    }

    fn token(
        &mut self,
        choice: usize,
        id: i64,
        text: &str,
        logprobs: Option<TokenLogprobs>,
    ) -> Option<Value> {
        let entry = logprobs.map(|one| chat_entry(&self.shared, id, &one));
        let own = self.choices.get_mut(choice)?;
        own.pending.extend(entry);
        let text = match &mut own.reader {
            Some(reader) => reader.push(text),
            None => text.to_owned(),
        };
        if text.is_empty() {
            return None;
        }
        let logprobs = std::mem::take(&mut own.pending);
        Some(self.chunk(choice, json!({"content": text}), logprobs, None))
    }

    fn end(&mut self, choice: usize, completion: Completion) -> Vec<Value> {
        let Some(own) = self.choices.get_mut(choice) else {
            return Vec::new();
        };
        let mut logprobs = std::mem::take(&mut own.pending);
        let (rest, calls) = own
            .reader
            .take()
            .map(ToolReader::finish)
            .unwrap_or_default();
        let mut chunks = Vec::new();
        if !rest.is_empty() {
            let delta = json!({"content": rest});
            chunks.push(self.chunk(choice, delta, std::mem::take(&mut logprobs), None));
        }
        let mut reason = finish_reason(completion.finish_reason);
        if !calls.is_empty() {
            reason = "tool_calls";
            let mut calls = self.calls(calls);
            for (index, call) in calls.iter_mut().enumerate() {
                call["index"] = index.into();
            }
            let delta = json!({"tool_calls": calls});
            chunks.push(self.chunk(choice, delta, std::mem::take(&mut logprobs), None));
        }
        chunks.push(self.chunk(choice, json!({}), logprobs, Some(reason)));
        chunks
    }
}
