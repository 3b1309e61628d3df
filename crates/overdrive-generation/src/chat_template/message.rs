use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Error, Result};

/// A message of a conversation: in JSON an object with `role`, `content` and any other field that the
/// model's template reads (`tool_calls`, `name`, `reasoning_content`, …).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Message {
    fields: Map<String, Value>,
}

/// The fields that a message of the assistant may have instead of content.
const INSTEAD_OF_CONTENT: [&str; 7] = [
    "tool_calls",
    "function_call",
    "refusal",
    "audio",
    "reasoning_content",
    "reasoning",
    "thinking",
];

impl Message {
    /// Returns a message of any role.
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        let mut fields = Map::new();
        fields.insert("role".to_owned(), role.into());
        fields.insert("content".to_owned(), content.into().into());
        Message { fields }
    }

    /// Returns a system message. Not every template supports one.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new("system", content)
    }

    /// Returns a message of the user.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new("user", content)
    }

    /// Returns a message of the assistant.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new("assistant", content)
    }

    /// Returns the message with one more field, or another value of it.
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Message {
        self.fields.insert(key.to_owned(), value.into());
        self
    }

    /// Returns the value of a field.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key)
    }

    /// Returns the role; empty if the message has none.
    pub fn role(&self) -> &str {
        self.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// Returns the content, if it is a string.
    pub fn content(&self) -> Option<&str> {
        self.get("content").and_then(Value::as_str)
    }

    /// Returns `true` if the message has no content and needs it, as in OpenAI's API: a message of the system, of a
    /// developer, of the user or of a tool, and one of the assistant without tool calls, a refusal, audio or reasoning.
    pub fn lacks_content(&self) -> bool {
        let has = |key: &str| {
            self.get(key).is_some_and(|value| match value {
                Value::Null => false,
                Value::Array(list) => !list.is_empty(),
                _ => true,
            })
        };
        let instead = match self.role() {
            "system" | "developer" | "user" | "tool" => &[][..],
            "assistant" => &INSTEAD_OF_CONTENT,
            // Of other roles only the template knows.
            _ => return false,
        };
        self.get("content").is_none_or(Value::is_null) && !instead.iter().any(|key| has(key))
    }

    /// Returns the message with its content as the one text that most templates expect, as vLLM passes it: the texts of a
    /// list of parts are joined by line breaks, and a message of the assistant without content, such as one that calls
    /// tools, has an empty text.
    ///
    /// # Errors
    /// [`Error::MessageContent`] with what is wrong with it.
    pub fn with_text(mut self) -> Result<Message> {
        let wrong = Error::MessageContent;
        let text = match self.get("content") {
            Some(Value::String(_)) => return Ok(self),
            None | Some(Value::Null) if self.role() == "assistant" => String::new(),
            None | Some(Value::Null) => return Ok(self),
            Some(Value::Array(parts)) => {
                let mut texts = Vec::with_capacity(parts.len());
                for part in parts {
                    // OpenAI's API has parts of type `refusal` in messages of the assistant.
                    let named = |key: &str| part.get(key).and_then(Value::as_str);
                    let text = part.as_str().or(named("text")).or(named("refusal"));
                    let Some(text) = text else {
                        let kind = named("type").unwrap_or("unknown");
                        let problem = match kind {
                            // Also `input_text` and `output_text`, those of OpenAI's responses.
                            _ if kind.ends_with("text") => "its `text` must be a string",
                            _ => "only parts of type \"text\" are read here",
                        };
                        return Err(wrong(format!("has a part of type {kind:?}; {problem}")));
                    };
                    texts.push(text);
                }
                texts.join("\n")
            }
            Some(_) => return Err(wrong("must be a string or a list of parts".to_owned())),
        };
        self.fields.insert("content".to_owned(), text.into());
        Ok(self)
    }

    /// Returns the fields as templates see them: without null values, and with the reasoning under each
    /// of the names that templates read, as transformers passes it.
    pub(super) fn for_template(&self) -> Map<String, Value> {
        let given = |key: &str| self.get(key).filter(|value| !value.is_null());
        let mut fields = self.fields.clone();
        fields.retain(|_, value| !value.is_null());
        let names = ["reasoning_content", "thinking", "reasoning"];
        if let Some(thought) = names.into_iter().find_map(given) {
            let thinking = given("thinking").unwrap_or(thought).clone();
            fields.insert("thinking".to_owned(), thinking);
            fields.insert("reasoning_content".to_owned(), thought.clone());
        }
        fields
    }
}

impl From<Map<String, Value>> for Message {
    fn from(fields: Map<String, Value>) -> Message {
        Message { fields }
    }
}
