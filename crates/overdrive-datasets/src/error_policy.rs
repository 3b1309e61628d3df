//! The handling of records that cannot be read.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::{Dataset, Error, Result};

/// The handling of records that cannot be read: invalid UTF-8, an invalid row, a missing image.
///
/// It applies to errors of records only ([`Error::is_about_record`]). An error of the disk or of an index is
/// returned under every policy, since continuing would lose data silently.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ErrorPolicy {
    /// The error is returned. The default.
    #[default]
    Stop,
    /// The record is skipped and counted; its batch has one record fewer.
    Skip,
    /// The next readable record replaces it; after the last record the search continues from the first. The record is
    /// counted too. Batches keep their sizes, and the same records are read in every run.
    Replace,
}

/// The number of records that could not be read, and the messages of the first ones.
#[derive(Debug, Default)]
pub struct ErrorLog {
    count: AtomicU64,
    first: Mutex<Vec<String>>,
}

impl ErrorLog {
    /// The number of messages that are kept: a damaged file of millions of records must not fill the memory.
    const KEPT: usize = 10;

    /// Returns the number of records that could not be read. Reading a record twice counts twice.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns the messages of the first unreadable records, in the order of their occurrence.
    pub fn first(&self) -> Vec<String> {
        self.lock().clone()
    }

    pub(crate) fn add(&self, error: &Error) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let mut first = self.lock();
        if first.len() < Self::KEPT {
            tracing::warn!("a record is skipped: {error}");
            first.push(error.to_string());
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        // The list is valid even if a push panicked, so a poisoned lock is harmless.
        self.first.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ErrorPolicy {
    /// Reads record `index` under this policy; returns `None` if the record is skipped.
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
    /// Under [`ErrorPolicy::Stop`] the error of the record; under the others, an error that is not about a record,
    /// and under [`ErrorPolicy::Replace`] that of the record if no record at all can be read.
    pub fn get<D: Dataset + ?Sized>(
        self,
        dataset: &D,
        index: usize,
        log: &ErrorLog,
    ) -> Result<Option<D::Item>> {
        let error = match dataset.get(index) {
            Ok(item) => return Ok(Some(item)),
            Err(error) => error.of_record(index),
        };
        if self == Self::Stop || !error.is_about_record() {
            return Err(error);
        }
        log.add(&error);
        if self == Self::Skip {
            return Ok(None);
        }
        // The search starts at the next record, so that the replacement depends on the index alone.
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
