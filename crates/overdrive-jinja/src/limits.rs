//! The limits of a template: steps, text, nesting, and the size of values.

use crate::error::{Error, Result};

/// The largest source in bytes, ten times the size of the longest published templates.
pub(crate) const MAX_SOURCE_BYTES: usize = 256 << 10;

/// The levels to which tags and expressions may be nested in a source.
pub(crate) const MAX_NESTING: usize = 100;

/// The largest number of steps of one rendering: statements, expressions, and iterated elements. A message of a
/// conversation takes about a hundred, and the limit is reached within seconds.
pub(crate) const MAX_STEPS: u64 = 10_000_000;

/// The levels of statements and expressions that may be evaluated within one another, through macros and recursive
/// loops.
pub(crate) const MAX_LEVELS: usize = 1000;

/// The largest output of one rendering in bytes: some millions of tokens.
pub(crate) const MAX_OUTPUT_BYTES: usize = 64 << 20;

/// The depth to which a value may be nested.
pub(crate) const MAX_DEPTH: usize = 100;

/// The largest number of elements, and blocks of 64 bytes of text, in the values created by one rendering.
pub(crate) const MAX_ELEMENTS: usize = 1 << 24;

/// The largest number of elements of a `range`, as in Jinja's sandbox.
pub(crate) const MAX_RANGE: usize = 100_000;

/// The most parameters of a macro, named arguments of a call, attributes of a namespace, and parts of an attribute's path:
/// they are searched one after another.
pub(crate) const MAX_NAMES: usize = 1000;

/// Returns an error if `count` is more than [`MAX_NAMES`].
pub(crate) fn check_names(count: usize) -> Result<()> {
    match count > MAX_NAMES {
        false => Ok(()),
        true => Err(Error::limit(format!(
            "more than {MAX_NAMES} parameters, named arguments or attributes are in one place"
        ))),
    }
}

/// Returns the error of a text beyond [`MAX_OUTPUT_BYTES`].
pub(crate) fn too_long() -> Error {
    Error::limit(format!(
        "its text has more than {MAX_OUTPUT_BYTES} bytes, the limit of one rendering"
    ))
}
