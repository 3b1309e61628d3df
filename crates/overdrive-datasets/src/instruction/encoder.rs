use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::chat::{
    ChatFormat, ChatMessage, PlainChat, RenderedChat, answers_by_prefix, prompt_length, role,
};
use super::message::{has_no_weight, message};
use super::record::{InstructionRecord, task_message};
use crate::tokenizer_files::switch_limits_off;
use crate::{Error, IGNORE_INDEX, Result, TokenizedExample};
use overdrive_core::{Error as CommonError, check_at_least, check_option};

/// The options of [`InstructionEncoder`]: the tokens that enter the loss, and the format of records without a
/// chat template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EncodeOptions {
    /// The maximum number of tokens of a sequence; longer ones are truncated (TRL's `max_length`). Default: 1024.
    pub max_seq_length: usize,
    /// If `true`, only the answer of a prompt and an answer enters the loss. Default: `true`, as in TRL.
    pub completion_only_loss: bool,
    /// If `true`, only the assistant's messages of a conversation enter the loss. Default: `true`; TRL's default
    /// is `false`.
    pub assistant_only_loss: bool,
    /// The format of a prompt without a chat template, with `{prompt}` at the position of the prompt. Default:
    /// `{prompt}` alone, as in TRL.
    pub prompt_template: String,
}

impl Default for EncodeOptions {
    fn default() -> Self {
        EncodeOptions {
            max_seq_length: 1024,
            completion_only_loss: true,
            assistant_only_loss: true,
            prompt_template: "{prompt}".to_owned(),
        }
    }
}

/// An encoder of records as tokens and labels. It uses the model's chat template; without one, a prompt and its
/// answer are concatenated and followed by the end-of-text token, as in TRL, Alpaca's records are written with
/// Alpaca's prompt, and conversations as [`PlainChat`] does.
///
/// Labels are [`IGNORE_INDEX`] except for answers: the text between a template's `{% generation %}` tags, or,
/// if it has none, the text that follows a generation prompt. A token that has a byte of an answer enters the
/// loss. Messages with `weight` 0 do not.
pub struct InstructionEncoder {
    tokenizer: Tokenizer,
    chat: Option<Arc<dyn ChatFormat>>,
    end_of_text: Option<(u32, String)>,
    options: EncodeOptions,
}

impl InstructionEncoder {
    /// Returns an encoder with the model's chat template, if it has one, and its end-of-text token.
    ///
    /// # Errors
    /// [`Error::Common`] for an `end_of_text` that the tokenizer does not have, fewer than two tokens per sequence,
    /// or a `prompt_template` without `{prompt}`.
    pub fn new(
        mut tokenizer: Tokenizer,
        chat: Option<Arc<dyn ChatFormat>>,
        end_of_text: Option<u32>,
        options: EncodeOptions,
    ) -> Result<InstructionEncoder> {
        // A single token has no next token to predict.
        check_at_least("max_seq_length", options.max_seq_length, 2)?;
        check_option(
            options.prompt_template.contains("{prompt}"),
            "prompt_template",
            format!("{:?}", options.prompt_template),
            "a text with {prompt} at the position of the prompt",
        )?;
        let end_of_text = end_of_text
            .map(|id| {
                let text = tokenizer.id_to_token(id);
                let text = text.ok_or_else(|| {
                    CommonError::option(
                        "end_of_text",
                        id,
                        "a token that the tokenizer has, or None",
                    )
                })?;
                Ok::<_, Error>((id, text))
            })
            .transpose()?;
        // The encoder truncates and the batch pads; the tokenizer must do neither.
        switch_limits_off(&mut tokenizer)?;
        Ok(InstructionEncoder {
            tokenizer,
            chat,
            end_of_text,
            options,
        })
    }

    /// Returns the options of the encoder.
    pub fn options(&self) -> &EncodeOptions {
        &self.options
    }

    /// Returns the tokenizer, without truncation and padding.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the token that ends an answer without a chat template.
    pub fn end_of_text(&self) -> Option<u32> {
        self.end_of_text.as_ref().map(|(id, _)| *id)
    }

    /// Returns `true` if records are written with a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.chat.is_some()
    }

    /// Returns the tokens and labels of a record, at most `max_seq_length` of them. If truncation removes all
    /// answers, no label enters the loss.
    ///
    /// # Errors
    /// A message that states why the record cannot be tokenized.
    pub fn encode(
        &self,
        record: &InstructionRecord,
    ) -> std::result::Result<TokenizedExample, String> {
        let learned = LossOptions {
            completion_only: self.options.completion_only_loss,
            assistant_only: self.options.assistant_only_loss,
        };
        let text = self.write(record, learned)?;
        self.tokenize(&text)
    }

    /// Returns the prompt that a model is given: the record's text up to the (last) answer, and its tokens; `None`
    /// for a record without an answer.
    ///
    /// # Errors
    /// Those of [`InstructionEncoder::encode`].
    pub fn prompt(
        &self,
        record: &InstructionRecord,
    ) -> std::result::Result<Option<(String, Vec<i64>)>, String> {
        let learned = LossOptions {
            completion_only: true,
            assistant_only: true,
        };
        let text = self.write(record, learned)?;
        let (Some(answer), false) = (text.learned.last(), text.is_all_learned()) else {
            return Ok(None);
        };
        let prompt = &text.text[..answer.start];
        let encoding = self
            .tokenizer
            .encode(prompt, text.add_special_tokens)
            .map_err(|error| error.to_string())?;
        let ids = encoding.get_ids().iter().map(|&id| i64::from(id));
        Ok(Some((prompt.to_owned(), ids.collect())))
    }

    fn write(
        &self,
        record: &InstructionRecord,
        learned: LossOptions,
    ) -> std::result::Result<RenderedRecord, String> {
        match (record, &self.chat) {
            (InstructionRecord::Text(text), _) => Ok(self.completion("", text, learned)),
            (
                InstructionRecord::Chat {
                    messages,
                    tools,
                    prompt_messages,
                },
                chat,
            ) => {
                let plain;
                let format: &dyn ChatFormat = match chat {
                    Some(chat) => chat.as_ref(),
                    None => {
                        plain = PlainChat::new(self.end_text());
                        &plain
                    }
                };
                self.chat(format, messages, tools.as_ref(), *prompt_messages, learned)
            }
            (
                InstructionRecord::Answer {
                    system,
                    prompt,
                    response,
                },
                Some(chat),
            ) => {
                let mut messages = Vec::new();
                messages.extend(system.as_deref().map(|text| message("system", text)));
                messages.push(message("user", prompt));
                let prompts = messages.len();
                messages.push(message("assistant", response));
                self.chat(chat.as_ref(), &messages, None, prompts, learned)
            }
            (
                InstructionRecord::Task {
                    system,
                    instruction,
                    input,
                    output,
                },
                Some(chat),
            ) => {
                let mut messages = Vec::new();
                messages.extend(system.as_deref().map(|text| message("system", text)));
                messages.push(message("user", &task_message(instruction, input)));
                let prompts = messages.len();
                messages.push(message("assistant", output));
                self.chat(chat.as_ref(), &messages, None, prompts, learned)
            }
            (
                InstructionRecord::Answer {
                    system,
                    prompt,
                    response,
                },
                None,
            ) => {
                let prompt = self.options.prompt_template.replace("{prompt}", prompt);
                let prompt = match system {
                    Some(system) => format!("{system}\n\n{prompt}"),
                    None => prompt,
                };
                Ok(self.completion(&prompt, response, learned))
            }
            (
                InstructionRecord::Task {
                    system,
                    instruction,
                    input,
                    output,
                },
                None,
            ) => {
                let prompt = alpaca_prompt(system.as_deref(), instruction, input);
                Ok(self.completion(&prompt, output, learned))
            }
        }
    }

    fn chat(
        &self,
        format: &dyn ChatFormat,
        messages: &[ChatMessage],
        tools: Option<&Value>,
        prompt_messages: usize,
        learned: LossOptions,
    ) -> std::result::Result<RenderedRecord, String> {
        let rendered = format.render(messages, tools, false)?;
        let all = 0..rendered.text.len();
        let is_completion = prompt_messages > 0;
        let learned = if is_completion && learned.completion_only {
            let prompt = &messages[..prompt_messages];
            let start = prompt_length(format, prompt, tools, &rendered.text, prompt_messages)?;
            std::iter::once(start..all.end).collect()
        } else if is_completion || !learned.assistant_only {
            let mut prompts = messages
                .iter()
                .filter(|message| role(message) != "assistant");
            if prompts.any(has_no_weight) {
                return Err(
                    "a message that is not an answer has `weight` 0, but this run trains on the whole conversation; \
                     remove the weight, or set assistant_only_loss = true"
                        .to_owned(),
                );
            }
            std::iter::once(all).collect()
        } else {
            answers(format, messages, tools, &rendered)?
        };
        let is_left_out =
            |message: &&ChatMessage| role(message) == "assistant" && has_no_weight(message);
        let learned = match messages.iter().find(is_left_out) {
            None => learned,
            Some(_) => {
                let answers = answers(format, messages, tools, &rendered)?;
                without(learned, &left_out(messages, answers)?)
            }
        };
        Ok(RenderedRecord {
            text: rendered.text,
            learned,
            // The template has written the special tokens and the end.
            add_special_tokens: false,
            add_end: false,
        })
    }

    /// Renders a prompt and an answer, followed by the end-of-text token.
    fn completion(&self, prompt: &str, answer: &str, learned: LossOptions) -> RenderedRecord {
        let text = format!("{prompt}{answer}");
        let start = match learned.completion_only {
            true => prompt.len(),
            false => 0,
        };
        let learned = std::iter::once(start..text.len()).collect();
        RenderedRecord {
            learned,
            text,
            add_special_tokens: true,
            add_end: true,
        }
    }

    fn end_text(&self) -> &str {
        self.end_of_text.as_ref().map_or("", |(_, text)| text)
    }

    fn tokenize(&self, written: &RenderedRecord) -> std::result::Result<TokenizedExample, String> {
        let encoding = self
            .tokenizer
            .encode(written.text.as_str(), written.add_special_tokens)
            .map_err(|error| error.to_string())?;
        let mut input_ids = Vec::with_capacity(encoding.len() + 1);
        let mut labels = Vec::with_capacity(encoding.len() + 1);
        let mut spans = written.learned.iter().peekable();
        let everything = written.is_all_learned();
        for (&id, &(start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            // Ranges that end before the token are done; empty tokens (special ones) skip none.
            while spans
                .next_if(|span| span.end <= start && start < end)
                .is_some()
            {}
            // A token that is partly in an answer counts: the model must predict all of it.
            let learned = spans
                .peek()
                .is_some_and(|span| start < end && end > span.start && start < span.end);
            input_ids.push(i64::from(id));
            labels.push(match learned || everything {
                true => i64::from(id),
                false => IGNORE_INDEX,
            });
        }
        if written.add_end
            && let Some((end, _)) = &self.end_of_text
        {
            let end = i64::from(*end);
            if input_ids.last() == Some(&end) {
                // The text or the tokenizer has already added the token; it enters the loss nevertheless.
                labels.pop();
            } else {
                input_ids.push(end);
            }
            labels.push(end);
        }
        let truncated = input_ids.len() > self.options.max_seq_length;
        input_ids.truncate(self.options.max_seq_length);
        labels.truncate(self.options.max_seq_length);
        Ok(TokenizedExample {
            input_ids,
            labels,
            truncated,
        })
    }
}

impl fmt::Debug for InstructionEncoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InstructionEncoder")
            .field("has_chat_template", &self.chat.is_some())
            .field("end_of_text", &self.end_of_text)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

/// The parts of prompts and answers, and of conversations, that enter the loss.
#[derive(Debug, Clone, Copy)]
struct LossOptions {
    completion_only: bool,
    assistant_only: bool,
}

/// A record rendered as text.
struct RenderedRecord {
    text: String,
    /// The byte ranges that enter the loss, in order.
    learned: Vec<Range<usize>>,
    add_special_tokens: bool,
    add_end: bool,
}

impl RenderedRecord {
    fn is_all_learned(&self) -> bool {
        matches!(self.learned.as_slice(), [all] if *all == (0..self.text.len()))
    }
}

/// Returns the byte ranges of the assistant's answers.
fn answers(
    format: &dyn ChatFormat,
    messages: &[ChatMessage],
    tools: Option<&Value>,
    rendered: &RenderedChat,
) -> std::result::Result<Vec<Range<usize>>, String> {
    match &rendered.answers {
        Some(answers) => Ok(answers.clone()),
        None => answers_by_prefix(format, messages, tools, &rendered.text),
    }
}

/// Returns the `answers` whose messages have the weight 0.
fn left_out(
    messages: &[ChatMessage],
    answers: Vec<Range<usize>>,
) -> std::result::Result<Vec<Range<usize>>, String> {
    let of_assistant = messages
        .iter()
        .filter(|message| role(message) == "assistant");
    let (count, marked) = (of_assistant.clone().count(), answers.len());
    if count != marked {
        return Err(format!(
            "a message has `weight` 0, but the chat template marks {marked} answers for {count} messages of the \
             assistant, so the answer to leave out cannot be identified; use a template that marks each answer once"
        ));
    }
    let weighted = of_assistant.zip(answers);
    let left_out = weighted.filter_map(|(message, range)| has_no_weight(message).then_some(range));
    Ok(left_out.collect())
}

/// Returns the ranges `learned` without the ranges `left_out`; both are in order.
fn without(learned: Vec<Range<usize>>, left_out: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut kept = Vec::new();
    for range in learned {
        let mut start = range.start;
        for out in left_out {
            if out.end <= start || out.start >= range.end {
                continue;
            }
            if out.start > start {
                kept.push(start..out.start);
            }
            start = out.end;
        }
        if start < range.end {
            kept.push(start..range.end);
        }
    }
    kept
}

/// Returns the prompt of Stanford Alpaca, with or without an input. A system prompt takes the place of its first
/// paragraph, as in Axolotl and LLaMA-Factory.
fn alpaca_prompt(system: Option<&str>, instruction: &str, input: &str) -> String {
    let (task, material) = match input.is_empty() {
        true => (
            "Below is an instruction that describes a task. Write a response that appropriately \
             completes the request.",
            String::new(),
        ),
        false => (
            "Below is an instruction that describes a task, paired with an input that provides \
             further context. Write a response that appropriately completes the request.",
            format!("### Input:\n{input}\n\n"),
        ),
    };
    let task = system.unwrap_or(task);
    format!("{task}\n\n### Instruction:\n{instruction}\n\n{material}### Response:\n")
}
