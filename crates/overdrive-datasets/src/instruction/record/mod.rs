mod context;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::chat::ChatMessage;
use super::message::{is_blank, kind, messages};
use crate::records::json_problem;
use context::Context;

/// The keys of a record that would change its text, and that are not supported.
const REFUSED: [(&str, &str); 9] = [
    ("images", "only text is supported"),
    ("image", "only text is supported"),
    ("videos", "only text is supported"),
    ("audios", "only text is supported"),
    ("documents", "put their text into a message"),
    (
        "chat_template_kwargs",
        "set the variables of the template in the template itself",
    ),
    (
        "kto_tag",
        "there is no training on single ratings; keep the records with good answers",
    ),
    (
        "chosen",
        "train on preferences (the example `dpo`), or put the good answer into the record",
    ),
    (
        "rejected",
        "train on preferences (the example `dpo`), or put the good answer into the record",
    ),
];

/// The answer of a record that is read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AnswerKey {
    /// The answer of instruction data. The default.
    #[default]
    Response,
    /// The preferred answer of preference data.
    Chosen,
    /// The other answer of preference data.
    Rejected,
}

impl AnswerKey {
    /// Returns the keys that may hold the answer to a `prompt`.
    fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Response => &["response", "completion"],
            Self::Chosen => &["chosen"],
            Self::Rejected => &["rejected"],
        }
    }
}

/// A record of instruction data.
///
/// | keys | form |
/// |---|---|
/// | `messages` (or `conversations`): `[{role, content}, …]` | a conversation |
/// | `conversations`: `[{from, value}, …]` | the same in ShareGPT's form |
/// | `prompt`, `response` (or `completion`), each a text | a question and its answer |
/// | `prompt`, `completion`, each `[{role, content}, …]` | a conversation; the messages of `completion` are the answer |
/// | `instruction`, `output` (or `response`), and `input` (or `context`) | Alpaca's instruction, input and output |
/// | `text` | a text, all of which enters the loss |
///
/// Beside all of these but `text`:
///
/// | key | effect |
/// |---|---|
/// | `system` (or `system_prompt`) | the system message; an error if the messages have one too |
/// | `tools` (or OpenAI's `functions`), a list or a text of JSON | the tools that the chat template renders |
/// | `history`: `[[question, answer], …]` | earlier turns before a question; their answers enter the loss, as in LLaMA-Factory |
///
/// A message with `weight` 0 (or `train`, `training` or `loss` that is `false`) does not enter the loss. OpenAI's
/// `function_call`, a text of JSON as `arguments`, a list of text parts as `content`, and ShareGPT's `function_call`
/// are converted to the form that templates read. Keys that would change the text and are not supported are errors:
/// images, preferences (`chosen`, `rejected`, `kto_tag`), `documents`, `refusal`. A missing key, null and an empty
/// text or list are the same. All other keys are ignored, and so is OpenAI's `parallel_tool_calls`, which no template
/// renders.
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
        /// The system prompt, from `system`.
        system: Option<String>,
        /// The instruction.
        instruction: String,
        /// The input; it may be empty.
        input: String,
        /// The answer.
        output: String,
    },
    /// A conversation.
    Chat {
        /// The messages. One with `weight` 0 does not enter the loss.
        messages: Vec<ChatMessage>,
        /// The tools that the assistant may call.
        tools: Option<Value>,
        /// The number of messages of the prompt, which do not enter the loss: 0 except for `prompt` and
        /// `completion`.
        prompt_messages: usize,
    },
}

impl InstructionRecord {
    /// Parses a record of instruction data.
    ///
    /// # Errors
    /// A message that states what is wrong with the record.
    pub fn from_json(bytes: &[u8]) -> Result<InstructionRecord, String> {
        Self::from_fields(fields_of(bytes)?, AnswerKey::Response)
    }

    /// Parses a record of the kind of data that has `answer`.
    pub(super) fn with_answer(
        bytes: &[u8],
        answer: AnswerKey,
    ) -> Result<InstructionRecord, String> {
        match answer {
            AnswerKey::Response => Self::from_json(bytes),
            AnswerKey::Chosen | AnswerKey::Rejected => Self::from_preference_json(bytes, answer),
        }
    }

    /// Parses a record of preference data and keeps the answer that `answer` selects. The record has the columns of
    /// TRL:
    ///
    /// | keys | form |
    /// |---|---|
    /// | `prompt`, `chosen`, `rejected`, each a text | a question and two answers |
    /// | `prompt`, `chosen`, `rejected`, each `[{role, content}, …]` | a conversation and two continuations |
    /// | `chosen`, `rejected`, each `[{role, content}, …]` | two conversations; the messages with which both begin are the prompt |
    ///
    /// The keys beside these are those of instruction data.
    ///
    /// # Errors
    /// A message that states what is wrong with the record.
    pub fn from_preference_json(
        bytes: &[u8],
        answer: AnswerKey,
    ) -> Result<InstructionRecord, String> {
        let mut fields = fields_of(bytes)?;
        for key in ["chosen", "rejected"] {
            if !fields.contains_key(key) {
                return Err(format!(
                    "it has no `{key}`; a record of preference data has `prompt`, `chosen` and `rejected`"
                ));
            }
        }
        split_off_prompt(&mut fields)?;
        // The other answer, and the forms of instruction data that published preference data repeats.
        let others = ["chosen", "rejected", "messages", "conversations"];
        fields.retain(|key, _| {
            answer.keys().contains(&key.as_str()) || !others.contains(&key.as_str())
        });
        Self::from_fields(fields, answer)
    }

    fn from_fields(
        mut fields: Map<String, Value>,
        answer: AnswerKey,
    ) -> Result<InstructionRecord, String> {
        for (key, remedy) in REFUSED {
            // Published preference data repeats the chosen answer in `messages`.
            let is_repeated =
                fields.contains_key("messages") && ["chosen", "rejected"].contains(&key);
            let is_read = answer.keys().contains(&key);
            if !is_repeated && !is_read && fields.get(key).is_some_and(|value| !is_blank(value)) {
                return Err(format!("`{key}` is not supported; {remedy}"));
            }
        }
        let context = Context::take(&mut fields)?;
        if let Some((key, value)) = take(&mut fields, &["messages", "conversations"]) {
            return context.of_messages(key, messages(key, value)?, 0);
        }
        if let Some((_, prompt)) = take(&mut fields, &["prompt"]) {
            let (key, answer) = take(&mut fields, answer.keys())
                .ok_or("it has `prompt`, but neither `response` nor `completion`")?;
            return match prompt {
                Value::Array(_) => {
                    let mut all = messages("prompt", prompt)?;
                    let prompt_messages = all.len();
                    all.extend(messages(key, answer)?);
                    context.of_messages("prompt", all, prompt_messages)
                }
                _ => {
                    let (prompt, response) = (text("prompt", prompt)?, text(key, answer)?);
                    Ok(match context.needs_messages() {
                        true => context.of_turn(&prompt, &response),
                        false => InstructionRecord::Answer {
                            system: context.system,
                            prompt,
                            response,
                        },
                    })
                }
            };
        }
        if let Some((_, instruction)) = take(&mut fields, &["instruction"]) {
            let (key, output) = take(&mut fields, &["output", "response"])
                .ok_or("it has `instruction`, but neither `output` nor `response`")?;
            let instruction = text("instruction", instruction)?;
            let input = take(&mut fields, &["input", "context"]);
            let input = input.map(|(key, value)| text(key, value)).transpose()?;
            let input = input.unwrap_or_default();
            let output = text(key, output)?;
            return Ok(match context.needs_messages() {
                true => context.of_turn(&task_message(&instruction, &input), &output),
                false => InstructionRecord::Task {
                    system: context.system,
                    instruction,
                    input,
                    output,
                },
            });
        }
        if let Some((key, value)) = take(&mut fields, &["text"]) {
            if let Some(other) = context.first_key() {
                return Err(format!(
                    "it has `{other}` beside `text`, which must be the complete text; use `messages`, or put it into the text"
                ));
            }
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

/// Parses the fields of a record.
fn fields_of(bytes: &[u8]) -> Result<Map<String, Value>, String> {
    let value: Value = serde_json::from_slice(bytes).map_err(|error| json_problem(&error))?;
    let Value::Object(mut fields) = value else {
        return Err("expected a JSON object".to_owned());
    };
    // Datasets with columns of one type fill missing fields with null.
    fields.retain(|_, value| !value.is_null());
    Ok(fields)
}

/// Moves the messages with which both answers begin to `prompt`, unless the record has a prompt of messages, or a
/// prompt of text with answers of text. A text beside two whole conversations repeats their beginning, so it does
/// not count as a prompt.
fn split_off_prompt(fields: &mut Map<String, Value>) -> Result<(), String> {
    let (chosen, rejected) = (fields.get("chosen"), fields.get("rejected"));
    let lists = chosen
        .and_then(Value::as_array)
        .zip(rejected.and_then(Value::as_array));
    let (chosen, rejected) = match (fields.get("prompt"), lists) {
        (None | Some(Value::String(_)), Some(lists)) => lists,
        (None, None) => {
            return Err(
                "it has no `prompt`, which may be left out only if `chosen` and `rejected` are lists of messages with \
                 a common beginning"
                    .to_owned(),
            );
        }
        _ => return Ok(()),
    };
    let messages = chosen.iter().zip(rejected);
    let common = messages.take_while(|(one, other)| one == other).count();
    if common == 0 {
        return Err(
            "its `chosen` and `rejected` have no first message in common, and `prompt` is not a list of messages; put \
             the messages before the answers into `prompt`"
                .to_owned(),
        );
    }
    let prompt = chosen[..common].to_vec();
    let answers = [
        ("chosen", chosen[common..].to_vec()),
        ("rejected", rejected[common..].to_vec()),
    ];
    fields.insert("prompt".to_owned(), prompt.into());
    for (key, messages) in answers {
        fields.insert(key.to_owned(), messages.into());
    }
    Ok(())
}

/// Returns the user's message of an instruction and its input.
pub(super) fn task_message(instruction: &str, input: &str) -> String {
    match input.is_empty() {
        true => instruction.to_owned(),
        false => format!("{instruction}\n\n{input}"),
    }
}

/// Removes the first of these keys that exists, and returns it with its value.
fn take(fields: &mut Map<String, Value>, keys: &[&'static str]) -> Option<(&'static str, Value)> {
    keys.iter()
        .find_map(|&key| Some((key, fields.remove(key)?)))
}

/// Removes all of these keys, which are synonyms, and returns the one that is not blank.
fn take_one(
    fields: &mut Map<String, Value>,
    keys: &[&'static str],
) -> Result<Option<(&'static str, Value)>, String> {
    let mut found: Option<(&'static str, Value)> = None;
    while let Some((key, value)) = take(fields, keys) {
        match &found {
            _ if is_blank(&value) => {}
            Some((other, before)) if *before != value => {
                return Err(format!(
                    "it has `{other}` and `{key}`, which differ; keep one of them"
                ));
            }
            _ => found = Some((key, value)),
        }
    }
    Ok(found)
}

fn text(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("`{key}` is {}, expected a text", kind(&other))),
    }
}
