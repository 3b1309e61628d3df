//! The list of a libtorch's libraries with their sizes, which tells a whole folder from a damaged one.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use crate::failure::{Failure, Result};

/// The name of the list in the folder of a libtorch.
pub(super) const FILE: &str = "overdrive-manifest";

/// Returns one line per library with its size, which detects a truncated or missing library in a millisecond.
pub(super) fn of(root: &Path) -> Result<String> {
    let lib = root.join("lib");
    let fail = |error: std::io::Error| Failure::io("could not list", &lib, &error);
    let mut lines = Vec::new();
    for entry in fs::read_dir(&lib).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let bytes = entry.metadata().map_err(fail)?.len();
        lines.push(format!("{bytes} {}\n", entry.file_name().to_string_lossy()));
    }
    // `read_dir` has no fixed order; the manifest must not depend on it.
    lines.sort();
    Ok(lines.concat())
}

/// Compares the libraries with the manifest. A folder without one was unpacked by hand and is trusted; one whose
/// manifest cannot be read is not.
pub(super) fn holds(root: &Path) -> bool {
    let text = match fs::read_to_string(root.join(FILE)) {
        Ok(text) => text,
        Err(error) => return error.kind() == ErrorKind::NotFound,
    };
    text.lines().all(|line| {
        let Some((bytes, name)) = line.split_once(' ') else {
            return false;
        };
        fs::metadata(root.join("lib").join(name))
            .is_ok_and(|metadata| Ok(metadata.len()) == bytes.parse())
    })
}
