//! A dataset of tokenized texts.

use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use tokenizers::utils::truncation::{TruncationDirection, TruncationParams};
use tokenizers::{PostProcessor, Tokenizer};

use crate::build_tokens::Encoder;
use crate::{Dataset, Error, Result, TextLines, TextOptions};
use overdrive_core::check_option;

/// The end at which a text with too many tokens is truncated: `truncation_side` of transformers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TruncationSide {
    /// The end of the text is cut off. The default.
    #[default]
    Right,
    /// The beginning of the text is cut off.
    Left,
}

/// The options of [`TextDataset`], with the names and defaults of a tokenizer call in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TextDatasetOptions {
    /// The largest number of tokens, including special ones. Default: `None`, no bound.
    pub max_length: Option<usize>,
    /// The end at which a longer text is truncated. Default: the right one.
    pub truncation_side: TruncationSide,
    /// If `true`, the tokenizer's special tokens are put around a text (`[CLS]`, `<s>`). Default: `true`.
    pub add_special_tokens: bool,
}

impl Default for TextDatasetOptions {
    fn default() -> Self {
        Self {
            max_length: None,
            truncation_side: TruncationSide::Right,
            add_special_tokens: true,
        }
    }
}

/// A dataset of texts that are tokenized on demand. A [`crate::TokenizedExample`] can be made `from` each.
///
/// The texts are lines, paragraphs or whole files ([`TextDataset::open`], [`TextOptions::sample_by`]), or any dataset
/// of texts ([`TextDataset::new`]), such as a field of JSON records by [`crate::DatasetExt::map`]. For texts that
/// are read many times, a token store is better ([`crate::build_dataset_tokens`]). Special tokens in a text are
/// tokenized as ordinary text.
///
/// ```
/// use overdrive_datasets::{Dataset, TextDataset, TextDatasetOptions, TextOptions};
/// # use overdrive_datasets::{BpeOptions, Corpus, CorpusOptions, train_bpe};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("lines.txt");
/// # std::fs::write(&path, "So much depends\nupon\na red wheel barrow\n".repeat(50)).unwrap();
/// # let corpus = Corpus::from_paths([&path], &CorpusOptions::default())?;
/// # let tokenizer = train_bpe(corpus.sample(16 << 20), &BpeOptions { vocab_size: 270, ..Default::default() })?.tokenizer;
/// let options = TextDatasetOptions { max_length: Some(8), ..Default::default() };
/// let lines = TextDataset::open([&path], &TextOptions::default(), tokenizer, options)?;
/// let tokens: Vec<u32> = lines.get(2)?;
/// assert_eq!(tokens.len(), 8);
/// assert!("a red wheel barrow".starts_with(&lines.tokenizer().decode(&tokens, true).unwrap()));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
pub struct TextDataset<D = TextLines> {
    texts: D,
    tokenizer: Tokenizer,
    /// The faster encoder, if no special tokens are put around a text.
    plain: Option<Encoder>,
    options: TextDatasetOptions,
}

impl TextDataset<TextLines> {
    /// Opens files, folders and patterns as [`TextLines::open`] does.
    ///
    /// # Errors
    /// Those of [`TextLines::open`] and [`TextDataset::new`].
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        text: &TextOptions,
        tokenizer: Tokenizer,
        options: TextDatasetOptions,
    ) -> Result<Self> {
        Self::new(TextLines::open(paths, text)?, tokenizer, options)
    }
}

impl<D: Dataset<Item = String>> TextDataset<D> {
    /// Tokenizes the texts of any dataset.
    ///
    /// # Errors
    /// Returns an error if `max_length` is 0, or leaves no room beside the tokenizer's special tokens.
    pub fn new(texts: D, mut tokenizer: Tokenizer, options: TextDatasetOptions) -> Result<Self> {
        let special = match (options.add_special_tokens, tokenizer.get_post_processor()) {
            (true, Some(post)) => post.added_tokens(false),
            _ => 0,
        };
        if let Some(max) = options.max_length {
            let expected = format!(
                "at least {}: one token beside the tokenizer's special tokens",
                special + 1
            );
            check_option(max > special, "max_length", max, expected)?;
        }
        let truncation = options.max_length.map(|max_length| TruncationParams {
            max_length,
            direction: match options.truncation_side {
                TruncationSide::Right => TruncationDirection::Right,
                TruncationSide::Left => TruncationDirection::Left,
            },
            ..TruncationParams::default()
        });
        tokenizer
            .with_truncation(truncation)
            .map_err(Error::tokenizer("set the truncation"))?;
        tokenizer.with_padding(None);
        // A text may contain the name of a special token, which must not become that token.
        tokenizer.set_encode_special_tokens(true);
        let plain = (special == 0)
            .then(|| Encoder::new(&tokenizer))
            .transpose()?;
        Ok(Self {
            texts,
            tokenizer,
            plain,
            options,
        })
    }

    /// Tokenizes all texts, on all cores, and returns the number of tokens of each, for samplers that group by
    /// length. It takes four bytes per text.
    ///
    /// # Errors
    /// Returns an error if a text cannot be read.
    pub fn lengths(&self) -> Result<Vec<u32>> {
        (0..self.len())
            .into_par_iter()
            .map(|index| Ok(u32::try_from(self.get(index)?.len()).unwrap_or(u32::MAX)))
            .collect()
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Some(plain) = &self.plain else {
            let encoding = self
                .tokenizer
                .encode_fast(text, self.options.add_special_tokens)
                .map_err(Error::tokenizer("tokenize a text"))?;
            return Ok(encoding.get_ids().to_vec());
        };
        let mut tokens = plain.encode(text)?;
        if let Some(max) = self.options.max_length {
            match self.options.truncation_side {
                TruncationSide::Right => tokens.truncate(max),
                TruncationSide::Left => drop(tokens.drain(..tokens.len().saturating_sub(max))),
            }
        }
        Ok(tokens)
    }
}

impl<D> TextDataset<D> {
    /// Returns the texts.
    pub fn texts(&self) -> &D {
        &self.texts
    }

    /// Returns the tokenizer, with the truncation of the options and without padding.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }
}

impl<D: std::fmt::Debug> std::fmt::Debug for TextDataset<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TextDataset")
            .field("texts", &self.texts)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl<D: Dataset<Item = String>> Dataset for TextDataset<D> {
    type Item = Vec<u32>;

    fn len(&self) -> usize {
        self.texts.len()
    }

    fn get(&self, index: usize) -> Result<Vec<u32>> {
        self.encode(&self.texts.get(index)?)
    }

    fn prefetch(&self, indices: &[usize]) {
        self.texts.prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.texts.check_unchanged()
    }
}
