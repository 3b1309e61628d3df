use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Scheme;

/// The sizes and errors of the tensors that [`quantize_checkpoint`](crate::quantize_checkpoint) wrote.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CheckpointReport {
    /// The scheme of the linear layers.
    pub scheme: Scheme,
    /// The report of each tensor, in the order of the files.
    pub tensors: Vec<TensorReport>,
    /// The number of bytes of all weight files, with their headers.
    pub file_bytes: u64,
}

/// The sizes and the error of one tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TensorReport {
    /// The name in the checkpoint.
    pub name: String,
    /// The shape in the checkpoint.
    pub shape: Vec<i64>,
    /// The scheme, or `None` if the tensor stayed dense.
    pub scheme: Option<Scheme>,
    /// The number of bytes of the tensor in f32.
    pub fp32_bytes: u64,
    /// The number of bytes that were written.
    pub bytes: u64,
    /// The relative error `‖w − ŵ‖ / ‖w‖`; 0 if the tensor stayed dense.
    pub relative_error: f64,
    /// The sum of the squared errors.
    pub squared_error: f64,
    /// The sum of the squares of the weight.
    pub squares: f64,
}

impl CheckpointReport {
    /// Returns the number of bytes of all tensors in f32.
    pub fn fp32_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.fp32_bytes).sum()
    }

    /// Returns the size in f32 divided by the size of the files.
    pub fn ratio(&self) -> f64 {
        // At least 1: a report may be deserialized from anything.
        self.fp32_bytes() as f64 / self.file_bytes.max(1) as f64
    }

    /// Returns the relative error `‖w − ŵ‖ / ‖w‖` of all quantized weights together.
    pub fn relative_error(&self) -> f64 {
        let (mut errors, mut squares) = (0.0, 0.0);
        for tensor in self.quantized() {
            errors += tensor.squared_error;
            squares += tensor.squares;
        }
        relative(errors, squares)
    }

    /// Returns the reports of the quantized tensors.
    pub fn quantized(&self) -> impl Iterator<Item = &TensorReport> {
        self.tensors.iter().filter(|tensor| tensor.scheme.is_some())
    }
}

pub(super) fn relative(errors: f64, squares: f64) -> f64 {
    match squares > 0.0 {
        true => (errors / squares).sqrt(),
        false => 0.0,
    }
}

impl fmt::Display for CheckpointReport {
    /// Writes a table with one line for each quantized weight and one for all dense tensors.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let longest = self.quantized().map(|tensor| tensor.name.len()).max();
        let width = longest.unwrap_or(0).max("not quantized (000)".len());
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        writeln!(
            f,
            "{:<width$}  {:<14} {:>14} {:>9} {:>9} {:>7}",
            "weight", "scheme", "shape", "MiB fp32", "MiB", "error"
        )?;
        let mut line =
            |name: &str, scheme: &str, shape: &str, fp32: u64, bytes: u64, error: &str| {
                writeln!(
                    f,
                    "{name:<width$}  {scheme:<14} {shape:>14} {:>9.3} {:>9.3} {error:>7}",
                    mib(fp32),
                    mib(bytes)
                )
            };
        let percent = |error: f64| format!("{:.2} %", 100.0 * error);
        for tensor in &self.tensors {
            if let Some(scheme) = tensor.scheme {
                let shape: Vec<String> = tensor.shape.iter().map(i64::to_string).collect();
                let error = percent(tensor.relative_error);
                line(
                    &tensor.name,
                    &scheme.to_string(),
                    &shape.join("×"),
                    tensor.fp32_bytes,
                    tensor.bytes,
                    &error,
                )?;
            }
        }
        let kept: Vec<&TensorReport> = self
            .tensors
            .iter()
            .filter(|tensor| tensor.scheme.is_none())
            .collect();
        let name = format!("not quantized ({})", kept.len());
        let sum = |of: fn(&TensorReport) -> u64| kept.iter().map(|tensor| of(tensor)).sum();
        line(&name, "", "", sum(|t| t.fp32_bytes), sum(|t| t.bytes), "")?;
        let error = percent(self.relative_error());
        line("all", "", "", self.fp32_bytes(), self.file_bytes, &error)?;
        write!(f, "{:.2} times smaller than in fp32", self.ratio())
    }
}
