//! The bounds of the sizes in a configuration. A file may contain any number; sizes are not used for allocation,
//! multiplication or loops before these checks.

use super::fields::bad;
use crate::{Error, Result};

/// The largest size of one dimension: products of two sizes fit 64 bits, and libtorch's kernels index with 32.
pub(crate) const MAX_SIZE: i64 = i32::MAX as i64;

/// The largest number of layers. The deepest published transformer has 1000 (Wang et al. 2022,
/// arXiv:2203.00555).
const MAX_LAYERS: i64 = 1 << 16;

/// The largest number of parameters: libtorch counts bytes in an i64, and an fp64 parameter has eight.
const MAX_PARAMETERS: i128 = i64::MAX as i128 / 8;

/// The number of layers up to which a list of missing tensors is clearer than their count.
const LISTED_LAYERS: i64 = 128;

/// Checks that a size is positive and at most [`MAX_SIZE`].
pub(crate) fn check_size(key: &str, size: i64) -> Result<()> {
    if size <= 0 {
        return Err(bad(key, &size.into(), "a positive integer"));
    }
    if size > MAX_SIZE {
        return Err(too_large(key, size));
    }
    Ok(())
}

/// Returns the error of a size above [`MAX_SIZE`].
pub(super) fn too_large(key: &str, size: impl Into<serde_json::Value>) -> Error {
    let expected = format!("a positive integer, at most {MAX_SIZE}");
    bad(key, &size.into(), &expected)
}

/// Checks the number of layers, before anything is created or counted per layer.
pub(crate) fn check_layers(key: &str, layers: i64) -> Result<()> {
    if (1..=MAX_LAYERS).contains(&layers) {
        return Ok(());
    }
    let expected = format!("a positive integer, at most {MAX_LAYERS}");
    Err(bad(key, &layers.into(), &expected))
}

/// Checks that files with `tensors` tensors can hold the model: every layer has several.
pub(crate) fn check_layers_of_files((key, layers): (&str, i64), tensors: usize) -> Result<()> {
    let tensors = i64::try_from(tensors).unwrap_or(i64::MAX);
    if layers <= tensors.max(LISTED_LAYERS) {
        return Ok(());
    }
    let expected = format!("at most {tensors}, the number of tensors in the weight files");
    Err(bad(key, &layers.into(), &expected))
}

/// Checks that the parameters of checked sizes can be counted in bytes.
pub(crate) fn check_parameters(parameters: i128, keys: &str) -> Result<()> {
    if parameters <= MAX_PARAMETERS {
        return Ok(());
    }
    let expected = format!("of at most {MAX_PARAMETERS} parameters; make {keys} smaller");
    let found = format!("of {parameters} parameters");
    Err(overdrive_core::Error::option("config.json", found, expected).into())
}
