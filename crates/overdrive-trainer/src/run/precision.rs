//! The precision of a run.

use overdrive_distributed::ProcessGroup;
use overdrive_precision::Precision;
use serde_json::Value;
use tch::Device;

use super::folder::RunFolder;
use crate::Result;
use crate::arguments::{TrainingArguments, read_file};

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
