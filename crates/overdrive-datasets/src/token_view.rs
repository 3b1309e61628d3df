//! Views of token stores as one stream of tokens, and splits.

use std::ops::Range;
use std::sync::Arc;

use crate::{Document, Error, Result, TokenStore};
use overdrive_core::random::random_u64;
use overdrive_core::{Error as CommonError, check_option};

/// The stream of random numbers that splits use (see [`overdrive_core::random::random_u64`]).
const SPLIT_STREAM: u32 = 0x5917;

/// The unit by which a split divides the tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SplitBy {
    /// Each document is entirely in one of the two views, by a hash of the seed and its number. Neither view is
    /// empty. The default.
    #[default]
    Document,
    /// The end of the stream is the validation view; the cut may be within a document. nanoGPT splits a single file
    /// this way.
    Position,
    /// The split is by document if at least two validation documents are expected, and by position otherwise.
    Auto,
}

/// The options of [`TokenView::split`].
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SplitOptions {
    /// The fraction of the documents (or of the tokens, if it is cut by position) for validation, above 0 and below
    /// 1. Default: 0.05.
    pub validation_fraction: f64,
    /// The seed that chooses the documents. Default: 0.
    pub seed: u64,
    /// The unit of the split. Default: [`SplitBy::Document`].
    pub by: SplitBy,
}

impl Default for SplitOptions {
    fn default() -> Self {
        Self {
            validation_fraction: 0.05,
            seed: 0,
            by: SplitBy::Document,
        }
    }
}

/// A contiguous range of tokens in a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Segment {
    /// The position of its first token in the view.
    view_start: usize,
    /// The position of its first token in the store.
    store_start: usize,
    /// The index of the store among those of the view.
    store: usize,
}

/// A selection of documents of a store, or of several stores, concatenated to one stream of tokens.
///
/// A view copies no tokens: it is a list of ranges (24 bytes per run of neighbouring documents), and reading a
/// window finds its range by binary search. Clones share the list.
#[derive(Debug, Clone)]
pub struct TokenView {
    stores: Arc<[Arc<TokenStore>]>,
    segments: Arc<[Segment]>,
    /// The documents in it, as runs of their numbers; `None` when it was cut by position. The documents of all stores
    /// are numbered consecutively.
    documents: Option<Arc<[Range<usize>]>>,
    len: usize,
    text_bytes: Option<u64>,
}

impl TokenView {
    /// Returns a view of a whole store.
    pub fn new(store: impl Into<Arc<TokenStore>>) -> Self {
        let store = store.into();
        let documents = 0..store.document_count();
        Self::of_documents(store, std::iter::once(documents))
    }

    /// Returns the views one after the other, as one stream. Documents are numbered as if their stores were one.
    ///
    /// ```
    /// use overdrive_datasets::{StoreOptions, TokenStoreWriter, TokenView};
    /// # let dir = tempfile::tempdir().unwrap();
    /// let store = |name: &str, tokens: &[u32]| {
    ///     let mut writer = TokenStoreWriter::create(dir.path().join(name), StoreOptions::new(100))?;
    ///     writer.push_document(tokens, tokens.len() as u64)?;
    ///     writer.finish().map(TokenView::new)
    /// };
    /// let both = TokenView::concat(&[store("a.tokens", &[1, 2])?, store("b.tokens", &[3])?]);
    /// assert_eq!(both.tokens(0..3)?, [1, 2, 3]);
    /// assert_eq!(both.document_count(), Some(2));
    /// # Ok::<(), overdrive_datasets::Error>(())
    /// ```
    pub fn concat(views: &[Self]) -> Self {
        let mut stores = Vec::new();
        let mut segments = Vec::new();
        let mut documents = Some(Vec::new());
        let mut text_bytes = Some(0);
        let (mut len, mut numbered) = (0, 0);
        for view in views {
            segments.extend(view.segments.iter().map(|segment| Segment {
                view_start: len + segment.view_start,
                store: stores.len() + segment.store,
                ..*segment
            }));
            let shift = |run: &Range<usize>| run.start + numbered..run.end + numbered;
            documents = documents
                .zip(view.documents.as_ref())
                .map(|(mut all, own)| {
                    all.extend(own.iter().map(shift));
                    all
                });
            text_bytes = text_bytes.zip(view.text_bytes).map(|(sum, own)| sum + own);
            len += view.len;
            numbered += view
                .stores
                .iter()
                .map(|store| store.document_count())
                .sum::<usize>();
            stores.extend(view.stores.iter().cloned());
        }
        Self {
            stores: stores.into(),
            segments: segments.into(),
            documents: documents.map(Into::into),
            len,
            text_bytes,
        }
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn check_range(&self, start: usize, count: usize) -> Result<()> {
        let end = start.saturating_add(count);
        match end <= self.len {
            true => Ok(()),
            false => Err(Error::OutOfRange {
                start,
                end,
                tokens: self.len,
            }),
        }
    }

    /// Copies the tokens from `start` on into `out`, across documents and without an allocation.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], and [`Error::TokenOutOfVocabulary`] for a token outside the vocabulary.
    pub fn copy_to(&self, start: usize, mut out: &mut [i64]) -> Result<()> {
        self.check_range(start, out.len())?;
        let mut position = start;
        let mut index = self
            .segments
            .partition_point(|segment| segment.view_start <= start);
        while !out.is_empty() {
            // The first segment starts at 0, so `index` is at least 1.
            let segment = self.segments[index - 1];
            let rest = self.segment_end(index - 1) - position;
            let (now, later) = out.split_at_mut(rest.min(out.len()));
            self.stores[segment.store]
                .copy_to(segment.store_start + (position - segment.view_start), now)?;
            position += now.len();
            out = later;
            index += 1;
        }
        Ok(())
    }

    /// Returns the tokens of a range.
    ///
    /// # Errors
    /// Those of [`TokenView::copy_to`].
    pub fn tokens(&self, range: Range<usize>) -> Result<Vec<i64>> {
        // Checked before memory is allocated, because the range may have any length.
        self.check_range(range.start, range.len())?;
        let mut out = vec![0; range.len()];
        self.copy_to(range.start, &mut out)?;
        Ok(out)
    }

    /// Returns the number of documents; `None` if the view was cut by position.
    pub fn document_count(&self) -> Option<usize> {
        self.documents
            .as_ref()
            .map(|runs| runs.iter().map(ExactSizeIterator::len).sum())
    }

    /// Returns the numbers of its documents in the store, in order; none if the view was cut by position. In a view of
    /// several stores, the numbers of a store continue those of the store before it.
    pub fn document_numbers(&self) -> impl Iterator<Item = usize> + '_ {
        self.documents
            .iter()
            .flat_map(|runs| runs.iter().cloned().flatten())
    }

    /// Returns document `number`, one of [`document_numbers`](Self::document_numbers), and the store that its range of
    /// tokens refers to; `None` if there is no such document.
    pub fn document(&self, number: usize) -> Option<(&TokenStore, Document)> {
        let mut local = number;
        for store in self.stores.iter() {
            match local.checked_sub(store.document_count()) {
                None => return Some((store, store.document(local)?)),
                Some(rest) => local = rest,
            }
        }
        None
    }

    /// Returns the length of its text in UTF-8 bytes; `None` if the store does not have it. For a view that was cut
    /// by position it is an estimate: the store's bytes in proportion to the tokens.
    pub fn text_bytes(&self) -> Option<u64> {
        self.text_bytes
    }

    /// Converts the mean loss per token in nats to bits per byte of text, which unlike the loss does not depend on
    /// the tokenizer. Returns `None` if the store does not have its text's length.
    ///
    /// It uses the view's number of tokens per byte, so the loss should be the mean over the whole view or over a
    /// representative sample.
    pub fn bits_per_byte(&self, nats_per_token: f64) -> Option<f64> {
        let bytes = self.text_bytes.filter(|&bytes| bytes > 0)?;
        Some(nats_per_token / std::f64::consts::LN_2 * self.len as f64 / bytes as f64)
    }

    /// Returns the stores of the view, in order: one, except for a view by [`concat`](Self::concat).
    pub fn stores(&self) -> &[Arc<TokenStore>] {
        &self.stores
    }

    /// Returns a view of the tokens in `range`.
    ///
    /// # Errors
    /// [`Error::OutOfRange`].
    pub fn slice(&self, range: Range<usize>) -> Result<Self> {
        if range.start > range.end || range.end > self.len {
            let Range { start, end } = range;
            return Err(Error::OutOfRange {
                start,
                end,
                tokens: self.len,
            });
        }
        if range == (0..self.len) {
            return Ok(self.clone());
        }
        let mut segments = Vec::new();
        for (index, segment) in self.segments.iter().enumerate() {
            let start = segment.view_start.max(range.start);
            if start < self.segment_end(index).min(range.end) {
                segments.push(Segment {
                    view_start: start - range.start,
                    store_start: segment.store_start + (start - segment.view_start),
                    store: segment.store,
                });
            }
        }
        let share = range.len() as f64 / self.len as f64;
        Ok(Self {
            stores: self.stores.clone(),
            segments: segments.into(),
            documents: None,
            len: range.len(),
            text_bytes: self
                .text_bytes
                .map(|bytes| (bytes as f64 * share).round() as u64),
        })
    }

    /// Splits the view into training and validation, in this order.
    ///
    /// By document, the side of a document depends only on the seed and its number in the store. If all documents
    /// fell on one side, the one nearest to the other side is moved there.
    ///
    /// # Errors
    /// [`Error::Common`] if the fraction is not between 0 and 1, or if a view that was cut by position is split by
    /// document; [`Error::TooFew`] for fewer than two documents (by document) or two tokens (by position).
    pub fn split(&self, options: &SplitOptions) -> Result<(Self, Self)> {
        let fraction = options.validation_fraction;
        let valid = fraction > 0.0 && fraction < 1.0;
        check_option(
            valid,
            "validation_fraction",
            fraction,
            "above 0 and below 1",
        )?;
        match options.by {
            SplitBy::Document => self.split_by_document(options),
            SplitBy::Position => self.split_by_position(fraction),
            SplitBy::Auto => match self.document_count() {
                Some(count) if count as f64 * fraction >= 2.0 => self.split_by_document(options),
                _ => self.split_by_position(fraction),
            },
        }
    }

    fn split_by_document(&self, options: &SplitOptions) -> Result<(Self, Self)> {
        let documents = self.document_count().ok_or_else(|| {
            let expected = "position for a view that was cut by position";
            CommonError::option("by", "document", expected)
        })?;
        if documents < 2 {
            return Err(Error::TooFew {
                unit: "documents",
                count: documents,
                needed: 2,
                remedy: "give more files, or split by position (SplitBy::Position)",
            });
        }
        // The fraction, scaled to the range of u64; the cast saturates.
        let threshold = (options.validation_fraction * 2.0_f64.powi(64)) as u64;
        let rank = |number: usize| random_u64(options.seed, SPLIT_STREAM, number as u64);
        let count = self
            .document_numbers()
            .filter(|&number| rank(number) < threshold)
            .count();
        let by_rank = |number: &usize| rank(*number);
        let exception = match count {
            0 => self.document_numbers().min_by_key(by_rank),
            _ if count == documents => self.document_numbers().max_by_key(by_rank),
            _ => None,
        };
        let in_validation =
            |number: &usize| (rank(*number) < threshold) != (Some(*number) == exception);
        let side = |validation: bool| {
            let mut first = 0;
            // The numbers ascend, and each store takes its own.
            let mut numbers = self.document_numbers().peekable();
            let views = self.stores.iter().map(|store| {
                let (start, end) = (first, first + store.document_count());
                first = end;
                let of_store = std::iter::from_fn(|| numbers.next_if(|number| *number < end));
                let chosen = of_store.filter(|number| in_validation(number) == validation);
                let runs = chosen.map(|number| number - start..number - start + 1);
                Self::of_documents(store.clone(), runs)
            });
            Self::concat(&views.collect::<Vec<_>>())
        };
        Ok((side(false), side(true)))
    }

    fn split_by_position(&self, fraction: f64) -> Result<(Self, Self)> {
        if self.len < 2 {
            return Err(Error::TooFew {
                unit: "tokens",
                count: self.len,
                needed: 2,
                remedy: "give more text",
            });
        }
        let validation = (self.len as f64 * fraction).round() as usize;
        let cut = self.len - validation.clamp(1, self.len - 1);
        Ok((self.slice(0..cut)?, self.slice(cut..self.len)?))
    }

    /// Returns a view of the documents of `runs` in one store, which must be in order and not overlap.
    fn of_documents(store: Arc<TokenStore>, runs: impl Iterator<Item = Range<usize>>) -> Self {
        let mut documents: Vec<Range<usize>> = Vec::new();
        for run in runs.filter(|run| !run.is_empty()) {
            match documents.last_mut() {
                // Neighbouring documents are joined into one run, so that a view of nearly all documents is small.
                Some(last) if last.end == run.start => last.end = run.end,
                _ => documents.push(run),
            }
        }
        let mut segments = Vec::new();
        let mut len = 0;
        let mut text_bytes = store.text_bytes().map(|_| 0);
        for run in &documents {
            let end_of = |number| {
                store
                    .document(number)
                    .map_or(0, |document| document.tokens.end)
            };
            let start = if run.start == 0 {
                0
            } else {
                end_of(run.start - 1)
            };
            let tokens = end_of(run.end - 1) - start;
            if tokens > 0 {
                segments.push(Segment {
                    view_start: len,
                    store_start: start,
                    store: 0,
                });
                len += tokens;
            }
            text_bytes = match text_bytes {
                // For the whole store, the header holds the sum, so the table need not be read.
                Some(_) if run.len() == store.document_count() => store.text_bytes(),
                Some(sum) => {
                    let bytes = run.clone().filter_map(|n| store.document(n)?.text_bytes);
                    Some(sum + bytes.sum::<u64>())
                }
                None => None,
            };
        }
        Self {
            stores: Arc::new([store]),
            segments: segments.into(),
            documents: Some(documents.into()),
            len,
            text_bytes,
        }
    }

    fn segment_end(&self, index: usize) -> usize {
        self.segments
            .get(index + 1)
            .map_or(self.len, |next| next.view_start)
    }
}
