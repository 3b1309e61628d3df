//! The search for files by paths, folders and patterns.

use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use overdrive_core::Error as CommonError;

use crate::range_source::{is_url, not_opened, registered_source};
use crate::{Error, Result};

/// The extensions of compressed files, which follow the extension of the format.
const COMPRESSED_EXTENSIONS: [&str; 3] = [".gz", ".bgz", ".zst"];

/// Finds the files that `paths` name, in a fixed order.
///
/// A path is a file, a folder or a pattern. A folder stands for all files in it and in its subfolders with one of
/// `extensions` (all files if there are none), in the order of their names; links are followed, hidden files and links
/// to nothing (these with a warning) are left out, and compressed files count by the inner extension, `a.csv.gz` as
/// `a.csv`. A pattern has `*`, `?`, `[…]` or `**` and stands for the matching files. A file that is named several
/// times is listed several times. The name of a file on a server ([`register_source`](crate::register_source)) stands
/// for itself.
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
/// Returns an error if a path does not exist and is not a pattern, a folder cannot be read, or no file is found.
pub fn find_files<P: AsRef<Path>>(
    paths: impl IntoIterator<Item = P>,
    extensions: &[&str],
) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut searched = Vec::new();
    for path in paths {
        let path = path.as_ref();
        searched.push(path.display().to_string());
        if registered_source(path).is_some() {
            files.push(path.to_owned());
        } else if is_url(path) {
            return Err(not_opened(path));
        } else if path.is_dir() {
            files.extend(files_in(path, extensions)?);
        } else if !path.exists() && is_pattern(path) {
            add_matches(path, &mut files)?;
        } else {
            // A missing file must be an error; opening it later would be too late for some callers.
            std::fs::metadata(path).map_err(CommonError::io("open", path))?;
            files.push(path.to_owned());
        }
    }
    if files.is_empty() {
        return Err(Error::NoData {
            searched: match searched.len() {
                0 => "an empty list of paths".to_owned(),
                _ => searched.join(", "),
            },
            problem: "no files match; name a file, a folder with files of this format, or a pattern such as \
            data/*.jsonl"
            .to_owned(),
        });
    }
    Ok(files)
}

/// Returns the files in a folder and its subfolders with one of `extensions` (all files if there are none), in the order
/// of their names, without hidden ones. Links to nothing are left out with one warning.
pub(crate) fn files_in(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let walk = WalkDir::new(folder)
        // The folders of Hugging Face's cache consist of links to files.
        .follow_links(true)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(|entry| entry.depth() == 0 || !is_hidden(entry.path()));
    let mut files = Vec::new();
    let mut links_to_nothing = Vec::new();
    for entry in walk {
        match entry {
            Ok(entry) => {
                if entry.file_type().is_file() && has_extension(entry.path(), extensions) {
                    files.push(entry.into_path());
                }
            }
            // A link to a folder around it leads to no other files.
            Err(error) if error.loop_ancestor().is_some() => {}
            Err(error) => {
                let path = error.path().unwrap_or(folder).to_owned();
                let error = std::io::Error::from(error);
                if !(path.is_symlink() && is_missing(&error)) {
                    return Err(CommonError::io("read", path)(error).into());
                }
                if has_extension(&path, extensions) {
                    links_to_nothing.push(path);
                }
            }
        }
    }
    if let Some(first) = links_to_nothing.first() {
        tracing::warn!(
            "{} links in {} lead to no file and are left out; the first is {}",
            links_to_nothing.len(),
            folder.display(),
            first.display()
        );
    }
    Ok(files)
}

/// Returns `true` if an error says that nothing is at a path.
fn is_missing(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    [NotFound, NotADirectory].contains(&error.kind())
}

fn add_matches(pattern: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let invalid = |value: String| {
        let expected =
            "a pattern of valid UTF-8 with closed brackets, and ** only as a whole folder";
        CommonError::option("path", value, expected)
    };
    let text = pattern
        .to_str()
        .ok_or_else(|| invalid(pattern.display().to_string()))?;
    // As in shells, `*` does not cross folders or match hidden files.
    let options = glob::MatchOptions {
        require_literal_separator: true,
        require_literal_leading_dot: true,
        ..glob::MatchOptions::new()
    };
    // glob returns the matches in alphabetical order.
    let matches = glob::glob_with(text, options).map_err(|_| invalid(text.to_owned()))?;
    for found in matches {
        let path = found.map_err(|error| {
            let path = error.path().to_owned();
            CommonError::io("read the folder", &path)(error.into())
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

/// Returns `true` if the name of a file, without the extension of a compression, has one of these extensions, in upper
/// or lower case. Without extensions every file has one.
pub(crate) fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_ascii_lowercase();
    let name = COMPRESSED_EXTENSIONS
        .iter()
        .find_map(|packed| name.strip_suffix(packed))
        .unwrap_or(&name);
    extensions.is_empty()
        || extensions.iter().any(|extension| {
            name.strip_suffix(&extension.to_ascii_lowercase())
                .is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
        })
}
