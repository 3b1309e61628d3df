//! `/v1/chat/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request as HttpRequest, State};
use axum::response::Response;
use overdrive_generation::{
    AnswerText, ChatTemplate, ChatTemplateOptions, Completion, ReasoningParser, Request,
    TokenLogprobs,
};
use serde_json::{Map, Value, json};

use crate::answer::{Answer, stream, whole};
use crate::answer_parser::AnswerParser;
use crate::api_error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::job::{Job, finish_reason};
use crate::logprobs::chat_entry;
use crate::messages::{self, Conversation};
use crate::sampling::{MAX_LOGPROBS, Sampling};
use crate::shared::{Shared, blocking, now};
use crate::tools::{Schema, ToolCall, Tools, response_format};

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
    let options = template_options(&mut fields, tools.as_ref())?;
    let n = sampling.config.num_return_sequences;
    let (include_usage, is_stream) = (sampling.include_usage, sampling.stream);
    let turn = Turn {
        field: "messages",
        conversation,
        options,
        // The format is that of a text, and a required call has none.
        schema: forced.or(format),
        adapter: model.adapter,
    };
    let (job, reasoning) = turn.submit(&shared, sampling, started).await?;
    let choice = Choice {
        parser: AnswerParser::new(reasoning, tools),
        pending: Vec::new(),
    };
    let answer = Chat {
        id: shared.id("chatcmpl"),
        created: now(),
        model: model.name,
        has_logprobs,
        choices: vec![choice; n],
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
    /// Returns the job, and the parser of the reasoning in its answers.
    pub(crate) async fn submit(
        self,
        shared: &Arc<Shared>,
        sampling: Sampling,
        started: Instant,
    ) -> ApiResult<(Job, ReasoningParser)> {
        let seats = shared.seats("n", sampling.config.num_return_sequences)?;
        let preparing = Arc::clone(shared);
        let (seats, (request, reasoning)) = blocking(seats, move || {
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
            let tokenizer = &shared.model.tokenizer;
            let mut reasoning = ReasoningParser::new(tokenizer, &prompt)?;
            let end = config.eos_token_id.clone();
            let mut request = Request::new(prompt, config).with_images(images);
            request.adapter = self.adapter;
            if let Some(schema) = self.schema {
                let constraint = schema.constraint(shared)?;
                let constraint = reasoning.constrain_content(constraint, tokenizer, &end);
                request = request.with_constraint(constraint);
            }
            Ok((request, reasoning))
        })
        .await?;
        let job = Job::submit(shared, vec![request], seats, started)?;
        Ok((job, reasoning))
    }
}

/// Takes the options of the template, under vLLM's names.
pub(crate) fn template_options(
    fields: &mut Fields,
    tools: Option<&Tools>,
) -> ApiResult<ChatTemplateOptions> {
    let documents = fields.take("documents")?;
    let mut variables: Map<String, Value> =
        fields.take("chat_template_kwargs")?.unwrap_or_default();
    if let Some(effort) = fields.take::<String>("reasoning_effort")? {
        // The templates of hybrid models have a switch and no effort.
        if effort == "none" {
            variables.entry("enable_thinking").or_insert(false.into());
        }
        variables.entry("reasoning_effort").or_insert(effort.into());
    }
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
    choices: Vec<Choice>,
    shared: Arc<Shared>,
}

/// The state of a choice.
#[derive(Clone)]
struct Choice {
    parser: AnswerParser,
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

/// Returns the fields of a delta with some text.
fn delta(text: AnswerText) -> Value {
    let mut delta = Map::new();
    for (name, text) in [
        ("reasoning_content", text.reasoning),
        ("content", text.content),
    ] {
        if !text.is_empty() {
            delta.insert(name.to_owned(), text.into());
        }
    }
    delta.into()
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
        let Some(Choice { mut parser, .. }) = self.choices.get(choice).cloned() else {
            return Value::Null;
        };
        let AnswerText { reasoning, content } = parser.push(&text);
        let (rest, calls) = parser.finish();
        let (reasoning, content) = (reasoning + &rest.reasoning, content + &rest.content);
        let has_calls = !calls.is_empty();
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
        }
        let mut reason = finish_reason(completion.finish_reason);
        if has_calls {
            reason = "tool_calls";
            message["tool_calls"] = self.calls(calls).into();
            if content.is_empty() {
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
        let text = own.parser.push(text);
        if text == AnswerText::default() {
            return None;
        }
        let logprobs = std::mem::take(&mut own.pending);
        Some(self.chunk(choice, delta(text), logprobs, None))
    }

    fn end(&mut self, choice: usize, completion: Completion) -> Vec<Value> {
        let Some(own) = self.choices.get_mut(choice) else {
            return Vec::new();
        };
        let mut logprobs = std::mem::take(&mut own.pending);
        let (rest, calls) = own.parser.clone().finish();
        let mut chunks = Vec::new();
        if rest != AnswerText::default() {
            let logprobs = std::mem::take(&mut logprobs);
            chunks.push(self.chunk(choice, delta(rest), logprobs, None));
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
