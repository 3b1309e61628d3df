//! The messages of a conversation: ShareGPT's and OpenAI's keys in the form that chat templates read.

use serde_json::{Map, Value, json};

use super::chat::{ChatMessage, role};

/// The key of a message that does not enter the loss, with the value 0 (OpenAI's `weight`).
const WEIGHT: &str = "weight";

/// The keys by which formats decide whether a message enters the loss: OpenAI's, Axolotl's and ms-swift's.
const LOSS_KEYS: [&str; 4] = [WEIGHT, "train", "training", "loss"];

/// The keys of a message that would change its text or its loss, and that are not supported.
const REFUSED: [(&str, &str); 4] = [
    ("refusal", "put the text of the refusal into `content`"),
    ("audio", "only text is supported"),
    (
        "train_detail",
        "only whole messages can be left out of the loss",
    ),
    (
        "training_detail",
        "only whole messages can be left out of the loss",
    ),
];

/// The keys of a message that chat templates render besides `content`.
const TEMPLATE_KEYS: [&str; 4] = ["tool_calls", "reasoning_content", "thinking", "reasoning"];

/// Returns `true` if the message has the weight 0, so that it does not enter the loss.
pub(super) fn has_no_weight(message: &ChatMessage) -> bool {
    message
        .get(WEIGHT)
        .is_some_and(|weight| weight.as_f64() == Some(0.0))
}

/// Returns the key of a message that only a chat template can render.
pub(super) fn needs_template(message: &ChatMessage) -> Option<&'static str> {
    TEMPLATE_KEYS
        .into_iter()
        .find(|key| message.get(*key).is_some_and(|value| !is_blank(value)))
}

/// Returns `true` for null and for an empty text, list or object: datasets with columns of one type fill missing fields
/// with these.
pub(super) fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Returns the kind of a value, for error messages.
pub(super) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// Returns a message of a role and a text.
pub(super) fn message(role: &str, content: &str) -> ChatMessage {
    let mut message = ChatMessage::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), content.into());
    message
}

/// Returns the messages of the list under `key`.
pub(super) fn messages(key: &str, value: Value) -> Result<Vec<ChatMessage>, String> {
    let list = match value {
        Value::Array(list) => list,
        other => {
            return Err(format!(
                "`{key}` is {}, expected a list of messages",
                kind(&other)
            ));
        }
    };
    if list.is_empty() {
        return Err(format!("`{key}` is an empty list"));
    }
    (1..)
        .zip(list)
        .map(|(number, one)| {
            read(one).map_err(|problem| format!("message {number} of `{key}` {problem}"))
        })
        .collect()
}

fn read(value: Value) -> Result<ChatMessage, String> {
    let Value::Object(mut fields) = value else {
        return Err(format!("is {}, expected an object", kind(&value)));
    };
    for (key, remedy) in REFUSED {
        if fields.remove(key).is_some_and(|value| !is_blank(&value)) {
            return Err(format!("has `{key}`, which is not supported; {remedy}"));
        }
    }
    if !fields.contains_key("role") && fields.contains_key("from") {
        from_share_gpt(&mut fields)?;
    }
    // OpenAI has replaced this role by `tool`, and templates know only the new one.
    if role(&fields) == "function" {
        fields.insert("role".to_owned(), "tool".into());
    }
    if role(&fields).is_empty() {
        return Err("has no `role`".to_owned());
    }
    read_weight(&mut fields)?;
    read_calls(&mut fields)?;
    let has_calls = fields.contains_key("tool_calls");
    match fields.get_mut("content") {
        Some(Value::String(_)) => Ok(fields),
        Some(content @ Value::Array(_)) => {
            *content = joined_parts(content)?.into();
            Ok(fields)
        }
        // A message that only calls tools has no content.
        None | Some(Value::Null) if has_calls => Ok(fields),
        None | Some(Value::Null) => Err("has no `content`".to_owned()),
        Some(other) => Err(format!("has a `content` that is {}", kind(other))),
    }
}

/// Replaces `from` and `value` by `role` and `content`, or, for a call of tools, by `tool_calls`.
fn from_share_gpt(fields: &mut Map<String, Value>) -> Result<(), String> {
    let from = fields.remove("from").unwrap_or_default();
    let Value::String(from) = from else {
        return Err(format!("has a `from` that is {}", kind(&from)));
    };
    let said = fields.remove("value").ok_or("has `from` but no `value`")?;
    let role = match from.as_str() {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "model" | "bot" | "function_call" => "assistant",
        "system" => "system",
        "tool" | "function" | "function_response" | "observation" => "tool",
        other => return Err(format!("is from {other:?}, which is not a known role")),
    };
    fields.insert("role".to_owned(), role.into());
    if from != "function_call" {
        fields.insert("content".to_owned(), said);
        return Ok(());
    }
    let calls = match said {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| {
            format!("is from \"function_call\", and its `value` is not JSON: {error}")
        })?,
        other => other,
    };
    let calls = match calls {
        Value::Array(calls) => calls,
        call => vec![call],
    };
    let calls = calls.into_iter().map(as_tool_call).collect();
    fields.insert("content".to_owned(), "".into());
    fields.insert("tool_calls".to_owned(), Value::Array(calls));
    Ok(())
}

fn as_tool_call(function: Value) -> Value {
    json!({"type": "function", "function": function})
}

/// Replaces the keys that decide whether a message enters the loss by `weight`, which is 0 or missing.
fn read_weight(fields: &mut ChatMessage) -> Result<(), String> {
    let mut found: Option<(&str, bool)> = None;
    for key in LOSS_KEYS {
        let value = match fields.remove(key) {
            None | Some(Value::Null) => continue,
            Some(value) => value,
        };
        let enters = match (value.as_f64(), value.as_bool()) {
            (Some(0.0), _) | (_, Some(false)) => false,
            (Some(1.0), _) | (_, Some(true)) => true,
            _ => {
                return Err(format!(
                    "has a `{key}` of {value}; it must be 0 or false (out of the loss), or 1 or true"
                ));
            }
        };
        match found {
            Some((other, before)) if before != enters => {
                return Err(format!(
                    "has `{other}` and `{key}`, which contradict each other"
                ));
            }
            _ => found = Some((key, enters)),
        }
    }
    match found {
        Some((key, true)) if role(fields) != "assistant" => Err(format!(
            "has `{key}`, but is from the {}; only messages of the assistant can enter the loss",
            role(fields)
        )),
        Some((_, false)) => {
            fields.insert(WEIGHT.to_owned(), 0.into());
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Converts tool calls to the form that templates read: a list under `tool_calls`, with arguments as JSON values and
/// not as text.
fn read_calls(fields: &mut ChatMessage) -> Result<(), String> {
    if let Some(call) = fields
        .remove("function_call")
        .filter(|call| !is_blank(call))
    {
        if fields
            .get("tool_calls")
            .is_some_and(|calls| !is_blank(calls))
        {
            return Err("has `function_call` and `tool_calls`; keep `tool_calls`".to_owned());
        }
        fields.insert("tool_calls".to_owned(), json!([as_tool_call(call)]));
    }
    // Templates treat a message with this key as one that calls tools.
    if fields.get("tool_calls").is_some_and(is_blank) {
        fields.remove("tool_calls");
    }
    let Some(calls) = fields.get_mut("tool_calls") else {
        return Ok(());
    };
    let Value::Array(calls) = calls else {
        return Err(format!(
            "has `tool_calls` that are {}, expected a list",
            kind(calls)
        ));
    };
    for call in calls {
        // Hugging Face's form may leave out the object around name and arguments.
        let function = match call.get("function") {
            Some(_) => call.get_mut("function"),
            None => Some(call),
        };
        let Some(Value::Object(function)) = function else {
            return Err("has a call that is not an object with `name` and `arguments`".to_owned());
        };
        if !function.get("name").is_some_and(Value::is_string) {
            return Err("has a call without a `name`".to_owned());
        }
        if let Some(arguments) = function.get_mut("arguments")
            && let Value::String(text) = arguments
        {
            // Some programs write an empty text for no arguments.
            let text = if text.trim().is_empty() { "{}" } else { text };
            let parsed: Value = serde_json::from_str(text)
                .map_err(|error| format!("has a call whose `arguments` are not JSON: {error}"))?;
            *arguments = parsed;
        }
    }
    Ok(())
}

/// Joins the texts of a list of parts by line breaks, as overdrive-serve and vLLM do.
fn joined_parts(parts: &Value) -> Result<String, String> {
    let parts = parts.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        let text = match part {
            Value::String(text) => Some(text.as_str()),
            part => part.get("text").and_then(Value::as_str),
        };
        let kind = || {
            part.get("type")
                .and_then(Value::as_str)
                .unwrap_or("unknown")
        };
        texts.push(text.ok_or_else(|| {
            format!(
                "has a part of the type {:?} in `content`; only text is supported",
                kind()
            )
        })?);
    }
    Ok(texts.join("\n"))
}
