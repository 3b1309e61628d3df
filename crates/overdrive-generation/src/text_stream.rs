use std::ops::ControlFlow;
use std::sync::Arc;

use overdrive_transformer::CausalLm;
use tokenizers::Tokenizer;

use crate::{
    Error, GenerateOptions, GenerateOutput, GenerationConfig, Result, generate_with_options,
};

/// Continues one prompt as [`generate_with`](crate::generate_with) does, and calls `on_text` with each
/// piece of new text: whole characters, no special tokens, and nothing that may still become one of
/// `stop_strings`. Where it breaks, generation ends.
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

/// Decodes tokens as they come into text that never splits a UTF-8 character.
///
/// A byte-level token may be a part of a character; such bytes wait until it is whole. What
/// [`push`](TextStream::push) and [`finish`](TextStream::finish) return, joined, is what the tokenizer
/// makes of all tokens at once. Only the last few tokens are decoded again at each push.
#[derive(Debug)]
pub struct TextStream<'t> {
    tokenizer: Source<'t>,
    skip_special_tokens: bool,
    ids: Vec<u32>,
    /// Tokens from here on are decoded together: a decoder may treat the first of a text apart.
    context: usize,
    /// Tokens up to here have been handed out.
    done: usize,
}

/// Where the tokenizer is.
#[derive(Debug)]
enum Source<'t> {
    Borrowed(&'t Tokenizer),
    Shared(Arc<Tokenizer>),
}

impl TextStream<'static> {
    /// As [`TextStream::new`], for a stream that outlives what made it.
    pub fn shared(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        TextStream::from_source(Source::Shared(tokenizer), skip_special_tokens)
    }
}

impl<'t> TextStream<'t> {
    /// A stream of new text. With `skip_special_tokens`, tokens like `</s>` leave no text.
    pub fn new(tokenizer: &'t Tokenizer, skip_special_tokens: bool) -> Self {
        TextStream::from_source(Source::Borrowed(tokenizer), skip_special_tokens)
    }

    fn from_source(tokenizer: Source<'t>, skip_special_tokens: bool) -> Self {
        TextStream {
            tokenizer,
            skip_special_tokens,
            ids: Vec::new(),
            context: 0,
            done: 0,
        }
    }

    /// Takes the tokens before the stream (a prompt) without giving their text, so that the first new
    /// token is decoded as a continuation: without them a tokenizer may drop its leading space.
    pub fn with_prefix(mut self, ids: &[u32]) -> Self {
        self.ids = ids.to_vec();
        self.context = 0;
        self.done = ids.len();
        self
    }

    /// Takes one token; returns the text that is now certain, empty while a character is incomplete.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] where the tokenizer cannot decode.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.text_since_done()?;
        // U+FFFD at the end stands for bytes that may still become a character.
        if text.is_empty() || text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        self.context = self.done;
        self.done = self.ids.len();
        Ok(text)
    }

    /// The rest, with U+FFFD for bytes that have become no character; the stream begins anew.
    ///
    /// # Errors
    /// As [`TextStream::push`].
    pub fn finish(&mut self) -> Result<String> {
        let text = self.text_since_done()?;
        self.ids.clear();
        (self.context, self.done) = (0, 0);
        Ok(text)
    }

    fn text_since_done(&self) -> Result<String> {
        let before = self.decode(self.context, self.done)?;
        let all = self.decode(self.context, self.ids.len())?;
        // The text of a prefix is a prefix of the text, except where an incomplete character at its
        // end has become another; nothing is handed out while it is incomplete, save for a prompt's.
        match all.strip_prefix(&before) {
            Some(new) => Ok(new.to_owned()),
            None => {
                let common = common_prefix(&before, &all);
                Ok(all[common..].to_owned())
            }
        }
    }

    fn decode(&self, from: usize, to: usize) -> Result<String> {
        let tokenizer = match &self.tokenizer {
            Source::Borrowed(tokenizer) => *tokenizer,
            Source::Shared(tokenizer) => tokenizer,
        };
        tokenizer
            .decode(&self.ids[from..to], self.skip_special_tokens)
            .map_err(Error::Tokenizer)
    }
}

/// Bytes that two texts share at their beginning, in whole characters.
fn common_prefix(a: &str, b: &str) -> usize {
    a.chars()
        .zip(b.chars())
        .take_while(|(a, b)| a == b)
        .map(|(a, _)| a.len_utf8())
        .sum()
}
