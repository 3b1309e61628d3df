use std::fmt;

use overdrive_distributed::ProcessGroup;
use tch::{Kind, Tensor};

use crate::Result;
use crate::arguments::REWARD_METRICS;

/// The sums of the rewards of pairs, which stay on the device until their means are read.
#[derive(Debug, Default)]
pub struct RewardTotals {
    /// The sums of the chosen and the rejected rewards and of the pairs whose chosen reward is the larger, (3), Double;
    /// `None` without a pair.
    sums: Option<Tensor>,
    pairs: usize,
}

/// The mean rewards of pairs, under the names of TRL. Displayed as a line.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RewardMetrics {
    /// `rewards/chosen`: the mean reward of the chosen answers.
    pub chosen: f64,
    /// `rewards/rejected`: the mean reward of the rejected answers.
    pub rejected: f64,
    /// `rewards/accuracies`: the share of pairs whose chosen answer has the larger reward, 0 to 1.
    pub accuracies: f64,
    /// `rewards/margins`: the mean difference between the rewards of the chosen and of the rejected answer.
    pub margins: f64,
}

impl RewardTotals {
    /// Returns the rewards of pairs from the log-ratios (B) of policy and reference.
    pub(super) fn of(chosen: &Tensor, rejected: &Tensor, beta: f64) -> Result<Self> {
        let rewards = |ratios: &Tensor| ratios.f_detach()?.f_mul_scalar(beta);
        let (chosen, rejected) = (rewards(chosen)?, rewards(rejected)?);
        let wins = chosen.f_gt_tensor(&rejected)?;
        let sums = [&chosen, &rejected, &wins].map(|values| values.f_sum(Kind::Double));
        let sums = sums
            .into_iter()
            .collect::<std::result::Result<Vec<_>, _>>()?;
        Ok(Self {
            sums: Some(Tensor::f_stack(&sums, 0)?),
            pairs: chosen.numel(),
        })
    }

    /// Adds the rewards of other pairs.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn add(&mut self, other: &Self) -> Result<()> {
        self.sums = match (&self.sums, &other.sums) {
            (Some(own), Some(other)) => Some(own.f_add(other)?),
            (own, other) => own.as_ref().or(other.as_ref()).map(Tensor::shallow_clone),
        };
        self.pairs += other.pairs;
        Ok(())
    }

    /// Returns the means over the pairs of all processes, each of which calls it, and starts anew. Waits for the device.
    ///
    /// # Errors
    /// An error if a process is lost.
    pub fn take_mean(&mut self, group: &ProcessGroup) -> Result<RewardMetrics> {
        let Self { sums, pairs } = std::mem::take(self);
        let sums = sums.map(Vec::<f64>::try_from).transpose()?;
        let sums = sums.unwrap_or_default();
        let sum = |index: usize| sums.get(index).copied().unwrap_or(0.0);
        let [chosen, rejected, wins, pairs] = group.sums([sum(0), sum(1), sum(2), pairs as f64])?;
        Ok(RewardMetrics {
            chosen: chosen / pairs,
            rejected: rejected / pairs,
            accuracies: wins / pairs,
            margins: (chosen - rejected) / pairs,
        })
    }
}

impl RewardMetrics {
    /// Returns the means with their names.
    pub fn named(&self) -> impl Iterator<Item = (String, f64)> + use<> {
        let means = [self.chosen, self.rejected, self.accuracies, self.margins];
        REWARD_METRICS.map(str::to_owned).into_iter().zip(means)
    }
}

impl fmt::Display for RewardMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rewards     chosen {:.3}, rejected {:.3}, margins {:.3}, accuracies {:.2}",
            self.chosen, self.rejected, self.margins, self.accuracies
        )
    }
}
