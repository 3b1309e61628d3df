use std::fmt;
use std::path::PathBuf;

/// The result of an export.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportReport {
    /// The file of the graph.
    pub path: PathBuf,
    /// The size of the graph's file in bytes.
    pub bytes: u64,
    /// The file of the weights, if they are in a separate file.
    pub data_path: Option<PathBuf>,
    /// The size of the weights' file in bytes; 0 if there is no such file.
    pub data_bytes: u64,
    /// The number of nodes (calls of operators).
    pub nodes: usize,
    /// The number of constant tensors.
    pub initializers: usize,
    /// The version of ONNX's operators.
    pub opset: i64,
    /// The version of the file format.
    pub ir_version: i64,
    /// The other domains of operators: `com.microsoft` of ONNX Runtime, or none.
    pub domains: Vec<String>,
    /// The inputs of the graph, in order.
    pub inputs: Vec<ValueReport>,
    /// The outputs of the graph, in order.
    pub outputs: Vec<ValueReport>,
}

/// An input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValueReport {
    /// The name.
    pub name: String,
    /// The dtype: `int64`, `float32`, `float16`.
    pub element: &'static str,
    /// The dimensions: numbers, or names of dimensions that are known when the model runs.
    pub shape: Vec<String>,
}

impl fmt::Display for ValueReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {} [{}]",
            self.name,
            self.element,
            self.shape.join(", ")
        )
    }
}

/// Writes a summary in a few lines, with only the first input and output of the cache.
impl fmt::Display for ExportReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        write!(
            f,
            "{} ({:.1} MB",
            self.path.display(),
            megabytes(self.bytes)
        )?;
        if let Some(path) = &self.data_path {
            let (name, size) = (path.display(), megabytes(self.data_bytes));
            write!(f, "; weights in {name}, {size:.1} MB")?;
        }
        writeln!(f, ")")?;
        write!(
            f,
            "{} nodes, {} constants, opset {}, IR version {}",
            self.nodes, self.initializers, self.opset, self.ir_version
        )?;
        for domain in &self.domains {
            write!(f, ", {domain}")?;
        }
        writeln!(f)?;
        for (what, values) in [("input", &self.inputs), ("output", &self.outputs)] {
            let is_cache = |value: &&ValueReport| {
                value.name.ends_with(".key") || value.name.ends_with(".value")
            };
            let cached = values.iter().filter(is_cache).count();
            for value in values.iter().filter(|value| !is_cache(value)) {
                writeln!(f, "{what} {value}")?;
            }
            if let Some(first) = values.iter().find(is_cache) {
                writeln!(f, "{what} {first} and {} more of the cache", cached - 1)?;
            }
        }
        Ok(())
    }
}
