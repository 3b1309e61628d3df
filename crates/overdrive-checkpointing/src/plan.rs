//! Plans: the choice of the blocks to recompute so that memory suffices and little time is lost.

use serde::{Deserialize, Serialize};

use crate::{BlockCost, Error, Result, Schedule};

/// The blocks of a chain that are recomputed, and the predicted cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// For each block, `true` if it is recomputed.
    pub recompute: Vec<bool>,
    /// The predicted peak of the activations' bytes in forward and backward.
    pub predicted_peak_bytes: u64,
    /// The peak without checkpointing.
    pub plain_peak_bytes: u64,
    /// The seconds of recomputation per step.
    pub recompute_s: f64,
    /// The factor by which forward and backward of the blocks take longer, assuming that backward takes
    /// twice the time of forward: from 1 (no block recomputed) to 4/3 (every block).
    pub predicted_slowdown: f64,
    /// The costs from which the plan was made.
    pub costs: Vec<BlockCost>,
}

impl Plan {
    /// Returns the plan that recomputes the cheapest blocks, by seconds per freed byte, until the
    /// activations of the chain peak at no more than `budget_bytes`. Among equal blocks it chooses the
    /// first ones, because backward has freed the later ones when it recomputes them.
    ///
    /// The algorithm is greedy; then blocks that turned out unnecessary are removed, the most expensive
    /// first. For equal blocks the plan is optimal; otherwise it is within the cost of one block of the
    /// optimum.
    ///
    /// # Errors
    /// [`Error::Budget`] if recomputing every block is not enough.
    ///
    /// ```
    /// use overdrive_checkpointing::{BlockCost, Plan};
    ///
    /// let block = BlockCost { saved_bytes: 100, input_bytes: 10, forward_s: 0.01 };
    /// let plan = Plan::for_budget(&[block; 4], 250)?;
    /// assert_eq!(plan.recompute, [true, true, false, false]);
    /// assert_eq!((plan.plain_peak_bytes, plan.predicted_peak_bytes), (400, 220));
    /// # Ok::<(), overdrive_checkpointing::Error>(())
    /// ```
    pub fn for_budget(costs: &[BlockCost], budget_bytes: u64) -> Result<Self> {
        let plain_peak_bytes = peak(costs, &vec![false; costs.len()]);
        let mut recompute = vec![false; costs.len()];
        let mut order: Vec<usize> = (0..costs.len())
            .filter(|&k| freed_bytes(&costs[k]) > 0)
            .collect();
        // The sort is stable, so equal blocks stay in their order.
        order.sort_by(|&a, &b| price(&costs[a]).total_cmp(&price(&costs[b])));
        let mut chosen = Vec::new();
        for &index in &order {
            if peak(costs, &recompute) <= budget_bytes {
                break;
            }
            recompute[index] = true;
            chosen.push(index);
        }
        if peak(costs, &recompute) > budget_bytes {
            return Err(Error::Budget {
                budget_bytes,
                least_bytes: smallest_peak(costs),
            });
        }
        chosen.sort_by(|&a, &b| costs[b].forward_s.total_cmp(&costs[a].forward_s));
        for index in chosen {
            recompute[index] = false;
            if peak(costs, &recompute) > budget_bytes {
                recompute[index] = true;
            }
        }
        Ok(Self::new(costs, recompute, plain_peak_bytes))
    }

    fn new(costs: &[BlockCost], recompute: Vec<bool>, plain_peak_bytes: u64) -> Self {
        let forward: f64 = costs.iter().map(|cost| cost.forward_s).sum();
        let recompute_s: f64 = costs
            .iter()
            .zip(&recompute)
            .filter(|(_, again)| **again)
            .map(|(cost, _)| cost.forward_s)
            .sum();
        Self {
            predicted_peak_bytes: peak(costs, &recompute),
            recompute,
            plain_peak_bytes,
            recompute_s,
            predicted_slowdown: if forward > 0.0 {
                // A step is forward (1) and backward (2).
                1.0 + recompute_s / (3.0 * forward)
            } else {
                1.0
            },
            costs: costs.to_vec(),
        }
    }

    /// Returns the plan as a schedule for the chain that was measured.
    pub fn schedule(&self) -> Schedule {
        Schedule::Chosen(self.recompute.clone())
    }
}

/// Returns the bytes that recomputing frees; 0 for a block that saves only its input.
fn freed_bytes(cost: &BlockCost) -> u64 {
    cost.saved_bytes.saturating_sub(cost.input_bytes)
}

/// Returns the seconds of recomputation per freed byte.
fn price(cost: &BlockCost) -> f64 {
    cost.forward_s / freed_bytes(cost) as f64
}

/// Returns the bytes that a block holds between forward and backward.
fn held_bytes(cost: &BlockCost, recompute: bool) -> u64 {
    if recompute {
        cost.input_bytes
    } else {
        cost.saved_bytes
    }
}

/// Returns the peak of the activations' bytes: at the end of forward, or while a block is recomputed,
/// when the blocks before it hold their bytes and those after it have been freed.
fn peak(costs: &[BlockCost], recompute: &[bool]) -> u64 {
    let (mut before, mut most) = (0, 0);
    for (cost, &again) in costs.iter().zip(recompute) {
        let now = if again {
            cost.saved_bytes.max(cost.input_bytes)
        } else {
            cost.saved_bytes
        };
        most = most.max(before + now);
        before += held_bytes(cost, again);
    }
    most.max(before)
}

/// Returns the smallest possible peak. Recomputing a block that frees bytes never raises the peak, so all
/// of them are recomputed.
fn smallest_peak(costs: &[BlockCost]) -> u64 {
    let all: Vec<bool> = costs.iter().map(|cost| freed_bytes(cost) > 0).collect();
    peak(costs, &all)
}
