//! The context of the messages of a record: a system prompt, earlier turns, tools.

use serde_json::{Map, Value, json};

use super::{InstructionRecord, take_one, text};
use crate::instruction::chat::{ChatMessage, role};
use crate::instruction::message::{is_blank, kind, message};

/// The keys that may stand beside the messages, the question or the instruction of a record.
pub(super) struct Context {
    pub(super) system: Option<String>,
    history: Vec<(String, String)>,
    tools: Option<Value>,
}

impl Context {
    /// Removes the keys from a record.
    pub(super) fn take(fields: &mut Map<String, Value>) -> Result<Self, String> {
        let system = take_one(fields, &["system", "system_prompt"])?;
        let system = system.map(|(key, value)| text(key, value)).transpose()?;
        Ok(Self {
            system,
            history: history(fields)?,
            tools: tools(fields)?,
        })
    }

    pub(super) fn first_key(&self) -> Option<&'static str> {
        match self {
            Self {
                system: Some(_), ..
            } => Some("system"),
            Self { history, .. } if !history.is_empty() => Some("history"),
            Self { tools: Some(_), .. } => Some("tools"),
            _ => None,
        }
    }

    /// Returns `true` if a question and its answer must become a conversation.
    pub(super) fn needs_messages(&self) -> bool {
        !self.history.is_empty() || self.tools.is_some()
    }

    /// Returns the record of the messages under `key`, of which the first `prompt_messages` do not enter the loss.
    pub(super) fn of_messages(
        self,
        key: &str,
        mut messages: Vec<ChatMessage>,
        prompt_messages: usize,
    ) -> Result<InstructionRecord, String> {
        if !self.history.is_empty() {
            return Err(format!(
                "it has `history` beside `{key}`; put the earlier turns into `{key}`"
            ));
        }
        let mut added = 0;
        if let Some(system) = self.system {
            match messages.first() {
                Some(first) if role(first) != "system" => {
                    messages.insert(0, message("system", &system));
                    added = 1;
                }
                Some(first) if first.get("content").and_then(Value::as_str) != Some(&system) => {
                    return Err(format!(
                        "it has `system`, and another system message in `{key}`; remove one of them"
                    ));
                }
                _ => {}
            }
        }
        let prompt_messages = match prompt_messages {
            0 => 0,
            count => count + added,
        };
        Ok(InstructionRecord::Chat {
            messages,
            tools: self.tools,
            prompt_messages,
        })
    }

    /// Returns the conversation of the earlier turns, a question and its answer.
    pub(super) fn of_turn(self, question: &str, answer: &str) -> InstructionRecord {
        let mut messages = Vec::new();
        messages.extend(self.system.map(|system| message("system", &system)));
        for (question, answer) in &self.history {
            messages.extend([message("user", question), message("assistant", answer)]);
        }
        messages.push(message("user", question));
        let before = messages.len();
        messages.push(message("assistant", answer));
        InstructionRecord::Chat {
            messages,
            tools: self.tools,
            // The answers of earlier turns enter the loss too.
            prompt_messages: match self.history.is_empty() {
                true => before,
                false => 0,
            },
        }
    }
}

/// Removes the earlier turns.
fn history(fields: &mut Map<String, Value>) -> Result<Vec<(String, String)>, String> {
    let turns = match fields.remove("history") {
        None => return Ok(Vec::new()),
        Some(value) if is_blank(&value) => return Ok(Vec::new()),
        Some(value) => value,
    };
    let pairs: Option<Vec<(String, String)>> = turns.as_array().and_then(|turns| {
        let texts = turns.iter().map(|turn| match turn.as_array()?.as_slice() {
            [question, answer] => {
                Some((question.as_str()?.to_owned(), answer.as_str()?.to_owned()))
            }
            _ => None,
        });
        texts.collect()
    });
    pairs.ok_or_else(|| "`history` is not a list of pairs of a question and its answer".to_owned())
}

/// Removes the list of tools. It may also be JSON in a text, since the columns of some datasets have one type.
fn tools(fields: &mut Map<String, Value>) -> Result<Option<Value>, String> {
    let tools = tool_list(fields, "tools")?;
    // OpenAI's older form, which `tools` has replaced.
    let functions = tool_list(fields, "functions")?;
    match (tools, functions) {
        (Some(_), Some(_)) => Err("it has `tools` and `functions`; keep `tools`".to_owned()),
        (None, Some(functions)) => {
            let tool = |function| json!({"type": "function", "function": function});
            Ok(Some(functions.into_iter().map(tool).collect()))
        }
        (tools, None) => Ok(tools.map(Value::Array)),
    }
}

fn tool_list(fields: &mut Map<String, Value>, key: &str) -> Result<Option<Vec<Value>>, String> {
    let list = match fields.remove(key) {
        None => return Ok(None),
        Some(value) if is_blank(&value) => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(&text)
            .map_err(|error| format!("`{key}` is a text that is not JSON: {error}"))?,
        Some(other) => other,
    };
    match list {
        Value::Array(tools) if tools.is_empty() => Ok(None),
        Value::Array(tools) => Ok(Some(tools)),
        other => Err(format!("`{key}` is {}, expected a list", kind(&other))),
    }
}
