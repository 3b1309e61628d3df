//! Dynamic loss scaling: `scale → backward → unscale_ → clip → step → update`.

use std::collections::HashMap;

use overdrive_core::check_option;
use overdrive_optim::{GradScaling, Optimizer, OptimizerId, StateDict, StateError, Stateful};
use overdrive_sys::amp;
use tch::{Device, Kind, Tensor};

use crate::scale_monitor::ScaleMonitor;
use crate::unscale::{HalfGradients, on, unscale_gradients};
use crate::{
    CollapseThresholds, Error, GradScalerConfig, GradScalerState, Result, ScaleWarning,
    ScalerStatistics,
};

/// A gradient scaler (`torch.amp.GradScaler`). It multiplies the loss so that small fp16 gradients do not underflow,
/// and skips the steps whose gradients overflowed.
///
/// A step is `scaler.scale(&loss)?.backward()`, then [`step`](Self::step) for each optimizer, then one
/// [`update`](Self::update). To read or clip gradients, call [`unscale_`](Self::unscale_) first. With several
/// backward passes per step, scale each loss and unscale once, at the end.
///
/// The scale is a tensor on the device of the first loss. No function waits for the device except
/// [`step`](Self::step) with an optimizer that cannot skip on the device, and the getters whose documentation says
/// so. Overflows are counted without waiting too ([`statistics`](Self::statistics)): flag and scale of each step are
/// copied to the host asynchronously, and read when they have arrived.
#[derive(Debug)]
pub struct GradScaler {
    config: GradScalerConfig,
    /// The scale and growth tracker to create on the device: of the configuration, or of a loaded state.
    initial: (f64, i64),
    on_device: Option<OnDevice>,
    optimizers: HashMap<OptimizerId, Progress>,
    monitor: ScaleMonitor,
}

/// The tensors of the scaler, on the device of the first loss.
#[derive(Debug)]
struct OnDevice {
    scale: Tensor,
    growth_tracker: Tensor,
}

/// The progress of one optimizer in the current step.
#[derive(Debug)]
struct Progress {
    stage: Stage,
    /// A flag for each device: 1 where a gradient contains an infinity or a NaN.
    found_inf: Vec<(Device, Tensor)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Ready,
    Unscaled,
    Stepped,
}

/// The result of [`GradScaler::step`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StepOutcome {
    /// The parameters were updated.
    Stepped,
    /// A gradient contained an infinity or a NaN, and nothing was changed.
    SkippedNonFinite,
    /// The optimizer decides on the device, and the host does not know the result. [`GradScaler::found_inf`] returns
    /// it, and waits for the device.
    DecidedOnDevice,
}

impl GradScaler {
    /// Creates a scaler. Its tensors are created when the first loss is scaled.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`].
    pub fn new(config: GradScalerConfig) -> Result<Self> {
        config.validate()?;
        Ok(Self {
            config,
            initial: (config.init_scale, 0),
            on_device: None,
            optimizers: HashMap::new(),
            monitor: ScaleMonitor::new(config.init_scale),
        })
    }

    /// Returns the loss times the scale, on which to call backward. Several losses may be scaled in a step. A
    /// disabled scaler returns the loss itself.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn scale(&mut self, outputs: &Tensor) -> Result<Tensor> {
        if !self.config.enabled {
            return Ok(outputs.shallow_clone());
        }
        let scale = &self.on_device(outputs.device())?.scale;
        Ok(outputs.f_mul(&on(scale, outputs.device())?)?)
    }

    /// Divides the gradients of `optimizer`'s parameters by the scale, in place, and records whether any contains an
    /// infinity or a NaN. Call it at most once per step, after the last backward; otherwise `step` does it. A
    /// disabled scaler does nothing.
    ///
    /// # Errors
    /// [`Error::AlreadyUnscaled`], [`Error::UnscaleAfterStep`], [`Error::NotScaled`], and
    /// [`Error::HalfGradients`], after which the gradients are as they were.
    pub fn unscale_(&mut self, optimizer: &(impl Optimizer + ?Sized)) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        let scale = &self.scaled("unscale_")?.scale;
        match self.stage(optimizer.id()) {
            Stage::Unscaled => return Err(Error::AlreadyUnscaled),
            Stage::Stepped => return Err(Error::UnscaleAfterStep),
            Stage::Ready => {}
        }
        // In fp64, as PyTorch does: the reciprocal is then the fp32 number nearest to the exact one.
        // MPS has no fp64.
        let inverse = match scale.device() {
            Device::Mps => scale.f_reciprocal()?,
            _ => scale
                .f_to_kind(Kind::Double)?
                .f_reciprocal()?
                .f_to_kind(Kind::Float)?,
        };
        let found_inf = unscale_gradients(optimizer, &inverse, HalfGradients::Refuse)?;
        self.optimizers.insert(
            optimizer.id(),
            Progress {
                stage: Stage::Unscaled,
                found_inf,
            },
        );
        Ok(())
    }

    /// Unscales the gradients unless [`unscale_`](Self::unscale_) did, and steps `optimizer` unless a gradient
    /// overflowed. A disabled scaler steps the optimizer.
    ///
    /// An optimizer with [`Optimizer::step_scaled`] (the fused AdamW) skips on the device,
    /// and its gradients stay scaled unless `unscale_` was called. For other optimizers the host waits for the
    /// flag.
    ///
    /// # Errors
    /// [`Error::AlreadyStepped`], [`Error::NotScaled`], [`Error::NoInfChecks`] if no parameter has a
    /// gradient, [`Error::HalfGradients`], and errors of the optimizer.
    pub fn step(&mut self, optimizer: &mut (impl Optimizer + ?Sized)) -> Result<StepOutcome> {
        if !self.config.enabled {
            optimizer.step()?;
            return Ok(StepOutcome::Stepped);
        }
        let id = optimizer.id();
        let scale = self.scaled("step")?.scale.shallow_clone();
        if self.stage(id) == Stage::Stepped {
            return Err(Error::AlreadyStepped);
        }
        let outcome = match self.step_on_device(optimizer, &scale)? {
            true => StepOutcome::DecidedOnDevice,
            false => {
                if self.stage(id) == Stage::Ready {
                    self.unscale_(optimizer)?;
                }
                if self.found_inf(optimizer)? {
                    StepOutcome::SkippedNonFinite
                } else {
                    optimizer.step()?;
                    StepOutcome::Stepped
                }
            }
        };
        if let Some(progress) = self.optimizers.get_mut(&id) {
            progress.stage = Stage::Stepped;
        }
        Ok(outcome)
    }

    /// Steps an optimizer that skips on the device. Returns `false`, having done nothing, if it cannot.
    fn step_on_device(
        &mut self,
        optimizer: &mut (impl Optimizer + ?Sized),
        scale: &Tensor,
    ) -> Result<bool> {
        if !optimizer.supports_step_scaled() {
            return Ok(false);
        }
        let id = optimizer.id();
        let unscaled = self.stage(id) == Stage::Unscaled;
        if !unscaled {
            // A factor of 1 only checks for infinities: the optimizer's kernel unscales in the same pass as it
            // updates, which saves one pass over the gradients.
            let one = Tensor::f_ones([] as [i64; 0], (Kind::Float, scale.device()))?;
            let found_inf = unscale_gradients(optimizer, &one, HalfGradients::Allow)?;
            self.optimizers.insert(
                id,
                Progress {
                    stage: Stage::Ready,
                    found_inf,
                },
            );
        }
        let found_inf = self.combined_found_inf(id, scale.device())?;
        let grad_scale = (!unscaled).then_some(scale);
        Ok(optimizer.step_scaled(&GradScaling {
            grad_scale,
            found_inf: &found_inf,
        })?)
    }

    /// Forgets the unscaling and the steps since the last [`update`](Self::update), and leaves the scale: for a step that
    /// failed, such as for lack of memory. Drop the gradients too, which may be unscaled already.
    pub fn abandon(&mut self) {
        self.optimizers.clear();
    }

    /// Updates the scale: it shrinks if any optimizer found an infinity, and grows after `growth_interval` steps
    /// without one. Call it once per step, after `step` for every optimizer. A disabled scaler does nothing.
    ///
    /// # Errors
    /// [`Error::NotScaled`]; [`Error::NoInfChecks`] if no optimizer was unscaled or stepped.
    pub fn update(&mut self) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        let state = self.scaled("update")?;
        let (scale, growth_tracker) = (
            state.scale.shallow_clone(),
            state.growth_tracker.shallow_clone(),
        );
        let found_inf = self.any_found_inf(&scale)?.ok_or(Error::NoInfChecks {
            what: "any optimizer",
        })?;
        let update = amp::ScaleUpdate {
            growth_factor: self.config.growth_factor,
            backoff_factor: self.config.backoff_factor,
            growth_interval: self.config.growth_interval,
        };
        amp::update_scale(&scale, &growth_tracker, &found_inf, update)?;
        // The next step begins: every optimizer is unscaled anew.
        self.optimizers.clear();
        self.monitor.observe(&found_inf, &scale)
    }

    /// Ends the step like [`update`](Self::update), and sets the scale to a given value.
    ///
    /// # Errors
    /// [`Error::NotScaled`]; [`overdrive_core::Error::InvalidOption`] for a scale that is not positive and finite.
    pub fn update_to(&mut self, new_scale: f64) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        let valid = new_scale > 0.0 && new_scale.is_finite();
        check_option(valid, "new_scale", new_scale, "positive and finite")?;
        let scale = self.scaled("update_to")?.scale.shallow_clone();
        let scale = scale.shallow_clone().f_fill_(new_scale)?;
        // If no gradient was checked, the step counts as one without an overflow.
        let found_inf = match self.any_found_inf(&scale)? {
            Some(found_inf) => found_inf,
            None => scale.f_zeros_like()?,
        };
        self.optimizers.clear();
        self.monitor.observe(&found_inf, &scale)
    }

    /// Returns `true` if the gradients of `optimizer` contained an infinity or a NaN when they were unscaled in this
    /// step. Waits for the device.
    ///
    /// # Errors
    /// [`Error::NoInfChecks`] if they were not unscaled, or there are none.
    pub fn found_inf(&self, optimizer: &(impl Optimizer + ?Sized)) -> Result<bool> {
        let mut any = false;
        for (_, found_inf) in &self.recorded(optimizer.id())?.found_inf {
            any |= found_inf.f_double_value(&[])? != 0.0;
        }
        Ok(any)
    }

    /// Returns the overflows counted so far; a disabled scaler counts none. Does not wait: on a GPU the
    /// last one or two steps may be missing ([`settle_statistics`](Self::settle_statistics)).
    pub fn statistics(&self) -> &ScalerStatistics {
        self.monitor.statistics()
    }

    /// Waits for the device until [`statistics`](Self::statistics) covers every update.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn settle_statistics(&mut self) -> Result<()> {
        self.monitor.settle()
    }

    /// Resumes counting from saved statistics.
    pub fn resume_statistics(&mut self, statistics: ScalerStatistics) {
        self.monitor.resume(statistics);
    }

    /// Returns a warning with the remedy if the scale has collapsed by the statistics so far. The first one is also
    /// logged by `tracing`. Does not wait.
    pub fn collapse_warning(&self) -> Option<ScaleWarning> {
        self.monitor.collapse_warning()
    }

    /// Sets the thresholds of a collapsed scale.
    pub fn set_collapse_thresholds(&mut self, thresholds: CollapseThresholds) {
        self.monitor.thresholds = thresholds;
    }

    /// Returns the current scale; 1 if disabled. Waits for the device.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn get_scale(&self) -> Result<f64> {
        if !self.config.enabled {
            return Ok(1.0);
        }
        match &self.on_device {
            Some(state) => Ok(state.scale.f_double_value(&[])?),
            None => Ok(self.initial.0),
        }
    }

    /// Returns the number of steps without an infinity since the scale last changed. Waits for the device.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn get_growth_tracker(&self) -> Result<i64> {
        match &self.on_device {
            Some(state) => Ok(state.growth_tracker.f_int64_value(&[])?),
            None => Ok(self.initial.1),
        }
    }

    /// Returns the current options.
    pub fn config(&self) -> &GradScalerConfig {
        &self.config
    }

    /// Returns `true` unless the scaler is disabled.
    pub fn is_enabled(&self) -> bool {
        self.config.enabled
    }

    /// Sets the growth factor.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] unless it is greater than 1.
    pub fn set_growth_factor(&mut self, growth_factor: f64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            growth_factor,
            ..self.config
        })
    }

    /// Sets the backoff factor.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] unless it is between 0 and 1.
    pub fn set_backoff_factor(&mut self, backoff_factor: f64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            backoff_factor,
            ..self.config
        })
    }

    /// Sets the growth interval.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] unless it is at least 1.
    pub fn set_growth_interval(&mut self, growth_interval: i64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            growth_interval,
            ..self.config
        })
    }

    /// Returns the state to save, between [`update`](Self::update) and the next step; `None` if disabled.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn state_dict(&self) -> Result<Option<GradScalerState>> {
        if !self.config.enabled {
            return Ok(None);
        }
        Ok(Some(GradScalerState {
            scale: self.get_scale()?,
            growth_factor: self.config.growth_factor,
            backoff_factor: self.config.backoff_factor,
            growth_interval: self.config.growth_interval,
            growth_tracker: self.get_growth_tracker()?,
        }))
    }

    /// Loads a saved state. A step that has begun is abandoned, as by [`abandon`](Self::abandon).
    ///
    /// # Errors
    /// [`Error::Disabled`] for a disabled scaler; [`overdrive_core::Error::InvalidOption`] if a value is out of range.
    /// Nothing is changed then.
    pub fn load_state_dict(&mut self, state: &GradScalerState) -> Result<()> {
        if !self.config.enabled {
            return Err(Error::Disabled);
        }
        let config = GradScalerConfig {
            init_scale: state.scale,
            growth_factor: state.growth_factor,
            backoff_factor: state.backoff_factor,
            growth_interval: state.growth_interval,
            enabled: true,
        };
        config.validate()?;
        if let Some(on_device) = &self.on_device {
            let _ = on_device.scale.shallow_clone().f_fill_(state.scale)?;
            let _ = on_device
                .growth_tracker
                .shallow_clone()
                .f_fill_(state.growth_tracker)?;
        }
        // `init_scale` stays an option of this program; the loaded scale is in `initial`.
        self.config = GradScalerConfig {
            init_scale: self.config.init_scale,
            ..config
        };
        self.initial = (state.scale, state.growth_tracker);
        self.monitor.restart_at(state.scale);
        self.abandon();
        Ok(())
    }

    fn reconfigure(&mut self, config: GradScalerConfig) -> Result<()> {
        config.validate()?;
        self.config = config;
        Ok(())
    }

    fn on_device(&mut self, device: Device) -> Result<&OnDevice> {
        let state = match self.on_device.take() {
            Some(state) => state,
            None => OnDevice {
                scale: Tensor::f_full([] as [i64; 0], self.initial.0, (Kind::Float, device))?,
                // int32, which the kernel of `_amp_update_scale_` requires.
                growth_tracker: Tensor::f_full(
                    [] as [i64; 0],
                    self.initial.1,
                    (Kind::Int, device),
                )?,
            },
        };
        Ok(self.on_device.insert(state))
    }

    fn scaled(&self, called: &'static str) -> Result<&OnDevice> {
        self.on_device.as_ref().ok_or(Error::NotScaled { called })
    }

    fn stage(&self, id: OptimizerId) -> Stage {
        self.optimizers
            .get(&id)
            .map_or(Stage::Ready, |progress| progress.stage)
    }

    fn recorded(&self, id: OptimizerId) -> Result<&Progress> {
        self.optimizers
            .get(&id)
            .filter(|progress| !progress.found_inf.is_empty())
            .ok_or(Error::NoInfChecks {
                what: "this optimizer",
            })
    }

    /// Returns a scalar above 0 if any optimizer found an infinity, on the device of `scale`; `None`
    /// if no gradient was checked.
    fn any_found_inf(&self, scale: &Tensor) -> Result<Option<Tensor>> {
        let recorded = self.optimizers.values();
        sum_of(
            recorded.flat_map(|progress| &progress.found_inf),
            scale.device(),
        )
    }

    fn combined_found_inf(&self, id: OptimizerId, device: Device) -> Result<Tensor> {
        let sum = sum_of(&self.recorded(id)?.found_inf, device)?;
        sum.ok_or(Error::NoInfChecks {
            what: "this optimizer",
        })
    }
}

/// Returns the sum of flags on `device`, to which they are added: comparing them would wait for it. `None` if there are
/// none.
fn sum_of<'a>(
    flags: impl IntoIterator<Item = &'a (Device, Tensor)>,
    device: Device,
) -> Result<Option<Tensor>> {
    let mut flags = flags.into_iter();
    flags.try_fold(None, |sum: Option<Tensor>, (_, flag)| {
        let flag = on(flag, device)?;
        Ok(Some(match sum {
            Some(sum) => sum.f_add(&flag)?,
            None => flag,
        }))
    })
}

/// A disabled scaler has an empty state, and loads only an empty state.
impl Stateful for GradScaler {
    fn state_dict(&self) -> std::result::Result<StateDict, StateError> {
        StateDict::of_value(&GradScaler::state_dict(self)?)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> std::result::Result<(), StateError> {
        match state.value::<Option<GradScalerState>>()? {
            Some(state) => Ok(GradScaler::load_state_dict(self, &state)?),
            None if self.is_enabled() => Err("the state is that of a disabled scaler".into()),
            None => Ok(()),
        }
    }
}
