//! Checks of a configuration before anything is loaded. Ranges of single keys are in the table of keys;
//! here are the checks of several keys together.

use crate::diagnosis::as_value;
use crate::keys::check_ranges;
use crate::measures::STEPS_BEFORE_TRACE;
use crate::{Error, Result, TrainingArguments};

/// An [`Error::Invalid`].
pub(crate) fn invalid<T>(
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

impl TrainingArguments {
    /// Checks the values, alone and together. Nothing is read from the disk.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the key, what is wrong and the way out.
    pub fn validate(&self) -> Result<()> {
        check_ranges(&as_value(self)?, &as_value(&Self::default())?)?;
        // JSON writes NaN as it writes a key that is not set.
        let optional = [
            ("eval_steps", self.eval_steps),
            ("ddp_bucket_cap_mb", self.ddp_bucket_cap_mb),
            ("ema_decay", self.ema_decay),
        ];
        for (key, number) in optional {
            if number.is_some_and(|number| !number.is_finite()) {
                return invalid(key, "not a finite number", "it must be one", "leave it out");
            }
        }
        if self.max_steps == 0 {
            let way_out = "give 1 or more, or -1 to train for `num_train_epochs`";
            return invalid("max_steps", 0, "a run has at least one step", way_out);
        }
        let epochs = self.num_train_epochs;
        if self.max_steps < 0 && !(epochs.is_finite() && epochs > 0.0) {
            let problem = "it must be a number above 0 where `max_steps` is not set";
            return invalid("num_train_epochs", epochs, problem, "give one of the two");
        }
        let last_without_trace = STEPS_BEFORE_TRACE.cast_signed();
        if self.trace.is_some() && (1..=last_without_trace).contains(&self.max_steps) {
            return invalid(
                "max_steps",
                self.max_steps,
                format!("`trace` records from step {} on", STEPS_BEFORE_TRACE + 1),
                "give more steps, or leave `trace` out",
            );
        }
        if self.tokenizer.is_none() && self.vocab_size < 257 {
            return invalid(
                "vocab_size",
                self.vocab_size,
                "a byte-level tokenizer has a token for each of the 256 bytes and one between documents",
                "give 257 or more, or a `tokenizer`",
            );
        }
        if self.bf16 && self.fp16 {
            return invalid(
                "bf16",
                true,
                "`fp16` is true as well, and a run has one of them",
                "drop one, or add `--no-fp16` or `--no-bf16`",
            );
        }
        self.validate_loading()?;
        self.validate_saving()?;
        self.model.validate(self.context_length)
    }
}
