//! The adapter of each row of a batch.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use tch::Tensor;

use crate::{Result, RowChoice};

thread_local! {
    static CURRENT: RefCell<Option<Rc<AdapterRows>>> = const { RefCell::new(None) };
}

/// The adapter of each row of a batch whose rows belong to different adapters (PEFT's `adapter_names`, vLLM's
/// LoRA requests).
///
/// While it is [in scope](AdapterRows::scope) on a thread, the layers of a model multiply all rows by their weights
/// at once, and apply each adapter to its own rows only. A layer without the adapter of a row computes its weight
/// alone for that row. A row without a name uses the adapters that are active in the model, as without a scope.
///
/// Adapters that the host does not know, because a CUDA graph reads them, are a [`RowChoice`].
///
/// A row is one input vector of a layer: an input `(…, I)` has as many rows as its other dimensions have elements.
///
/// ```
/// use std::sync::Arc;
/// use overdrive_nn::AdapterRows;
///
/// let french: Arc<str> = "french".into();
/// let rows = AdapterRows::new([(3, None), (2, Some(Arc::clone(&french))), (1, Some(french))]);
/// assert_eq!(rows.len(), 6);
/// assert_eq!(rows.runs().collect::<Vec<_>>(), [(0, 3, None), (3, 3, Some("french"))]);
/// let _scope = rows.scope(); // until it is dropped, models on this thread compute these rows
/// ```
#[derive(Debug, Clone)]
pub struct AdapterRows(Rows);

#[derive(Debug, Clone)]
enum Rows {
    /// The number of rows and the adapter of each run of rows.
    Runs(Vec<(usize, Option<Arc<str>>)>),
    Choice(RowChoice),
}

impl Default for AdapterRows {
    /// Makes no rows.
    fn default() -> AdapterRows {
        AdapterRows(Rows::Runs(Vec::new()))
    }
}

impl AdapterRows {
    /// Makes the rows from runs in order: the number of consecutive rows and their adapter, `None` for the model alone.
    pub fn new(rows: impl IntoIterator<Item = (usize, Option<Arc<str>>)>) -> AdapterRows {
        let mut runs: Vec<(usize, Option<Arc<str>>)> = Vec::new();
        for (count, name) in rows.into_iter().filter(|(count, _)| *count > 0) {
            match runs.last_mut() {
                Some((len, last)) if *last == name => *len += count,
                _ => runs.push((count, name)),
            }
        }
        AdapterRows(Rows::Runs(runs))
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        match &self.0 {
            Rows::Runs(runs) => runs.iter().map(|(count, _)| count).sum(),
            Rows::Choice(choice) => choice.len(),
        }
    }

    /// Returns `true` if there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the adapters that a tensor on the device says. [`runs`](AdapterRows::runs) is empty then.
    pub fn choice(&self) -> Option<&RowChoice> {
        match &self.0 {
            Rows::Runs(_) => None,
            Rows::Choice(choice) => Some(choice),
        }
    }

    /// Returns the first row, the number of rows and the adapter of each run.
    pub fn runs(&self) -> impl Iterator<Item = (usize, usize, Option<&str>)> {
        let runs = match &self.0 {
            Rows::Runs(runs) => runs.as_slice(),
            Rows::Choice(_) => &[],
        };
        let mut next = 0;
        runs.iter().map(move |(count, name)| {
            let start = next;
            next += count;
            (start, *count, name.as_deref())
        })
    }

    /// Returns the adapters of `len` rows from row `start` on.
    ///
    /// # Errors
    /// An error of libtorch for a [`choice`](AdapterRows::choice) of fewer rows.
    pub fn narrow(&self, start: usize, len: usize) -> Result<AdapterRows> {
        let runs = match &self.0 {
            Rows::Runs(runs) => runs,
            Rows::Choice(choice) => return Ok(choice.narrow(start, len)?.into()),
        };
        let end = start.saturating_add(len);
        let mut first = 0;
        Ok(AdapterRows::new(runs.iter().map(|(count, name)| {
            let run = first..first + count;
            first = run.end;
            let inside = run.end.min(end).saturating_sub(run.start.max(start));
            (inside, name.clone())
        })))
    }

    /// Returns the adapters of these rows in this order, for a layer that computes only some rows, such as an expert.
    ///
    /// # Errors
    /// [`Error::InvalidOption`](overdrive_core::Error::InvalidOption) for a row that does not exist, or an error of
    /// libtorch.
    pub fn select(&self, rows: &[i64]) -> Result<AdapterRows> {
        let runs = match &self.0 {
            Rows::Runs(runs) => runs,
            Rows::Choice(choice) => return Ok(choice.select(rows)?.into()),
        };
        let ends = runs.iter().scan(0, |end, (count, _)| {
            *end += count;
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let name = |row: &i64| {
            let run = usize::try_from(*row).ok();
            let run = run.and_then(|row| runs.get(ends.partition_point(|end| *end <= row)));
            let (_, name) = run.ok_or_else(|| {
                let expected = format!("at least 0 and below {}, the number of rows", self.len());
                overdrive_core::Error::option("row", row, expected)
            })?;
            Ok((1, name.clone()))
        };
        let names: Result<Vec<_>> = rows.iter().map(name).collect();
        Ok(AdapterRows::new(names?))
    }

    /// Returns the names of the adapters.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let chosen = self.choice().into_iter().flat_map(RowChoice::names);
        self.runs().filter_map(|(_, _, name)| name).chain(chosen)
    }

    /// Puts the rows in scope on this thread until the returned guard is dropped.
    #[must_use = "the rows are in scope until the value is dropped"]
    pub fn scope(self) -> AdapterRowsScope {
        let before = CURRENT.with(|current| current.replace(Some(Rc::new(self))));
        AdapterRowsScope { before }
    }

    /// Returns the rows that are in scope on this thread.
    pub fn current() -> Option<Rc<AdapterRows>> {
        CURRENT.with(|current| current.borrow().clone())
    }

    /// Checks that `x (…, I)`, the input of `layer`, has this number of rows.
    ///
    /// # Errors
    /// [`Error::Shape`](overdrive_core::Error::Shape) if it has another number of rows.
    pub fn check(&self, layer: &str, x: &Tensor) -> Result<()> {
        let size = x.size();
        let rows: i64 = size[..size.len().saturating_sub(1)].iter().product();
        if usize::try_from(rows).is_ok_and(|rows| rows == self.len()) {
            return Ok(());
        }
        let expected = format!(
            "(…, I) with {} rows, the number in `AdapterRows`; a layer that does not see every row of the batch cannot \
             choose its adapter by row",
            self.len()
        );
        Err(overdrive_core::Error::shape(format!("input of {layer}"), size, expected).into())
    }
}

impl From<RowChoice> for AdapterRows {
    fn from(choice: RowChoice) -> AdapterRows {
        AdapterRows(Rows::Choice(choice))
    }
}

/// Keeps [`AdapterRows`] in scope; the rows that were in scope before return when it is dropped.
#[derive(Debug)]
pub struct AdapterRowsScope {
    // The `Rc` also keeps the scope on its thread.
    before: Option<Rc<AdapterRows>>,
}

impl Drop for AdapterRowsScope {
    fn drop(&mut self) {
        CURRENT.with(|current| current.replace(self.before.take()));
    }
}
