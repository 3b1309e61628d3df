//! What all ranks must see alike: losses, norms, decisions.

use overdrive_optim::ClipOptions;
use tch::{Kind, Tensor};

use crate::{Backend, ProcessGroup, ReduceOp, Result};

impl ProcessGroup {
    /// The sum of a number over the ranks.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective).
    pub fn sum(&self, value: f64) -> Result<f64> {
        self.reduced(value, ReduceOp::Sum)
    }

    /// The sums of several numbers over the ranks, in one collective: loss, tokens and whether to stop, once
    /// a step.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    ///
    /// ```
    /// let group = overdrive_distributed::ProcessGroup::single();
    /// let (loss_sum, tokens, stop) = (30.0, 12.0, false);
    /// let sums = group.sums([loss_sum, tokens, f64::from(u8::from(stop))])?;
    /// let (loss, stop) = (sums[0] / sums[1], sums[2] > 0.0);
    /// assert_eq!((loss, stop), (2.5, false));
    /// # Ok::<(), overdrive_distributed::Error>(())
    /// ```
    pub fn sums<const N: usize>(&self, values: [f64; N]) -> Result<[f64; N]> {
        let sums = self.reduce_numbers(&values, ReduceOp::Sum)?;
        let mut out = values;
        out.copy_from_slice(&sums);
        Ok(out)
    }

    /// What to multiply the **sum** of this rank's losses with, so that the mean of the gradients over the
    /// ranks is that of the mean loss of all tokens: `world_size / tokens of all ranks`, the same on every
    /// rank. `tokens` are this rank's in the whole step; none anywhere gives 0.
    ///
    /// [`GradientAccumulator`](overdrive_accumulation::GradientAccumulator) does this by itself.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn token_weight(&self, tokens: u64) -> Result<f64> {
        let total = self.sum(tokens as f64)?;
        Ok(if total > 0.0 {
            self.world_size() as f64 / total
        } else {
            0.0
        })
    }

    /// The mean of a number over the ranks: of losses that are means over as many tokens each.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn mean(&self, value: f64) -> Result<f64> {
        self.reduced(value, ReduceOp::Avg)
    }

    /// The mean over everything the ranks counted: `sum` is this rank's total and `count` how much went
    /// into it (tokens, say). Nothing counted anywhere: NaN.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    ///
    /// ```
    /// let group = overdrive_distributed::ProcessGroup::single();
    /// assert_eq!(group.weighted_mean(30.0, 12.0)?, 2.5);
    /// # Ok::<(), overdrive_distributed::Error>(())
    /// ```
    pub fn weighted_mean(&self, sum: f64, count: f64) -> Result<f64> {
        let both = self.reduce_numbers(&[sum, count], ReduceOp::Sum)?;
        Ok(both[0] / both[1])
    }

    /// The least of a number over the ranks.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn min(&self, value: f64) -> Result<f64> {
        self.reduced(value, ReduceOp::Min)
    }

    /// The greatest of a number over the ranks.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn max(&self, value: f64) -> Result<f64> {
        self.reduced(value, ReduceOp::Max)
    }

    /// Whether it is so on any rank: to stop early on all where one wants to.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn any(&self, value: bool) -> Result<bool> {
        Ok(self.max(f64::from(u8::from(value)))? > 0.0)
    }

    /// Whether it is so on all ranks.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn all(&self, value: bool) -> Result<bool> {
        Ok(self.min(f64::from(u8::from(value)))? > 0.0)
    }

    /// Makes a scaler's flag the same on all ranks, in place and without reading it: 1 or more if any rank
    /// found an infinity or NaN. Not needed after `DistributedDataParallel`'s backward, whose sums carry
    /// an infinity of one rank to all.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn agree_on_found_inf(&self, found_inf: &Tensor) -> Result<()> {
        self.all_reduce(found_inf, ReduceOp::Max)
    }

    /// The total norm of gradients that are shared out between the ranks: this rank's part in
    /// `parameters`, every element on one rank only. (Gradients after `DistributedDataParallel` are whole
    /// on each rank: [`overdrive_optim::grad_norm`] is their norm.)
    ///
    /// # Errors
    /// As [`sum`](Self::sum) and [`overdrive_optim::grad_norm`].
    pub fn sharded_grad_norm(&self, parameters: &[Tensor]) -> Result<f64> {
        let norm = overdrive_optim::grad_norm(parameters, ClipOptions::default())?;
        let norm = norm.f_double_value(&[])?;
        Ok(self.sum(norm * norm)?.sqrt())
    }

    fn reduced(&self, value: f64, op: ReduceOp) -> Result<f64> {
        Ok(self.reduce_numbers(&[value], op)?[0])
    }

    /// Several numbers over the ranks, in one collective. All ranks pass as many.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    fn reduce_numbers(&self, values: &[f64], op: ReduceOp) -> Result<Vec<f64>> {
        let mut values = values.to_vec();
        if self.shared.connected.is_none() {
            return Ok(values);
        }
        let tensor = Tensor::f_from_slice(&values)?;
        let tensor = match self.shared.config.backend {
            Backend::Gloo => tensor,
            Backend::Nccl => tensor.f_to_device(self.device())?,
        };
        self.all_reduce(&tensor, op)?;
        values = Vec::<f64>::try_from(tensor.f_to_kind(Kind::Double)?)?;
        Ok(values)
    }
}

/// Prints lines to standard error, each with one write, so that those of several ranks do not mix.
///
/// ```
/// use overdrive_distributed::{ProcessGroup, RankLog};
///
/// let log = RankLog::new(&ProcessGroup::single());
/// log.main("printed by rank 0 alone");
/// log.every("printed by all, with `[rank 0]` before it");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct RankLog {
    rank: usize,
}

impl RankLog {
    /// The lines of this process's rank.
    #[must_use]
    pub fn new(group: &ProcessGroup) -> Self {
        Self { rank: group.rank() }
    }

    /// Prints on rank 0 alone.
    pub fn main(&self, line: impl std::fmt::Display) {
        if self.rank == 0 {
            let line = format!("{line}\n");
            eprint!("{line}");
        }
    }

    /// Prints on every rank, with its number before the line.
    pub fn every(&self, line: impl std::fmt::Display) {
        let line = format!("[rank {}] {line}\n", self.rank);
        eprint!("{line}");
    }
}
