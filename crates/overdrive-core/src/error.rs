//! The errors that all crates share.

use std::borrow::Cow;
use std::fmt::{Debug, Display};
use std::path::{Path, PathBuf};

/// The result of a check or of a file operation.
pub type Result<T> = std::result::Result<T, Error>;

/// An error that any crate can return.
///
/// `expected` completes the sentence "it must be …" and names the remedy where there is one: "positive",
/// "0 (no clipping) or positive", "one of linear, cosine".
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of its range, or conflicts with another option.
    #[error("`{option}` is {value}; it must be {expected}")]
    InvalidOption {
        /// The name of the option, as the user writes it.
        option: Cow<'static, str>,
        /// Its value.
        value: String,
        /// The values that are allowed.
        expected: Cow<'static, str>,
    },
    /// A tensor does not have the shape that the operation needs.
    #[error("`{tensor}` has shape {shape:?}; it must be {expected}")]
    Shape {
        /// The name of the tensor or argument.
        tensor: Cow<'static, str>,
        /// Its shape.
        shape: Vec<i64>,
        /// The shape that is needed.
        expected: Cow<'static, str>,
    },
    /// A tensor does not have a dtype that the operation supports.
    #[error("`{tensor}` is {dtype}; it must be {expected}")]
    Dtype {
        /// The name of the tensor or argument.
        tensor: Cow<'static, str>,
        /// Its dtype.
        dtype: String,
        /// The dtypes that are allowed.
        expected: Cow<'static, str>,
    },
    /// A tensor is not on the device that the operation needs.
    #[error("`{tensor}` is on {device}; it must be {expected}")]
    Device {
        /// The name of the tensor or argument.
        tensor: Cow<'static, str>,
        /// Its device.
        device: String,
        /// The device that it must be on.
        expected: Cow<'static, str>,
    },
    /// A file or folder could not be read, written, renamed, …
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation that failed, as a verb: "read", "write", "rename".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error that the operating system reported.
        source: std::io::Error,
    },
    /// A file cannot be parsed as the expected format.
    #[error("{} is not valid {format}: {source}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The name of the format: "JSON".
        format: &'static str,
        /// The message of the parser.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A bug in Overdrive: an invariant of its own code was violated.
    #[error("internal error: {what}; please report it")]
    Internal {
        /// The violated invariant.
        what: String,
    },
}

impl Error {
    /// Returns the error for an `option` whose `value` is not allowed.
    pub fn option(
        option: impl Into<Cow<'static, str>>,
        value: impl Display,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::InvalidOption {
            option: option.into(),
            value: value.to_string(),
            expected: expected.into(),
        }
    }

    /// Returns the error for a tensor of the wrong shape.
    pub fn shape(
        tensor: impl Into<Cow<'static, str>>,
        shape: impl Into<Vec<i64>>,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::Shape {
            tensor: tensor.into(),
            shape: shape.into(),
            expected: expected.into(),
        }
    }

    /// Returns the error for a tensor of the wrong dtype (a `tch::Kind`).
    pub fn dtype(
        tensor: impl Into<Cow<'static, str>>,
        dtype: impl Debug,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::Dtype {
            tensor: tensor.into(),
            dtype: format!("{dtype:?}"),
            expected: expected.into(),
        }
    }

    /// Returns the error for a tensor on the wrong device (a `tch::Device`).
    pub fn device(
        tensor: impl Into<Cow<'static, str>>,
        device: impl Debug,
        expected: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::Device {
            tensor: tensor.into(),
            device: format!("{device:?}"),
            expected: expected.into(),
        }
    }

    /// Returns the error for a bug in Overdrive, for example "the layer before this one returned no rows".
    pub fn internal(what: impl Into<String>) -> Self {
        Self::Internal { what: what.into() }
    }

    /// Returns what `map_err` needs after a file operation: `fs::read(path).map_err(Error::io("read", path))?`.
    pub fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io {
            action,
            path: path.as_ref().to_path_buf(),
            source,
        }
    }

    /// Returns what `map_err` needs after parsing a file: `parse(text).map_err(Error::parse("JSON", path))?`.
    pub fn parse<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        format: &'static str,
        path: impl AsRef<Path>,
    ) -> impl FnOnce(E) -> Self {
        move |source| Self::Parse {
            path: path.as_ref().to_path_buf(),
            format,
            source: source.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    enum Kind {
        Int,
    }

    #[test]
    fn messages_name_the_thing_its_value_and_what_is_allowed() {
        let messages = [
            (
                Error::option("max_grad_norm", -1, "0 (no clipping) or positive"),
                "`max_grad_norm` is -1; it must be 0 (no clipping) or positive",
            ),
            (
                Error::shape("query", [2, 3], "(B, H, T, D)"),
                "`query` has shape [2, 3]; it must be (B, H, T, D)",
            ),
            (
                Error::dtype("weight", Kind::Int, "Float, Half or BFloat16"),
                "`weight` is Int; it must be Float, Half or BFloat16",
            ),
            (
                Error::device("key", 0, "on the device of the query"),
                "`key` is on 0; it must be on the device of the query",
            ),
            (
                Error::internal("the plan has no step"),
                "internal error: the plan has no step; please report it",
            ),
            (
                Error::io("read", "a/b.json")(std::io::ErrorKind::NotFound.into()),
                "cannot read a/b.json: entity not found",
            ),
            (
                Error::parse("JSON", "a/b.json")("expected `,`"),
                "a/b.json is not valid JSON: expected `,`",
            ),
        ];
        for (error, message) in messages {
            assert_eq!(error.to_string(), message);
        }
    }
}
