//! A report about a run, as an HTML page.

mod chart;
mod curves;
mod page;
mod summary;

use std::path::Path;

use overdrive_core::files;
use overdrive_profiling::Machine;
use serde_json::Value;

use crate::{Result, StepMetrics};

/// A text that the model generated.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sample {
    /// The prompt.
    pub prompt: String,
    /// The generated text after it.
    pub completion: String,
}

/// A report about one training run: headline figures, curves, where the time went, samples, the
/// configuration and the machine, as one self-contained HTML file (no scripts, no
/// fonts, no network) that follows the reader's light or dark setting.
///
/// Sections of empty fields are left out. All text is escaped: a sample that contains
/// `<script>` is shown, not run.
///
/// ```
/// use overdrive_tracking::{Report, StepMetrics};
///
/// let metrics = (1..=100)
///     .map(|step| StepMetrics {
///         step,
///         loss: 3.0 + 5.0 * (-0.05 * step as f64).exp(),
///         learning_rate: 1e-3,
///         tokens_per_second: 2300.0,
///         peak_memory_bytes: 800 << 20,
///         ..Default::default()
///     })
///     .collect();
/// let report = Report { title: "Tiny Llama".into(), metrics, ..Default::default() };
///
/// let folder = tempfile::tempdir()?;
/// report.write_html(folder.path().join("report.html"))?;
/// report.write_loss_svg(folder.path().join("loss.svg"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// The name of the run.
    pub title: String,
    /// One or two sentences under the title: model, data.
    pub description: String,
    /// The records of the run, in order, as logged or as returned by [`read_metrics`](crate::read_metrics).
    pub metrics: Vec<StepMetrics>,
    /// The number of trained parameters.
    pub parameters: Option<u64>,
    /// The configuration: any JSON object; objects inside it are shown as `outer.inner`.
    pub configuration: Value,
    /// Texts that the trained model generated.
    pub samples: Vec<Sample>,
    /// The machine on which the run was made.
    pub machine: Option<Machine>,
    /// Notes that help to read the figures: an interrupted run, skipped steps.
    pub notes: Vec<String>,
}

impl Report {
    /// Returns the report as one HTML page.
    ///
    /// # Errors
    /// [`crate::Error::Chart`].
    pub fn to_html(&self) -> Result<String> {
        page::html(self)
    }

    /// Returns the loss curve as a standalone SVG file.
    ///
    /// # Errors
    /// [`crate::Error::Chart`].
    pub fn loss_svg(&self) -> Result<String> {
        curves::loss(&self.metrics).standalone()
    }

    /// Writes [`to_html`](Self::to_html) to a file.
    ///
    /// # Errors
    /// [`crate::Error::Chart`], [`overdrive_core::Error::Io`].
    pub fn write_html(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), &self.to_html()?)
    }

    /// Writes [`loss_svg`](Self::loss_svg) to a file.
    ///
    /// # Errors
    /// [`crate::Error::Chart`], [`overdrive_core::Error::Io`].
    pub fn write_loss_svg(&self, path: impl AsRef<Path>) -> Result<()> {
        write(path.as_ref(), &self.loss_svg()?)
    }
}

fn write(path: &Path, text: &str) -> Result<()> {
    Ok(files::write(path, text.as_bytes())?)
}
