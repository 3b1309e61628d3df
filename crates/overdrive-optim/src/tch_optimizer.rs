//! An adapter for tch's own optimizers.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tch::{Tensor, nn};

use crate::{Error, Optimizer, OptimizerId, Result};

/// An adapter that makes tch's own optimizers (`nn::Sgd`, `nn::Adam`, `nn::RmsProp`…) usable with
/// gradient scalers, accumulation and schedules.
///
/// It has one learning rate for all groups. It cannot access the optimizer's state, which tch does not bind.
///
/// ```
/// use overdrive_optim::{Optimizer, TchOptimizer};
/// use tch::nn::{self, OptimizerConfig};
///
/// let store = nn::VarStore::new(tch::Device::Cpu);
/// let weight = store.root().ones("weight", &[2]);
/// let mut optimizer = TchOptimizer::new(nn::Sgd::default().build(&store, 0.5)?, 0.5)?;
/// weight.sum(tch::Kind::Float).backward();
/// optimizer.step()?;
/// assert_eq!(Vec::<f32>::try_from(&weight)?, [0.5, 0.5]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TchOptimizer {
    inner: nn::Optimizer,
    learning_rate: f64,
    id: OptimizerId,
}

impl TchOptimizer {
    /// Wraps `optimizer` and sets its learning rate (tch has no getter for the current one).
    ///
    /// # Errors
    /// [`Error::Common`] if the learning rate is negative or NaN.
    pub fn new(optimizer: nn::Optimizer, learning_rate: f64) -> Result<Self> {
        let mut this = Self {
            inner: optimizer,
            learning_rate,
            id: OptimizerId::unique(),
        };
        this.set_learning_rates(&[learning_rate])?;
        Ok(this)
    }

    /// Returns the wrapped optimizer.
    pub fn into_inner(self) -> nn::Optimizer {
        self.inner
    }

    /// Calls a method of tch's optimizer, which panics on an error, and returns the panic as an error.
    fn catch_panic(&mut self, call: impl FnOnce(&mut nn::Optimizer)) -> Result<()> {
        let inner = &mut self.inner;
        // `AssertUnwindSafe`: tch panics after libtorch has returned, so its optimizer is not in the
        // middle of a change.
        catch_unwind(AssertUnwindSafe(|| call(inner))).map_err(|payload| {
            let message = overdrive_core::panic_text(&*payload).to_owned();
            Error::TchOptimizer { message }
        })
    }
}

impl Optimizer for TchOptimizer {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn parameters(&self) -> Vec<Tensor> {
        self.inner.trainable_variables()
    }

    fn step(&mut self) -> Result<()> {
        self.catch_panic(nn::Optimizer::step)
    }

    fn zero_grad(&mut self) -> Result<()> {
        // Not tch's `zero_grad`, which fills the gradients with zeros instead of dropping them.
        for parameter in self.inner.trainable_variables() {
            overdrive_sys::grad::clear(&parameter)?;
        }
        Ok(())
    }

    fn learning_rates(&self) -> Vec<f64> {
        vec![self.learning_rate]
    }

    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        let &[learning_rate] = learning_rates else {
            return Err(Error::LearningRateCount {
                given: learning_rates.len(),
                groups: 1,
            });
        };
        overdrive_core::check_non_negative("learning_rate", learning_rate)?;
        self.catch_panic(|optimizer| optimizer.set_lr(learning_rate))?;
        self.learning_rate = learning_rate;
        Ok(())
    }
}
