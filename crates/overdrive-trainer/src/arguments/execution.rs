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
        execution.fp32_residual_connection = self.fp32_residual_connection;
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

    /// Returns the precision that `bf16`, `fp16`, `fp8` and `tf32` select. Fine-tuning may train in another one, so
    /// programs take the precision from `apply`.
    pub fn precision(&self) -> Precision {
        // The first three exclude each other, which `validate` checks.
        match (self.bf16, self.fp16, self.fp8) {
            (true, _, _) => Precision::Bf16,
            (_, true, _) => Precision::Fp16,
            (_, _, true) => Precision::Fp8,
            _ if self.tf32 == Some(true) => Precision::Tf32,
            _ => Precision::Fp32,
        }
    }

    /// Sets `bf16`, `fp16`, `fp8` and `tf32` to `precision`, and `auto_precision` to `false`.
    pub fn set_precision(&mut self, precision: Precision) {
        self.select(precision);
        self.auto_precision = false;
    }

    /// Sets the keys that select a precision.
    pub(crate) fn select(&mut self, precision: Precision) {
        self.bf16 = precision == Precision::Bf16;
        self.fp16 = precision == Precision::Fp16;
        self.fp8 = precision == Precision::Fp8;
        self.tf32 = (precision == Precision::Tf32).then_some(true);
    }

    /// Returns `true` if one of `bf16`, `fp16`, `fp8` and `tf32` selects the precision.
    pub fn selects_precision(&self) -> bool {
        self.bf16 || self.fp16 || self.fp8 || self.tf32.is_some()
    }
}
