//! The iteration over the records of a dataset.

use crate::{Dataset, ErrorLog, ErrorPolicy, Result};

/// An iterator over the records of a dataset in their order.
#[derive(Debug)]
pub struct DatasetIter<'a, D> {
    dataset: &'a D,
    next: usize,
    on_error: ErrorPolicy,
    log: ErrorLog,
    ended: bool,
}

impl<'a, D> DatasetIter<'a, D> {
    pub(crate) fn new(dataset: &'a D, on_error: ErrorPolicy) -> Self {
        Self {
            dataset,
            next: 0,
            on_error,
            log: ErrorLog::default(),
            ended: false,
        }
    }

    /// Returns the log of the records that were skipped or replaced.
    pub fn errors(&self) -> &ErrorLog {
        &self.log
    }
}

impl<D: Dataset> Iterator for DatasetIter<'_, D> {
    type Item = Result<D::Item>;

    /// Returns the next readable record. The iterator ends after an error that the policy returns.
    fn next(&mut self) -> Option<Result<D::Item>> {
        while !self.ended && self.next < self.dataset.len() {
            let index = self.next;
            self.next += 1;
            match self.on_error.get(self.dataset, index, &self.log) {
                Ok(Some(item)) => return Some(Ok(item)),
                Ok(None) => {}
                Err(error) => {
                    self.ended = true;
                    return Some(Err(error));
                }
            }
        }
        None
    }
}
