//! The arguments about execution: kernels, attention, activation checkpointing.

use overdrive_checkpointing::CheckpointOptions;
use overdrive_precision::Precision;
use overdrive_transformer::Execution;

use super::training::TrainingArguments;

impl TrainingArguments {
    /// Returns the execution options of `attn_implementation`, `fused_kernels` and `gradient_checkpointing`.
    pub fn execution(&self) -> Execution {
        let mut execution = Execution::default();
        execution.fused_kernels = self.fused_kernels;
        execution.attention = self.attn_implementation;
        if self.gradient_checkpointing {
            let options = &self.gradient_checkpointing_kwargs;
            execution.checkpointing = options.schedule.clone();
            execution.checkpoint_options = CheckpointOptions {
                preserve_rng_state: options.preserve_rng_state,
                determinism_check: options.determinism_check,
                ..CheckpointOptions::keeping(options.policy.clone())
            };
        }
        execution
    }

    /// Returns the precision that `bf16`, `fp16` and `tf32` select. Fine-tuning may train in another one, so
    /// programs take the precision from `apply`.
    pub fn precision(&self) -> Precision {
        // bf16 and fp16 exclude each other, which `validate` checks.
        if self.bf16 {
            Precision::Bf16
        } else if self.fp16 {
            Precision::Fp16
        } else if self.tf32 == Some(true) {
            Precision::Tf32
        } else {
            Precision::Fp32
        }
    }

    /// Sets `bf16`, `fp16` and `tf32` to `precision`, and `auto_precision` to `false`.
    pub fn set_precision(&mut self, precision: Precision) {
        (self.bf16, self.fp16, self.tf32) = precision_keys(precision);
        self.auto_precision = false;
    }
}

/// Returns the values of `bf16`, `fp16` and `tf32` that select a precision.
pub(crate) fn precision_keys(precision: Precision) -> (bool, bool, Option<bool>) {
    match precision {
        Precision::Bf16 => (true, false, None),
        Precision::Fp16 => (false, true, None),
        Precision::Tf32 => (false, false, Some(true)),
        Precision::Fp32 => (false, false, None),
    }
}
