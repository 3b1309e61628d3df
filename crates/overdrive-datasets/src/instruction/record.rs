use serde_json::{Map, Value};

use super::chat::{ChatMessage, role};

/// A record of instruction data.
///
/// | keys | form |
/// |---|---|
/// | `messages` (or `conversations`): `[{role, content}, …]` | a conversation; `tools` beside it |
/// | `conversations`: `[{from, value}, …]` | the same in ShareGPT's form |
/// | `prompt`, `response` (or `completion`), each a text | a question and its answer; `system` beside it |
/// | `prompt`, `completion`, each `[{role, content}, …]` | a conversation; the messages of `completion` are the answer |
/// | `instruction`, `output` (or `response`), and `input` | Alpaca's instruction, input and output |
/// | `text` | a text, all of which enters the loss |
///
/// Other keys are ignored.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum InstructionRecord {
    /// A text.
    Text(String),
    /// A question and an answer.
    Answer {
        /// The system prompt, from `system`.
        system: Option<String>,
        /// The question.
        prompt: String,
        /// The answer.
        response: String,
    },
    /// An instruction, an input and an output: Alpaca's form.
    Task {
        /// The instruction.
        instruction: String,
        /// The input; it may be empty.
        input: String,
        /// The answer.
        output: String,
    },
    /// A conversation.
    Chat {
        /// The messages.
        messages: Vec<ChatMessage>,
        /// The tools that the assistant may call.
        tools: Option<Value>,
        /// The number of messages of the prompt, which do not enter the loss: 0 except for `prompt` and
        /// `completion`.
        prompt_messages: usize,
    },
}

impl InstructionRecord {
    /// Parses a record.
    ///
    /// # Errors
    /// A message that states what is wrong with the record.
    pub fn from_json(bytes: &[u8]) -> Result<InstructionRecord, String> {
        let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let Value::Object(mut fields) = value else {
            return Err("expected a JSON object".to_owned());
        };
        // Datasets with columns of one type fill missing fields with null.
        fields.retain(|_, value| !value.is_null());
        let tools = tools(&mut fields)?;
        if let Some((key, value)) = take(&mut fields, &["messages", "conversations"]) {
            return Ok(InstructionRecord::Chat {
                messages: messages(key, value)?,
                tools,
                prompt_messages: 0,
            });
        }
        if let Some((_, prompt)) = take(&mut fields, &["prompt"]) {
            let (key, answer) = take(&mut fields, &["response", "completion"])
                .ok_or("it has `prompt`, and neither `response` nor `completion`")?;
            return match prompt {
                Value::Array(_) => {
                    let mut all = messages("prompt", prompt)?;
                    let prompt_messages = all.len();
                    all.extend(messages(key, answer)?);
                    Ok(InstructionRecord::Chat {
                        messages: all,
                        tools,
                        prompt_messages,
                    })
                }
                _ => Ok(InstructionRecord::Answer {
                    system: take(&mut fields, &["system"])
                        .map(|(key, value)| text(key, value))
                        .transpose()?,
                    prompt: text("prompt", prompt)?,
                    response: text(key, answer)?,
                }),
            };
        }
        if let Some((_, instruction)) = take(&mut fields, &["instruction"]) {
            let (key, output) = take(&mut fields, &["output", "response"])
                .ok_or("it has `instruction`, and neither `output` nor `response`")?;
            let input = take(&mut fields, &["input"]).map(|(key, value)| text(key, value));
            return Ok(InstructionRecord::Task {
                instruction: text("instruction", instruction)?,
                input: input.transpose()?.unwrap_or_default(),
                output: text(key, output)?,
            });
        }
        if let Some((key, value)) = take(&mut fields, &["text"]) {
            return Ok(InstructionRecord::Text(text(key, value)?));
        }
        let has: Vec<&str> = fields.keys().map(String::as_str).collect();
        let has = match has.is_empty() {
            true => "nothing".to_owned(),
            false => has.join(", "),
        };
        Err(format!(
            "it has {has}; expected `messages`, `prompt` and `response`, `instruction` and `output`, or \
             `text`"
        ))
    }
}

/// Removes the first of these keys that exists, and returns it with its value.
fn take(fields: &mut Map<String, Value>, keys: &[&'static str]) -> Option<(&'static str, Value)> {
    keys.iter()
        .find_map(|&key| Some((key, fields.remove(key)?)))
}

fn text(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("`{key}` is {}, expected a text", kind(&other))),
    }
}

/// Removes the list of tools. It may also be JSON in a text, since the columns of some datasets have one type.
fn tools(fields: &mut Map<String, Value>) -> Result<Option<Value>, String> {
    let Some(value) = fields.remove("tools") else {
        return Ok(None);
    };
    let list = match value {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| format!("`tools` is a text that is not JSON: {error}"))?,
        other => other,
    };
    match &list {
        Value::Array(tools) if tools.is_empty() => Ok(None),
        Value::Array(_) => Ok(Some(list)),
        other => Err(format!("`tools` is {}, expected a list", kind(other))),
    }
}

fn messages(key: &str, value: Value) -> Result<Vec<ChatMessage>, String> {
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
            message(one).map_err(|problem| format!("message {number} of `{key}` {problem}"))
        })
        .collect()
}

fn message(value: Value) -> Result<ChatMessage, String> {
    let Value::Object(mut fields) = value else {
        return Err(format!("is {}, expected an object", kind(&value)));
    };
    if !fields.contains_key("role")
        && let Some(from) = fields.remove("from")
    {
        let said = fields.remove("value").ok_or("has `from`, and no `value`")?;
        let from = text("from", from)?;
        let role = match from.as_str() {
            "human" | "user" => "user",
            "gpt" | "assistant" | "chatgpt" | "model" | "bot" => "assistant",
            "system" => "system",
            "tool" | "function" | "function_response" | "observation" => "tool",
            other => return Err(format!("is from {other:?}, which is not a known role")),
        };
        fields.insert("role".to_owned(), role.into());
        fields.insert("content".to_owned(), said);
    }
    if role(&fields).is_empty() {
        return Err("has no `role`".to_owned());
    }
    match fields.get("content") {
        Some(Value::String(_) | Value::Array(_)) => Ok(fields),
        // A message that only calls tools has no content.
        None | Some(Value::Null) if fields.contains_key("tool_calls") => Ok(fields),
        None | Some(Value::Null) => Err("has no `content`".to_owned()),
        Some(other) => Err(format!("has a `content` that is {}", kind(other))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<InstructionRecord, String> {
        InstructionRecord::from_json(json.as_bytes())
    }

    #[test]
    fn share_gpt_becomes_roles_and_contents() {
        let record = read(
            r#"{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?"}]}"#,
        );
        let Ok(InstructionRecord::Chat { messages, .. }) = record else {
            panic!("{record:?}")
        };
        let said: Vec<_> = messages
            .iter()
            .map(|m| (role(m), m["content"].as_str().unwrap()))
            .collect();
        assert_eq!(said, [("user", "Hi"), ("assistant", "Yes?")]);
    }

    #[test]
    fn each_form_is_known_by_its_keys() {
        let answer = read(r#"{"prompt": "2+2=", "completion": "4", "id": 7}"#).unwrap();
        assert!(
            matches!(answer, InstructionRecord::Answer { ref response, .. } if response == "4")
        );
        let task = read(r#"{"instruction": "Add", "input": null, "output": "4"}"#).unwrap();
        assert!(matches!(task, InstructionRecord::Task { ref input, .. } if input.is_empty()));
        let chat = read(
            r#"{"prompt": [{"role": "user", "content": "?"}], "completion": [{"role": "assistant", "content": "!"}]}"#,
        );
        assert!(matches!(
            chat,
            Ok(InstructionRecord::Chat {
                prompt_messages: 1,
                ..
            })
        ));
        assert_eq!(
            read(r#"{"text": "a"}"#),
            Ok(InstructionRecord::Text("a".to_owned()))
        );
    }

    #[test]
    fn invalid_records_are_errors_with_a_reason() {
        for (json, problem) in [
            (
                r#"{"prompt": "a"}"#,
                "it has `prompt`, and neither `response` nor `completion`",
            ),
            (
                r#"{"question": "a"}"#,
                "it has question; expected `messages`",
            ),
            (r#"{"messages": []}"#, "`messages` is an empty list"),
            (
                r#"{"messages": [{"content": "a"}]}"#,
                "message 1 of `messages` has no `role`",
            ),
            (
                r#"{"messages": [{"role": "user", "content": 3}]}"#,
                "has a `content` that is a number",
            ),
            (
                r#"{"conversations": [{"from": "x", "value": "a"}]}"#,
                "is from \"x\", which is not a known role",
            ),
            (
                r#"{"prompt": 3, "response": "a"}"#,
                "`prompt` is a number, expected a text",
            ),
            (r#"[1]"#, "expected a JSON object"),
            (r#"{"text": "a""#, "EOF while parsing"),
        ] {
            let error = read(json).unwrap_err();
            assert!(error.contains(problem), "{json}: {error}");
        }
    }
}
