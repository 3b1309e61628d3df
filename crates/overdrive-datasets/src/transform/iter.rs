//! All records, one by one.

use crate::{Dataset, ErrorLog, ErrorPolicy, Result};

/// The records of a dataset in their order.
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

    /// The records that were left out or replaced.
    pub fn errors(&self) -> &ErrorLog {
        &self.log
    }
}

impl<D: Dataset> Iterator for DatasetIter<'_, D> {
    type Item = Result<D::Item>;

    /// The next record that can be read. After an error that the policy hands on, it has ended.
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
