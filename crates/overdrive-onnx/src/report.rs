use std::fmt;
use std::path::PathBuf;

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExportReport {
    /// The file of the graph.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
    /// The file of the weights, where it is another.
    pub data_path: Option<PathBuf>,
    /// Its size; 0 where there is none.
    pub data_bytes: u64,
    /// Calls of operators.
    pub nodes: usize,
    /// Constant tensors.
    pub initializers: usize,
    /// Version of ONNX's operators.
    pub opset: i64,
    /// Version of the file format.
    pub ir_version: i64,
    /// Other domains whose operators are called: `com.microsoft`, which ONNX Runtime has, or none.
    pub domains: Vec<String>,
    /// What the model takes, in order.
    pub inputs: Vec<ValueReport>,
    /// What it gives.
    pub outputs: Vec<ValueReport>,
}

/// An input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ValueReport {
    /// Its name.
    pub name: String,
    /// The format of its elements: `int64`, `float32`, `float16`.
    pub element: &'static str,
    /// Its dimensions: numbers, or names of what is known when the model runs.
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

/// A few lines for people; of the cache's inputs and outputs the first is shown.
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
