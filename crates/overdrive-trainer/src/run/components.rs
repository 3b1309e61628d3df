//! The components of a run from its arguments: precision, accumulation, averages, schedule, recorder, profiler.

use overdrive_accumulation::AccumulationConfig;
use overdrive_distributed::ProcessGroup;
use overdrive_optim::{Ema, EmaConfig, LrScheduler, Optimizer, Schedule, StateDict};
use overdrive_precision::Precision;
use overdrive_profiling::{
    ModelFlops, PeakFlops, Profiler, ProfilerConfig, Schedule as ProfilerSchedule, StepRecorder,
    StepRecorderConfig,
};
use overdrive_sys::denormals::set_flush_denormals;
use overdrive_sys::memory;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::folder::RunFolder;
use super::plan::TrainingPlan;
use crate::Result;
use crate::arguments::{FinetuneArguments, STEPS_BEFORE_TRACE, TrainingArguments, read_file};
use crate::data::TextData;

impl TrainingArguments {
    /// Sets the number of threads, the treatment of subnormal numbers, TF32 and the seed of libtorch, and returns the
    /// precision of the run, which its autocast, its loss scaler, its memory plan and its recorder get.
    ///
    /// Call it on the thread that trains, before it computes anything.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn apply(&self) -> Result<Precision> {
        self.set_threads()?;
        // Set after the number of threads, so that it applies to all of them.
        set_flush_denormals(self.flush_denormals);
        // If the key is not set, libtorch's setting stays, which the user may have changed.
        if let Some(allowed) = self.tf32 {
            overdrive_precision::tf32::allow(allowed)?;
        }
        // libtorch declares the seed signed and uses its 64 bits.
        tch::manual_seed(self.seed.cast_signed());
        Ok(self.precision())
    }

    /// Returns the `config.json` of a new model of the shape of `model`, for the tokenizer of `data`.
    pub(crate) fn model_config(&self, data: &TextData) -> Value {
        let mut json = self
            .model
            .to_hugging_face(data.vocab_size(), self.context_length);
        if let Some(end) = data.end_of_text() {
            // The token between documents both ends and starts one.
            json["eos_token_id"] = end.into();
            json["bos_token_id"] = end.into();
        }
        json
    }

    /// Returns the options of gradient accumulation and clipping.
    pub fn accumulation(&self) -> AccumulationConfig {
        AccumulationConfig {
            gradient_accumulation_steps: usize::try_from(self.gradient_accumulation_steps)
                .unwrap_or(usize::MAX),
            // Hugging Face writes 0 for no clipping, and logs the norm nevertheless.
            max_grad_norm: Some(match self.max_grad_norm > 0.0 {
                true => self.max_grad_norm,
                false => f64::INFINITY,
            }),
        }
    }

    /// Returns the moving average of the trainable parameters if `ema_decay` is set.
    ///
    /// # Errors
    /// An error if the decay is outside its range.
    pub fn new_ema(&self, parameters: Vec<(String, Tensor)>) -> Result<Option<Ema>> {
        let Some(decay) = self.ema_decay else {
            return Ok(None);
        };
        let config = EmaConfig {
            decay,
            ..EmaConfig::default()
        };
        Ok(Some(Ema::new(parameters, config)?))
    }

    /// Returns the schedule that `lr_scheduler_type` names, over the steps of `plan`.
    ///
    /// # Errors
    /// An error if an option of the schedule is outside its range.
    pub fn new_scheduler(
        &self,
        plan: &TrainingPlan,
        optimizer: &mut dyn Optimizer,
    ) -> Result<LrScheduler> {
        let schedule = Schedule::new(
            self.lr_scheduler_type,
            plan.schedule_length(),
            self.learning_rate,
            &self.lr_scheduler_kwargs,
        )?;
        Ok(LrScheduler::new(schedule, optimizer)?)
    }

    /// Gives an optimizer and a schedule that were loaded from a snapshot the options of these arguments: learning
    /// rate, schedule, weight decay, betas. A snapshot has those of the run that saved it. `options` is the state of the
    /// optimizer when it was new, before its schedule.
    ///
    /// The optimizer's state is in memory twice for a moment if an option differs.
    ///
    /// # Errors
    /// As [`new_scheduler`](Self::new_scheduler), and an error of the optimizer.
    pub(super) fn set_resumed_options(
        &self,
        plan: &TrainingPlan,
        options: &StateDict,
        optimizer: &mut dyn Optimizer,
        scheduler: &mut LrScheduler,
    ) -> Result<()> {
        let loaded = optimizer.state_dict()?;
        let before = loaded.metadata.clone();
        let loaded = loaded.with_options_of(options);
        if loaded.metadata != before {
            optimizer.load_state_dict(&loaded)?;
        }
        let steps = scheduler.last_step();
        optimizer.set_learning_rate(self.learning_rate)?;
        *scheduler = self.new_scheduler(plan, optimizer)?;
        Ok(scheduler.set_step(steps, optimizer)?)
    }

    /// Returns a recorder of the steps on `devices` devices like `device`. If the FLOPs of the `model` are known, it
    /// records the MFU, with the peak of the device in `precision`. On a CPU the peak is measured, which takes a fraction
    /// of a second.
    ///
    /// # Errors
    /// An error of the measurement.
    pub fn new_recorder(
        &self,
        model: Option<ModelFlops>,
        precision: Precision,
        device: Device,
        devices: usize,
    ) -> Result<StepRecorder> {
        let kind = match precision {
            Precision::Fp16 => Kind::Half,
            // The MFU of FP8 is that of bf16, as in torchtitan: above 1 if FP8 gains more than bf16 can.
            Precision::Bf16 | Precision::Fp8 => Kind::BFloat16,
            _ => Kind::Float,
        };
        let memory_peak = || {
            memory::stats(device)
                .map(|stats| stats.peak_allocated_bytes)
                .ok()
        };
        let before = memory_peak();
        let peak_flops = model.map(|_| PeakFlops::of(device, kind)).transpose()?;
        // The matrices of the measurement are not memory of the run.
        if memory_peak() > before {
            memory::reset_peak(device)?;
        }
        Ok(StepRecorder::new(StepRecorderConfig {
            device,
            peak_flops,
            model: model.map(|model| ModelFlops {
                sequence_length: self.context_length,
                ..model
            }),
            devices,
            ..StepRecorderConfig::default()
        })?)
    }

    /// Returns the profiler that writes `trace`, if it is set: three steps after the first five. Finish it
    /// after the loop: a run that ends earlier writes the steps it has.
    ///
    /// # Errors
    /// An error of libtorch's profiler.
    pub fn new_profiler(&self) -> Result<Option<Profiler<'static>>> {
        let Some(path) = self.trace.clone() else {
            return Ok(None);
        };
        let schedule = ProfilerSchedule {
            // One of the skipped steps is the profiler's own warm-up, whose overhead must not be in the trace.
            wait: STEPS_BEFORE_TRACE - 1,
            warmup: 1,
            active: 3,
            repeat: 1,
            ..ProfilerSchedule::default()
        };
        Ok(Some(Profiler::start(
            ProfilerConfig::default(),
            schedule,
            move |mut trace| trace.save_chrome_trace(&path),
        )?))
    }
}

impl TrainingArguments {
    /// Sets `bf16` or `fp16` to the recommended precision of `device` if `auto_precision` is set and none of
    /// `bf16`, `fp16`, `fp8` and `tf32` is. Returns the choice and its reason, for a log line.
    ///
    /// A run that is resumed keeps the precision of its stored arguments. Rank 0 chooses for all processes.
    /// Call it before [`apply`](Self::apply).
    ///
    /// # Errors
    /// An error of reading the stored arguments, or of the group; an error if `device` cannot train in the precision.
    pub fn choose_precision(
        &mut self,
        group: &ProcessGroup,
        device: Device,
    ) -> Result<Option<String>> {
        let mut line = None;
        if self.auto_precision && !self.selects_precision() {
            // The recommendation on a CPU depends on the number of threads.
            self.set_threads()?;
            let (precision, tf32, reason) = match group.world_size() {
                1 => self.choice(device)?,
                _ => group.on_main("choose the precision", || self.choice(device))?,
            };
            self.select(precision);
            self.tf32 = tf32.or(self.tf32);
            line = Some(format!("{precision} ({reason})"));
        }
        self.precision().check(device)?;
        Ok(line)
    }

    /// Returns the precision, `tf32` if a stored run sets it, and the reason.
    fn choice(&self, device: Device) -> Result<(Precision, Option<bool>, String)> {
        if let Some(run) = RunFolder::to_resume(self)? {
            let stored = read_file(&run.arguments())?;
            let flag = |key: &str| stored.get(key).and_then(Value::as_bool);
            let is_set = |key: &str| flag(key) == Some(true);
            let before = Self {
                bf16: is_set("bf16"),
                fp16: is_set("fp16"),
                fp8: is_set("fp8"),
                tf32: flag("tf32"),
                ..self.clone()
            };
            let reason = "as in the run that is resumed".to_owned();
            return Ok((before.precision(), before.tf32, reason));
        }
        let recommended = Precision::recommend(device);
        let reason = format!("{}; off: --no-auto-precision", recommended.reason);
        Ok((recommended.precision, None, reason))
    }

    /// Sets the number of libtorch's threads if `threads` is set.
    pub(crate) fn set_threads(&self) -> Result<()> {
        if let Some(threads) = self.threads {
            overdrive_sys::threads::set_intra_op(threads)?;
        }
        Ok(())
    }
}

impl FinetuneArguments {
    /// Sets the number of threads, the treatment of subnormal numbers, TF32 and the seed of libtorch, and returns the
    /// precision of the run, which its autocast, its loss scaler, its memory plan and its recorder get.
    ///
    /// # Errors
    /// As [`TrainingArguments::apply`].
    pub fn apply(&self) -> Result<Precision> {
        self.training.apply()?;
        Ok(self.precision())
    }
}
