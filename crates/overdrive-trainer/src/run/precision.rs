//! The precision of a run.

use overdrive_distributed::ProcessGroup;
use overdrive_precision::Precision;
use serde_json::Value;
use tch::Device;

use super::folder::RunFolder;
use crate::Result;
use crate::arguments::{TrainingArguments, precision_keys, read_file};

/// A choice for the keys `bf16`, `fp16` and `tf32`, and its reason.
type Choice = ((bool, bool, Option<bool>), String);

impl TrainingArguments {
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
            let stored = read_file(&run.arguments())?;
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
            precision_keys(recommended.precision),
            format!("{}; off: --no-auto-precision", recommended.reason),
        ))
    }

    /// Sets the number of libtorch's threads if `threads` is set.
    pub(crate) fn set_threads(&self) -> Result<()> {
        if let Some(threads) = self.threads {
            overdrive_sys::threads::set_intra_op(threads)?;
        }
        Ok(())
    }
}
