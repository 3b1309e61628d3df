//! Texts as tokens.

use std::path::Path;

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use tokenizers::utils::truncation::{TruncationDirection, TruncationParams};
use tokenizers::{PostProcessor, Tokenizer};

use crate::build::Encoder;
use crate::{Dataset, Error, Result, TextLines, TextOptions};

/// Which end a text loses that has too many tokens: `truncation_side` of transformers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TruncationSide {
    /// Its end. The default.
    #[default]
    Right,
    /// Its beginning.
    Left,
}

/// How texts become tokens: names and defaults of a call of a tokenizer in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TextDatasetOptions {
    /// At most so many tokens, special ones among them. Default: as many as there are.
    pub max_length: Option<usize>,
    /// What a longer text loses. Default: its end.
    pub truncation_side: TruncationSide,
    /// Puts the special tokens that the tokenizer has around a text (`[CLS]`, `<s>`). Default: true.
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

/// Texts, tokenized when they are asked for; a [`crate::TokenizedExample`] is made `from` each.
///
/// It is made of lines, paragraphs or whole files ([`TextDataset::open`], [`TextOptions::sample_by`]), or of any
/// dataset of texts ([`TextDataset::new`]): a field of JSON by [`crate::DatasetExt::map`]. What is tokenized once
/// and read many times is better kept as a token store ([`crate::build_dataset_tokens`]). Special tokens that
/// stand in a text are tokenized as ordinary text.
///
/// ```
/// use overdrive_datasets::{Dataset, TextDataset, TextDatasetOptions, TextOptions};
/// # use overdrive_datasets::{BpeOptions, Corpus, CorpusOptions, train_bpe};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("lines.txt");
/// # std::fs::write(&path, "So much depends\nupon\na red wheel barrow\n".repeat(50)).unwrap();
/// # let corpus = Corpus::from_paths([&path], &CorpusOptions::default())?;
/// # let tokenizer = train_bpe(&corpus, &BpeOptions { vocab_size: 270, ..Default::default() })?.tokenizer;
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
    /// The quicker way, where no special tokens are put around a text.
    plain: Option<Encoder>,
    options: TextDatasetOptions,
}

impl TextDataset<TextLines> {
    /// Opens files, folders and patterns as [`TextLines::open`] does.
    ///
    /// # Errors
    /// As [`TextLines::open`] and [`TextDataset::new`].
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
    /// The texts of any dataset.
    ///
    /// # Errors
    /// When `max_length` is 0, or leaves no room beside the tokenizer's special tokens.
    pub fn new(texts: D, mut tokenizer: Tokenizer, options: TextDatasetOptions) -> Result<Self> {
        let special = match (options.add_special_tokens, tokenizer.get_post_processor()) {
            (true, Some(post)) => post.added_tokens(false),
            _ => 0,
        };
        if let Some(max) = options.max_length.filter(|&max| max <= special) {
            return Err(Error::InvalidOption {
                option: "max_length",
                value: max.to_string(),
                expected: "room for at least one token beside the tokenizer's special ones",
            });
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
        // Text is data: what looks like a special token in it is not one.
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

    /// How many tokens each text has, counted now on all cores: what length-grouped samplers go by. Four
    /// bytes a text.
    ///
    /// # Errors
    /// When a text cannot be read.
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
    /// The texts.
    pub fn texts(&self) -> &D {
        &self.texts
    }

    /// The tokenizer, with the truncation of the options and without padding.
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
}
