//! Advice on the changes that make a run fit.

use std::fmt;

use overdrive_checkpointing::{SavePolicy, Schedule};
use overdrive_core::units;
use overdrive_transformer::AttentionImplementation;

use super::{MemoryPlan, OptimizerMemory};
use crate::Result;

/// A change of a plan that saves memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// Flash attention instead of eager.
    FlashAttention,
    /// Fused kernels, and a loss that never holds all logits.
    FusedKernels,
    /// An optimizer with 8-bit states.
    Optimizer8bit,
    /// Recomputation of every block in backward.
    CheckpointEveryBlock,
    /// A micro-batch of this many sequences, with more gradient accumulation for the same step.
    Batch(u64),
    /// An optimizer whose states are in host memory or a file.
    PagedOptimizer,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FlashAttention => f.write_str("flash attention"),
            Self::FusedKernels => f.write_str("fused kernels with the chunked loss"),
            Self::Optimizer8bit => f.write_str("an 8-bit optimizer"),
            Self::CheckpointEveryBlock => f.write_str("activation checkpointing of every block"),
            Self::Batch(batch) => write!(
                f,
                "micro-batches of {batch} with more gradient accumulation"
            ),
            Self::PagedOptimizer => f.write_str("a paged optimizer"),
        }
    }
}

impl Change {
    fn apply(self, plan: &mut MemoryPlan) {
        match self {
            Self::FlashAttention => plan.attention = AttentionImplementation::Flash,
            Self::FusedKernels => plan.fused_kernels = true,
            Self::Optimizer8bit => plan.optimizer = OptimizerMemory::AdamW8bit,
            Self::CheckpointEveryBlock => {
                (plan.schedule, plan.policy) = (Schedule::EveryBlock, SavePolicy::Nothing);
            }
            Self::Batch(batch) => {
                plan.accumulates |= batch < plan.batch;
                plan.batch = batch;
            }
            Self::PagedOptimizer => plan.optimizer = OptimizerMemory::PagedAdamW,
        }
    }
}

/// Advice on fitting a plan into a memory limit. [`Display`](fmt::Display) is a sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryAdvice {
    /// The memory limit.
    pub limit_bytes: u64,
    /// The peak of the unchanged plan.
    pub peak_bytes: u64,
    /// The changes, the cheapest in time first; empty if the unchanged plan fits.
    pub changes: Vec<Change>,
    /// The peak with these changes.
    pub changed_peak_bytes: u64,
    /// The largest micro-batch that fits without other changes; 0 if not even 1 fits.
    pub largest_batch: u64,
}

impl MemoryAdvice {
    /// Returns `true` if the unchanged plan fits.
    pub fn fits(&self) -> bool {
        self.peak_bytes <= self.limit_bytes
    }

    /// Returns `true` if the plan fits with the changes.
    fn fits_changed(&self) -> bool {
        self.changed_peak_bytes <= self.limit_bytes
    }
}

/// The largest micro-batch of a search.
const MOST: u64 = 1 << 32;

impl MemoryPlan {
    /// Returns the changes that make the plan fit into `limit_bytes` of tensors: first those that cost no time (flash
    /// attention, fused kernels), then those that cost little (an 8-bit optimizer), then recomputation, then
    /// smaller micro-batches, and last a paged optimizer. Only changes that help are listed. Choose a limit
    /// below the size of the device: libraries and fragmentation take some of it.
    ///
    /// # Errors
    /// As for [`estimate`](Self::estimate).
    pub fn advice(&self, limit_bytes: u64) -> Result<MemoryAdvice> {
        let peak_bytes = self.estimate()?.peak;
        let mut plan = self.clone();
        let mut changed_peak_bytes = peak_bytes;
        let mut changes = Vec::new();
        let mut candidates = vec![
            Change::FlashAttention,
            Change::FusedKernels,
            Change::Optimizer8bit,
            Change::CheckpointEveryBlock,
        ];
        let halves = std::iter::successors(Some(self.batch / 2), |batch| Some(batch / 2));
        candidates.extend(halves.take_while(|&batch| batch > 0).map(Change::Batch));
        candidates.push(Change::PagedOptimizer);
        for change in candidates {
            if changed_peak_bytes <= limit_bytes {
                break;
            }
            let mut changed = plan.clone();
            change.apply(&mut changed);
            let peak = changed.estimate()?.peak;
            // A change that saves nothing at the peak only costs time.
            if peak < changed_peak_bytes {
                // A smaller batch replaces the larger one before it.
                if let (Change::Batch(_), Some(Change::Batch(_))) = (change, changes.last()) {
                    changes.pop();
                }
                changes.push(change);
                (plan, changed_peak_bytes) = (changed, peak);
            }
        }
        Ok(MemoryAdvice {
            limit_bytes,
            peak_bytes,
            changes,
            changed_peak_bytes,
            largest_batch: self.largest_batch(limit_bytes)?,
        })
    }

    /// Returns the largest micro-batch whose peak is at most `limit_bytes`, but at most 2^32; 0 if not even 1 fits.
    ///
    /// # Errors
    /// As for [`estimate`](Self::estimate).
    pub fn largest_batch(&self, limit_bytes: u64) -> Result<u64> {
        let fits = |batch| -> Result<bool> {
            let plan = MemoryPlan {
                batch,
                ..self.clone()
            };
            Ok(plan.estimate()?.peak <= limit_bytes)
        };
        if !fits(1)? {
            return Ok(0);
        }
        let (mut fitting, mut too_large) = (1, MOST + 1);
        while too_large - fitting > 1 {
            let middle = u64::midpoint(fitting, too_large);
            if fits(middle)? {
                fitting = middle;
            } else {
                too_large = middle;
            }
        }
        Ok(fitting)
    }
}

impl fmt::Display for MemoryAdvice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (peak, limit) = (
            units::bytes(self.peak_bytes),
            units::bytes(self.limit_bytes),
        );
        if self.fits() {
            return write!(
                f,
                "{peak} of {limit}: it fits, as do micro-batches of up to {}",
                self.largest_batch
            );
        }
        write!(f, "{peak} do not fit into {limit}")?;
        if self.largest_batch > 0 {
            let batch = self.largest_batch;
            write!(
                f,
                "; micro-batches of {batch} would, with more gradient accumulation"
            )?;
        }
        if self.changes.is_empty() {
            return Ok(());
        }
        let named: Vec<_> = self.changes.iter().map(Change::to_string).collect();
        write!(
            f,
            "; with {} it takes {}{}",
            named.join(" and "),
            units::bytes(self.changed_peak_bytes),
            if self.fits_changed() {
                ""
            } else {
                ", which is still too much"
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::tiny;
    use super::*;

    const MIB: u64 = 1 << 20;

    fn plan() -> MemoryPlan {
        MemoryPlan {
            attention: AttentionImplementation::Eager,
            ..MemoryPlan::new(tiny(), 8, 256)
        }
    }

    #[test]
    fn a_plan_that_fits_needs_no_change() {
        let advice = plan().advice(64 << 30).expect("a plan");
        assert!(advice.fits() && advice.changes.is_empty());
        assert!(advice.largest_batch > 8);
        assert!(advice.to_string().contains("it fits"), "{advice}");
    }

    #[test]
    fn free_changes_come_before_those_that_cost_time() {
        let peak = plan().estimate().expect("a plan").peak;
        let advice = plan().advice(peak - 1).expect("a plan");
        assert_eq!(advice.changes, [Change::FlashAttention]);
        assert!(advice.fits_changed());
        let text = advice.to_string();
        assert!(text.contains("; with flash attention it takes "), "{text}");
    }

    #[test]
    fn a_tight_limit_takes_several_changes_and_one_batch_size() {
        let advice = plan().advice(100 * MIB).expect("a plan");
        assert!(advice.fits_changed(), "{advice}");
        assert!(
            advice.changes.contains(&Change::CheckpointEveryBlock),
            "{advice}"
        );
        let batches = advice
            .changes
            .iter()
            .filter(|c| matches!(c, Change::Batch(_)));
        assert!(batches.count() <= 1, "{advice}");
    }

    #[test]
    fn a_plan_that_can_never_fit_is_reported_as_too_large() {
        let advice = plan().advice(MIB).expect("a plan");
        assert!(!advice.fits_changed());
        assert_eq!(advice.largest_batch, 0);
        assert!(
            advice.to_string().ends_with("which is still too much"),
            "{advice}"
        );
    }

    #[test]
    fn the_search_for_a_batch_ends_without_a_limit() {
        assert_eq!(plan().largest_batch(u64::MAX).expect("a plan"), MOST);
    }

    #[test]
    fn the_largest_batch_fits_and_the_next_one_does_not() {
        let limit = 900 * MIB;
        let batch = plan().largest_batch(limit).expect("a plan");
        let peak = |batch| {
            MemoryPlan { batch, ..plan() }
                .estimate()
                .expect("a plan")
                .peak
        };
        assert!(peak(batch) <= limit && peak(batch + 1) > limit, "{batch}");
    }
}
