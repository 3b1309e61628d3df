use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar of bytes on stderr, for callbacks that report `(done, all)`. It is shown only if stderr is a
/// terminal.
#[derive(Debug, Clone)]
pub struct ByteProgress(ProgressBar);

impl ByteProgress {
    /// Returns a bar whose line starts with `verb`, such as `loading`.
    pub fn new(verb: &str) -> Result<ByteProgress> {
        let template = format!("{verb} {{wide_bar}} {{bytes}} of {{total_bytes}}");
        let style = ProgressStyle::with_template(&template)?;
        Ok(ByteProgress(ProgressBar::no_length().with_style(style)))
    }

    /// Reports `done` of `all` bytes.
    pub fn set(&self, done: u64, all: u64) {
        self.0.set_length(all);
        self.0.set_position(done);
    }

    /// Removes the bar.
    pub fn clear(&self) {
        self.0.finish_and_clear();
    }
}
