//! What becomes of records that cannot be read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::{Dataset, Error, Result};

/// What becomes of a record that cannot be read: invalid UTF-8, a broken row, a missing image.
///
/// It is about records only ([`Error::is_about_record`]): when the disk or the index fails, going on
/// would lose data without a word, so that is an error under every policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ErrorPolicy {
    /// The error is handed on.
    #[default]
    Stop,
    /// The record is left out and counted; a batch has one record less.
    Skip,
    /// The next record that can be read takes its place, the first one behind the last. It is counted
    /// too. A batch keeps its size, and the same records are read in every run.
    Replace,
}

/// How many records could not be read, and what was wrong with the first few.
#[derive(Debug, Default)]
pub struct ErrorLog {
    count: AtomicU64,
    first: Mutex<Vec<String>>,
}

impl ErrorLog {
    /// So many messages are kept.
    const KEPT: usize = 10;

    /// How many records could not be read. Reading one twice counts twice.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The messages of the first few, as they happened.
    pub fn first(&self) -> Vec<String> {
        self.lock().clone()
    }

    fn add(&self, error: &Error) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut first = self.lock();
        if first.len() < Self::KEPT {
            tracing::warn!("a record is left out: {error}");
            first.push(error.to_string());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        // A push that panicked left the list whole.
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ErrorPolicy {
    /// Reads record `index` under this policy; `None` says that it is left out.
    ///
    /// ```
    /// use overdrive_datasets::{ErrorLog, ErrorPolicy, TextLines, TextOptions};
    /// # let dir = tempfile::tempdir().unwrap();
    /// # let path = dir.path().join("lines.txt");
    /// std::fs::write(&path, b"good\nbad \xff\nalso good\n").unwrap();
    /// let lines = TextLines::open([&path], &TextOptions::default())?;
    /// let log = ErrorLog::default();
    /// assert!(ErrorPolicy::Stop.get(&lines, 1, &log).is_err());
    /// assert_eq!(ErrorPolicy::Skip.get(&lines, 1, &log)?, None);
    /// assert_eq!(ErrorPolicy::Replace.get(&lines, 1, &log)?.unwrap(), "also good");
    /// assert_eq!(log.count(), 2);
    /// assert!(log.first()[0].contains("lines.txt, record 1 (byte 5): not valid UTF-8"));
    /// # Ok::<(), overdrive_datasets::Error>(())
    /// ```
    ///
    /// # Errors
    /// Under [`ErrorPolicy::Stop`] the record's; under the others what is not about a record; and
    /// under [`ErrorPolicy::Replace`] the record's when no record at all can be read.
    pub fn get<D: Dataset + ?Sized>(
        self,
        dataset: &D,
        index: usize,
        log: &ErrorLog,
    ) -> Result<Option<D::Item>> {
        let error = match dataset.get(index) {
            Ok(item) => return Ok(Some(item)),
            Err(error) => error,
        };
        if self == Self::Stop || !error.is_about_record() {
            return Err(error);
        }
        log.add(&error);
        if self == Self::Skip {
            return Ok(None);
        }
        let others = (index + 1..dataset.len()).chain(0..index);
        for other in others {
            match dataset.get(other) {
                Ok(item) => return Ok(Some(item)),
                Err(error) if error.is_about_record() => log.add(&error),
                Err(error) => return Err(error),
            }
        }
        Err(error)
    }
}
