//! The manifest of a model, which compile_package.py writes.

use overdrive_core::Error as CommonError;
use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::Result;

/// The newest `format_version` that this crate reads.
const FORMAT_VERSION: u32 = 1;

/// The metadata under the key `overdrive`: the versions that the code was compiled for, and its inputs and outputs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Manifest {
    /// The version of this format: 1.
    pub format_version: u32,
    /// The version of PyTorch that compiled it, such as `2.11.0`.
    pub torch: String,
    /// The computation: `logits`, `prefill` or `decode`.
    pub kind: String,
    /// The family of the model, as in its `config.json`.
    #[serde(default)]
    pub model_type: String,
    /// The inputs, in order.
    pub inputs: Vec<TensorSpec>,
    /// The outputs, in order.
    pub outputs: Vec<TensorSpec>,
    /// Groups of names, each of one tied weight.
    #[serde(default)]
    pub tied: Vec<Vec<String>>,
    /// If `true`, weights can be replaced; `false` if they are packed for the processor. Default `true`.
    #[serde(default = "default_swappable")]
    pub swappable: bool,
    /// The instructions that the code may use, by GCC's names.
    #[serde(default)]
    pub processor: Vec<String>,
}

fn default_swappable() -> bool {
    true
}

/// An input or output of a compiled model.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct TensorSpec {
    /// The name.
    pub name: String,
    /// PyTorch's name of the dtype: `float32`, `int64`.
    pub dtype: String,
    /// The shape.
    pub shape: Vec<Size>,
    /// If `true`, the model writes to the tensor.
    #[serde(default)]
    pub mutated: bool,
}

/// The size of one dimension.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Size {
    /// A static size.
    Fixed(i64),
    /// A dynamic size, equal in all dimensions of this name.
    Named {
        /// The name, such as `batch`.
        name: String,
        /// The smallest size; `None` for no bound.
        #[serde(default)]
        min: Option<i64>,
        /// The largest size; `None` for no bound.
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
        write!(f, "{} {}", self.dtype, self.dimensions())
    }
}

impl TensorSpec {
    /// Returns the dtype; `None` for one that tch does not know.
    #[must_use]
    pub fn kind(&self) -> Option<Kind> {
        kind_of(&self.dtype)
    }

    /// Returns the shape as text: `(batch in 1..=4, 3)`.
    fn dimensions(&self) -> String {
        let sizes: Vec<String> = self.shape.iter().map(Size::to_string).collect();
        format!("({})", sizes.join(", "))
    }

    /// Checks the dtype and shape of a tensor. `sizes` holds the dynamic sizes of previous inputs by name; those
    /// of this tensor are added.
    pub(crate) fn check(&self, tensor: &Tensor, sizes: &mut Vec<(String, i64)>) -> Result<()> {
        let size = tensor.size();
        let kind = tensor.f_kind()?;
        if self.kind() != Some(kind) {
            return Err(CommonError::dtype(self.name.clone(), kind, self.dtype.clone()).into());
        }
        let wrong =
            |expected: String| CommonError::shape(self.name.clone(), tensor.size(), expected);
        if size.len() != self.shape.len() {
            return Err(wrong(self.dimensions()).into());
        }
        for (got, expected) in size.iter().zip(&self.shape) {
            match expected {
                Size::Fixed(fixed) if got == fixed => {}
                Size::Fixed(_) => return Err(wrong(self.dimensions()).into()),
                Size::Named { name, min, max } => {
                    let inside =
                        min.is_none_or(|min| *got >= min) && max.is_none_or(|max| *got <= max);
                    if !inside {
                        return Err(wrong(self.dimensions()).into());
                    }
                    match sizes.iter().find(|(known, _)| known == name) {
                        Some((_, before)) if before == got => {}
                        Some((_, before)) => {
                            let expected = format!(
                                "{} with {name} = {before}, as in a previous input",
                                self.dimensions()
                            );
                            return Err(wrong(expected).into());
                        }
                        None => sizes.push((name.clone(), *got)),
                    }
                }
            }
        }
        Ok(())
    }
}

impl Manifest {
    /// Parses a manifest of a version that this crate knows.
    pub(crate) fn parse(text: &str) -> std::result::Result<Manifest, String> {
        // Checks the version first: a later format may have other fields, and the message should name the version.
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let version: Version = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let version = version.format_version;
        if version == 0 || version > FORMAT_VERSION {
            return Err(format!(
                "format_version {version}; this version of Overdrive reads up to {FORMAT_VERSION}"
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
            error.contains("(batch in 1..=4, 3)") && error.contains("[5, 3]"),
            "{error}"
        );
        assert!(spec.check(&ids(2, 4), &mut Vec::new()).is_err());
        assert!(
            spec.check(&ids(2, 3).to_kind(Kind::Int), &mut Vec::new())
                .is_err()
        );
    }
}
