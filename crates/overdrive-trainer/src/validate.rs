//! Values that make no sense, found before anything is loaded.

use crate::measures::STEPS_BEFORE_TRACE;
use crate::{Error, Result, TrainingArguments};

fn invalid<T>(
    key: &'static str,
    given: impl ToString,
    problem: impl Into<String>,
    way_out: impl Into<String>,
) -> Result<T> {
    Err(Error::Invalid {
        key,
        given: given.to_string(),
        problem: problem.into(),
        way_out: way_out.into(),
    })
}

fn at_least_one(key: &'static str, value: u64) -> Result<()> {
    if value == 0 {
        invalid(key, value, "it must be at least 1", "give 1 or more")
    } else {
        Ok(())
    }
}

/// A finite number from `low` on; whether `low` itself is allowed is `including`.
fn above(key: &'static str, value: f64, low: f64, including: bool) -> Result<()> {
    if value.is_finite() && (value > low || (including && value == low)) {
        return Ok(());
    }
    let problem = if including { "at least" } else { "above" };
    let way_out = "give such a number, or leave the key out for the default";
    invalid(
        key,
        value,
        format!("it must be a number {problem} {low}"),
        way_out,
    )
}

fn below_one(key: &'static str, value: f64) -> Result<()> {
    if (0.0..1.0).contains(&value) {
        return Ok(());
    }
    invalid(
        key,
        value,
        "it must be at least 0 and below 1",
        "Hugging Face's default is a good one",
    )
}

/// A number of steps: whole, or below 1 as a part of the run.
fn interval(key: &'static str, value: f64) -> Result<()> {
    above(key, value, 0.0, false)?;
    if value >= 1.0 && value.fract() != 0.0 {
        let problem = "from 1 on it is a number of steps and must be whole";
        return invalid(
            key,
            value,
            problem,
            "give a whole number, or a part of the run below 1",
        );
    }
    Ok(())
}

impl TrainingArguments {
    /// Whether the values make sense, alone and together. Nothing is read from the disk.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the key, what is wrong and the way out.
    pub fn validate(&self) -> Result<()> {
        self.validate_steps()?;
        self.validate_optimizer()?;
        self.validate_data()?;
        self.validate_saving()?;
        if self.bf16 && self.fp16 {
            return invalid(
                "bf16",
                "true",
                "`fp16` is true as well, and a run has one of them",
                "drop one, or add `--no-fp16` or `--no-bf16`",
            );
        }
        above("ddp_timeout", self.ddp_timeout, 0.0, false)?;
        if let Some(size) = self.ddp_bucket_cap_mb {
            above("ddp_bucket_cap_mb", size, 0.0, false)?;
        }
        if self.threads == Some(0) {
            return invalid(
                "threads",
                0,
                "an operator needs a thread",
                "give 1 or more, or leave it out",
            );
        }
        self.model.validate(self.context_length)
    }

    fn validate_steps(&self) -> Result<()> {
        at_least_one(
            "per_device_train_batch_size",
            self.per_device_train_batch_size,
        )?;
        at_least_one(
            "per_device_eval_batch_size",
            self.per_device_eval_batch_size,
        )?;
        at_least_one(
            "gradient_accumulation_steps",
            self.gradient_accumulation_steps,
        )?;
        if let Some(batches) = self.max_eval_batches {
            at_least_one("max_eval_batches", batches)?;
        }
        if self.max_steps == 0 {
            let way_out = "give 1 or more, or -1 to train for `num_train_epochs`";
            return invalid("max_steps", 0, "a run has at least one step", way_out);
        }
        if self.max_steps < 0 {
            above("num_train_epochs", self.num_train_epochs, 0.0, false)?;
        }
        if self.trace.is_some() && (1..=STEPS_BEFORE_TRACE.cast_signed()).contains(&self.max_steps)
        {
            return invalid(
                "max_steps",
                self.max_steps,
                format!("`trace` records from step {} on", STEPS_BEFORE_TRACE + 1),
                "give more steps, or leave `trace` out",
            );
        }
        interval("logging_steps", self.logging_steps)?;
        interval("save_steps", self.save_steps)?;
        if let Some(steps) = self.eval_steps {
            interval("eval_steps", steps)?;
        }
        if self.warmup_steps != 0.0 {
            interval("warmup_steps", self.warmup_steps)?;
        }
        if !(0.0..=1.0).contains(&self.warmup_ratio) {
            let way_out = "for a number of steps use `warmup_steps`";
            return invalid(
                "warmup_ratio",
                self.warmup_ratio,
                "it is a part, from 0 to 1",
                way_out,
            );
        }
        Ok(())
    }

    fn validate_optimizer(&self) -> Result<()> {
        above("learning_rate", self.learning_rate, 0.0, false)?;
        above("weight_decay", self.weight_decay, 0.0, true)?;
        below_one("adam_beta1", self.adam_beta1)?;
        below_one("adam_beta2", self.adam_beta2)?;
        above("adam_epsilon", self.adam_epsilon, 0.0, false)?;
        above("max_grad_norm", self.max_grad_norm, 0.0, true)
    }

    fn validate_data(&self) -> Result<()> {
        at_least_one("context_length", self.context_length)?;
        self.validate_loading()?;
        if self.tokenizer.is_none() && self.vocab_size < 257 {
            return invalid(
                "vocab_size",
                self.vocab_size,
                "a byte-level tokenizer has a token for each of the 256 bytes and one between documents",
                "give 257 or more, or a `tokenizer`",
            );
        }
        if !(self.validation_fraction > 0.0 && self.validation_fraction < 1.0) {
            return invalid(
                "validation_fraction",
                self.validation_fraction,
                "it is the part of the documents kept for validation, above 0 and below 1",
                "0.05 is a good start",
            );
        }
        Ok(())
    }
}
