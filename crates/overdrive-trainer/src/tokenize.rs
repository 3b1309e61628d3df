//! The tokenization of text into a file of tokens.

use std::path::Path;

use overdrive_datasets::{BuildOptions, BuildReport, TokenStore, Tokenizer};

use crate::text_source::TextSource;
use crate::{Result, TrainingArguments};

/// Tokenizes the text that `arguments` name into a token store at `path`, and passes log lines about the text to `say`.
/// The keys `data`, `dataset_text_field`, `sample_by` and `remove_duplicates` count, as in a training run on the text; a
/// run on the store has the same tokens.
///
/// # Errors
/// An error if there is no text, if it cannot be read, if the tokenizer does not have the tokens that `options` name, or
/// if the store cannot be written.
pub fn tokenize(
    arguments: &TrainingArguments,
    tokenizer: &Tokenizer,
    options: &BuildOptions,
    path: &Path,
    mut say: impl FnMut(&str),
) -> Result<(TokenStore, BuildReport)> {
    let source = TextSource::open(arguments)?;
    source.describe(arguments, &mut say)?;
    source.build_to(path, tokenizer, options)
}
