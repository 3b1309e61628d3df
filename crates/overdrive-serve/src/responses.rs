//! `/v1/responses`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use overdrive_generation::{AnswerText, FinishReason, Message};
use serde_json::{Map, Value, json};

use crate::answer::{Events, stream_events};
use crate::answer_parser::AnswerParser;
use crate::api_error::{ApiError, ApiResult, json_response};
use crate::chat::{Turn, template, template_options};
use crate::fields::{Fields, shorten};
use crate::job::{Job, Step, finish_reason};
use crate::messages;
use crate::sampling::Sampling;
use crate::shared::{Shared, now};
use crate::tools::{Tools, answer_format};

/// Fields that would change the answer, or that ask for a state that this server does not keep.
const UNSUPPORTED: &[&str] = &[
    "store",
    "previous_response_id",
    "conversation",
    "background",
    "prompt",
    "include",
    "max_tool_calls",
    "context_management",
    "n",
];

pub(crate) async fn responses(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> ApiResult<Response> {
    let started = Instant::now();
    let mut fields = Fields::read(request, &shared.options).await?;
    let model = shared.choose_model(fields.take("model")?)?;
    shared.engine()?;
    let template = template(&shared, "input")?;
    fields.refuse(UNSUPPORTED)?;
    let mut text: Map<String, Value> = fields.take("text")?.unwrap_or_default();
    let mut reasoning: Map<String, Value> = fields.take("reasoning")?.unwrap_or_default();
    let effort = reasoning.remove("effort");
    fields.set("reasoning_effort", effort.clone().unwrap_or_default());
    for (name, value, neutral) in [
        ("truncation", fields.take("truncation")?, json!("disabled")),
        ("top_logprobs", fields.take("top_logprobs")?, json!(0)),
        ("text.verbosity", text.remove("verbosity"), json!("medium")),
        (
            "reasoning.summary",
            reasoning.remove("summary"),
            json!("auto"),
        ),
    ] {
        if let Some(value) = value.filter(|value| !value.is_null() && *value != neutral) {
            let found = shorten(&value.to_string());
            let expected = format!("{neutral}; this server supports no other value");
            return Err(ApiError::range(name, found, &expected));
        }
    }
    // Its only option pads the events of OpenAI's own service.
    fields.take::<Value>("stream_options")?;
    let mut sampling = Sampling::take(&mut fields, &shared)?;
    sampling.max_tokens = fields.take("max_output_tokens")?;
    sampling.max_tokens_field = "max_output_tokens";
    let format = match text.remove("format") {
        None | Some(Value::Null) => None,
        Some(Value::Object(format)) => Some(format),
        Some(other) => {
            let found = shorten(&other.to_string());
            return Err(ApiError::range("text.format", found, "an object"));
        }
    };
    let shown_format = match &format {
        Some(format) => Value::Object(format.clone()),
        None => json!({"type": "text"}),
    };
    let tools: Vec<Value> = fields.take("tools")?.unwrap_or_default();
    let choice: Option<Value> = fields.take("tool_choice")?;
    let instructions: Option<String> = fields.take("instructions")?;
    let response = json!({
        "id": shared.id("resp"),
        "object": "response",
        "created_at": now(),
        "status": "in_progress",
        "background": false,
        "error": null,
        "incomplete_details": null,
        "instructions": instructions,
        "max_output_tokens": sampling.max_tokens,
        "metadata": fields.take::<Value>("metadata")?.unwrap_or_else(|| json!({})),
        "model": *model.name,
        "output": [],
        "parallel_tool_calls": fields.peek("parallel_tool_calls") != Some(&json!(false)),
        "previous_response_id": null,
        "reasoning": {"effort": effort, "summary": null},
        "store": false,
        "temperature": sampling.config.temperature,
        "text": {"format": shown_format},
        "tool_choice": choice.clone().unwrap_or_else(|| json!("auto")),
        "tools": tools,
        "top_p": sampling.config.top_p,
        "truncation": "disabled",
        "usage": null,
    });

    let functions = tools.into_iter().map(tool).collect::<ApiResult<Vec<_>>>()?;
    fields.set("tools", functions);
    if let Some(choice) = choice {
        fields.set("tool_choice", chat_choice(choice)?);
    }
    let format = format.map(|format| {
        let inner = Some(Value::Object(format.clone()));
        answer_format(format, inner, "text.format")
    });
    let format = format.transpose()?.flatten();
    let (tools, forced) = Tools::take(&mut fields, template)?;
    let input = fields.require("input")?;
    fields.set("input", chat_messages(input)?);
    let mut conversation = messages::take(&mut fields, "input", template, &shared)?;
    if let Some(instructions) = instructions {
        conversation
            .messages
            .insert(0, Message::system(instructions));
    }
    let options = template_options(&mut fields, tools.as_ref())?;
    let is_stream = sampling.stream;
    let turn = Turn {
        field: "input",
        conversation,
        options,
        // The format is that of a text, and a required call has none.
        schema: forced.or(format),
        adapter: model.adapter,
    };
    let (mut job, reasoning) = turn.submit(&shared, sampling, started).await?;
    let mut writer = Writer {
        parser: AnswerParser::new(reasoning, tools),
        response,
        open: None,
        reasoning_tokens: 0,
        output: Vec::new(),
        is_stream,
        sequence: 0,
        text: String::new(),
        shared,
    };
    if is_stream {
        return stream_events(job, writer).await;
    }
    while let Some(step) = job.next().await {
        writer.step(step?);
    }
    writer.add_usage(&job);
    Ok(json_response(StatusCode::OK, &writer.response))
}

/// Returns a tool in the form of a chat.
fn tool(tool: Value) -> ApiResult<Value> {
    match tool {
        Value::Object(mut function) if function.get("type") == Some(&json!("function")) => {
            function.shift_remove("type");
            Ok(json!({"type": "function", "function": function}))
        }
        other => {
            let kind = shorten(&other["type"].to_string());
            let message = format!(
                "`tools` has a tool of type {kind}, and this server runs no tools of its own; give functions only"
            );
            Err(ApiError::field("tools", message))
        }
    }
}

/// Returns `tool_choice` in the form of a chat.
fn chat_choice(choice: Value) -> ApiResult<Value> {
    match choice["type"].as_str() {
        Some("function") => tool(choice),
        Some("allowed_tools") => {
            let tools = choice["tools"].as_array().into_iter().flatten();
            let tools = tools.cloned().map(tool).collect::<ApiResult<Vec<_>>>()?;
            let allowed = json!({"mode": choice["mode"], "tools": tools});
            Ok(json!({"type": "allowed_tools", "allowed_tools": allowed}))
        }
        _ => Ok(choice),
    }
}

/// Returns the input, a text or a list of items, as the messages of a chat.
fn chat_messages(input: Value) -> ApiResult<Value> {
    let items = match input {
        Value::String(text) => return Ok(json!([{"role": "user", "content": text}])),
        Value::Array(items) => items,
        other => {
            let found = shorten(&other.to_string());
            return Err(ApiError::range(
                "input",
                found,
                "a string or a list of items",
            ));
        }
    };
    let mut messages: Vec<Value> = Vec::new();
    // Reasoning, which belongs to the next message of the model.
    let mut reasoning: Option<String> = None;
    for (index, item) in items.into_iter().enumerate() {
        match item["type"].as_str().unwrap_or("message") {
            "message" => messages.push(json!({"role": item["role"], "content": item["content"]})),
            "reasoning" => {
                let parts = item["content"].as_array().into_iter().flatten();
                let text: String = parts.filter_map(|part| part["text"].as_str()).collect();
                reasoning = Some(text).filter(|text| !text.is_empty());
                continue;
            }
            "function_call" => {
                let call = json!({
                    "id": item["call_id"], "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]},
                });
                // A text and the calls after it are one message of the model.
                match messages
                    .last_mut()
                    .filter(|last| last["role"] == "assistant")
                {
                    Some(last) => match last["tool_calls"].as_array_mut() {
                        Some(calls) => calls.push(call),
                        None => last["tool_calls"] = json!([call]),
                    },
                    None => messages
                        .push(json!({"role": "assistant", "content": "", "tool_calls": [call]})),
                }
            }
            "function_call_output" => messages.push(json!({
                "role": "tool", "tool_call_id": item["call_id"], "content": item["output"],
            })),
            other => {
                let message = format!(
                    "`input[{index}]` has the type {other:?}; it must be message, reasoning, function_call or \
                     function_call_output"
                );
                return Err(ApiError::field("input", message));
            }
        }
        if let Some(last) = messages
            .last_mut()
            .filter(|last| last["role"] == "assistant")
            && let Some(text) = reasoning.take()
        {
            last["reasoning_content"] = text.into();
        }
    }
    Ok(Value::Array(messages))
}

/// The response while it is made, and the events of its stream that have not been sent.
struct Writer {
    shared: Arc<Shared>,
    parser: AnswerParser,
    response: Value,
    /// The item whose text is being written.
    open: Option<Item>,
    /// The items that are complete.
    output: Vec<Value>,
    reasoning_tokens: usize,
    /// If `false`, there are no events, which nobody would read.
    is_stream: bool,
    /// The number of the next event.
    sequence: u64,
    text: String,
}

/// An item of text: the reasoning of the model, or a message.
struct Item {
    kind: ItemKind,
    id: String,
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ItemKind {
    Reasoning,
    Message,
}

impl ItemKind {
    /// Returns the content of an item with some text.
    fn part(self, text: &str) -> Value {
        match self {
            ItemKind::Reasoning => json!({"type": "reasoning_text", "text": text}),
            ItemKind::Message => {
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
            }
        }
    }

    fn item(self, id: &str, status: &str, content: &[Value]) -> Value {
        match self {
            ItemKind::Reasoning => {
                json!({"type": "reasoning", "id": id, "status": status, "summary": [], "content": content})
            }
            ItemKind::Message => {
                json!({"type": "message", "id": id, "status": status, "role": "assistant", "content": content})
            }
        }
    }
}

impl Writer {
    fn emit(&mut self, kind: &str, event: impl FnOnce(&Writer) -> Value) {
        if !self.is_stream {
            return;
        }
        let mut event = event(self);
        event["type"] = kind.into();
        event["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        self.text
            .push_str(&format!("event: {kind}\ndata: {event}\n\n"));
    }

    fn emit_response(&mut self, kind: &str) {
        self.emit(kind, |writer| json!({"response": writer.response}));
    }

    fn emit_item(&mut self, kind: &str, item: &Value) {
        self.emit(
            kind,
            |writer| json!({"output_index": writer.output.len(), "item": item}),
        );
    }

    /// Emits an event about the text of an item; `event` ends its name.
    fn emit_text(&mut self, item: &Item, event: &str, name: &str, value: impl Into<Value>) {
        let (kind, has_logprobs) = match (name, item.kind) {
            ("part", _) => ("content_part", false),
            (_, ItemKind::Reasoning) => ("reasoning_text", false),
            (_, ItemKind::Message) => ("output_text", true),
        };
        self.emit(&format!("response.{kind}.{event}"), |writer| {
            let index = writer.output.len();
            let mut fields = json!({"item_id": item.id, "output_index": index, "content_index": 0});
            fields[name] = value.into();
            if has_logprobs {
                fields["logprobs"] = json!([]);
            }
            fields
        });
    }

    fn push(&mut self, text: &AnswerText) {
        for (kind, text) in [
            (ItemKind::Reasoning, &text.reasoning),
            (ItemKind::Message, &text.content),
        ] {
            if !text.is_empty() {
                self.push_text(kind, text);
            }
        }
    }

    /// Appends text to the open item, or to a new one if that is of another kind.
    fn push_text(&mut self, kind: ItemKind, piece: &str) {
        if self.open.as_ref().is_some_and(|open| open.kind != kind) {
            self.close_item("completed");
        }
        let mut item = self.open.take().unwrap_or_else(|| self.open_item(kind));
        if !piece.is_empty() {
            self.emit_text(&item, "delta", "delta", piece);
            item.text.push_str(piece);
        }
        self.open = Some(item);
    }

    fn open_item(&mut self, kind: ItemKind) -> Item {
        let id = self.shared.id(match kind {
            ItemKind::Reasoning => "rs",
            ItemKind::Message => "msg",
        });
        let added = kind.item(&id, "in_progress", &[]);
        self.emit_item("response.output_item.added", &added);
        let text = String::new();
        let item = Item { kind, id, text };
        self.emit_text(&item, "added", "part", kind.part(""));
        item
    }

    fn close_item(&mut self, status: &str) {
        let Some(item) = self.open.take() else {
            return;
        };
        let part = item.kind.part(&item.text);
        self.emit_text(&item, "done", "text", item.text.as_str());
        self.emit_text(&item, "done", "part", part.clone());
        let done = item.kind.item(&item.id, status, &[part]);
        self.emit_item("response.output_item.done", &done);
        self.output.push(done);
    }

    /// Completes the response with the rest of the text and the calls.
    fn close(&mut self, reason: FinishReason) {
        let (rest, calls) = self.parser.clone().finish();
        self.push(&rest);
        if calls.is_empty() && self.open.is_none() {
            self.push_text(ItemKind::Message, "");
        }
        let is_cut = finish_reason(reason) == "length";
        let status = if is_cut { "incomplete" } else { "completed" };
        self.close_item(status);
        for call in calls {
            let (id, call_id) = (self.shared.id("fc"), self.shared.call_id());
            let item = |status: &str, arguments: &str| {
                json!({"type": "function_call", "id": id, "call_id": call_id, "name": call.name,
                    "arguments": arguments, "status": status})
            };
            self.emit_item("response.output_item.added", &item("in_progress", ""));
            let index = self.output.len();
            let arguments = &call.arguments;
            self.emit(
                "response.function_call_arguments.delta",
                |_| json!({"item_id": id, "output_index": index, "delta": arguments}),
            );
            self.emit(
                "response.function_call_arguments.done",
                |_| json!({"item_id": id, "output_index": index, "name": call.name, "arguments": arguments}),
            );
            let item = item("completed", arguments);
            self.emit_item("response.output_item.done", &item);
            self.output.push(item);
        }
        self.response["output"] = std::mem::take(&mut self.output).into();
        self.response["status"] = status.into();
        if is_cut {
            self.response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
    }

    fn add_usage(&mut self, job: &Job) {
        let (input, output) = job.tokens();
        self.response["usage"] = json!({
            "input_tokens": input,
            "input_tokens_details": {"cached_tokens": job.cached_tokens()},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": input + output,
        });
    }
}

impl Events for Writer {
    fn begin(&mut self, _job: &Job) {
        self.emit_response("response.created");
        self.emit_response("response.in_progress");
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Prompt { .. } => {}
            Step::Token { text, .. } => {
                let text = self.parser.push(&text);
                self.reasoning_tokens += usize::from(self.parser.is_reasoning());
                self.push(&text);
            }
            Step::Finished { completion, .. } => self.close(completion.finish_reason),
        }
    }

    fn finish(&mut self, job: &Job) {
        self.add_usage(job);
        let status = self.response["status"].as_str().unwrap_or_default();
        let kind = format!("response.{status}");
        self.emit_response(&kind);
    }

    fn fail(&mut self, error: &ApiError) {
        self.response["status"] = "failed".into();
        self.response["error"] = json!({"code": "server_error", "message": error.message()});
        self.emit_response("response.failed");
    }

    fn take_text(&mut self) -> String {
        std::mem::take(&mut self.text)
    }
}
