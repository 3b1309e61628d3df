//! The adapter of each row of a batch, by numbers on the device.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tch::{Kind, Tensor};

use crate::Result;

/// The adapters of rows by numbers on the device. The same operators run whatever the numbers are, so that a CUDA graph
/// can be captured once and replayed for other adapters.
///
/// Every row is projected by all adapters, and [`factors`](RowChoice::factors) keep its own. For a few adapters of small
/// rank and few rows this costs little beside the weight; for many rows, put runs into
/// [`AdapterRows`](crate::AdapterRows).
///
/// ```
/// use std::sync::Arc;
/// use overdrive_nn::{AdapterRows, RowChoice, RowUpdate};
/// use tch::{Kind, Tensor};
///
/// # fn main() -> overdrive_nn::Result<()> {
/// let names: Vec<Arc<str>> = vec!["french".into(), "german".into()];
/// let choice = RowChoice::new(names, &Tensor::from_slice(&[1i64, 2, 0]))?; // german, none, french
/// let french = RowUpdate { adapter: 0, rank: 1, scale: 0.5 };
/// let german = RowUpdate { adapter: 1, rank: 2, scale: 2.0 };
/// let factors = choice.factors(&[french, german], Kind::Float)?;
/// let expected = Tensor::from_slice(&[0f32, 2.0, 2.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]);
/// assert_eq!(factors, expected.view([3, 3]));
/// let _scope = AdapterRows::from(choice).scope();
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct RowChoice {
    names: Arc<[Arc<str>]>,
    /// i64 `(rows,)`.
    adapters: Tensor,
    scales: Arc<Mutex<Scales>>,
}

/// The scales of updates, f32 `(names + 1, Σ rank)`, by the adapter, the rank and the bits of the scale of each.
type Scales = BTreeMap<Vec<(usize, i64, u64)>, Tensor>;

/// A low-rank update, for [`RowChoice::factors`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowUpdate {
    /// The index of its adapter in [`RowChoice::names`]; their number for an update of the rows without an adapter.
    pub adapter: usize,
    /// The number of columns of its projections.
    pub rank: i64,
    /// The factor of its projections.
    pub scale: f64,
}

impl RowChoice {
    /// Makes the choice from `adapters (rows,)`, i64: the index of the adapter of each row in `names`, or the number of
    /// names for a row without one. The tensor is shared, and its values may change between passes.
    ///
    /// # Errors
    /// [`Error::Shape`](overdrive_core::Error::Shape) or [`Error::Dtype`](overdrive_core::Error::Dtype).
    pub fn new(names: impl Into<Arc<[Arc<str>]>>, adapters: &Tensor) -> Result<RowChoice> {
        if adapters.dim() != 1 {
            let found = adapters.size();
            return Err(overdrive_core::Error::shape("adapters", found, "(rows,)").into());
        }
        if adapters.kind() != Kind::Int64 {
            let found = adapters.kind();
            return Err(overdrive_core::Error::dtype("adapters", found, "Int64").into());
        }
        Ok(RowChoice {
            names: names.into(),
            adapters: adapters.shallow_clone(),
            scales: Arc::default(),
        })
    }

    /// Returns the names of the adapters.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|name| &**name)
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.adapters.numel()
    }

    /// Returns `true` if there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the adapters of `len` rows from row `start` on.
    ///
    /// # Errors
    /// An error of libtorch if there are fewer rows.
    pub fn narrow(&self, start: usize, len: usize) -> Result<RowChoice> {
        Ok(RowChoice {
            adapters: self.adapters.f_narrow(0, start as i64, len as i64)?,
            ..self.clone()
        })
    }

    /// Returns the adapters of these rows in this order.
    ///
    /// # Errors
    /// An error of libtorch for a row that there is not.
    pub fn select(&self, rows: &[i64]) -> Result<RowChoice> {
        let rows = Tensor::f_from_slice(rows)?.f_to_device(self.adapters.device())?;
        Ok(RowChoice {
            adapters: self.adapters.f_index_select(0, &rows)?,
            ..self.clone()
        })
    }

    /// Returns the factors `(rows, Σ rank)` of the projections of `updates` side by side: the scale of an update in the
    /// rows of its adapter, 0 in all others.
    ///
    /// # Errors
    /// An error of libtorch, for an index that is too large or for want of memory.
    pub fn factors(&self, updates: &[RowUpdate], kind: Kind) -> Result<Tensor> {
        let key = |update: &RowUpdate| (update.adapter, update.rank, update.scale.to_bits());
        let key = updates.iter().map(key).collect();
        let mut known = self.scales.lock().unwrap_or_else(PoisonError::into_inner);
        // Kept, so that the pass before a capture writes them, and no replay does.
        let scales = match known.get(&key) {
            Some(scales) => scales.shallow_clone(),
            None => {
                let scales = self.scales(updates)?;
                known.insert(key, scales.shallow_clone());
                scales
            }
        };
        Ok(scales.f_index_select(0, &self.adapters)?.f_to_kind(kind)?)
    }

    fn scales(&self, updates: &[RowUpdate]) -> Result<Tensor> {
        let columns: i64 = updates.iter().map(|update| update.rank).sum();
        let size = [self.names.len() as i64 + 1, columns];
        let scales = Tensor::f_zeros(size, (Kind::Float, self.adapters.device()))?;
        let mut first = 0;
        for update in updates {
            let row = scales.f_select(0, update.adapter as i64)?;
            let mut own = row.f_narrow(0, first, update.rank)?;
            let _same = own.f_fill_(update.scale)?;
            first += update.rank;
        }
        Ok(scales)
    }
}

impl Clone for RowChoice {
    /// Returns a handle that shares the tensor.
    fn clone(&self) -> RowChoice {
        RowChoice {
            names: Arc::clone(&self.names),
            adapters: self.adapters.shallow_clone(),
            scales: Arc::clone(&self.scales),
        }
    }
}
