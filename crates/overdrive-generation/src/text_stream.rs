use std::ops::ControlFlow;
use std::sync::Arc;

use overdrive_transformer::CausalLm;
use tokenizers::Tokenizer;

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
/// A byte-level token may be a part of a character; its bytes wait until the character is whole. The
/// joined results of [`push`](TextStream::push) and [`finish`](TextStream::finish) are the text of all
/// tokens decoded at once. Only the last few tokens are decoded again at each push.
#[derive(Debug)]
pub struct TextStream<'t> {
    tokenizer: Source<'t>,
    skip_special_tokens: bool,
    ids: Vec<u32>,
    /// The first token that is decoded together with the next ones: a decoder may treat the first token
    /// of a text differently.
    context: usize,
    /// The number of tokens whose text has been returned.
    done: usize,
}

/// The tokenizer, borrowed or shared.
#[derive(Debug)]
enum Source<'t> {
    Borrowed(&'t Tokenizer),
    Shared(Arc<Tokenizer>),
}

impl TextStream<'static> {
    /// Works as [`TextStream::new`], for a stream that owns a share of its tokenizer.
    pub fn shared(tokenizer: Arc<Tokenizer>, skip_special_tokens: bool) -> Self {
        TextStream::from_source(Source::Shared(tokenizer), skip_special_tokens)
    }
}

impl<'t> TextStream<'t> {
    /// Returns a stream of new text. With `skip_special_tokens`, tokens like `</s>` leave no text.
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

    /// Returns the stream with the tokens before it (a prompt), whose text it does not return, so that
    /// the first new token is decoded as a continuation: without them a tokenizer may drop its leading
    /// space.
    pub fn with_prefix(mut self, ids: &[u32]) -> Self {
        self.ids = ids.to_vec();
        self.context = 0;
        self.done = ids.len();
        self
    }

    /// Appends a token; returns the text that is certain now, empty while a character is incomplete.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] if the tokenizer cannot decode.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.text_since_done()?;
        // U+FFFD at the end stands for bytes that may still become a character.
        if text.is_empty() || text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        // The tokens of this piece are the context of the next one, so that each push decodes a few
        // tokens only.
        self.context = self.done;
        self.done = self.ids.len();
        Ok(text)
    }

    /// Returns the rest, with U+FFFD for bytes that have become no character, and restarts the stream.
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
        // Decoding a token alone would lose its leading space; as the difference of two texts it keeps
        // it.
        let before = self.decode(self.context, self.done)?;
        let all = self.decode(self.context, self.ids.len())?;
        // The text of a prefix is a prefix of the text, unless an incomplete character at its end has
        // been completed. No incomplete character is returned, except at the end of a prompt.
        match all.strip_prefix(&before) {
            Some(new) => Ok(new.to_owned()),
            None => {
                let common = common_prefix(&before, &all);
                Ok(all[common..].to_owned())
            }
        }
    }

    /// Returns the tokenizer.
    pub(crate) fn tokenizer(&self) -> &Tokenizer {
        match &self.tokenizer {
            Source::Borrowed(tokenizer) => tokenizer,
            Source::Shared(tokenizer) => tokenizer,
        }
    }

    fn decode(&self, from: usize, to: usize) -> Result<String> {
        self.tokenizer()
            .decode(&self.ids[from..to], self.skip_special_tokens)
            .map_err(Error::Tokenizer)
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
