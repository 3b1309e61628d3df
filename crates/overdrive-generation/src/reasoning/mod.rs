//! The reasoning in the text of an answer.

mod constraint;
mod harmony;
#[cfg(test)]
mod tests;

use tokenizers::Tokenizer;

use self::harmony::Harmony;
use crate::{Message, Result, TextStream, certain_length};

/// The marks around a model's reasoning: those of most models, of Mistral's and of Gemma 4.
const MARKS: [(&str, &str); 3] = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
];

/// The number of tokens at the end of a prompt that can contain a mark.
const PROMPT_TOKENS: usize = 16;

/// New text of an answer, divided into reasoning and content.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AnswerText {
    /// The text of the model's reasoning, without its marks.
    pub reasoning: String,
    /// The other text.
    pub content: String,
}

impl From<AnswerText> for Message {
    /// Returns a whole answer as the next message of its conversation. Reasoning is its field `reasoning_content`, which
    /// templates show or leave out.
    fn from(answer: AnswerText) -> Message {
        let message = Message::assistant(answer.content);
        match answer.reasoning.is_empty() {
            true => message,
            false => message.with("reasoning_content", answer.reasoning),
        }
    }
}

/// Separates the reasoning of an answer from its content, while the answer is generated.
///
/// It reads what reasoning models write without being told which model it is: text between `<think>` and `</think>`
/// (Qwen3, DeepSeek-R1, SmolLM3, OLMo 3), `[THINK]` and `[/THINK]` (Mistral), `<|channel>thought` and `<channel|>` (Gemma 4)
/// at the start of an answer, and the channels of the harmony format (gpt-oss). An answer also begins with reasoning if the
/// prompt ends with the first mark, as the chat templates of some models write it. The white space around
/// reasoning belongs to neither part. Of harmony, the channel `analysis` is reasoning, the channels `final` and `commentary` are
/// content; a message to a tool is content that begins with `<|channel|>commentary to=` and the name of the tool.
///
/// vLLM's `--reasoning-parser` and llama.cpp's `--reasoning-format` do the same.
///
/// ```
/// # use overdrive_generation::{ReasoningParser, Tokenizer};
/// # let json = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}"#;
/// # let tokenizer: Tokenizer = json.parse().unwrap();
/// let mut parser = ReasoningParser::new(&tokenizer, &[])?;
/// assert_eq!(parser.push("<think>\nTwo and").reasoning, "Two and");
/// assert_eq!(parser.push(" two.\n</think>\n\n4").content, "4");
/// assert_eq!(parser.finish().content, "");
/// # Ok::<(), overdrive_generation::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ReasoningParser {
    /// The text that has not been returned.
    pending: String,
    state: State,
}

#[derive(Debug, Clone)]
enum State {
    /// Only white space so far, or a part of a mark.
    Start,
    /// Reasoning up to the mark, after white space if `is_begun` is false.
    Reasoning {
        end: &'static str,
        is_begun: bool,
    },
    /// White space after the reasoning.
    After,
    Content,
    Harmony(Harmony),
}

impl ReasoningParser {
    /// Returns the parser of an answer to `prompt`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`](crate::Error::Tokenizer) if the tokenizer cannot decode the end of the prompt.
    pub fn new(tokenizer: &Tokenizer, prompt: &[i64]) -> Result<ReasoningParser> {
        let end = |count: usize| {
            let ids = prompt.iter().skip(prompt.len().saturating_sub(count));
            let ids: Vec<u32> = ids.filter_map(|&id| u32::try_from(id).ok()).collect();
            TextStream::decode(tokenizer, &ids, false)
        };
        if let Some(tokens) = harmony::Tokens::of(tokenizer) {
            let message = prompt.iter().rev().position(|&id| id == tokens.start);
            let message = message.map(end).transpose()?;
            let place = Harmony::after(message.as_deref());
            return Ok(ReasoningParser::from(State::Harmony(place)));
        }
        let prompt = end(PROMPT_TOKENS)?;
        let open = MARKS
            .iter()
            .find(|(begin, _)| prompt.trim_end().ends_with(begin));
        Ok(ReasoningParser::from(match open {
            Some((_, end)) => State::reasoning(end),
            None => State::Start,
        }))
    }

    fn from(state: State) -> ReasoningParser {
        ReasoningParser {
            pending: String::new(),
            state,
        }
    }

    /// Returns `true` while the answer is certainly in its reasoning.
    pub fn is_reasoning(&self) -> bool {
        match &self.state {
            State::Reasoning { .. } => true,
            State::Harmony(harmony) => harmony.is_reasoning(),
            _ => false,
        }
    }

    /// Appends a piece of the answer; returns the text that is certain now.
    pub fn push(&mut self, piece: &str) -> AnswerText {
        self.pending.push_str(piece);
        let mut text = AnswerText::default();
        while self.step(&mut text) {}
        text
    }

    /// Returns the rest of the text.
    pub fn finish(mut self) -> AnswerText {
        let mut text = AnswerText::default();
        match &mut self.state {
            State::Harmony(harmony) => harmony.finish(&self.pending, &mut text),
            State::Reasoning { .. } => text.reasoning.push_str(self.pending.trim_end()),
            // White space between the reasoning and nothing.
            State::After => {}
            State::Start | State::Content => text.content = self.pending,
        }
        text
    }

    /// Divides a whole answer.
    pub fn parse(mut self, answer: &str) -> AnswerText {
        let mut text = self.push(answer);
        let rest = self.finish();
        text.reasoning.push_str(&rest.reasoning);
        text.content.push_str(&rest.content);
        text
    }

    /// Takes text from what is pending; returns `true` if there may be more to take.
    fn step(&mut self, text: &mut AnswerText) -> bool {
        let pending = &mut self.pending;
        match &mut self.state {
            State::Start => {
                let begun = pending.trim_start();
                if let Some((begin, end)) = MARKS.iter().find(|(mark, _)| begun.starts_with(mark)) {
                    *pending = begun[begin.len()..].to_owned();
                    self.state = State::reasoning(end);
                    return true;
                }
                if MARKS.iter().any(|(mark, _)| mark.starts_with(begun)) {
                    return false;
                }
                self.state = State::Content;
                true
            }
            State::Reasoning { end, is_begun } => {
                if !*is_begun {
                    trim_start(pending);
                    *is_begun = !pending.is_empty();
                }
                let found = pending.find(*end);
                let certain = found.unwrap_or_else(|| certain_length(pending, &[*end]));
                let shown = pending[..certain].trim_end().len();
                text.reasoning.push_str(&pending[..shown]);
                match found {
                    Some(start) => {
                        pending.drain(..start + end.len());
                        self.state = State::After;
                        true
                    }
                    None => {
                        pending.drain(..shown);
                        false
                    }
                }
            }
            State::After => {
                trim_start(pending);
                if pending.is_empty() {
                    return false;
                }
                self.state = State::Content;
                true
            }
            State::Content => {
                text.content.push_str(pending);
                pending.clear();
                false
            }
            State::Harmony(harmony) => harmony.step(pending, text),
        }
    }
}

impl State {
    fn reasoning(end: &'static str) -> State {
        State::Reasoning {
            end,
            is_begun: false,
        }
    }
}

fn trim_start(text: &mut String) {
    let white = text.len() - text.trim_start().len();
    text.drain(..white);
}
