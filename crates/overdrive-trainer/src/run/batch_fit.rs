//! The micro-batch that fits into the memory, by the estimate.

use std::error::Error as StdError;
use std::iter::successors;

use overdrive_accumulation::{BatchPlan, attempt};
use overdrive_distributed::ProcessGroup;
use overdrive_precision::Precision;
use overdrive_profiling::free_memory;
use overdrive_snapshot::Snapshot;
use overdrive_sys::{is_out_of_memory, memory};
use tch::{Device, TchError};

use super::folder::RunFolder;
use super::memory::gpu_memory;
use crate::arguments::{Configuration, FinetuneArguments, ResumeFromCheckpoint, TrainingArguments};
use crate::error::of_group;
use crate::memory_estimate::{DecoderShape, GpuMemory, MemoryPlan};
use crate::{Error, Result};

/// The fraction of the free memory that an automatic choice uses: the estimate counts tensors only, and is up to 15%
/// off in either direction.
const USED_FRACTION: f64 = 0.9;

impl TrainingArguments {
    /// Returns the division of the effective batch into micro-batches and `world_size` processes.
    ///
    /// # Errors
    /// An error if the product of the three does not fit into 64 bits.
    pub fn batch_plan(&self, world_size: usize) -> Result<BatchPlan> {
        let (micro_batch, steps) = (
            self.per_device_train_batch_size,
            self.gradient_accumulation_steps,
        );
        Ok(BatchPlan::new(micro_batch, steps, world_size as u64)?)
    }

    /// Sets the micro-batch and the accumulation to those of `plan`.
    pub fn set_batch_plan(&mut self, plan: BatchPlan) {
        self.per_device_train_batch_size = plan.micro_batch();
        self.gradient_accumulation_steps = plan.accumulation_steps();
    }

    /// Returns the estimated peak of the tensors, in bytes, with the batch of `plan` for a model of any shape.
    /// `gpu_memory` is that of [`MemoryPlan`](crate::MemoryPlan::gpu_memory).
    ///
    /// # Errors
    /// As [`MemoryPlan::estimate`](crate::MemoryPlan::estimate).
    pub fn estimated_peak(
        &self,
        shape: DecoderShape,
        precision: Precision,
        plan: BatchPlan,
        gpu_memory: Option<GpuMemory>,
    ) -> Result<u64> {
        let memory = MemoryPlan {
            batch: plan.micro_batch(),
            accumulates: plan.accumulation_steps() > 1,
            gpu_memory,
            ..self.memory_plan_of(shape, precision)
        };
        Ok(memory.estimate()?.peak)
    }

    /// Returns the batch plans of a search, from `largest` down: each divisor of the effective batch is a micro-batch
    /// once.
    pub fn batch_plans(largest: BatchPlan) -> impl Iterator<Item = BatchPlan> {
        successors(Some(largest), |plan| {
            plan.with_micro_batch_at_most(plan.micro_batch() - 1)
        })
    }

    /// With `auto_find_batch_size`, divides the effective batch into micro-batches that fit into the free memory of
    /// the `device` of each process of the group by the estimate, and returns a line about a change. Nothing changes
    /// without the key, where the free memory is unknown, or where not even a micro-batch of 1 fits by the estimate,
    /// which may be wrong.
    ///
    /// # Errors
    /// As [`batch_plan`](Self::batch_plan) and [`estimated_peak`](Self::estimated_peak), and errors of the group.
    pub fn fit_batch(
        &mut self,
        shape: DecoderShape,
        precision: Precision,
        device: Device,
        group: &ProcessGroup,
    ) -> Result<Option<String>> {
        let arguments = self.clone();
        let peak = |plan, gpu| arguments.estimated_peak(shape, precision, plan, gpu);
        self.fit_to(device, group, peak)
    }

    /// Sets the largest batch plan whose `bytes` fit into the free memory of each process, if it is smaller than the
    /// current plan, and returns a log line about it.
    fn fit_to(
        &mut self,
        device: Device,
        group: &ProcessGroup,
        bytes: impl Fn(BatchPlan, Option<GpuMemory>) -> Result<u64>,
    ) -> Result<Option<String>> {
        if !self.auto_find_batch_size {
            return Ok(None);
        }
        let Some(limit) = least_of_all(usable_memory(device), group)? else {
            return Ok(None);
        };
        let gpu = least_gpu_memory(gpu_memory(device), group)?;
        let before = self.per_device_train_batch_size;
        let largest = self.batch_plan(group.world_size())?;
        let plan = largest_that_fits(largest, limit, |plan| bytes(plan, gpu))?;
        let smaller = plan.filter(|plan| plan.micro_batch() < before);
        Ok(smaller.map(|plan| {
            self.set_batch_plan(plan);
            format!("batch       {plan}, by the estimate of the memory (asked for: micro-batches of {before})")
        }))
    }

    /// Makes a further attempt continue the run in its folder, which is open now (`auto_find_batch_size`).
    pub fn continue_in(&mut self, folder: &RunFolder) {
        self.output_dir = Some(folder.root().to_owned());
        if !self.auto_find_batch_size {
            return;
        }
        self.overwrite_output_dir = false;
        // Resuming changes nothing in this attempt: the folder of a new run has no snapshot yet.
        if !matches!(
            self.resume_from_checkpoint,
            Some(ResumeFromCheckpoint::Folder(_))
        ) {
            self.resume_from_checkpoint = Some(ResumeFromCheckpoint::Latest(true));
        }
    }

    /// Prepares another attempt after `error`, if memory ran out and `auto_find_batch_size` is set: it continues the
    /// run in its folder with micro-batches of at most half the size. Returns `false` if no attempt is left.
    fn retry(
        &mut self,
        group: &ProcessGroup,
        error: &(dyn StdError + 'static),
        say: &mut dyn FnMut(&str),
    ) -> Result<bool> {
        // With several processes, memory may have run out on only one of them, while the others wait for it.
        let searches = self.auto_find_batch_size && group.world_size() == 1;
        if !searches || !is_out_of_memory(error) {
            return Ok(false);
        }
        let Some(batch) = self.batch_plan(1)?.halved() else {
            return Ok(false);
        };
        self.set_batch_plan(batch);
        // An explicitly named snapshot, which may belong to another run, stays the newest until this run has
        // saved its own.
        if let (Some(root), Some(ResumeFromCheckpoint::Folder(_))) =
            (&self.output_dir, &self.resume_from_checkpoint)
            && !Snapshot::list(root)?.is_empty()
        {
            self.resume_from_checkpoint = Some(ResumeFromCheckpoint::Latest(true));
        }
        say(&format!(
            "            memory ran out; again with {batch}, from the last snapshot if there is one"
        ));
        memory::empty_cache(self.device(group))?;
        Ok(true)
    }
}

impl FinetuneArguments {
    /// Returns the memory plan of `step` with micro-batches of `examples`.
    pub(crate) fn step_plan(&self, step: &FinetuneStep, examples: u64) -> MemoryPlan {
        MemoryPlan {
            batch: examples.saturating_mul(step.objective.rows()),
            whole_logits: step.objective.has_whole_logits(),
            ..self.training.memory_plan_of(step.shape, step.precision)
        }
    }

    /// Returns the estimated bytes that a step takes beside the weights of a loaded model: the activations, the logits,
    /// the gradients and optimizer states of the trained parameters, and autocast's copies.
    fn estimated_step(
        &self,
        step: &FinetuneStep,
        plan: BatchPlan,
        gpu_memory: Option<GpuMemory>,
    ) -> Result<u64> {
        let memory = MemoryPlan {
            accumulates: plan.accumulation_steps() > 1,
            gpu_memory,
            ..self.step_plan(step, plan.micro_batch())
        };
        let all = memory.estimate()?;
        // Fractions of all parameters; an `f64` is precise enough for an estimate.
        let part = |bytes: u64, parameters: u64| {
            (bytes as f64 * (parameters as f64 / step.shape.parameters().max(1) as f64)) as u64
        };
        let states = part(all.gradients + all.optimizer, step.trainable);
        // On a CPU the layers cast a frozen weight in each pass and keep no copy.
        let frozen = gpu_memory.map_or(0, |_| step.frozen_in_fp32);
        let copies = part(all.cast_weights, step.trainable + frozen);
        Ok(states + copies + all.activations + all.recomputed.max(all.logits))
    }

    /// As [`TrainingArguments::fit_batch`], with a model that is loaded.
    ///
    /// # Errors
    /// As [`TrainingArguments::fit_batch`].
    pub(crate) fn fit_batch(
        &mut self,
        step: &FinetuneStep,
        device: Device,
        group: &ProcessGroup,
    ) -> Result<Option<String>> {
        let arguments = self.clone();
        let bytes = |plan, gpu| arguments.estimated_step(step, plan, gpu);
        self.training.fit_to(device, group, bytes)
    }
}

/// What the memory of a step depends on, besides the arguments.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FinetuneStep {
    pub(crate) shape: DecoderShape,
    pub(crate) precision: Precision,
    /// The number of trained parameters.
    pub(crate) trainable: u64,
    /// The number of frozen parameters in fp32, which autocast copies.
    pub(crate) frozen_in_fp32: u64,
    pub(crate) objective: Objective,
}

/// What a model is fine-tuned for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Objective {
    /// The next tokens of an example.
    Tokens,
    /// The better of two answers.
    Preferences,
}

impl Objective {
    /// Returns the number of rows of an example.
    fn rows(self) -> u64 {
        match self {
            Self::Tokens => 1,
            Self::Preferences => 2,
        }
    }

    fn has_whole_logits(self) -> bool {
        self == Self::Preferences
    }
}

/// Calls `train` with `arguments`, and after memory ran out, if `auto_find_batch_size` is set, again with micro-batches of at
/// most half the size, which continue the run in its folder. An error that lost processes have caused names them.
///
/// An error or a panic of tch can report that memory ran out; such a panic is returned as an error.
///
/// `train` gets `say`, for its own lines, and calls [`TrainingArguments::continue_in`] when the folder of the run is open.
///
/// # Errors
/// The error of `train`.
pub fn train_with_batch_that_fits<A, T, E>(
    arguments: &mut A,
    group: &ProcessGroup,
    mut say: impl FnMut(&str),
    mut train: impl FnMut(&mut A, &mut dyn FnMut(&str)) -> std::result::Result<T, E>,
) -> std::result::Result<T, E>
where
    A: Configuration,
    E: From<Error> + AsRef<dyn StdError + Send + Sync>,
{
    loop {
        let error = match attempt(|| train(arguments, &mut say)) {
            Ok(Ok(trained)) => return Ok(trained),
            Ok(Err(error)) => error,
            Err(message) => Error::from(TchError::Torch(message)).into(),
        };
        let cause: &(dyn StdError + 'static) = error.as_ref();
        if !arguments.training_mut().retry(group, cause, &mut say)? {
            return Err(match group.explain(cause) {
                Some(explained) if of_group(cause).is_none() => Error::from(explained).into(),
                _ => error,
            });
        }
    }
}

/// Returns the first plan, from `largest` down, whose `bytes` are at most `limit`.
fn largest_that_fits(
    largest: BatchPlan,
    limit: u64,
    bytes: impl Fn(BatchPlan) -> Result<u64>,
) -> Result<Option<BatchPlan>> {
    for plan in TrainingArguments::batch_plans(largest) {
        if bytes(plan)? <= limit {
            return Ok(Some(plan));
        }
    }
    Ok(None)
}

/// Returns the smallest of the bytes of all processes, so that all of them take the same micro-batch; `None` if one of
/// them does not know its own.
fn least_of_all(bytes: Option<u64>, group: &ProcessGroup) -> Result<Option<u64>> {
    // Zero stands for an unknown number. Bytes of memory are exact in a `f64`.
    let least = group.min(bytes.map_or(0.0, |bytes| bytes as f64))?;
    Ok((least > 0.0).then_some(least as u64))
}

/// Returns the memory that every process can count on, from the `own` of each, so that the estimates of all are the same;
/// `None` if one of them does not know its own.
fn least_gpu_memory(own: Option<GpuMemory>, group: &ProcessGroup) -> Result<Option<GpuMemory>> {
    let bytes = least_of_all(own.map(|gpu| gpu.bytes), group)?;
    let has_kernel = own.is_some_and(|gpu| gpu.loss_kernel);
    let loss_kernel = group.min(f64::from(u8::from(has_kernel)))? > 0.0;
    Ok(bytes.map(|bytes| GpuMemory { bytes, loss_kernel }))
}

/// Returns the bytes of tensors that an automatic choice may plan with: nine tenths of the free memory.
pub fn usable_memory(device: Device) -> Option<u64> {
    free_memory(device).map(|bytes| (bytes as f64 * USED_FRACTION) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::Preset;

    fn finetuning(training: TrainingArguments) -> FinetuneArguments {
        FinetuneArguments {
            training,
            ..FinetuneArguments::default()
        }
    }

    fn step(shape: DecoderShape, precision: Precision, objective: Objective) -> FinetuneStep {
        FinetuneStep {
            shape,
            precision,
            trainable: 0,
            frozen_in_fp32: 0,
            objective,
        }
    }

    fn arguments() -> (TrainingArguments, DecoderShape) {
        let arguments = TrainingArguments {
            per_device_train_batch_size: 48,
            auto_find_batch_size: true,
            ..Preset::Tiny.arguments()
        };
        let shape = arguments.memory_plan(4096, Precision::Fp32).shape;
        (arguments, shape)
    }

    #[test]
    fn the_largest_divisor_that_fits_is_found_and_the_effective_batch_stays() {
        let (arguments, shape) = arguments();
        let peak = |micro: u64| {
            let plan = arguments.batch_plan(1).unwrap();
            let plan = plan.with_micro_batch(micro).unwrap();
            arguments
                .estimated_peak(shape, Precision::Fp32, plan, None)
                .unwrap()
        };
        let fits = |limit| {
            let peak = |plan| arguments.estimated_peak(shape, Precision::Fp32, plan, None);
            largest_that_fits(arguments.batch_plan(1).unwrap(), limit, peak).unwrap()
        };
        for (micro, larger) in [(24, 48), (16, 24), (12, 16), (1, 2)] {
            for limit in [peak(micro), peak(larger) - 1] {
                let found = fits(limit).unwrap();
                assert_eq!(found.micro_batch(), micro);
                assert_eq!(found.effective_batch(), 48);
            }
        }
        assert_eq!(fits(peak(1) - 1), None);
    }

    #[test]
    fn half_as_many_pairs_fit_as_rows() {
        let (mut training, shape) = arguments();
        // Then tokens hold all logits too.
        training.fused_kernels = false;
        let plan = training.batch_plan(1).unwrap();
        let arguments = finetuning(training);
        let step = |plan, objective| {
            let step = step(shape, Precision::Fp32, objective);
            arguments.estimated_step(&step, plan, None)
        };
        let limit = step(plan.with_micro_batch(24).unwrap(), Objective::Tokens).unwrap();
        for (objective, micro) in [(Objective::Tokens, 24), (Objective::Preferences, 12)] {
            let found = largest_that_fits(plan, limit, |plan| step(plan, objective));
            let found = found.unwrap().unwrap();
            assert_eq!((found.micro_batch(), found.effective_batch()), (micro, 48));
        }
    }

    #[test]
    fn the_plans_of_a_search_are_all_divisors() {
        let plan = BatchPlan::new(12, 2, 1).unwrap();
        let sizes: Vec<u64> = TrainingArguments::batch_plans(plan)
            .map(BatchPlan::micro_batch)
            .collect();
        assert_eq!(sizes, [12, 8, 6, 4, 3, 2, 1]);
    }

    #[test]
    fn a_batch_is_halved_down_to_one_when_memory_runs_out() {
        let (mut arguments, _) = arguments();
        let group = ProcessGroup::single();
        let error = tch::TchError::Torch("CUDA out of memory.".to_owned());
        let mut sizes = Vec::new();
        while arguments.retry(&group, &error, &mut |_| ()).unwrap() {
            assert_eq!(arguments.sequences_per_step(), 48);
            sizes.push(arguments.per_device_train_batch_size);
        }
        assert_eq!(sizes, [24, 12, 6, 3, 1]);
    }

    #[test]
    fn a_panic_of_tch_because_memory_ran_out_halves_the_batch_too() {
        let (mut arguments, _) = arguments();
        let mut sizes = Vec::new();
        let trained = train_with_batch_that_fits(
            &mut arguments,
            &ProcessGroup::single(),
            |_| (),
            |arguments, _| -> std::result::Result<&str, Box<dyn StdError + Send + Sync>> {
                sizes.push(arguments.per_device_train_batch_size);
                let allocated = match sizes.len() {
                    1 => Err(TchError::Torch("CUDA out of memory.".to_owned())),
                    _ => Ok("trained"),
                };
                // As the functions of tch without `f_` do.
                Ok(allocated.unwrap())
            },
        );
        assert_eq!(trained.unwrap(), "trained");
        assert_eq!(sizes, [48, 24]);
    }

    #[test]
    fn only_frozen_weights_in_fp32_have_copies_in_half_precision_and_only_on_a_gpu() {
        let (training, shape) = arguments();
        let plan = training.batch_plan(1).unwrap();
        let all = training.memory_plan_of(shape, Precision::Bf16);
        let all = all.estimate().unwrap();
        assert!(all.cast_weights > 0);
        let arguments = finetuning(training);
        let gpu = GpuMemory {
            bytes: 0,
            loss_kernel: true,
        };
        let copies = |frozen_in_fp32, gpu| {
            let step = FinetuneStep {
                frozen_in_fp32,
                ..step(shape, Precision::Bf16, Objective::Tokens)
            };
            let step = arguments.estimated_step(&step, plan, gpu).unwrap();
            step - all.activations - all.recomputed.max(all.logits)
        };
        assert_eq!(copies(0, Some(gpu)), 0);
        assert_eq!(copies(shape.parameters(), None), 0);
        assert_eq!(copies(shape.parameters(), Some(gpu)), all.cast_weights);
    }

    #[test]
    fn a_pair_of_answers_takes_two_rows_and_all_logits() {
        let (training, shape) = arguments();
        let arguments = finetuning(training);
        let plan = |objective| arguments.step_plan(&step(shape, Precision::Fp32, objective), 8);
        let (tokens, pairs) = (plan(Objective::Tokens), plan(Objective::Preferences));
        assert_eq!((tokens.batch, tokens.whole_logits), (8, false));
        assert_eq!((pairs.batch, pairs.whole_logits), (16, true));
    }

    #[test]
    fn a_step_of_adapters_takes_less_than_one_of_all_weights_and_more_with_more_rows() {
        let (training, shape) = arguments();
        let arguments = finetuning(training);
        let plan = arguments.training.batch_plan(1).unwrap();
        let step = |trainable: u64, plan: BatchPlan| {
            let step = FinetuneStep {
                trainable,
                ..step(shape, Precision::Fp32, Objective::Tokens)
            };
            arguments.estimated_step(&step, plan, None).unwrap()
        };
        let (all, few) = (shape.parameters(), shape.parameters() / 100);
        // Gradient and two moments of fp32.
        let saved = step(all, plan) - step(few, plan);
        let states = 12 * (all - few);
        assert!(saved.abs_diff(states) < states / 20, "{saved} {states}");
        let half = plan.halved().unwrap();
        assert!(step(few, half) < step(few, plan));
    }

    #[test]
    fn an_unknown_amount_of_memory_stays_unknown_in_a_group() {
        let group = ProcessGroup::single();
        for bytes in [None, Some(1), Some((1 << 40) + 1)] {
            assert_eq!(least_of_all(bytes, &group).unwrap(), bytes);
        }
    }

    #[test]
    fn without_the_key_nothing_changes() {
        let (mut arguments, shape) = arguments();
        arguments.auto_find_batch_size = false;
        let before = arguments.clone();
        let line =
            arguments.fit_batch(shape, Precision::Fp32, Device::Cpu, &ProcessGroup::single());
        assert_eq!((line.unwrap(), arguments), (None, before));
    }
}
