//! Dynamic loss scaling: `scale → backward → unscale_ → clip → step → update`.

use std::collections::HashMap;

use overdrive_optim::{GradScaling, Optimizer, OptimizerId, StateDict, StateError, Stateful};
use overdrive_sys::amp;
use tch::{Device, Kind, Tensor};

use crate::scale_monitor::ScaleMonitor;
use crate::unscale::{HalfGradients, on, unscale_gradients};
use crate::{
    CollapseThresholds, Error, GradScalerConfig, GradScalerState, Result, ScaleWarning,
    ScalerStatistics,
};

/// Multiplies the loss so that small fp16 gradients do not vanish, and skips the steps whose
/// gradients overflowed (`torch.amp.GradScaler`).
///
/// A step is `scaler.scale(&loss)?.backward()`, then [`step`](Self::step) for each optimizer, then
/// one [`update`](Self::update). To look at or clip gradients, call [`unscale_`](Self::unscale_)
/// first. With several backward passes a step, scale each loss and unscale once, at the end.
///
/// The scale lives on the device of the first loss. Nothing here waits for the device except
/// [`step`](Self::step) with an optimizer that cannot skip by itself, and the getters that say so.
/// The overflows are counted without waiting either ([`statistics`](Self::statistics)): flag and scale
/// of each step are copied to the host behind the work, and read when they have arrived.
#[derive(Debug)]
pub struct GradScaler {
    config: GradScalerConfig,
    /// Where the next scale and tracker start: from the configuration, or from a loaded state.
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

/// How far one optimizer is in the present step.
#[derive(Debug)]
struct Progress {
    stage: Stage,
    /// A flag a device: 1 where a gradient holds an infinity or a NaN.
    found_inf: Vec<(Device, Tensor)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Ready,
    Unscaled,
    Stepped,
}

/// What [`GradScaler::step`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepOutcome {
    /// The parameters were updated.
    Stepped,
    /// A gradient held an infinity or a NaN: nothing was changed.
    SkippedNonFinite,
    /// The optimizer decides on the device, without the host knowing; to know,
    /// ask [`GradScaler::found_inf`], which waits.
    DecidedOnDevice,
}

impl GradScaler {
    /// A scaler; its tensors are made when the first loss is scaled.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`].
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

    /// The loss times the scale, on which to call backward. Any tensor may be scaled so, several a
    /// step too. Disabled: the loss itself.
    ///
    /// # Errors
    /// What libtorch refuses.
    pub fn scale(&mut self, outputs: &Tensor) -> Result<Tensor> {
        if !self.config.enabled {
            return Ok(outputs.shallow_clone());
        }
        let scale = &self.on_device(outputs.device())?.scale;
        Ok(outputs.f_mul(&on(scale, outputs.device())?)?)
    }

    /// Divides the gradients of `optimizer`'s parameters by the scale, in place, and notes whether
    /// any holds an infinity or a NaN. Once a step, after the last backward; `step` does it if it
    /// was not called. Disabled: nothing.
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
        // In f64, as PyTorch does: the reciprocal is then the nearest float of the exact one.
        // MPS has no f64.
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

    /// Unscales if that was not done, and lets `optimizer` step unless a gradient overflowed.
    /// Disabled: steps.
    ///
    /// An optimizer with [`Optimizer::step_scaled`] (Overdrive's fused AdamW) skips on the device,
    /// and its gradients stay scaled unless `unscale_` was called; for others the host waits for the
    /// flag.
    ///
    /// # Errors
    /// [`Error::AlreadyStepped`], [`Error::NotScaled`], [`Error::NoInfChecks`] if no parameter has a
    /// gradient, [`Error::HalfGradients`], and the optimizer's own.
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

    /// Hands scale and flag to an optimizer that skips by itself; `false` if it cannot.
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
            // Looks for infinities and leaves the gradients as they are: the kernel unscales them.
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

    /// Moves the scale: down if any optimizer found an infinity, up after `growth_interval` steps
    /// without one. Once a step, after `step` was called for every optimizer. Disabled: nothing.
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
        self.optimizers.clear();
        self.monitor.observe(&found_inf, &scale)
    }

    /// Ends the step with a scale of the caller's choice instead.
    ///
    /// # Errors
    /// [`Error::NotScaled`]; [`Error::InvalidConfig`] for a scale that is not positive and finite.
    pub fn update_to(&mut self, new_scale: f64) -> Result<()> {
        if !self.config.enabled {
            return Ok(());
        }
        if !(new_scale > 0.0 && new_scale.is_finite()) {
            let expected = "positive and finite";
            return Err(Error::InvalidConfig {
                name: "new_scale",
                value: new_scale,
                expected,
            });
        }
        let scale = self.scaled("update_to")?.scale.shallow_clone();
        let scale = scale.shallow_clone().f_fill_(new_scale)?;
        // Without a check nobody knows of an overflow; the step counts as one without.
        let found_inf = match self.any_found_inf(&scale)? {
            Some(found_inf) => found_inf,
            None => scale.f_zeros_like()?,
        };
        self.optimizers.clear();
        self.monitor.observe(&found_inf, &scale)
    }

    /// Whether `optimizer`'s gradients, when they were unscaled this step, held an infinity or a NaN.
    /// Waits for the device.
    ///
    /// # Errors
    /// [`Error::NoInfChecks`] if they were not unscaled, or none exists.
    pub fn found_inf(&self, optimizer: &(impl Optimizer + ?Sized)) -> Result<bool> {
        let mut any = false;
        for (_, found_inf) in &self.recorded(optimizer.id())?.found_inf {
            any |= found_inf.f_double_value(&[])? != 0.0;
        }
        Ok(any)
    }

    /// The overflows counted so far; nothing is counted while disabled. Does not wait: on a GPU the
    /// last one or two steps may still be on their way ([`settle_statistics`](Self::settle_statistics)).
    pub fn statistics(&self) -> &ScalerStatistics {
        self.monitor.statistics()
    }

    /// Waits until [`statistics`](Self::statistics) covers every update. Waits for the device.
    ///
    /// # Errors
    /// What libtorch refuses.
    pub fn settle_statistics(&mut self) -> Result<()> {
        self.monitor.settle()
    }

    /// Goes on counting from saved statistics.
    pub fn resume_statistics(&mut self, statistics: ScalerStatistics) {
        self.monitor.resume(statistics);
    }

    /// Whether the scale has collapsed, by the statistics so far, and what to do about it. It is also
    /// logged, once for a scaler, as a `tracing` warning. Does not wait.
    pub fn trouble(&self) -> Option<ScaleWarning> {
        self.monitor.trouble()
    }

    /// Sets from where on the scale counts as collapsed.
    pub fn set_collapse_thresholds(&mut self, thresholds: CollapseThresholds) {
        self.monitor.thresholds = thresholds;
    }

    /// The present scale; 1 if disabled. Waits for the device.
    ///
    /// # Errors
    /// What libtorch refuses.
    pub fn get_scale(&self) -> Result<f64> {
        if !self.config.enabled {
            return Ok(1.0);
        }
        match &self.on_device {
            Some(state) => Ok(state.scale.f_double_value(&[])?),
            None => Ok(self.initial.0),
        }
    }

    /// Steps without an infinity since the scale last changed. Waits for the device.
    ///
    /// # Errors
    /// What libtorch refuses.
    pub fn get_growth_tracker(&self) -> Result<i64> {
        match &self.on_device {
            Some(state) => Ok(state.growth_tracker.f_int64_value(&[])?),
            None => Ok(self.initial.1),
        }
    }

    /// The parameters as they are now.
    pub fn config(&self) -> &GradScalerConfig {
        &self.config
    }

    /// Whether it scales.
    pub fn is_enabled(&self) -> bool {
        self.config.enabled
    }

    /// Sets the growth factor.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless it is greater than 1.
    pub fn set_growth_factor(&mut self, growth_factor: f64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            growth_factor,
            ..self.config
        })
    }

    /// Sets the backoff factor.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless it is between 0 and 1.
    pub fn set_backoff_factor(&mut self, backoff_factor: f64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            backoff_factor,
            ..self.config
        })
    }

    /// Sets the growth interval.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] unless it is at least 1.
    pub fn set_growth_interval(&mut self, growth_interval: i64) -> Result<()> {
        self.reconfigure(GradScalerConfig {
            growth_interval,
            ..self.config
        })
    }

    /// The state to save, between [`update`](Self::update) and the next step; `None` if disabled.
    ///
    /// # Errors
    /// What libtorch refuses.
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

    /// Takes over a saved state.
    ///
    /// # Errors
    /// [`Error::Disabled`] if this scaler is; [`Error::InvalidConfig`] if a value is out of range.
    /// Nothing has changed then.
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
        self.config = GradScalerConfig {
            init_scale: self.config.init_scale,
            ..config
        };
        self.initial = (state.scale, state.growth_tracker);
        self.monitor.restart_at(state.scale);
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

    /// A number above 0 where any optimizer found an infinity, on the device of `scale`; `None`
    /// where nothing was checked.
    fn any_found_inf(&self, scale: &Tensor) -> Result<Option<Tensor>> {
        let flags = self
            .optimizers
            .values()
            .flat_map(|progress| &progress.found_inf);
        flags.map(|(_, flag)| flag).try_fold(None, |sum, flag| {
            let flag = on(flag, scale.device())?;
            Ok(Some(match sum {
                Some(sum) => Tensor::f_add(&sum, &flag)?,
                None => flag,
            }))
        })
    }

    fn combined_found_inf(&self, id: OptimizerId, device: Device) -> Result<Tensor> {
        let mut flags = self.recorded(id)?.found_inf.iter();
        let Some((_, first)) = flags.next() else {
            return Err(Error::NoInfChecks {
                what: "this optimizer",
            });
        };
        flags.try_fold(on(first, device)?, |sum, (_, flag)| {
            Ok(sum.f_add(&on(flag, device)?)?)
        })
    }
}

/// A disabled scaler has an empty state, and takes only that.
impl Stateful for GradScaler {
    fn state_dict(&self) -> std::result::Result<StateDict, StateError> {
        StateDict::of_value(&GradScaler::state_dict(self)?)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> std::result::Result<(), StateError> {
        match state.value::<Option<GradScalerState>>()? {
            Some(state) => Ok(GradScaler::load_state_dict(self, &state)?),
            None if self.is_enabled() => Err("it is of a scaler that was disabled".into()),
            None => Ok(()),
        }
    }
}
