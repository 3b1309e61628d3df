//! The accumulator of micro-batches' gradients.

use overdrive_optim::{ClipOptions, Optimizer, clip_grad_norm, scale_grads};
use overdrive_precision::{GradScaler, StepOutcome};
use tch::{Kind, Tensor};

use crate::sync::SyncError;
use crate::{AccumulationConfig, Error, GradientSync, Result, SingleProcess, Window};

/// Accumulates the gradients of micro-batches so that they equal those of one large batch: the loss of a
/// step is the sum over all its tokens divided by their count.
///
/// Averaging each micro-batch and then averaging the averages, as many trainers did until late 2024,
/// gives tokens of short micro-batches more weight than those of long ones ([the bug in transformers]).
/// Here the losses of micro-batches are **sums**, and the divisor is the count of the whole window over
/// all processes, also for uneven micro-batches and for the short window at the end of the data.
///
/// There are two ways to give the counts, each of them once:
///
/// * [`open`](Self::open) a [`Window`] whose counts are known beforehand, then call
///   [`backward`](Self::backward). Every loss sum is divided before its backward. This is the better way,
///   because gradients keep their usual magnitude, which fp16 needs.
/// * Call [`backward_counted`](Self::backward_counted) without a window. [`step`](Self::step) divides the
///   gradients of the sums, with one multiplication of each gradient.
///
/// The accumulator owns the loss scaler of fp16, if there is one ([`with_scaler`](Self::with_scaler)). A step
/// performs, in this order: synchronize over processes, divide, unscale, clip, step the optimizer, update the
/// scaler, drop the gradients.
///
/// ```
/// use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
/// use overdrive_optim::{AdamW, AdamWConfig, ParamGroup};
/// use tch::{Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weight = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
/// let group = ParamGroup::new("all", vec![("weight".into(), weight.shallow_clone())]);
/// let mut optimizer = AdamW::new(vec![group], AdamWConfig::default())?;
/// let config = AccumulationConfig { gradient_accumulation_steps: 2, max_grad_norm: None };
/// let mut accumulator = GradientAccumulator::new(config)?;
///
/// let micro_batches = [Tensor::from_slice(&[1.0f32, 2.0, 3.0]), Tensor::from_slice(&[8.0f32])];
/// accumulator.open(Window::new(micro_batches.iter().map(|batch| batch.numel() as u64)))?;
/// for batch in &micro_batches {
///     let loss_sum = (&weight * batch).sum(Kind::Float);
///     accumulator.backward(&loss_sum)?;
/// }
/// assert_eq!(weight.grad().double_value(&[0]), 3.5); // 14 over 4 tokens, not (2 + 8) / 2
/// let step = accumulator.step(&mut optimizer)?;
/// assert_eq!((step.loss()?, step.tokens, step.stepped), (3.5, 4, true));
/// # Ok(())
/// # }
/// ```
///
/// [the bug in transformers]: https://huggingface.co/blog/gradient_accumulation
#[derive(Debug)]
pub struct GradientAccumulator<S = SingleProcess> {
    config: AccumulationConfig,
    sync: S,
    scaler: Option<GradScaler>,
    /// The announced window, and the counts of all processes in it, term by term.
    window: Option<(Window, Vec<u64>)>,
    micro_batches: usize,
    /// The sums of the loss's terms, on their device, with their counts.
    terms: Vec<(Tensor, u64)>,
    /// If `true`, the caller has marked the next backward as the last of the window.
    next_is_last: bool,
    /// If `true`, a backward or a step has begun and not ended: nobody knows which gradients and parameters it has
    /// changed.
    failed: bool,
}

/// The report of one optimizer step.
#[derive(Debug)]
#[non_exhaustive]
pub struct AccumulatedStep {
    /// If `true`, the parameters were updated. Otherwise the scaler found an infinity or NaN, or no token
    /// of the window contributed to the loss, and the schedule should not be stepped either.
    pub stepped: bool,
    /// The tokens of this process in the window: the count of the loss's first term.
    pub tokens: u64,
    /// The tokens of all processes in the window: the divisor.
    pub total_tokens: u64,
    /// The number of backward passes in the window.
    pub micro_batches: usize,
    /// The total norm of the gradients before clipping, a scalar on their device; `None` if clipping is
    /// disabled.
    pub grad_norm: Option<Tensor>,
    /// The mean loss over this process's tokens, a scalar on its device; 0 without tokens. For several
    /// terms it is the sum of their means.
    pub mean_loss: Tensor,
}

impl AccumulatedStep {
    /// Returns the mean loss per token. Synchronizes with the device.
    ///
    /// # Errors
    /// [`Error::Tch`] with libtorch's error.
    pub fn loss(&self) -> Result<f64> {
        Ok(self.mean_loss.f_double_value(&[])?)
    }

    /// Returns the gradient norm before clipping; `None` if clipping is disabled. Synchronizes with the
    /// device.
    ///
    /// # Errors
    /// [`Error::Tch`] with libtorch's error.
    pub fn grad_norm(&self) -> Result<Option<f64>> {
        Ok(self
            .grad_norm
            .as_ref()
            .map(|norm| norm.f_double_value(&[]))
            .transpose()?)
    }
}

impl GradientAccumulator {
    /// Returns an accumulator for one process.
    ///
    /// # Errors
    /// [`Error::Common`] for an option out of its range.
    pub fn new(config: AccumulationConfig) -> Result<Self> {
        Self::with_sync(config, SingleProcess)
    }
}

impl<S: GradientSync> GradientAccumulator<S> {
    /// Returns an accumulator whose gradients `sync` synchronizes over processes.
    ///
    /// # Errors
    /// [`Error::Common`] for an option out of its range.
    pub fn with_sync(config: AccumulationConfig, sync: S) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            config,
            sync,
            scaler: None,
            window: None,
            micro_batches: 0,
            terms: Vec::new(),
            next_is_last: false,
            failed: false,
        })
    }

    /// Scales the losses by `scaler`, which fp16 needs: [`Precision::new_scaler`] is `None` for the other
    /// precisions. A disabled scaler has no effect.
    ///
    /// [`Precision::new_scaler`]: overdrive_precision::Precision::new_scaler
    #[must_use]
    pub fn with_scaler(mut self, scaler: Option<GradScaler>) -> Self {
        self.scaler = scaler;
        self
    }

    /// Announces the micro-batches of the next step. Their number may differ from
    /// `gradient_accumulation_steps`, as at the end of the data.
    ///
    /// # Errors
    /// [`Error::WindowOpen`] if the previous one was not stepped; [`Error::Failed`] after a failed one;
    /// [`Error::Terms`] if the micro-batches have different numbers of terms; [`Error::Common`] if their sum
    /// exceeds a `u64`; [`Error::Sync`].
    pub fn open(&mut self, window: Window) -> Result<()> {
        self.check_not_failed()?;
        if self.micro_batches > 0 {
            return Err(Error::WindowOpen {
                seen: self.micro_batches,
            });
        }
        let expected = window.terms();
        let uneven = window.counts().iter().map(Vec::len).enumerate();
        if let Some((position, given)) = uneven.into_iter().find(|(_, given)| *given != expected) {
            return Err(Error::Terms {
                position,
                expected,
                given,
            });
        }
        // Summed once per window, so that backward needs no communication for the counts.
        let totals = window.totals()?.into_iter();
        let totals = totals.map(|count| self.sync.sum_count(count));
        let totals = totals.collect::<std::result::Result<_, _>>();
        self.window = Some((window, totals.map_err(sync_error)?));
        Ok(())
    }

    /// Adds the gradients of the next micro-batch of the open window.
    ///
    /// `loss` has one element: the **sum** of the losses of the tokens that the window counts, or the mean in a
    /// window of [`Window::of_means`]. With a scaler the loss is scaled here.
    ///
    /// # Errors
    /// [`Error::Common`] if the loss does not have one element; [`Error::NoGradient`] if it requires no gradient;
    /// [`Error::NotAnnounced`] without a window; [`Error::WindowFull`] after its last micro-batch; libtorch's errors. After
    /// an error of libtorch, such as out of memory, every call returns [`Error::Failed`] until
    /// [`abandon`](Self::abandon).
    pub fn backward(&mut self, loss: &Tensor) -> Result<()> {
        self.backward_terms(&[loss])
    }

    /// Adds the gradients of the next micro-batch, whose loss has several terms. Each is divided by its own
    /// count over the whole window and all processes, such as the tokens of a language loss and the pairs
    /// of a contrastive loss. Announce the window by [`Window::of_terms`]. To weight a term, multiply its
    /// sum.
    ///
    /// ```
    /// use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
    /// use tch::{Kind, Tensor};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let weight = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
    /// let mut accumulator = GradientAccumulator::new(AccumulationConfig::default())?;
    /// accumulator.open(Window::of_terms([[4, 1], [2, 1]]))?; // tokens, and one penalty per micro-batch
    /// for tokens in [4, 2] {
    ///     let language = (&weight * 6.0 * tokens).sum(Kind::Float);
    ///     let penalty = (&weight * 0.5).sum(Kind::Float);
    ///     accumulator.backward_terms(&[&language, &penalty])?;
    /// }
    /// assert_eq!(weight.grad().double_value(&[0]), 6.5); // 36 over 6 tokens, and the mean penalty
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`backward`](Self::backward); [`Error::Terms`] for another number of terms than announced.
    pub fn backward_terms(&mut self, terms: &[&Tensor]) -> Result<()> {
        check_scalars(terms)?;
        let (loss, counts) = self.announced_loss(terms)?;
        self.accumulate(&loss, terms, &counts)
    }

    /// Adds the gradients of the next micro-batch by a pass that the caller runs, such as the replay of a CUDA graph. `pass`
    /// gets the factor of the loss; it must run backward from the factor times the loss, and return the loss without the
    /// factor.
    ///
    /// ```
    /// use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
    /// use tch::{Kind, Tensor};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let weight = Tensor::from_slice(&[1.0f32]).set_requires_grad(true);
    /// let mut accumulator = GradientAccumulator::new(AccumulationConfig::default())?;
    /// accumulator.open(Window::new([2]))?;
    /// accumulator.backward_by(|factor| -> Result<Tensor, Box<dyn std::error::Error>> {
    ///     let loss_sum = (&weight * 6.0).sum(Kind::Float);
    ///     (&loss_sum * factor).f_backward()?;
    ///     Ok(loss_sum)
    /// })?;
    /// assert_eq!(weight.grad().double_value(&[0]), 3.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`backward`](Self::backward), and those of `pass`; [`Error::OwnPass`] with a scaler or several processes, which need
    /// a backward pass by the accumulator.
    pub fn backward_by<E: From<Error>>(
        &mut self,
        pass: impl FnOnce(f64) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(), E> {
        let (factor, count) = self.next_factor()?;
        self.check_not_failed()?;
        self.failed = true;
        let loss = pass(factor)?;
        check_scalars(&[&loss])?;
        self.record(&[&loss], &[count])?;
        self.failed = false;
        Ok(())
    }

    /// Returns the factor and the count of the next micro-batch, whose loss has one term.
    fn next_factor(&self) -> Result<(f64, u64)> {
        if self.scaler.is_some() || self.sync.world_size() > 1 {
            return Err(Error::OwnPass);
        }
        let (counts, totals) = self.next_counts(1)?;
        Ok((self.weight(totals[0]), counts[0]))
    }

    /// Adds the gradients of one micro-batch without a window: `loss_sum` is the **sum** of the losses of its
    /// `tokens` tokens. For data whose counts are not known beforehand.
    ///
    /// # Errors
    /// As [`backward`](Self::backward); [`Error::Announced`] if a window is open; [`Error::Common`] if the tokens of
    /// the window exceed a `u64`.
    pub fn backward_counted(&mut self, loss_sum: &Tensor, tokens: u64) -> Result<()> {
        if self.window.is_some() {
            return Err(Error::Announced);
        }
        check_scalars(&[loss_sum])?;
        sum_of_counts(self.terms.iter().map(|(_, count)| *count).chain([tokens]))?;
        // `step` divides the gradients of the sums.
        self.accumulate(loss_sum, &[loss_sum], &[tokens])
    }

    fn accumulate(&mut self, loss: &Tensor, terms: &[&Tensor], counts: &[u64]) -> Result<()> {
        check_requires_grad(loss)?;
        self.check_not_failed()?;
        // Scaled last: the weight may be tiny, and the scaler keeps the product in the range of fp16.
        let loss = match &mut self.scaler {
            Some(scaler) => scaler.scale(loss)?,
            None => loss.shallow_clone(),
        };
        let last = self.sync_gradients();
        self.failed = true;
        self.sync.before_backward(&loss, last).map_err(sync_error)?;
        loss.f_backward()?;
        // Only after a successful backward: a failed micro-batch does not count.
        self.record(terms, counts)?;
        self.failed = false;
        Ok(())
    }

    /// Applies the gradients of the window and drops them.
    ///
    /// Synchronizes with the device only with a scaler, in order to report whether it stepped.
    ///
    /// # Errors
    /// [`Error::NothingAccumulated`] and [`Error::WindowIncomplete`], which change nothing; [`Error::Sync`], and the
    /// errors of scaler, clipping and optimizer. The latter come in the middle of a step, which cannot be repeated:
    /// every call returns [`Error::Failed`] until [`abandon`](Self::abandon).
    pub fn step<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<AccumulatedStep> {
        self.check_not_failed()?;
        if self.micro_batches == 0 {
            return Err(Error::NothingAccumulated);
        }
        if let Some((window, _)) = &self.window
            && self.micro_batches < window.counts().len()
        {
            return Err(Error::WindowIncomplete {
                announced: window.counts().len(),
                seen: self.micro_batches,
            });
        }
        self.failed = true;
        let parameters = optimizer.parameters();
        let totals = self.synchronize(&parameters)?;
        // Without tokens all gradients are zero, but AdamW would still move the weights by its momentum
        // and decay.
        let (grad_norm, stepped) = if totals.iter().all(|&total| total == 0) {
            (None, false)
        } else {
            self.clip_and_step(&parameters, optimizer)?
        };
        optimizer.zero_grad()?;
        let report = AccumulatedStep {
            stepped,
            tokens: self.terms.first().map_or(0, |(_, count)| *count),
            total_tokens: totals.first().copied().unwrap_or_default(),
            micro_batches: self.micro_batches,
            grad_norm,
            mean_loss: self.mean_loss()?,
        };
        self.reset();
        Ok(report)
    }

    /// Drops the current window, its gradients, and what scaler and synchronization remember of it, for example after
    /// running out of memory. If the optimizer itself failed, it may have updated some of the parameters.
    ///
    /// # Errors
    /// [`Error::Optimizer`] with libtorch's error.
    pub fn abandon<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<()> {
        optimizer.zero_grad()?;
        if let Some(scaler) = &mut self.scaler {
            scaler.abandon();
        }
        self.sync.abandon();
        self.reset();
        Ok(())
    }

    /// Marks the next backward as the last of its window, although fewer than
    /// `gradient_accumulation_steps` have run, because the data ends. Not needed with announced windows.
    pub fn mark_last(&mut self) {
        self.next_is_last = true;
    }

    /// Returns `true` if the next backward is the last of its window, after which gradients are synchronized
    /// (Accelerate's `sync_gradients`).
    #[must_use]
    pub fn sync_gradients(&self) -> bool {
        self.next_is_last || self.micro_batches + 1 >= self.window_len()
    }

    /// Returns `true` if all micro-batches of the window have run and [`step`](Self::step) is due.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.micro_batches > 0 && (self.next_is_last || self.micro_batches >= self.window_len())
    }

    /// Returns the number of backward passes since the last step. If it is above 0 at the end of the
    /// data, step once more.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.micro_batches
    }

    /// Returns the options.
    #[must_use]
    pub fn config(&self) -> &AccumulationConfig {
        &self.config
    }

    /// Returns the loss scaler.
    #[must_use]
    pub fn scaler(&self) -> Option<&GradScaler> {
        self.scaler.as_ref()
    }

    /// Returns the loss scaler, for saving and loading its state.
    pub fn scaler_mut(&mut self) -> Option<&mut GradScaler> {
        self.scaler.as_mut()
    }

    /// Returns the synchronization over processes.
    pub fn sync_mut(&mut self) -> &mut S {
        &mut self.sync
    }

    fn window_len(&self) -> usize {
        match &self.window {
            Some((window, _)) => window.counts().len(),
            None => self.config.gradient_accumulation_steps,
        }
    }

    /// Returns the loss from which backward starts, the sum of the terms divided by their counts in the window, and
    /// the counts of this micro-batch.
    fn announced_loss(&self, terms: &[&Tensor]) -> Result<(Tensor, Vec<u64>)> {
        let (counts, totals) = self.next_counts(terms.len())?;
        let mut loss: Option<Tensor> = None;
        for (term, &total) in terms.iter().zip(totals) {
            let weighted = term.f_mul_scalar(self.weight(total))?;
            loss = Some(match loss {
                Some(loss) => loss.f_add(&weighted)?,
                None => weighted,
            });
        }
        let loss = loss.ok_or(Error::Terms {
            position: self.micro_batches,
            expected: 1,
            given: 0,
        })?;
        Ok((loss, counts.to_vec()))
    }

    /// Returns the counts of the next micro-batch, whose loss has `terms` terms, and those of all processes in the window.
    fn next_counts(&self, terms: usize) -> Result<(&[u64], &[u64])> {
        let position = self.micro_batches;
        let (window, totals) = self.window.as_ref().ok_or(Error::NotAnnounced)?;
        let announced = window.counts();
        let counts = announced.get(position).ok_or(Error::WindowFull {
            announced: announced.len(),
        })?;
        if counts.len() != terms {
            return Err(Error::Terms {
                position,
                expected: counts.len(),
                given: terms,
            });
        }
        Ok((counts, totals))
    }

    /// Returns the factor of loss sums: the number of processes, which undoes the mean of `synchronize`,
    /// over the count of all processes.
    fn weight(&self, total: u64) -> f64 {
        self.sync.world_size() as f64 / total.max(1) as f64
    }

    fn record(&mut self, terms: &[&Tensor], counts: &[u64]) -> Result<()> {
        for (index, (term, &count)) in terms.iter().zip(counts).enumerate() {
            let sum = term.f_detach()?.f_reshape([0i64; 0])?;
            // Summed in at least fp32: a bf16 sum of many micro-batches loses the small ones.
            let sum = match sum.f_kind()? {
                Kind::Double => sum,
                _ => sum.f_to_kind(Kind::Float)?,
            };
            match self.terms.get_mut(index) {
                Some((so_far, count_so_far)) => {
                    *so_far = so_far.f_add(&sum)?;
                    *count_so_far += count;
                }
                None => self.terms.push((sum, count)),
            }
        }
        self.micro_batches += 1;
        Ok(())
    }

    /// Synchronizes and divides the gradients, so that they are those of the mean loss of all processes
    /// (times the scaler's scale), and returns the counts of all processes, term by term.
    fn synchronize(&mut self, parameters: &[Tensor]) -> Result<Vec<u64>> {
        match &self.window {
            Some((_, totals)) => {
                let totals = totals.clone();
                self.sync.synchronize(parameters).map_err(sync_error)?;
                Ok(totals)
            }
            None => {
                let own = self.terms.first().map_or(0, |(_, count)| *count);
                let total = self.sync.sum_count(own).map_err(sync_error)?;
                self.sync.synchronize(parameters).map_err(sync_error)?;
                // After synchronizing: the sums of all processes have one divisor.
                scale_grads(parameters, &Tensor::from(self.weight(total)))?;
                Ok(vec![total])
            }
        }
    }

    fn clip_and_step<O: Optimizer + ?Sized>(
        &mut self,
        parameters: &[Tensor],
        optimizer: &mut O,
    ) -> Result<(Option<Tensor>, bool)> {
        let grad_norm = match self.config.max_grad_norm {
            Some(max_norm) => {
                // Before clipping, for two reasons: the limit is for unscaled gradients, and clipping
                // would turn infinities, by which the scaler finds an overflow, into NaN.
                if let Some(scaler) = &mut self.scaler {
                    scaler.unscale_(optimizer)?;
                }
                Some(clip_grad_norm(
                    parameters,
                    max_norm,
                    ClipOptions::default(),
                )?)
            }
            None => None,
        };
        // A scaler steps the optimizer itself, because it skips steps with infinities.
        let Some(scaler) = &mut self.scaler else {
            optimizer.step()?;
            return Ok((grad_norm, true));
        };
        let stepped = match scaler.step(optimizer)? {
            StepOutcome::Stepped => true,
            StepOutcome::SkippedNonFinite => false,
            // Decided on the device.
            _ => !scaler.found_inf(optimizer)?,
        };
        scaler.update()?;
        Ok((grad_norm, stepped))
    }

    /// Returns the sum of the terms, each divided by its own count.
    fn mean_loss(&self) -> Result<Tensor> {
        let means = self.terms.iter();
        let mut means = means.map(|(sum, count)| sum.f_div_scalar((*count).max(1) as f64));
        let first = means.next().ok_or(Error::NothingAccumulated)??;
        means.try_fold(first, |loss, mean| Ok(loss.f_add(&mean?)?))
    }

    fn check_not_failed(&self) -> Result<()> {
        match self.failed {
            true => Err(Error::Failed),
            false => Ok(()),
        }
    }

    fn reset(&mut self) {
        self.failed = false;
        self.window = None;
        self.micro_batches = 0;
        self.terms.clear();
        self.next_is_last = false;
    }
}

/// Checks that each term has one element.
fn check_scalars(terms: &[&Tensor]) -> Result<()> {
    let Some(wrong) = terms.iter().find(|term| term.numel() != 1) else {
        return Ok(());
    };
    let expected = "one element: the sum over the tokens (Reduction::Sum)";
    Err(overdrive_core::Error::shape("loss", wrong.size(), expected).into())
}

/// Returns the sum of the counts of one term in a window.
pub(crate) fn sum_of_counts(counts: impl IntoIterator<Item = u64>) -> Result<u64> {
    let mut counts = counts.into_iter();
    counts.try_fold(0u64, u64::checked_add).ok_or_else(|| {
        let expected = format!("at most {} in one window", u64::MAX);
        overdrive_core::Error::option("the sum of the counts", "larger", expected).into()
    })
}

/// Checks that backward reaches a parameter, which libtorch reports without saying what to do.
pub(crate) fn check_requires_grad(loss: &Tensor) -> Result<()> {
    if loss.requires_grad() {
        return Ok(());
    }
    Err(Error::NoGradient)
}

fn sync_error(source: SyncError) -> Error {
    Error::Sync { source }
}
