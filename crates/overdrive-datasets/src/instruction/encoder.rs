use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::chat::{ChatFormat, ChatMessage, PlainChat, answers_by_prefix, prompt_length};
use super::record::InstructionRecord;
use crate::{Error, IGNORE_INDEX, Result, TokenizedExample};

/// What of a record is learned, and how a record without a chat template is written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EncodeOptions {
    /// Tokens of a sequence at most; what follows is cut off. TRL's `max_length`; default 1024.
    pub max_seq_length: usize,
    /// Of a prompt and its answer, learn the answer alone; default true, as TRL's default is.
    pub completion_only_loss: bool,
    /// Of a conversation, learn what the assistant says alone; default true. TRL's default is false:
    /// there the questions are learned too.
    pub assistant_only_loss: bool,
    /// How a prompt is written where no chat template is used, `{prompt}` being its place; default
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

/// What is wrong with a record, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem(pub(super) String);

impl From<String> for Problem {
    fn from(text: String) -> Self {
        Problem(text)
    }
}

/// Turns records into tokens and labels, with the model's chat template or, without one, plainly: a
/// prompt and its answer follow one another and the end-of-text token ends them, as TRL does; Alpaca's
/// records are written with Alpaca's own prompt, conversations as [`PlainChat`] does.
///
/// Labels are [`IGNORE_INDEX`] but for answers: what stands between a template's `{% generation %}`
/// tags, and where it has none, what the conversation has more than with the beginning of an answer
/// alone. A token is learned that has a byte of the answer.
pub struct InstructionEncoder {
    tokenizer: Tokenizer,
    chat: Option<Arc<dyn ChatFormat>>,
    end_of_text: Option<(u32, String)>,
    options: EncodeOptions,
}

impl InstructionEncoder {
    /// With the template of the model, if it has one, and its end-of-text token.
    ///
    /// # Errors
    /// [`Error::UnknownToken`] for an `end_of_text` that the tokenizer lacks;
    /// [`Error::InvalidOption`] for fewer than two tokens a sequence or a `prompt_template` without
    /// `{prompt}`.
    pub fn new(
        mut tokenizer: Tokenizer,
        chat: Option<Arc<dyn ChatFormat>>,
        end_of_text: Option<u32>,
        options: EncodeOptions,
    ) -> Result<InstructionEncoder> {
        if options.max_seq_length < 2 {
            return Err(Error::InvalidOption {
                option: "max_seq_length",
                value: options.max_seq_length.to_string(),
                expected: "a token and the one that follows it are two",
            });
        }
        if !options.prompt_template.contains("{prompt}") {
            return Err(Error::InvalidOption {
                option: "prompt_template",
                value: format!("{:?}", options.prompt_template),
                expected: "{prompt} stands in it, at the place of the prompt",
            });
        }
        let end_of_text = end_of_text
            .map(|id| {
                let text = tokenizer.id_to_token(id);
                let text = text.ok_or_else(|| Error::UnknownToken {
                    token: id.to_string(),
                    option: "end_of_text",
                    known: String::new(),
                })?;
                Ok::<_, Error>((id, text))
            })
            .transpose()?;
        // Both would change what a record is.
        tokenizer
            .with_truncation(None)
            .map_err(Error::tokenizer("switch truncation off"))?;
        tokenizer.with_padding(None);
        Ok(InstructionEncoder {
            tokenizer,
            chat,
            end_of_text,
            options,
        })
    }

    /// The options.
    pub fn options(&self) -> &EncodeOptions {
        &self.options
    }

    /// The tokenizer, without truncation and padding.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Whether records are written with a chat template.
    pub fn has_chat_template(&self) -> bool {
        self.chat.is_some()
    }

    /// The tokens and labels of a record, at most `max_seq_length` of them. Where no answer is left,
    /// no label counts.
    ///
    /// # Errors
    /// In words, why it cannot be tokenized.
    pub fn encode(
        &self,
        record: &InstructionRecord,
    ) -> std::result::Result<TokenizedExample, String> {
        let learned = Learned {
            completions_alone: self.options.completion_only_loss,
            answers_alone: self.options.assistant_only_loss,
        };
        let text = self.write(record, learned).map_err(|problem| problem.0)?;
        self.tokenize(&text).map_err(|problem| problem.0)
    }

    /// What a model is given to answer to: the record's text up to the (last) answer, and the tokens
    /// of it. `None` for a text without an answer.
    ///
    /// # Errors
    /// As [`InstructionEncoder::encode`].
    pub fn prompt(
        &self,
        record: &InstructionRecord,
    ) -> std::result::Result<Option<(String, Vec<i64>)>, String> {
        let learned = Learned {
            completions_alone: true,
            answers_alone: true,
        };
        let text = self.write(record, learned).map_err(|problem| problem.0)?;
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
        learned: Learned,
    ) -> std::result::Result<Written, Problem> {
        match (record, &self.chat) {
            (InstructionRecord::Text(text), _) => Ok(self.ended("", text, learned)),
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
                    instruction,
                    input,
                    output,
                },
                Some(chat),
            ) => {
                let user = match input.is_empty() {
                    true => instruction.clone(),
                    false => format!("{instruction}\n\n{input}"),
                };
                let messages = [message("user", &user), message("assistant", output)];
                self.chat(chat.as_ref(), &messages, None, 1, learned)
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
                Ok(self.ended(&prompt, response, learned))
            }
            (
                InstructionRecord::Task {
                    instruction,
                    input,
                    output,
                },
                None,
            ) => Ok(self.ended(&alpaca_prompt(instruction, input), output, learned)),
        }
    }

    fn chat(
        &self,
        format: &dyn ChatFormat,
        messages: &[ChatMessage],
        tools: Option<&Value>,
        prompt_messages: usize,
        learned: Learned,
    ) -> std::result::Result<Written, Problem> {
        let rendered = format.render(messages, tools, false)?;
        let all = 0..rendered.text.len();
        let is_completion = prompt_messages > 0;
        let learned = if is_completion && learned.completions_alone {
            let prompt = &messages[..prompt_messages];
            let start = prompt_length(format, prompt, tools, &rendered.text, prompt_messages)?;
            std::iter::once(start..all.end).collect()
        } else if is_completion || !learned.answers_alone {
            vec![all]
        } else if let Some(answers) = rendered.answers {
            answers
        } else {
            answers_by_prefix(format, messages, tools, &rendered.text)?
        };
        Ok(Written {
            text: rendered.text,
            learned,
            // The template has written them.
            add_special_tokens: false,
            add_end: false,
        })
    }

    /// A prompt and what is learned, and the end of the text.
    fn ended(&self, prompt: &str, answer: &str, learned: Learned) -> Written {
        let text = format!("{prompt}{answer}");
        let start = match learned.completions_alone {
            true => prompt.len(),
            false => 0,
        };
        let learned = std::iter::once(start..text.len()).collect();
        Written {
            learned,
            text,
            add_special_tokens: true,
            add_end: true,
        }
    }

    fn end_text(&self) -> &str {
        self.end_of_text.as_ref().map_or("", |(_, text)| text)
    }

    fn tokenize(&self, written: &Written) -> std::result::Result<TokenizedExample, Problem> {
        let encoding = self
            .tokenizer
            .encode(written.text.as_str(), written.add_special_tokens)
            .map_err(|error| Problem(error.to_string()))?;
        let mut input_ids = Vec::with_capacity(encoding.len() + 1);
        let mut labels = Vec::with_capacity(encoding.len() + 1);
        let mut spans = written.learned.iter().peekable();
        let everything = written.is_all_learned();
        for (&id, &(start, end)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            while spans
                .next_if(|span| span.end <= start && start < end)
                .is_some()
            {}
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
                // The text's own, or the tokenizer's: learned like one of ours.
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

/// What is learned of a record that has a prompt, and of a conversation.
#[derive(Debug, Clone, Copy)]
struct Learned {
    completions_alone: bool,
    answers_alone: bool,
}

/// A record as text.
struct Written {
    text: String,
    /// Which bytes are learned, in order.
    learned: Vec<Range<usize>>,
    add_special_tokens: bool,
    add_end: bool,
}

impl Written {
    fn is_all_learned(&self) -> bool {
        matches!(self.learned.as_slice(), [all] if *all == (0..self.text.len()))
    }
}

fn message(role: &str, content: &str) -> ChatMessage {
    let mut message = ChatMessage::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), content.into());
    message
}

/// The prompt of Stanford Alpaca, with material and without.
fn alpaca_prompt(instruction: &str, input: &str) -> String {
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
    format!("{task}\n\n### Instruction:\n{instruction}\n\n{material}### Response:\n")
}
