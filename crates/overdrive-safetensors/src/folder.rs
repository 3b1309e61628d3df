use std::path::{Path, PathBuf};

use crate::Result;
use overdrive_core::Error as CommonError;

/// Returns the path of the file `name` in the folder `dir`, for names that come from a file, such as an index of
/// shards, and must not lead out of the folder. In the error, `key` is the origin of the name.
///
/// ```
/// use overdrive_safetensors::file_in;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let key = "weight_map of model.safetensors.index.json";
/// let path = file_in("models/tiny".as_ref(), "model-00001-of-00002.safetensors", key)?;
/// assert!(path.starts_with("models/tiny"));
/// assert!(file_in("models/tiny".as_ref(), "../other/model.safetensors", key).is_err());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the name contains a folder, is an absolute path or is `..`.
pub fn file_in(dir: &Path, name: &str, key: &str) -> Result<PathBuf> {
    let last = Path::new(name).file_name();
    if last.is_some_and(|last| last == name) {
        return Ok(dir.join(name));
    }
    let expected = "the name of a file in the same folder";
    Err(CommonError::option(key.to_owned(), format!("{name:?}"), expected).into())
}
