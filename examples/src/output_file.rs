//! The files that programs write.

use std::path::Path;

use overdrive::core::{Result, check_option, files};

/// Checks that the file `path`, which the flag `flag` gives, can lie where it is to be written, so that a program finds a
/// wrong path before it loads a model.
///
/// # Errors
/// [`overdrive::core::Error::InvalidOption`] if `path` is a folder, or its folder does not exist.
pub fn check_output_file(flag: &'static str, path: &Path) -> Result<()> {
    let folder = files::folder_of(path);
    let expected = format!("in a folder that exists; create {} first", folder.display());
    check_option(folder.is_dir(), flag, path.display(), expected)?;
    let expected = "a file; this is a folder: add a name";
    check_option(!path.is_dir(), flag, path.display(), expected)
}
