//! Checks of a configuration before anything is loaded. The ranges of single keys are in the table of keys;
//! this module checks keys against each other.

use std::path::PathBuf;

use crate::config_errors::as_value;
use crate::estimates::STEPS_BEFORE_TRACE;
use crate::keys::check_ranges;
use crate::{Result, TrainingArguments, token_files};

/// Returns an [`overdrive_core::Error::InvalidOption`]; `expected` completes "it must be".
pub(crate) fn invalid<T>(
    key: &'static str,
    value: impl std::fmt::Display,
    expected: impl Into<std::borrow::Cow<'static, str>>,
) -> Result<T> {
    Err(overdrive_core::Error::option(key, value, expected).into())
}

impl TrainingArguments {
    /// Checks the values by themselves and against each other. It does not access the disk.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the key, its value and the allowed values.
    pub fn validate(&self) -> Result<()> {
        check_ranges(&as_value(self)?, &as_value(&Self::default())?)?;
        // JSON has `null` both for NaN and for an optional key that is not set.
        let optional = [
            ("eval_steps", self.eval_steps),
            ("ddp_bucket_cap_mb", self.ddp_bucket_cap_mb),
            ("ema_decay", self.ema_decay),
        ];
        for (key, number) in optional {
            if number.is_some_and(|number| !number.is_finite()) {
                let expected = "a finite number; leave the key out for the default";
                return invalid(key, "not a finite number", expected);
            }
        }
        if self.max_steps == 0 {
            let expected = "at least 1, or -1 to train for `num_train_epochs`";
            return invalid("max_steps", 0, expected);
        }
        let epochs = self.num_train_epochs;
        if self.max_steps < 0 && !(epochs.is_finite() && epochs > 0.0) {
            let expected = "positive if `max_steps` is not set";
            return invalid("num_train_epochs", epochs, expected);
        }
        let last_without_trace = STEPS_BEFORE_TRACE.cast_signed();
        if self.trace.is_some() && (1..=last_without_trace).contains(&self.max_steps) {
            let expected = format!(
                "at least {0} with `trace`, which records from step {0} on; give more steps, or leave \
                 `trace` out",
                STEPS_BEFORE_TRACE + 1
            );
            return invalid("max_steps", self.max_steps, expected);
        }
        if self.emit_nvtx && self.trace.is_some() {
            let expected = "left out with `trace`: libtorch has one profiler; give one of the two";
            return invalid("emit_nvtx", true, expected);
        }
        // A tokenizer is trained on text only. A folder may hold tokens: there the trainer of the tokenizer checks.
        let is_named =
            |path: &PathBuf| path.extension().is_some() && !token_files::has_extension(path);
        let is_text = self.data.is_empty() || self.data.iter().any(is_named);
        if self.tokenizer.is_none() && is_text && self.vocab_size < 257 {
            let expected = "at least 257, because a byte-level tokenizer has a token for each of the 256 bytes \
                            and one for the end of a document; give 257 or more, or a `tokenizer`";
            return invalid("vocab_size", self.vocab_size, expected);
        }
        // A layer that sets one resets the other, so both come from the same file or from code.
        if self.bf16 && self.fp16 {
            let expected = "false if `fp16` is true; drop one, or add `--no-fp16` or `--no-bf16`";
            return invalid("bf16", true, expected);
        }
        self.validate_loading()?;
        self.validate_saving()?;
        self.model.validate(self.vocab_size, self.context_length)
    }
}
