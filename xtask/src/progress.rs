//! Progress bars.

use indicatif::{ProgressBar, ProgressStyle};

/// Returns a bar over `total` bytes on standard error, which is hidden if that is no terminal.
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
