//! The harmony format of gpt-oss: an answer is a list of messages, each with a channel and perhaps a recipient.

use tokenizers::Tokenizer;

use super::AnswerText;
use crate::certain_length;

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const RECIPIENT: &str = "to=";

/// The tokens between the parts of a message.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tokens {
    pub(super) start: i64,
    pub(super) channel: i64,
    pub(super) message: i64,
}

impl Tokens {
    /// Returns the tokens, if the tokenizer is one of this format.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Tokens> {
        let id = |mark| tokenizer.token_to_id(mark).map(i64::from);
        Some(Tokens {
            start: id(START)?,
            channel: id(CHANNEL)?,
            message: id(MESSAGE)?,
        })
    }
}

/// Returns `true` if a header is that of the answer proper.
pub(super) fn is_final(header: &str) -> bool {
    let header = Header::of(header);
    header.recipient.is_none() && matches!(header.channel, None | Some("final"))
}

/// Returns `true` if a header is that of a call.
pub(super) fn is_call(header: &str) -> bool {
    Header::of(header).recipient.is_some()
}

/// The place in an answer.
#[derive(Debug, Clone)]
pub(super) struct Harmony {
    part: Part,
    /// `true` until the body of the message has text.
    is_fresh: bool,
    has_reasoning: bool,
    has_content: bool,
}

/// A part of a message: its header, which ends with `<|message|>`, or its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Header,
    Reasoning,
    Content,
}

impl Harmony {
    /// Returns the place after a prompt, given the text from its last `<|start|>` on.
    pub(super) fn after(message: Option<&str>) -> Harmony {
        let part = match message.map(|text| text.split_once(MESSAGE)) {
            Some(None) => Part::Header,
            Some(Some((header, _))) => Header::of(header).part(),
            // The prompt was not rendered by the model's template.
            None => Part::Content,
        };
        Harmony {
            part,
            is_fresh: false,
            has_reasoning: false,
            has_content: false,
        }
    }

    pub(super) fn is_reasoning(&self) -> bool {
        self.part == Part::Reasoning
    }

    pub(super) fn is_content(&self) -> bool {
        self.part == Part::Content
    }

    /// Takes text from what is pending; returns `true` if there may be more to take.
    pub(super) fn step(&mut self, pending: &mut String, text: &mut AnswerText) -> bool {
        if self.part == Part::Header {
            return self.header(pending, text);
        }
        let marks = [START, CHANNEL];
        let next = marks.iter().filter_map(|mark| pending.find(mark)).min();
        let end = next.unwrap_or_else(|| certain_length(pending, &marks));
        let body: String = pending.drain(..end).collect();
        self.append(&body, text);
        if next.is_some() {
            self.part = Part::Header;
        }
        next.is_some()
    }

    /// Reads the header of a message.
    fn header(&mut self, pending: &mut String, text: &mut AnswerText) -> bool {
        let begun = pending.trim_start();
        let is_header = [CHANNEL, RECIPIENT, START, MESSAGE]
            .iter()
            .any(|mark| begun.starts_with(mark) || mark.starts_with(begun));
        if !is_header {
            // A model that has unlearned the format.
            self.part = Part::Content;
            return true;
        }
        let Some((header, body)) = pending.split_once(MESSAGE) else {
            return false;
        };
        let header = Header::of(header);
        self.part = header.part();
        self.is_fresh = true;
        if let Some(recipient) = header.recipient {
            let call = format!("{CHANNEL}commentary {RECIPIENT}{recipient}{MESSAGE}");
            self.append(&call, text);
        }
        *pending = body.to_owned();
        true
    }

    /// Appends the rest of a body; a header without a body is no text.
    pub(super) fn finish(&mut self, pending: &str, text: &mut AnswerText) {
        if self.part != Part::Header {
            self.append(pending, text);
        }
    }

    /// Appends a part of a body; the bodies of one kind are paragraphs.
    fn append(&mut self, body: &str, text: &mut AnswerText) {
        if body.is_empty() {
            return;
        }
        let (own, has_text) = match self.part {
            Part::Reasoning => (&mut text.reasoning, &mut self.has_reasoning),
            _ => (&mut text.content, &mut self.has_content),
        };
        if std::mem::replace(has_text, true) && std::mem::take(&mut self.is_fresh) {
            own.push_str("\n\n");
        }
        self.is_fresh = false;
        own.push_str(body);
    }
}

/// The header of a message, such as `<|channel|>commentary to=functions.weather <|constrain|>json`.
struct Header<'a> {
    channel: Option<&'a str>,
    recipient: Option<&'a str>,
}

impl<'a> Header<'a> {
    fn of(text: &'a str) -> Header<'a> {
        let word_after = |mark| {
            let (_, rest) = text.split_once(mark)?;
            rest.split(|c: char| c.is_whitespace() || c == '<').next()
        };
        Header {
            channel: word_after(CHANNEL),
            recipient: word_after(RECIPIENT),
        }
    }

    fn part(&self) -> Part {
        match (self.recipient, self.channel) {
            (None, Some("analysis")) => Part::Reasoning,
            _ => Part::Content,
        }
    }
}
