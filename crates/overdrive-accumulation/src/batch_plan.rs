//! The division of an effective batch into micro-batches, accumulation steps and processes.

use std::fmt;

use overdrive_core::check_at_least;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The division of an effective batch, the examples of one optimizer step: micro-batch × accumulation steps ×
/// processes.
///
/// Training results depend on the effective batch. It stays the same when the micro-batch is reduced to
/// fit into memory, because the number of accumulation steps grows accordingly.
///
/// ```
/// use overdrive_accumulation::BatchPlan;
///
/// let plan = BatchPlan::from_micro_batch(256, 16, 4)?;
/// assert_eq!(plan.accumulation_steps(), 4);
/// let smaller = plan.with_micro_batch(8)?;
/// assert_eq!((smaller.accumulation_steps(), smaller.effective_batch()), (8, 256));
/// let error = plan.with_micro_batch(12).unwrap_err().to_string();
/// assert!(error.contains("nearest that do: 8 and 16"), "{error}");
/// # Ok::<(), overdrive_accumulation::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "StoredBatchPlan", into = "StoredBatchPlan")]
pub struct BatchPlan {
    micro_batch: u64,
    accumulation_steps: u64,
    world_size: u64,
}

/// The serialized form, with the names of transformers.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredBatchPlan {
    per_device_train_batch_size: u64,
    gradient_accumulation_steps: u64,
    world_size: u64,
}

impl BatchPlan {
    /// Returns the plan of all three factors.
    ///
    /// # Errors
    /// [`Error::Common`] if one is 0; [`Error::UnevenPlan`] if their product exceeds 64 bits.
    pub fn new(micro_batch: u64, accumulation_steps: u64, world_size: u64) -> Result<Self> {
        check_at_least("micro_batch", micro_batch, 1)?;
        check_at_least("accumulation_steps", accumulation_steps, 1)?;
        check_at_least("world_size", world_size, 1)?;
        let product = micro_batch
            .checked_mul(accumulation_steps)
            .and_then(|p| p.checked_mul(world_size));
        if product.is_none() {
            return Err(Error::UnevenPlan {
                problem: format!(
                    "{micro_batch} × {accumulation_steps} × {world_size} is too large"
                ),
                remedy: "give an effective batch below 2^64".into(),
            });
        }
        Ok(Self {
            micro_batch,
            accumulation_steps,
            world_size,
        })
    }

    /// Returns the plan of an effective batch with this micro-batch on each of `world_size` processes.
    ///
    /// # Errors
    /// [`Error::Common`] if one is 0; [`Error::UnevenPlan`] with the nearest valid numbers if they do not
    /// divide.
    pub fn from_micro_batch(
        effective_batch: u64,
        micro_batch: u64,
        world_size: u64,
    ) -> Result<Self> {
        check_at_least("micro_batch", micro_batch, 1)?;
        let per_process = per_process(effective_batch, world_size)?;
        if per_process.is_multiple_of(micro_batch) {
            return Self::new(micro_batch, per_process / micro_batch, world_size);
        }
        Err(uneven("micro-batch", micro_batch, per_process, world_size))
    }

    /// Returns the plan of an effective batch in this many accumulation steps on each of `world_size`
    /// processes.
    ///
    /// # Errors
    /// As [`from_micro_batch`](Self::from_micro_batch).
    pub fn from_accumulation_steps(
        effective_batch: u64,
        accumulation_steps: u64,
        world_size: u64,
    ) -> Result<Self> {
        check_at_least("accumulation_steps", accumulation_steps, 1)?;
        let per_process = per_process(effective_batch, world_size)?;
        if per_process.is_multiple_of(accumulation_steps) {
            return Self::new(
                per_process / accumulation_steps,
                accumulation_steps,
                world_size,
            );
        }
        Err(uneven(
            "number of accumulation steps",
            accumulation_steps,
            per_process,
            world_size,
        ))
    }

    /// Returns the plan of the same effective batch with another micro-batch.
    ///
    /// # Errors
    /// As [`from_micro_batch`](Self::from_micro_batch).
    pub fn with_micro_batch(self, micro_batch: u64) -> Result<Self> {
        Self::from_micro_batch(self.effective_batch(), micro_batch, self.world_size)
    }

    /// Returns the plan of the same effective batch and micro-batch with another number of processes.
    ///
    /// # Errors
    /// As [`from_micro_batch`](Self::from_micro_batch).
    pub fn with_world_size(self, world_size: u64) -> Result<Self> {
        Self::from_micro_batch(self.effective_batch(), self.micro_batch, world_size)
    }

    /// Returns the plan of the same effective batch with the largest micro-batch that divides it and is
    /// at most `limit`, such as the result of a search; `None` for a limit of 0.
    #[must_use]
    pub fn with_micro_batch_at_most(self, limit: u64) -> Option<Self> {
        let per_process = self.micro_batch * self.accumulation_steps;
        let micro_batch = divisor_at_most(per_process, limit.min(per_process))?;
        let accumulation_steps = per_process / micro_batch;
        Some(Self {
            micro_batch,
            accumulation_steps,
            ..self
        })
    }

    /// Returns the next smaller plan of a search, with a micro-batch of at most half; `None` for a
    /// micro-batch of 1.
    #[must_use]
    pub fn halved(self) -> Option<Self> {
        self.with_micro_batch_at_most(self.micro_batch / 2)
    }

    /// Returns the number of examples of one optimizer step over all processes.
    #[must_use]
    pub fn effective_batch(self) -> u64 {
        // Cannot overflow: `new` has checked the product.
        self.micro_batch * self.accumulation_steps * self.world_size
    }

    /// Returns the number of examples of one forward and backward pass on one process.
    #[must_use]
    pub fn micro_batch(self) -> u64 {
        self.micro_batch
    }

    /// Returns the number of forward and backward passes of one optimizer step on one process.
    #[must_use]
    pub fn accumulation_steps(self) -> u64 {
        self.accumulation_steps
    }

    /// Returns the number of processes.
    #[must_use]
    pub fn world_size(self) -> u64 {
        self.world_size
    }
}

impl fmt::Display for BatchPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            micro_batch,
            accumulation_steps,
            world_size,
        } = self;
        write!(
            f,
            "{} examples per step = micro-batch {micro_batch} × {accumulation_steps} accumulation steps × {world_size} processes",
            self.effective_batch()
        )
    }
}

impl TryFrom<StoredBatchPlan> for BatchPlan {
    type Error = Error;

    fn try_from(stored: StoredBatchPlan) -> Result<Self> {
        Self::new(
            stored.per_device_train_batch_size,
            stored.gradient_accumulation_steps,
            stored.world_size,
        )
    }
}

impl From<BatchPlan> for StoredBatchPlan {
    fn from(plan: BatchPlan) -> Self {
        Self {
            per_device_train_batch_size: plan.micro_batch,
            gradient_accumulation_steps: plan.accumulation_steps,
            world_size: plan.world_size,
        }
    }
}

/// Returns the examples of one process, if the effective batch divides among the processes.
fn per_process(effective_batch: u64, world_size: u64) -> Result<u64> {
    check_at_least("effective_batch", effective_batch, 1)?;
    check_at_least("world_size", world_size, 1)?;
    if effective_batch.is_multiple_of(world_size) {
        return Ok(effective_batch / world_size);
    }
    // The message names the nearest multiples; below the number of processes there is only the one above.
    let below = effective_batch / world_size * world_size;
    let above = below.saturating_add(world_size);
    let nearest = if below == 0 {
        format!("{above}")
    } else {
        format!("{below} or {above}")
    };
    Err(Error::UnevenPlan {
        problem: format!(
            "an effective batch of {effective_batch} does not divide among {world_size} processes"
        ),
        remedy: format!("use {nearest}"),
    })
}

fn uneven(what: &str, value: u64, per_process: u64, world_size: u64) -> Error {
    let below = divisor_at_most(per_process, value);
    let above = divisor_at_least(per_process, value);
    let nearest = match (below, above) {
        (Some(below), Some(above)) => format!("{below} and {above}"),
        (Some(only), None) | (None, Some(only)) => only.to_string(),
        (None, None) => "none".to_string(),
    };
    let (whole, processes) = (
        per_process * world_size,
        if world_size == 1 {
            "process"
        } else {
            "processes"
        },
    );
    Error::UnevenPlan {
        problem: format!(
            "a {what} of {value} does not divide the {per_process} examples per step of each process ({whole} on {world_size} {processes})"
        ),
        remedy: format!("the nearest that do: {nearest}"),
    }
}

fn divisor_at_most(number: u64, limit: u64) -> Option<u64> {
    divisors(number).filter(|&divisor| divisor <= limit).max()
}

fn divisor_at_least(number: u64, limit: u64) -> Option<u64> {
    divisors(number).filter(|&divisor| divisor >= limit).min()
}

/// Returns every divisor, in no particular order; the divisor at the square root appears twice.
fn divisors(number: u64) -> impl Iterator<Item = u64> {
    // Divisors come in pairs (d, number / d), of which the smaller is at most the square root.
    let small =
        (1..).take_while(move |&d: &u64| d.checked_mul(d).is_some_and(|square| square <= number));
    small
        .filter(move |&d| number.is_multiple_of(d))
        .flat_map(move |d| [d, number / d])
}
