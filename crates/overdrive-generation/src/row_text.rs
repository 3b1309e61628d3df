use std::sync::Arc;

use tokenizers::Tokenizer;

use crate::stop_strings::StopFilter;
use crate::{Result, TextStream};

/// The text of one row while it is generated.
#[derive(Debug)]
pub(crate) struct RowText<'t> {
    stream: TextStream<'t>,
    stop: StopFilter,
    text: String,
}

impl RowText<'static> {
    /// Works as [`RowText::new`], for a row that owns a share of its tokenizer.
    pub(crate) fn shared(
        tokenizer: Arc<Tokenizer>,
        prompt: &[i64],
        stop_strings: &[String],
    ) -> Self {
        RowText::from_stream(TextStream::shared(tokenizer, true), prompt, stop_strings)
    }
}

impl<'t> RowText<'t> {
    /// Returns the empty text after `prompt`.
    pub(crate) fn new(tokenizer: &'t Tokenizer, prompt: &[i64], stop_strings: &[String]) -> Self {
        RowText::from_stream(TextStream::new(tokenizer, true), prompt, stop_strings)
    }

    fn from_stream(stream: TextStream<'t>, prompt: &[i64], stop_strings: &[String]) -> Self {
        // Ids that no tokenizer can have have been refused by the check of the prompt.
        let known: Vec<u32> = prompt
            .iter()
            .filter_map(|&id| u32::try_from(id).ok())
            .collect();
        RowText {
            stream: stream.with_prefix(&known),
            stop: StopFilter::new(stop_strings),
            text: String::new(),
        }
    }

    /// Appends a token, the `last` one or not; returns the text that is certain now, and the index of
    /// the stop string that it completes.
    pub(crate) fn push(&mut self, id: i64, last: bool) -> Result<(String, Option<usize>)> {
        let mut piece = match u32::try_from(id) {
            Ok(id) => self.stream.push(id)?,
            Err(_) => String::new(),
        };
        if last {
            piece.push_str(&self.stream.finish()?);
        }
        let found = self.stop.push(&piece);
        let mut text = found.text;
        if last && found.stop.is_none() {
            text.push_str(&self.stop.finish());
        }
        self.text.push_str(&text);
        Ok((text, found.stop))
    }

    /// Returns the whole text, held back parts included.
    pub(crate) fn into_text(mut self) -> String {
        self.text.push_str(&self.stop.finish());
        self.text
    }
}
