use std::ops::Range;

use serde_json::{Map, Value};

use super::message::needs_template;

/// A message of a conversation as a JSON object: `role`, `content` and any other fields that a template reads.
pub type ChatMessage = Map<String, Value>;

/// A chat template: the format in which a model expects its conversations.
///
/// This crate has no template engine; `overdrive_generation::ChatTemplate` is one, and overdrive-trainer
/// connects the two.
pub trait ChatFormat: Send + Sync {
    /// Returns the text of a conversation. If `add_generation_prompt` is `true`, it ends with the beginning of an
    /// answer.
    ///
    /// # Errors
    /// A message that states why the template rejects the conversation.
    fn render(
        &self,
        messages: &[ChatMessage],
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<RenderedChat, String>;
}

/// A conversation rendered as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RenderedChat {
    /// The text.
    pub text: String,
    /// The byte ranges of the assistant's answers, if the template marks them (`{% generation %}`); `None` if it
    /// does not.
    pub answers: Option<Vec<Range<usize>>>,
}

/// The format of conversations for models without a chat template. A message is written as
///
/// ```text
/// ### User:
/// What is Rust?
///
/// ```
///
/// and an answer, which enters the loss, ends with the end-of-text token instead of the empty line. Tools, their
/// calls and reasoning are errors.
#[derive(Debug, Clone)]
pub struct PlainChat {
    end: String,
}

impl PlainChat {
    /// Returns the format with the text of the token that ends an answer; an empty text stands for none.
    pub fn new(end_of_text: impl Into<String>) -> PlainChat {
        PlainChat {
            end: end_of_text.into(),
        }
    }

    /// Returns the heading of a message.
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
        tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<RenderedChat, String> {
        if tools.is_some() {
            return Err(
                "the record has tools, which need a chat template, but the model has none"
                    .to_owned(),
            );
        }
        let mut text = String::new();
        let mut answers = Vec::new();
        for (index, message) in messages.iter().enumerate() {
            if let Some(key) = needs_template(message) {
                return Err(format!(
                    "message {} has `{key}`, which needs a chat template, but the model has none",
                    index + 1
                ));
            }
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
                // The end token belongs to the answer: a model must learn to stop.
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
            // White space after the last answer belongs to no message.
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

/// Returns the role of a message; empty if it has none.
pub(super) fn role(message: &ChatMessage) -> &str {
    message
        .get("role")
        .and_then(Value::as_str)
        .unwrap_or_default()
}

/// Finds the assistant's answers if the template does not mark them. An answer is the text by which the
/// conversation up to and including it is longer than the conversation before it with a generation prompt.
pub(super) fn answers_by_prefix(
    format: &dyn ChatFormat,
    messages: &[ChatMessage],
    tools: Option<&Value>,
    text: &str,
) -> Result<Vec<Range<usize>>, String> {
    let mut answers = Vec::new();
    for (index, message) in messages.iter().enumerate() {
        if role(message) != "assistant" {
            continue;
        }
        let start = prompt_length(format, &messages[..index], tools, text, index)?;
        let end = if index + 1 == messages.len() {
            text.len()
        } else {
            // The answer to a message ends where the conversation up to it ends, which needs another rendering.
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

/// Returns the number of bytes of `text`, the whole conversation, before the answer to `prompt`.
pub(super) fn prompt_length(
    format: &dyn ChatFormat,
    prompt: &[ChatMessage],
    tools: Option<&Value>,
    text: &str,
    index: usize,
) -> Result<usize, String> {
    if prompt.is_empty() {
        return Ok(0);
    }
    let before = format.render(prompt, tools, true)?.text;
    match text.starts_with(&before) {
        true => Ok(before.len()),
        false => Err(not_a_prefix(index)),
    }
}

fn not_a_prefix(index: usize) -> String {
    format!(
        "the chat template renders message {} differently when messages follow it, so the answers \
         cannot be found in the text; use a template with {{% generation %}} tags, one answer per \
         record, or assistant_only_loss = false",
        index + 1
    )
}
