use std::ops::Range;

use serde_json::{Map, Value};

use super::encoder::Problem;

/// A message of a conversation as JSON has it: `role`, `content` and whatever else a template reads.
pub type ChatMessage = Map<String, Value>;

/// How a model wants its conversations written: its chat template.
///
/// This crate knows no template engine; `overdrive_generation::ChatTemplate` is one, and
/// overdrive-trainer puts the two together.
pub trait ChatFormat: Send + Sync {
    /// The text of a conversation. `add_generation_prompt`: whether the beginning of an answer follows.
    ///
    /// # Errors
    /// In words, why the template refuses the conversation.
    fn render(
        &self,
        messages: &[ChatMessage],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<RenderedChat, String>;
}

/// A conversation as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// Which bytes of it the assistant has written, where the template marks them
    /// (`{% generation %}`); `None` where it marks nothing.
    pub answers: Option<Vec<Range<usize>>>,
}

/// What stands for a chat template where a model has none. A message is written as
///
/// ```text
/// ### User:
/// What is Rust?
///
/// ```
///
/// and an answer, which is what is learned, ends with the end-of-text token in place of the empty line.
#[derive(Debug, Clone)]
pub struct PlainChat {
    end: String,
}

impl PlainChat {
    /// With the text of the token that ends an answer; empty for none.
    pub fn new(end_of_text: impl Into<String>) -> PlainChat {
        PlainChat {
            end: end_of_text.into(),
        }
    }

    /// The line before a message.
    fn heading(role: &str) -> String {
        let mut letters = role.chars();
        let first = letters.next().map(|first| first.to_uppercase().to_string());
        format!("### {}{}:\n", first.unwrap_or_default(), letters.as_str())
    }
}

impl ChatFormat for PlainChat {
    fn render(
        &self,
        messages: &[ChatMessage],
        _tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<RenderedChat, String> {
        let mut text = String::new();
        let mut answers = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            let role = role(message);
            let content = message.get("content").and_then(Value::as_str);
            let content = content.ok_or_else(|| {
                format!(
                    "message {} has no text, which needs a chat template",
                    index + 1
                )
            })?;
            text.push_str(&PlainChat::heading(role));
            let start = text.len();
            text.push_str(content);
            if role == "assistant" && !self.end.is_empty() {
                text.push_str(&self.end);
                answers.push(start..text.len());
                text.push('\n');
            } else if role == "assistant" {
                answers.push(start..text.len());
                text.push_str("\n\n");
            } else {
                text.push_str("\n\n");
            }
        }
        if let Some(last) = answers.last()
            && text[last.end..].trim().is_empty()
        {
            // What follows the last answer is nobody's.
            text.truncate(last.end);
        }
        if add_generation_prompt {
            text.push_str(&PlainChat::heading("assistant"));
        }
        Ok(RenderedChat {
            text,
            answers: Some(answers),
        })
    }
}

/// Who speaks; empty where the message does not say.
pub(super) fn role(message: &ChatMessage) -> &str {
    message
        .get("role")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// What the assistant wrote, where the template does not mark it: of each of its messages, what the
/// conversation up to it has more than the conversation before it and the beginning of an answer.
pub(super) fn answers_by_prefix(
    format: &dyn ChatFormat,
    messages: &[ChatMessage],
    tools: Option<&Value>,
    text: &str,
) -> Result<Vec<Range<usize>>, Problem> {
    let mut answers = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        if role(message) != "assistant" {
            continue;
        }
        let start = prompt_length(format, &messages[..index], tools, text, index)?;
        let end = if index + 1 == messages.len() {
            text.len()
        } else {
            let upto = format.render(&messages[..=index], tools, false)?.text;
            if !text.starts_with(&upto) || upto.len() < start {
                return Err(not_a_prefix(index));
            }
            upto.len()
        };
        answers.push(start..end);
    }
    Ok(answers)
}

/// The bytes of `text`, the whole conversation, that stand before the answer to `prompt`.
pub(super) fn prompt_length(
    format: &dyn ChatFormat,
    prompt: &[ChatMessage],
    tools: Option<&Value>,
    text: &str,
    index: usize,
) -> Result<usize, Problem> {
    if prompt.is_empty() {
        return Ok(0);
    }
    let before = format.render(prompt, tools, true)?.text;
    match text.starts_with(&before) {
        true => Ok(before.len()),
        false => Err(not_a_prefix(index)),
    }
}

fn not_a_prefix(index: usize) -> Problem {
    Problem(format!(
        "the chat template writes message {} in another way when messages follow it, so the answers \
         cannot be found in the text; give a template with {{% generation %}} tags, one answer a \
         record, or assistant_only_loss = false",
        index + 1
    ))
}
