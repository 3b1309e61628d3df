use std::sync::Arc;

use tokenizers::Tokenizer;

use crate::stop_strings::StopFilter;
use crate::{FinishReason, GenerationConfig, Result, TextStream};

/// The text of one row while it is generated.
#[derive(Debug)]
pub(crate) struct RowText<'t> {
    stream: TextStream<'t>,
    stop: StopFilter,
    /// The stop strings that are special tokens, by id and index: such a token leaves no text to compare.
    stop_tokens: Vec<(i64, usize)>,
    /// The number of upcoming tokens in which stop strings are ignored.
    exempt: usize,
    text: String,
}

impl RowText<'static> {
    /// Works as [`RowText::new`], for a row that owns a share of its tokenizer.
    pub(crate) fn shared(
        tokenizer: Arc<Tokenizer>,
        prompt: &[i64],
        config: &GenerationConfig,
    ) -> Self {
        RowText::from_stream(TextStream::shared(tokenizer, true), prompt, config)
    }
}

impl<'t> RowText<'t> {
    /// Returns the empty text after `prompt`.
    pub(crate) fn new(tokenizer: &'t Tokenizer, prompt: &[i64], config: &GenerationConfig) -> Self {
        RowText::from_stream(TextStream::new(tokenizer, true), prompt, config)
    }

    fn from_stream(stream: TextStream<'t>, prompt: &[i64], config: &GenerationConfig) -> Self {
        // The check of the prompt has already rejected ids that no tokenizer can have.
        let known: Vec<u32> = prompt
            .iter()
            .filter_map(|&id| u32::try_from(id).ok())
            .collect();
        RowText {
            stop: StopFilter::new(&config.stop_strings),
            stop_tokens: special_tokens(stream.tokenizer(), &config.stop_strings),
            exempt: config.min_tokens,
            stream: stream.with_prefix(&known),
            text: String::new(),
        }
    }

    /// Appends a token, with which the row ends for the reason `finished`, if any; returns the text that is
    /// certain now, and the index of the stop string that it completes.
    pub(crate) fn push(
        &mut self,
        id: i64,
        finished: Option<FinishReason>,
    ) -> Result<(String, Option<usize>)> {
        let counts = self.exempt == 0;
        self.exempt = self.exempt.saturating_sub(1);
        let by_id = self.stop_tokens.iter().find(|(token, _)| *token == id);
        let by_id = by_id.filter(|_| counts).map(|(_, number)| *number);
        let last = finished.is_some() || by_id.is_some();
        // As in vLLM, the token that ends a row leaves no text, even if it is an ordinary one.
        let is_end = matches!(
            finished,
            Some(FinishReason::EndOfText | FinishReason::StopToken)
        );
        let mut piece = match u32::try_from(id) {
            Ok(id) if !is_end => self.stream.push(id)?,
            _ => String::new(),
        };
        if last {
            piece.push_str(&self.stream.finish()?);
        }
        let found = self.stop.append(&piece, counts);
        let mut text = found.text;
        if last && found.stop.is_none() {
            text.push_str(&self.stop.finish());
        }
        self.text.push_str(&text);
        Ok((text, found.stop.or(by_id)))
    }

    /// Returns the whole text, including text that was held back.
    pub(crate) fn into_text(mut self) -> String {
        self.text.push_str(&self.stop.finish());
        self.text
    }
}

/// Returns the ids of those of `strings` that are special tokens, with the indices of the strings.
fn special_tokens(tokenizer: &Tokenizer, strings: &[String]) -> Vec<(i64, usize)> {
    let added = tokenizer.get_added_vocabulary();
    strings
        .iter()
        .enumerate()
        .filter(|(_, string)| added.is_special_token(string))
        .filter_map(|(number, string)| Some((tokenizer.token_to_id(string)?.into(), number)))
        .collect()
}
