//! The precision of a run.

use overdrive_distributed::ProcessGroup;
use overdrive_precision::Precision;
use serde_json::Value;
use tch::Device;

use crate::{Result, RunFolder, TrainingArguments, config_format};

/// A choice for the keys `bf16`, `fp16` and `tf32`, and its reason.
type Choice = ((bool, bool, Option<bool>), String);

impl TrainingArguments {
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

    /// Sets `bf16` or `fp16` to the recommended precision of `device` if `auto_precision` is set and none of
    /// `bf16`, `fp16` and `tf32` is. Returns the choice and its reason, for a log line.
    ///
    /// A run that is resumed keeps the precision of its stored arguments. Rank 0 chooses for all processes.
    /// Call it before [`apply`](Self::apply).
    ///
    /// # Errors
    /// An error of reading the stored arguments, or of the group.
    pub fn choose_precision(
        &mut self,
        group: &ProcessGroup,
        device: Device,
    ) -> Result<Option<String>> {
        if !self.auto_precision || self.bf16 || self.fp16 || self.tf32.is_some() {
            return Ok(None);
        }
        // The recommendation on a CPU depends on the number of threads.
        self.set_threads()?;
        let ((bf16, fp16, tf32), reason) = match group.world_size() {
            1 => self.choice(device)?,
            _ => group.on_main("choose the precision", || self.choice(device))?,
        };
        (self.bf16, self.fp16, self.tf32) = (bf16, fp16, tf32);
        Ok(Some(format!("{} ({reason})", self.precision())))
    }

    fn choice(&self, device: Device) -> Result<Choice> {
        if let Some(run) = RunFolder::to_resume(self)? {
            let stored = config_format::read(&run.arguments())?;
            let flag = |key: &str| stored.get(key).and_then(Value::as_bool);
            let keys = (
                flag("bf16") == Some(true),
                flag("fp16") == Some(true),
                flag("tf32"),
            );
            return Ok((keys, "as in the run that is resumed".to_owned()));
        }
        let recommended = Precision::recommend(device);
        Ok((
            keys_of(recommended.precision),
            format!("{}; off: --no-auto-precision", recommended.reason),
        ))
    }

    /// Sets `bf16`, `fp16` and `tf32` to `precision`, and `auto_precision` to `false`.
    pub fn set_precision(&mut self, precision: Precision) {
        (self.bf16, self.fp16, self.tf32) = keys_of(precision);
        self.auto_precision = false;
    }

    /// Sets the number of libtorch's threads if `threads` is set.
    pub(crate) fn set_threads(&self) -> Result<()> {
        if let Some(threads) = self.threads {
            overdrive_sys::threads::set_intra_op(threads)?;
        }
        Ok(())
    }
}

/// Returns the values of `bf16`, `fp16` and `tf32` that select a precision.
fn keys_of(precision: Precision) -> (bool, bool, Option<bool>) {
    match precision {
        Precision::Bf16 => (true, false, None),
        Precision::Fp16 => (false, true, None),
        Precision::Tf32 => (false, false, Some(true)),
        Precision::Fp32 => (false, false, None),
    }
}
