use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// One message of a conversation: what JSON has as an object with `role`, `content` and whatever else
/// the model's template reads (`tool_calls`, `name`, `reasoning_content`, …).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Message {
    fields: Map<String, Value>,
}

impl Message {
    /// A message of any role.
    pub fn new(role: &str, content: impl Into<String>) -> Message {
        let mut fields = Map::new();
        fields.insert("role".to_owned(), role.into());
        fields.insert("content".to_owned(), content.into().into());
        Message { fields }
    }

    /// What the model is told before the conversation. Not every template has a place for it.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new("system", content)
    }

    /// What the user says.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new("user", content)
    }

    /// What the model has said.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new("assistant", content)
    }

    /// With one more field, or another value of it.
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Message {
        self.fields.insert(key.to_owned(), value.into());
        self
    }

    /// A field.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key)
    }

    /// Who speaks; empty where the message does not say.
    pub fn role(&self) -> &str {
        self.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// What is said, where it is one text.
    pub fn content(&self) -> Option<&str> {
        self.get("content").and_then(Value::as_str)
    }

    /// As templates see it: without keys of null, and with what the model thought under each of the
    /// names that templates read, as transformers hands it over.
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
