//! Which blocks to recompute so that memory fits and as little time as possible is lost.

use serde::{Deserialize, Serialize};

use crate::{BlockCost, Error, Result, Schedule};

/// Which blocks of a chain are recomputed, and what that is predicted to cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Whether each block is recomputed.
    pub recompute: Vec<bool>,
    /// The most bytes of activations there are at once, in forward or backward.
    pub predicted_peak_bytes: u64,
    /// The same without checkpointing.
    pub plain_peak_bytes: u64,
    /// Seconds of recomputation a step.
    pub recompute_s: f64,
    /// How many times longer forward and backward of the blocks take, with a backward of twice the
    /// forward: from 1 (nothing recomputed) to 4/3 (everything).
    pub predicted_slowdown: f64,
    /// What it was made from.
    pub costs: Vec<BlockCost>,
}

impl Plan {
    /// The plan that recomputes the cheapest blocks, by seconds for a byte freed, until the activations
    /// of the chain peak at no more than `budget_bytes`. Among equals it takes the first: backward has
    /// freed the later ones when it recomputes them.
    ///
    /// Greedy, and then whatever turned out needless is left out again, the costliest first: for blocks
    /// alike the least there is; for others within the cost of one block of it.
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
        let mut order: Vec<usize> = (0..costs.len()).filter(|&k| frees(&costs[k]) > 0).collect();
        // Stable: equals stay in their order.
        order.sort_by(|&a, &b| price(&costs[a]).total_cmp(&price(&costs[b])));
        let mut taken = Vec::new();
        for &index in &order {
            if peak(costs, &recompute) <= budget_bytes {
                break;
            }
            recompute[index] = true;
            taken.push(index);
        }
        if peak(costs, &recompute) > budget_bytes {
            return Err(Error::Budget {
                budget_bytes,
                least_bytes: least(costs),
            });
        }
        taken.sort_by(|&a, &b| costs[b].forward_s.total_cmp(&costs[a].forward_s));
        for index in taken {
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
                1.0 + recompute_s / (3.0 * forward)
            } else {
                1.0
            },
            costs: costs.to_vec(),
        }
    }

    /// As a schedule for the chain that was measured.
    pub fn schedule(&self) -> Schedule {
        Schedule::Chosen(self.recompute.clone())
    }
}

/// The bytes that recomputing frees; 0 for a block that saves no more than its input.
fn frees(cost: &BlockCost) -> u64 {
    cost.saved_bytes.saturating_sub(cost.input_bytes)
}

/// Seconds for each of them.
fn price(cost: &BlockCost) -> f64 {
    cost.forward_s / frees(cost) as f64
}

/// What a block holds between forward and backward.
fn held(cost: &BlockCost, recompute: bool) -> u64 {
    if recompute {
        cost.input_bytes
    } else {
        cost.saved_bytes
    }
}

/// The most bytes at once: when forward ends, or while a block is recomputed, when all before it hold
/// theirs and all after it hold nothing any more.
fn peak(costs: &[BlockCost], recompute: &[bool]) -> u64 {
    let (mut before, mut most) = (0, 0);
    for (cost, &again) in costs.iter().zip(recompute) {
        let now = if again {
            cost.saved_bytes.max(cost.input_bytes)
        } else {
            cost.saved_bytes
        };
        most = most.max(before + now);
        before += held(cost, again);
    }
    most.max(before)
}

/// The least peak there is: every block that frees anything helps, or changes nothing.
fn least(costs: &[BlockCost]) -> u64 {
    let all: Vec<bool> = costs.iter().map(|cost| frees(cost) > 0).collect();
    peak(costs, &all)
}
