//! The progress bar of a build: indicatif's with the feature `progress`, and nothing without it.

#[cfg(feature = "progress")]
use indicatif::{ProgressBar as Bar, ProgressStyle};

/// A bar on standard error, which is drawn only if that is a terminal.
pub(crate) struct ProgressBar {
    #[cfg(feature = "progress")]
    bar: Bar,
}

#[cfg(feature = "progress")]
impl ProgressBar {
    /// Returns a bar that ends at `len`, in indicatif's template with `message`.
    pub(crate) fn new(len: u64, template: &str, message: String) -> Self {
        let style =
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = Bar::new(len).with_style(style).with_message(message);
        Self { bar }
    }

    pub(crate) fn hidden() -> Self {
        Self { bar: Bar::hidden() }
    }

    pub(crate) fn advance(&self, by: u64) {
        self.bar.inc(by);
    }

    pub(crate) fn finish_and_clear(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(not(feature = "progress"))]
impl ProgressBar {
    pub(crate) fn new(_len: u64, _template: &str, _message: String) -> Self {
        Self {}
    }

    pub(crate) fn hidden() -> Self {
        Self {}
    }

    pub(crate) fn advance(&self, _by: u64) {}

    pub(crate) fn finish_and_clear(&self) {}
}
