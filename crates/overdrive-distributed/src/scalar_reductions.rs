//! Reductions of scalars over the ranks: losses, norms, decisions.

use tch::{Kind, Tensor};

use crate::{Backend, ProcessGroup, ReduceOp, Result};

impl ProcessGroup {
    /// Returns the sum of `value` over the ranks.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective).
    pub fn sum(&self, value: f64) -> Result<f64> {
        self.reduced(value, ReduceOp::Sum)
    }

    /// Returns the sums of several values over the ranks, in one collective: for example loss, tokens and a
    /// stop flag, once per step.
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
        let mut out = values;
        out.copy_from_slice(&self.sums_of(&values)?);
        Ok(out)
    }

    /// Returns the sums of any number of values over the ranks, in one collective, such as the losses of the steps
    /// since the last log line. All ranks pass the same number of values.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn sums_of(&self, values: &[f64]) -> Result<Vec<f64>> {
        self.reduce_scalars(values, ReduceOp::Sum)
    }

    /// Returns the mean of `value` over the ranks, for example of losses over equally many tokens.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn mean(&self, value: f64) -> Result<f64> {
        self.reduced(value, ReduceOp::Avg)
    }

    /// Returns the mean over all counted items: `sum` is this rank's total and `count` its number of items
    /// (for example tokens). Returns NaN if the counts of all ranks are 0.
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
        let totals = self.reduce_scalars(&[sum, count], ReduceOp::Sum)?;
        Ok(totals[0] / totals[1])
    }

    /// Returns the minimum of `value` over the ranks.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn min(&self, value: f64) -> Result<f64> {
        self.reduced(value, ReduceOp::Min)
    }

    /// Returns the maximum of `value` over the ranks.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn max(&self, value: f64) -> Result<f64> {
        self.reduced(value, ReduceOp::Max)
    }

    /// Returns `true` on all ranks if `value` is `true` on at least one: for a stop that one rank requests.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn any(&self, value: bool) -> Result<bool> {
        Ok(self.max(f64::from(u8::from(value)))? > 0.0)
    }

    /// Returns `true` on all ranks if `value` is `true` on every rank.
    ///
    /// # Errors
    /// As [`sum`](Self::sum).
    pub fn all(&self, value: bool) -> Result<bool> {
        Ok(self.min(f64::from(u8::from(value)))? > 0.0)
    }

    fn reduced(&self, value: f64, op: ReduceOp) -> Result<f64> {
        Ok(self.reduce_scalars(&[value], op)?[0])
    }

    /// Reduces several scalars in one collective. All ranks pass the same number of values.
    fn reduce_scalars(&self, values: &[f64], op: ReduceOp) -> Result<Vec<f64>> {
        if self.shared.connected.is_none() {
            return Ok(values.to_vec());
        }
        let tensor = Tensor::f_from_slice(values)?;
        // NCCL reduces tensors on CUDA devices only.
        // f64, so that counts up to 2^53 are exact.
        let tensor = match self.shared.config.backend {
            Backend::Gloo => tensor,
            Backend::Nccl => tensor.f_to_device(self.device())?,
        };
        self.all_reduce(&tensor, op)?;
        Ok(Vec::<f64>::try_from(tensor.f_to_kind(Kind::Double)?)?)
    }
}
