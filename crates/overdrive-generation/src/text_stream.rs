use std::ops::ControlFlow;
use std::sync::Arc;

use overdrive_transformer::CausalLm;
use tokenizers::{DecoderWrapper, Tokenizer};

use crate::{
    Error, GenerateOptions, GenerateOutput, GenerationConfig, Result, generate_with_options,
};

/// Continues one prompt as [`generate_with`](crate::generate_with) does, and calls `on_text` with each
/// piece of new text: whole characters, no special tokens, no end-of-text or stop token, and no beginning
/// of one of `stop_strings`. If it breaks, generation ends.
///
/// # Errors
/// As [`generate_with_options`].
pub fn generate_text(
    model: &CausalLm,
    tokenizer: &Tokenizer,
    prompt: &[i64],
    config: &GenerationConfig,
    mut on_text: impl FnMut(&str) -> ControlFlow<()>,
) -> Result<GenerateOutput> {
    let options = GenerateOptions {
        tokenizer: Some(tokenizer),
        ..GenerateOptions::default()
    };
    generate_with_options(model, &[prompt.to_vec()], config, &options, |token| {
        if token.text.is_empty() {
            ControlFlow::Continue(())
        } else {
            on_text(token.text)
        }
    })
}

/// An incremental decoder of tokens whose text never splits a UTF-8 character.
///
/// A token may be part of a character; its bytes wait until the character is complete. The joined results of
/// [`push`](TextStream::push) and [`finish`](TextStream::finish) are the text of all tokens
/// [decoded at once](TextStream::decode). Only the last few tokens are decoded again at each push.
///
/// ```
/// # use overdrive_generation::{TextStream, Tokenizer};
/// # let json = r#"{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,
/// #   "pre_tokenizer":null,"post_processor":null,"decoder":{"type":"ByteFallback"},
/// #   "model":{"type":"BPE","vocab":{"<0xC3>":0,"<0xA9>":1,"a":2},"merges":[],"byte_fallback":true}}"#;
/// # let tokenizer: Tokenizer = json.parse().unwrap();
/// let mut stream = TextStream::new(&tokenizer, true);
/// assert_eq!(stream.push(0)?, ""); // the first byte of é
/// assert_eq!(stream.push(1)?, "é");
/// assert_eq!(stream.push(2)?, "a");
/// assert_eq!(stream.finish()?, "");
/// # Ok::<(), overdrive_generation::Error>(())
/// ```
#[derive(Debug)]
pub struct TextStream<'t> {
    tokenizer: Source<'t>,
    skip_special_tokens: bool,
    decoding: Decoding,
}

/// The tokenizer, borrowed or shared.
#[derive(Debug)]
enum Source<'t> {
    Borrowed(&'t Tokenizer),
    Shared(Arc<Tokenizer>),
}

/// The decoding of a tokenizer's tokens to text.
#[derive(Debug)]
enum Decoding {
    /// The text of more tokens begins with the text of the first ones, except for an incomplete character at its end.
    Growing(Growing),
    /// Each byte has its own token, as in SentencePiece. The tokenizers crate decodes a run of byte tokens only as a
    /// whole: one incomplete character turns each byte of the run into U+FFFD, even those of complete characters before
    /// it. Bytes are therefore decoded here.
    Bytes(Bytes),
}

#[derive(Debug, Default)]
struct Growing {
    ids: Vec<u32>,
    /// The first token that is decoded together with the next ones: a decoder may treat the first token
    /// of a text differently.
    context: usize,
    /// The number of tokens whose text has been returned.
    done: usize,
}

#[derive(Debug, Default)]
struct Bytes {
    /// The last token that leaves text, beside which the next one is decoded.
    last: Option<u32>,
    /// The bytes of an incomplete character.
    incomplete: Vec<u8>,
    /// `true` if the incomplete character began in the prompt, whose text is not returned.
    is_of_prompt: bool,
}

impl TextStream<'static> {
    /// Works as [`TextStream::new`], for a stream that owns a share of its tokenizer.
    pub fn shared(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        TextStream::from_source(Source::Shared(tokenizer), skip_special_tokens)
    }
}

impl<'t> TextStream<'t> {
    /// Returns a stream of new text. With `skip_special_tokens`, tokens like `</s>` leave no text; the marks of
    /// reasoning and of tool calls do.
    pub fn new(tokenizer: &'t Tokenizer, skip_special_tokens: bool) -> Self {
        TextStream::from_source(Source::Borrowed(tokenizer), skip_special_tokens)
    }

    /// Returns the text of tokens. In a run of byte tokens, whole characters are decoded and the longest beginnings of
    /// characters among the other bytes become one U+FFFD each; in all else it is `Tokenizer::decode`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer cannot decode.
    pub fn decode(tokenizer: &Tokenizer, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        if !has_byte_tokens(tokenizer) {
            return decode_all(tokenizer, ids, skip_special_tokens);
        }
        let mut stream = TextStream::new(tokenizer, skip_special_tokens);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&stream.push(id)?);
        }
        text.push_str(&stream.finish()?);
        Ok(text)
    }

    fn from_source(tokenizer: Source<'t>, skip_special_tokens: bool) -> Self {
        let mut stream = TextStream {
            tokenizer,
            skip_special_tokens,
            decoding: Decoding::Growing(Growing::default()),
        };
        if has_byte_tokens(stream.tokenizer()) {
            stream.decoding = Decoding::Bytes(Bytes::default());
        }
        stream
    }

    /// Returns the stream with the tokens before it (a prompt), whose text it does not return, so that
    /// the first new token is decoded as a continuation: without them a tokenizer may drop its leading
    /// space. A character that the prompt has begun is returned when it is whole.
    pub fn with_prefix(mut self, ids: &[u32]) -> Self {
        if let Decoding::Growing(growing) = &mut self.decoding {
            *growing = Growing {
                ids: ids.to_vec(),
                context: 0,
                done: ids.len(),
            };
            return self;
        }
        let mut bytes = Bytes::default();
        // A character has at most four bytes, so that the last tokens that leave text are enough.
        let mut kept: Vec<(u32, Option<u8>)> = ids
            .iter()
            .rev()
            .filter_map(|&id| Some((id, byte_of(&self.text_of(id)?))))
            .take(4)
            .collect();
        bytes.last = kept.first().map(|(id, _)| *id);
        let run = kept.iter().take_while(|(_, byte)| byte.is_some()).count();
        kept.truncate(run);
        for byte in kept.into_iter().rev().filter_map(|(_, byte)| byte) {
            bytes.push(byte);
        }
        bytes.is_of_prompt = !bytes.incomplete.is_empty();
        self.decoding = Decoding::Bytes(bytes);
        self
    }

    /// Appends a token; returns the text that is certain now, empty while a character is incomplete.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer cannot decode.
    pub fn push(&mut self, id: u32) -> Result<String> {
        let tokenizer = self.tokenizer.get();
        let growing = match &mut self.decoding {
            Decoding::Growing(growing) => growing,
            Decoding::Bytes(_) => return self.push_with_bytes(id),
        };
        growing.ids.push(id);
        let text = growing.text_since_done(tokenizer, self.skip_special_tokens)?;
        // U+FFFD at the end stands for bytes that may still become a character.
        if text.is_empty() || text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        // The tokens of this piece are the context of the next one, so that each push decodes a few
        // tokens only.
        growing.context = growing.done;
        growing.done = growing.ids.len();
        Ok(text)
    }

    fn push_with_bytes(&mut self, id: u32) -> Result<String> {
        let Some(token) = self.text_of(id) else {
            return Ok(String::new());
        };
        let byte = byte_of(&token);
        let Decoding::Bytes(bytes) = &mut self.decoding else {
            return Ok(String::new());
        };
        let before = bytes.last.replace(id);
        // The tokenizer decides whether the first space of a text is kept or dropped.
        if let Some(byte) = byte
            && (before.is_some() || byte != b' ')
        {
            return Ok(bytes.push(byte));
        }
        let mut text = bytes.end();
        text.push_str(&self.text_after(before, id)?);
        Ok(text)
    }

    /// Returns the text of a token after another one.
    fn text_after(&self, before: Option<u32>, id: u32) -> Result<String> {
        let tokenizer = self.tokenizer.get();
        let decode = |ids: &[u32]| decode_all(tokenizer, ids, self.skip_special_tokens);
        let Some(before) = before else {
            return decode(&[id]);
        };
        // Decoding a token alone would lose its leading space; as the difference of two texts it keeps it.
        let (start, all) = (decode(&[before])?, decode(&[before, id])?);
        Ok(all[common_prefix(&start, &all)..].to_owned())
    }

    /// Returns the rest, with U+FFFD for bytes that have become no character, and restarts the stream.
    ///
    /// # Errors
    /// As [`TextStream::push`].
    pub fn finish(&mut self) -> Result<String> {
        match &mut self.decoding {
            Decoding::Growing(growing) => {
                let tokenizer = self.tokenizer.get();
                let text = growing.text_since_done(tokenizer, self.skip_special_tokens)?;
                *growing = Growing::default();
                Ok(text)
            }
            Decoding::Bytes(bytes) => {
                let text = bytes.end();
                *bytes = Bytes::default();
                Ok(text)
            }
        }
    }

    /// Returns a token as the vocabulary has it; `None` if it leaves no text.
    fn text_of(&self, id: u32) -> Option<String> {
        token_of(self.tokenizer(), id, self.skip_special_tokens)
    }

    /// Returns the tokenizer.
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        self.tokenizer.get()
    }
}

impl Source<'_> {
    fn get(&self) -> &Tokenizer {
        match self {
            Source::Borrowed(tokenizer) => tokenizer,
            Source::Shared(tokenizer) => tokenizer,
        }
    }
}

impl Growing {
    fn text_since_done(&self, tokenizer: &Tokenizer, skip_special_tokens: bool) -> Result<String> {
        let decode =
            |to: usize| decode_all(tokenizer, &self.ids[self.context..to], skip_special_tokens);
        // Decoding a token alone would lose its leading space; as the difference of two texts it keeps
        // it.
        let (before, all) = (decode(self.done)?, decode(self.ids.len())?);
        // The text of a prefix is a prefix of the text, unless an incomplete character at its end has
        // been completed. No incomplete character is returned, except at the end of a prompt.
        Ok(all[common_prefix(&before, &all)..].to_owned())
    }
}

impl Bytes {
    /// Appends a byte; returns the characters that are certain now.
    fn push(&mut self, byte: u8) -> String {
        self.incomplete.push(byte);
        let mut text = String::new();
        loop {
            let (valid, broken) = match std::str::from_utf8(&self.incomplete) {
                Ok(valid) => (valid.len(), None),
                Err(error) => (error.valid_up_to(), error.error_len()),
            };
            if valid > 0 {
                let whole: Vec<u8> = self.incomplete.drain(..valid).collect();
                text.push_str(&String::from_utf8_lossy(&whole));
                self.is_of_prompt = false;
            }
            // Bytes that can become no character.
            let Some(broken) = broken else {
                return text;
            };
            self.incomplete.drain(..broken);
            text.push_str(self.replacement());
        }
    }

    /// Ends a run of bytes; returns U+FFFD for an incomplete character.
    fn end(&mut self) -> String {
        match std::mem::take(&mut self.incomplete).is_empty() {
            true => String::new(),
            false => self.replacement().to_owned(),
        }
    }

    /// Returns U+FFFD, unless the prompt has it.
    fn replacement(&mut self) -> &'static str {
        match std::mem::take(&mut self.is_of_prompt) {
            true => "",
            false => "\u{fffd}",
        }
    }
}

/// The special tokens that leave text nevertheless: marks of reasoning and of tool calls, without which neither could be
/// read. In the order of Gemma 4, harmony (gpt-oss), Mistral, DeepSeek, Granite 3, Phi-4-mini, and all others. llama.cpp keeps
/// them for models whose templates have them (`preserved_tokens`).
const MARKS: [&str; 26] = [
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function_calls>",
];

/// Returns a token as the vocabulary has it; `None` if it leaves no text.
fn token_of(tokenizer: &Tokenizer, id: u32, skip_special_tokens: bool) -> Option<String> {
    let token = tokenizer.id_to_token(id)?;
    let is_special = tokenizer.get_added_vocabulary().is_special_token(&token)
        && !MARKS.contains(&token.as_str());
    (!skip_special_tokens || !is_special).then_some(token)
}

/// Returns the text of all tokens at once.
fn decode_all(tokenizer: &Tokenizer, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
    // The decoder of BPE with suffixes subtracts 1 from the number of tokens, which panics where overflow is checked
    // (tokenizers 0.23.2).
    let leaves_text = |id: &u32| token_of(tokenizer, *id, skip_special_tokens).is_some();
    let ids: Vec<u32> = ids.iter().copied().filter(leaves_text).collect();
    if ids.is_empty() {
        return Ok(String::new());
    }
    // The others are left out above.
    tokenizer.decode(&ids, false).map_err(Error::Tokenizer)
}

/// Returns `true` if the tokenizer has a token for each byte that no other token covers.
fn has_byte_tokens(tokenizer: &Tokenizer) -> bool {
    fn decodes_bytes(decoder: &DecoderWrapper) -> bool {
        match decoder {
            DecoderWrapper::ByteFallback(_) => true,
            DecoderWrapper::Sequence(sequence) => sequence.get_decoders().iter().any(decodes_bytes),
            _ => false,
        }
    }
    tokenizer.get_decoder().is_some_and(decodes_bytes)
}

/// Returns the byte for which a token like `<0xF0>` stands.
fn byte_of(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    match digits.len() {
        2 => u8::from_str_radix(digits, 16).ok(),
        _ => None,
    }
}

/// Returns the number of bytes that two texts share at their beginning, in whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars()
        .zip(b.chars())
        .take_while(|(a, b)| a == b)
        .map(|(a, _)| a.len_utf8())
        .sum()
}
