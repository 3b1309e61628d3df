//! What compile_package.py writes down about a model.

use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// The newest `format_version` that this crate reads.
const FORMAT_VERSION: u32 = 1;

/// The metadata under the key `overdrive`: for what the code was made, and what it takes and gives.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// Counts the changes of this form; 1.
    pub format_version: u32,
    /// The version of PyTorch that compiled it, such as `2.11.0`.
    pub torch: String,
    /// What it computes: `logits`, `prefill` or `decode`.
    pub kind: String,
    /// The family of the model, as in its `config.json`.
    #[serde(default)]
    pub model_type: String,
    /// The inputs, in order.
    pub inputs: Vec<TensorSpec>,
    /// The outputs, in order.
    pub outputs: Vec<TensorSpec>,
    /// Groups of names that stand for one weight.
    #[serde(default)]
    pub tied: Vec<Vec<String>>,
    /// Whether weights can be replaced: not where they were packed for the processor.
    #[serde(default = "yes")]
    pub swappable: bool,
    /// What the code may use of the processor, in GCC's words.
    #[serde(default)]
    pub processor: Vec<String>,
}

fn yes() -> bool {
    true
}

/// A tensor that a compiled model takes or gives.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct TensorSpec {
    /// Its name.
    pub name: String,
    /// Its element type, in PyTorch's words: `float32`, `int64`.
    pub dtype: String,
    /// Its sizes.
    pub shape: Vec<Size>,
    /// Whether the model writes to it.
    #[serde(default)]
    pub mutated: bool,
}

/// A size of a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Size {
    /// Always this.
    Fixed(i64),
    /// The same for all that have this name, within bounds.
    Named {
        /// Such as `batch`.
        name: String,
        /// The least it may be.
        #[serde(default)]
        min: Option<i64>,
        /// The most.
        #[serde(default)]
        max: Option<i64>,
    },
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Size::Fixed(size) => write!(f, "{size}"),
            Size::Named { name, min, max } => {
                write!(f, "{name}")?;
                match (min, max) {
                    (Some(min), Some(max)) => write!(f, " in {min}..={max}"),
                    (Some(min), None) => write!(f, " from {min}"),
                    (None, Some(max)) => write!(f, " up to {max}"),
                    (None, None) => Ok(()),
                }
            }
        }
    }
}

impl std::fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let sizes: Vec<String> = self.shape.iter().map(Size::to_string).collect();
        write!(f, "{} ({})", self.dtype, sizes.join(", "))
    }
}

impl TensorSpec {
    /// The element type; `None` for one that tch does not know.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        kind_of(&self.dtype)
    }

    /// Holds a tensor against this, and against the sizes that other inputs have given to names.
    pub(crate) fn check(&self, tensor: &Tensor, names: &mut Vec<(String, i64)>) -> Result<()> {
        let wrong = |expected: String| Error::BadInput {
            name: self.name.clone(),
            expected,
            got: format!("{:?} of shape {:?}", tensor.kind(), tensor.size()),
        };
        let size = tensor.size();
        let kind_fits = self.kind() == Some(tensor.f_kind()?);
        if !kind_fits || size.len() != self.shape.len() {
            return Err(wrong(self.to_string()));
        }
        for (got, expected) in size.iter().zip(&self.shape) {
            match expected {
                Size::Fixed(fixed) if got == fixed => {}
                Size::Fixed(_) => return Err(wrong(self.to_string())),
                Size::Named { name, min, max } => {
                    let inside =
                        min.is_none_or(|min| *got >= min) && max.is_none_or(|max| *got <= max);
                    if !inside {
                        return Err(wrong(self.to_string()));
                    }
                    match names.iter().find(|(known, _)| known == name) {
                        Some((_, before)) if before == got => {}
                        Some((_, before)) => {
                            return Err(wrong(format!("{name} = {before}, as in an input before")));
                        }
                        None => names.push((name.clone(), *got)),
                    }
                }
            }
        }
        Ok(())
    }
}

impl Manifest {
    /// Reads it.
    pub(crate) fn parse(text: &str) -> std::result::Result<Manifest, String> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let version: Version = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let version = version.format_version;
        if version == 0 || version > FORMAT_VERSION {
            return Err(format!(
                "format_version {version}, and this Overdrive reads up to {FORMAT_VERSION}"
            ));
        }
        serde_json::from_str(text).map_err(|error| error.to_string())
    }
}

fn kind_of(dtype: &str) -> Option<Kind> {
    Some(match dtype {
        "float32" => Kind::Float,
        "float64" => Kind::Double,
        "float16" => Kind::Half,
        "bfloat16" => Kind::BFloat16,
        "int64" => Kind::Int64,
        "int32" => Kind::Int,
        "int16" => Kind::Int16,
        "int8" => Kind::Int8,
        "uint8" => Kind::Uint8,
        "bool" => Kind::Bool,
        _ => return None,
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn a_later_format_is_refused_by_its_number() {
        let error = Manifest::parse(r#"{"format_version": 9}"#).unwrap_err();
        assert!(
            error.contains("format_version 9") && error.contains("up to 1"),
            "{error}"
        );
    }

    #[test]
    fn a_name_has_one_size_in_all_inputs() {
        let spec: TensorSpec = serde_json::from_str(
            r#"{"name": "ids", "dtype": "int64", "shape": [{"name": "batch", "min": 1, "max": 4}, 3]}"#,
        )
        .unwrap();
        let ids = |rows: i64, columns: i64| {
            Tensor::zeros([rows, columns], (Kind::Int64, tch::Device::Cpu))
        };
        let mut names = Vec::new();
        spec.check(&ids(2, 3), &mut names).unwrap();
        let error = spec.check(&ids(3, 3), &mut names).unwrap_err().to_string();
        assert!(error.contains("batch = 2"), "{error}");
        let error = spec
            .check(&ids(5, 3), &mut Vec::new())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("int64 (batch in 1..=4, 3)") && error.contains("[5, 3]"),
            "{error}"
        );
        assert!(spec.check(&ids(2, 4), &mut Vec::new()).is_err());
        assert!(
            spec.check(&ids(2, 3).to_kind(Kind::Int), &mut Vec::new())
                .is_err()
        );
    }
}
