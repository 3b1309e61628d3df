//! The documents of a token store as a dataset.

use std::sync::Arc;

use crate::{Dataset, Error, Result, TokenView, TokenizedExample};

/// The documents of a view of token stores, each as a sequence whose tokens are all labels.
///
/// ```
/// use overdrive_datasets::{Dataset, StoreOptions, TokenDocuments, TokenStoreWriter, TokenView};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("text.tokens");
/// let mut writer = TokenStoreWriter::create(path, StoreOptions::new(100))?;
/// writer.push_document(&[1, 2, 3], 9)?; // 9 bytes of text
/// writer.push_document(&[4, 5], 4)?;
/// let documents = TokenDocuments::new(&TokenView::new(writer.finish()?));
/// assert_eq!(documents.lengths(), [3, 2]);
/// assert_eq!(documents.get(1)?.input_ids, [4, 5]);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TokenDocuments {
    view: TokenView,
    /// The documents' numbers in the view ([`TokenView::document_numbers`]).
    numbers: Arc<[u32]>,
}

impl TokenDocuments {
    /// Returns all documents of `view`; none if the view was cut by position.
    pub fn new(view: &TokenView) -> Self {
        let numbers = view
            .document_numbers()
            .filter_map(|number| u32::try_from(number).ok());
        Self {
            view: view.clone(),
            numbers: numbers.collect(),
        }
    }

    /// Keeps at most this many documents, spread evenly over all: a representative sample for a quick evaluation.
    #[must_use]
    pub fn at_most(self, documents: usize) -> Self {
        let all = self.numbers.len();
        let count = all.min(documents);
        let spread = (0..count).map(|index| self.numbers[index * all / count]);
        Self {
            numbers: spread.collect(),
            view: self.view,
        }
    }

    /// Returns the number of tokens of each document, without reading any.
    pub fn lengths(&self) -> Vec<u32> {
        let length = |&number: &u32| {
            let document = self.view.document(number as usize);
            let tokens = document.map_or(0, |(_, document)| document.tokens.len());
            u32::try_from(tokens).unwrap_or(u32::MAX)
        };
        self.numbers.iter().map(length).collect()
    }

    /// Returns the number in the view of document `index`; `None` if there is no such document.
    pub fn number(&self, index: usize) -> Option<usize> {
        self.numbers.get(index).map(|&number| number as usize)
    }
}

impl Dataset for TokenDocuments {
    type Item = TokenizedExample;

    fn len(&self) -> usize {
        self.numbers.len()
    }

    fn get(&self, index: usize) -> Result<TokenizedExample> {
        let number = self.number(index);
        let document = number.and_then(|number| self.view.document(number));
        let (store, document) = document.ok_or(Error::NoSuchRecord {
            index,
            len: self.numbers.len(),
        })?;
        let mut input_ids = vec![0; document.tokens.len()];
        store.copy_to(document.tokens.start, &mut input_ids)?;
        Ok(input_ids.into())
    }
}
