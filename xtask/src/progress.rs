//! Progress bars.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar over `total` bytes. Draws to standard error, and nothing where that is no terminal.
pub(crate) fn bytes(total: u64, message: impl Into<String>) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let style = ProgressStyle::with_template(
        "{msg:>24} {bar:30} {bytes:>10}/{total_bytes} {bytes_per_sec:>12} {eta:>4} left",
    );
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar.set_message(message.into());
    bar
}
