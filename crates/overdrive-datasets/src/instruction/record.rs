use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::chat::{ChatMessage, role};
use super::message::{is_blank, kind, message, messages};

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
    let value: Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
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

/// The keys that may stand beside the messages, the question or the instruction of a record.
struct Context {
    system: Option<String>,
    history: Vec<(String, String)>,
    tools: Option<Value>,
}

impl Context {
    /// Removes the keys from a record.
    fn take(fields: &mut Map<String, Value>) -> Result<Self, String> {
        let system = take_one(fields, &["system", "system_prompt"])?;
        let system = system.map(|(key, value)| text(key, value)).transpose()?;
        Ok(Self {
            system,
            history: history(fields)?,
            tools: tools(fields)?,
        })
    }

    fn first_key(&self) -> Option<&'static str> {
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
    fn needs_messages(&self) -> bool {
        !self.history.is_empty() || self.tools.is_some()
    }

    /// Returns the record of the messages under `key`, of which the first `prompt_messages` do not enter the loss.
    fn of_messages(
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
    fn of_turn(self, question: &str, answer: &str) -> InstructionRecord {
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
    fn function_calls_of_openai_and_share_gpt_become_tool_calls_with_arguments_as_json() {
        let messages = |json: &str| match read(json).unwrap() {
            InstructionRecord::Chat { messages, .. } => messages,
            other => panic!("{other:?}"),
        };
        let calls = serde_json::json!([
            {"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}},
        ]);
        for (form, json) in [
            (
                "function_call",
                r#"{"messages": [{"role": "assistant", "content": null,
                    "function_call": {"name": "sum", "arguments": "{\"a\": 1}"}}]}"#,
            ),
            (
                "tool_calls",
                r#"{"messages": [{"role": "assistant", "tool_calls":
                    [{"type": "function", "function": {"name": "sum", "arguments": "{\"a\": 1}"}}]}]}"#,
            ),
            (
                "share_gpt",
                r#"{"conversations": [{"from": "function_call", "value": "{\"name\": \"sum\", \"arguments\": {\"a\": 1}}"}]}"#,
            ),
        ] {
            let messages = messages(json);
            assert_eq!(messages[0]["tool_calls"], calls, "{form}");
            assert_eq!(role(&messages[0]), "assistant", "{form}");
            assert!(!messages[0].contains_key("function_call"), "{form}");
        }
        let result = messages(
            r#"{"messages": [{"role": "function", "name": "sum", "content": [{"type": "text", "text": "a"},
                {"type": "text", "text": "b"}]}]}"#,
        );
        assert_eq!(
            (role(&result[0]), result[0]["content"].as_str()),
            ("tool", Some("a\nb"))
        );
        let record = read(
            r#"{"messages": [{"role": "user", "content": "a"}], "functions": [{"name": "sum"}],
                "parallel_tool_calls": false}"#,
        );
        let Ok(InstructionRecord::Chat { tools, .. }) = record else {
            panic!("{record:?}")
        };
        let expected = serde_json::json!([{"type": "function", "function": {"name": "sum"}}]);
        assert_eq!(tools, Some(expected));
    }

    #[test]
    fn blank_keys_are_missing_ones() {
        let record = read(
            r#"{"instruction": "a", "input": "", "output": "b", "system": "", "history": [], "tools": "", "images": []}"#,
        );
        let plain = read(r#"{"instruction": "a", "output": "b"}"#);
        assert_eq!(record, plain);
        let messages =
            r#"[{"role": "assistant", "content": "a", "tool_calls": [], "refusal": null}]"#;
        let record = read(&format!(r#"{{"messages": {messages}, "system": null}}"#));
        let plain = read(r#"{"messages": [{"role": "assistant", "content": "a"}]}"#);
        assert_eq!(record, plain);
    }

    #[test]
    fn keys_that_would_change_the_text_are_refused_by_name() {
        let chat = |more: &str| {
            format!(r#"{{"conversations": [{{"from": "human", "value": "a"}}], {more}}}"#)
        };
        let said = |more: &str| {
            format!(r#"{{"messages": [{{"role": "assistant", "content": "a", {more}}}]}}"#)
        };
        for (json, problem) in [
            (
                chat(r#""history": [["a", "b"]]"#),
                "it has `history` beside `conversations`; put the earlier turns into `conversations`",
            ),
            (
                chat(r#""history": ["a"]"#),
                "`history` is not a list of pairs",
            ),
            (
                chat(r#""images": ["a.png"]"#),
                "`images` is not supported; only text is supported",
            ),
            (
                chat(r#""chosen": {"from": "gpt", "value": "b"}"#),
                "`chosen` is not supported",
            ),
            (chat(r#""kto_tag": false"#), "`kto_tag` is not supported"),
            (
                chat(r#""tools": [{}], "functions": [{}]"#),
                "it has `tools` and `functions`",
            ),
            (
                chat(r#""system": "a", "system_prompt": "b""#),
                "it has `system` and `system_prompt`, which differ",
            ),
            (
                r#"{"messages": [{"role": "system", "content": "a"}], "system": "b"}"#.to_owned(),
                "it has `system`, and another system message in `messages`; remove one of them",
            ),
            (
                r#"{"text": "a", "system": "b"}"#.to_owned(),
                "it has `system` beside `text`, which must be the complete text",
            ),
            (
                said(r#""weight": 0.5"#),
                "has a `weight` of 0.5; it must be 0 or false",
            ),
            (
                said(r#""weight": 0, "train": true"#),
                "has `weight` and `train`, which contradict",
            ),
            (
                said(r#""refusal": "No.""#),
                "has `refusal`, which is not supported; put the text",
            ),
            (
                said(r#""train_detail": [{}]"#),
                "has `train_detail`, which is not supported",
            ),
            (
                said(r#""tool_calls": [{"function": {"name": "f", "arguments": "{"}}]"#),
                "has a call whose `arguments` are not JSON",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a", "weight": 1}]}"#.to_owned(),
                "message 1 of `messages` has `weight`, but is from the user; only messages of the assistant",
            ),
            (
                r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#
                    .to_owned(),
                "has a part of the type \"image_url\" in `content`; only text is supported",
            ),
        ] {
            let error = read(&json).unwrap_err();
            assert!(error.contains(problem), "{json}: {error}");
        }
        // A system prompt that occurs twice counts once, and published preference data repeats the chosen
        // answer in `messages`.
        let twice =
            r#"{"messages": [{"role": "system", "content": "a"}], "system": "a", "chosen": "b"}"#;
        assert_eq!(
            read(twice),
            read(r#"{"messages": [{"role": "system", "content": "a"}]}"#)
        );
    }

    #[test]
    fn invalid_records_are_errors_with_a_reason() {
        for (json, problem) in [
            (
                r#"{"prompt": "a"}"#,
                "it has `prompt`, but neither `response` nor `completion`",
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

    fn preference(json: &str) -> [Result<InstructionRecord, String>; 2] {
        [AnswerKey::Chosen, AnswerKey::Rejected]
            .map(|answer| InstructionRecord::from_preference_json(json.as_bytes(), answer))
    }

    #[test]
    fn the_two_answers_of_a_preference_record_are_the_answers_to_one_prompt() {
        let [chosen, rejected] =
            preference(r#"{"prompt": "1+1=", "chosen": "2", "rejected": "3", "system": "Add."}"#);
        let answer = |text: &str| InstructionRecord::Answer {
            system: Some("Add.".to_owned()),
            prompt: "1+1=".to_owned(),
            response: text.to_owned(),
        };
        assert_eq!(chosen, Ok(answer("2")));
        assert_eq!(rejected, Ok(answer("3")));

        let user = r#"{"role": "user", "content": "Hi"}"#;
        let says = |text: &str| format!(r#"{{"role": "assistant", "content": "{text}"}}"#);
        let (good, bad) = (says("Hello!"), says("What?"));
        let explicit =
            format!(r#"{{"prompt": [{user}], "chosen": [{good}], "rejected": [{bad}]}}"#);
        // Whole conversations, as in published data, with or without the question as a text.
        let whole = format!(
            r#"{{"chosen": [{user}, {good}], "rejected": [{user}, {bad}], "messages": [{user}, {good}]}}"#
        );
        let repeated = whole.replacen('{', r#"{"prompt": "Hi", "#, 1);
        for json in [&explicit, &whole, &repeated] {
            for (record, text) in preference(json).into_iter().zip(["Hello!", "What?"]) {
                let Ok(InstructionRecord::Chat {
                    messages,
                    prompt_messages: 1,
                    ..
                }) = record
                else {
                    panic!("{json}: {record:?}")
                };
                assert_eq!(messages.len(), 2, "{json}");
                assert_eq!(messages[1]["content"], text, "{json}");
            }
        }
    }

    #[test]
    fn an_incomplete_preference_record_is_refused_with_the_missing_key() {
        let turn = r#"[{"role": "user", "content": "a"}]"#;
        let other = turn.replace('a', "b");
        for (json, expected) in [
            (
                r#"{"prompt": "a", "chosen": "b"}"#.to_owned(),
                "no `rejected`",
            ),
            (
                r#"{"prompt": "a", "rejected": "b"}"#.to_owned(),
                "no `chosen`",
            ),
            (
                r#"{"chosen": "ab", "rejected": "ac"}"#.to_owned(),
                "no `prompt`",
            ),
            (
                format!(r#"{{"chosen": {turn}, "rejected": {other}}}"#),
                "no first message",
            ),
            (
                format!(r#"{{"chosen": {turn}, "rejected": {turn}}}"#),
                "empty list",
            ),
            (
                format!(r#"{{"prompt": {turn}, "chosen": "b", "rejected": "c"}}"#),
                "is a text",
            ),
            (
                r#"{"prompt": "a", "chosen": "b", "rejected": ["c"]}"#.to_owned(),
                "is a list",
            ),
        ] {
            let refused = preference(&json).into_iter().filter_map(Result::err);
            let refused: Vec<String> = refused.collect();
            assert!(
                refused.iter().any(|problem| problem.contains(expected)),
                "{json}: {refused:?}"
            );
        }
        let error = read(r#"{"prompt": "a", "chosen": "b", "rejected": "c"}"#).unwrap_err();
        assert!(error.contains("the example `dpo`"), "{error}");
    }
}
