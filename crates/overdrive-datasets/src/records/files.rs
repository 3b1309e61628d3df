//! From paths, folders and patterns to files.

use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use crate::{Error, Result};

/// The files that `paths` name, in a fixed order.
///
/// A path is a file, a folder (all files in it and below it with one of `extensions`, in the order of
/// their names; hidden ones are left out; compressed ones count by what they hold, `a.csv.gz` as `a.csv`) or a pattern with `*`, `?`, `[…]` and `**`, whose matches
/// are files. What is named more than once is listed more than once. A folder with no `extensions`
/// gives all its files.
///
/// ```
/// # let dir = tempfile::tempdir().unwrap();
/// # for name in ["b.jsonl", "a.jsonl", "notes.md", ".hidden.jsonl"] {
/// #     std::fs::write(dir.path().join(name), "{}").unwrap();
/// # }
/// let in_folder = overdrive_datasets::find_files([dir.path()], &["jsonl"])?;
/// let by_pattern = overdrive_datasets::find_files([dir.path().join("*.jsonl")], &[])?;
/// assert_eq!(in_folder, [dir.path().join("a.jsonl"), dir.path().join("b.jsonl")]);
/// assert_eq!(in_folder, by_pattern);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
///
/// # Errors
/// When a path does not exist and is no pattern, when a folder cannot be read, and when nothing is
/// found.
pub fn find_files<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
    extensions: &[&str],
) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut searched = Vec::new();
    for path in paths {
        let path = path.as_ref();
        searched.push(path.display().to_string());
        if path.is_dir() {
            add_folder(path, extensions, &mut files)?;
        } else if !path.exists() && is_pattern(path) {
            add_matches(path, &mut files)?;
        } else {
            // A file that does not exist is an error when it is opened; here it would be lost.
            std::fs::metadata(path).map_err(Error::io("open", path))?;
            files.push(path.to_owned());
        }
    }
    if files.is_empty() {
        return Err(Error::NoFiles {
            searched: match searched.len() {
                0 => "an empty list of paths".to_owned(),
                _ => searched.join(", "),
            },
            hint: "name a file, a folder with files of this format, or a pattern such as data/*.jsonl",
        });
    }
    Ok(files)
}

fn add_folder(folder: &Path, extensions: &[&str], files: &mut Vec<PathBuf>) -> Result<()> {
    let walk = WalkDir::new(folder)
        .follow_links(true)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(|entry| entry.depth() == 0 || !is_hidden(entry.path()));
    for entry in walk {
        let entry = entry.map_err(|error| {
            let path = error.path().unwrap_or(folder).to_owned();
            Error::io("read the folder", &path)(error.into())
        })?;
        if entry.file_type().is_file() && has_extension(entry.path(), extensions) {
            files.push(entry.into_path());
        }
    }
    Ok(())
}

fn add_matches(pattern: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let invalid = |value: String| Error::InvalidOption {
        option: "path",
        value,
        expected: "a pattern of valid UTF-8 with closed brackets, and ** only as a whole folder",
    };
    let text = pattern
        .to_str()
        .ok_or_else(|| invalid(pattern.display().to_string()))?;
    let options = glob::MatchOptions {
        require_literal_separator: true,
        require_literal_leading_dot: true,
        ..glob::MatchOptions::new()
    };
    // The matches come in the order of their names.
    let matches = glob::glob_with(text, options).map_err(|_| invalid(text.to_owned()))?;
    for found in matches {
        let path = found.map_err(|error| {
            let path = error.path().to_owned();
            Error::io("read the folder", &path)(error.into())
        })?;
        if path.is_file() {
            files.push(path);
        }
    }
    Ok(())
}

fn is_pattern(path: &Path) -> bool {
    path.to_string_lossy().contains(['*', '?', '['])
}

fn is_hidden(path: &Path) -> bool {
    path.file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_ascii_lowercase();
    let name = [".gz", ".bgz", ".zst"]
        .iter()
        .find_map(|packed| name.strip_suffix(packed))
        .unwrap_or(&name);
    extensions.is_empty()
        || extensions.iter().any(|extension| {
            name.strip_suffix(&extension.to_ascii_lowercase())
                .is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
        })
}
