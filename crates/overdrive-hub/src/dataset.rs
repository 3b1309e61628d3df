use std::path::{Path, PathBuf};

use crate::cache::Snapshot;
use crate::dataset_files::{Choice, choose, is_data, shard_missing};
use crate::download::{Download, Meter};
use crate::locate::locate;
use crate::name::{HubName, RepositoryKind, is_repository_part, is_revision};
use crate::{Error, HubOptions, Result};

/// The description of a dataset, which lists its configurations.
const README: &str = "README.md";

/// Returns the paths of the files of a dataset on this machine: `name` itself if it is a file or folder, else the files
/// of a split of the hub's dataset with this name, which are downloaded unless the cache has them.
///
/// The name is `ORG/NAME[/CONFIG][:SPLIT][@REVISION]`. Without a configuration it is the one that the dataset declares as
/// its default, without a split `train`. Configurations are those of the dataset's README and, without any, folders;
/// their splits are those that Python's `datasets` finds. Files are Parquet, JSON Lines, CSV or text,
/// also compressed.
///
/// ```no_run
/// use overdrive_hub::{HubOptions, dataset_paths};
///
/// # fn main() -> Result<(), overdrive_hub::Error> {
/// for file in dataset_paths("roneneldan/TinyStories:validation", &HubOptions::from_env()?)? {
///     println!("{}", file.display());
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`model_path`](crate::model_path); [`Error::NoFile`] if there is no such configuration or split, with those that
/// there are.
pub fn dataset_paths(name: impl AsRef<Path>, options: &HubOptions) -> Result<Vec<PathBuf>> {
    let path = name.as_ref();
    if path.exists() {
        return Ok(vec![path.to_owned()]);
    }
    let text = path.to_string_lossy().into_owned();
    let Some(name) = DatasetName::parse(&text) else {
        return Err(Error::NoSuchPath { name: text });
    };
    locate(
        &text,
        &name.hub,
        options,
        |snapshot| in_cache(snapshot, &name),
        |download| complete(download, &name, options),
    )
}

/// Returns the data of a training run with each name of a dataset on the hub replaced by the paths of its files
/// ([`dataset_paths`]). Paths, patterns, and other texts that the hub cannot have as a name stay as they are.
///
/// ```
/// use std::path::PathBuf;
/// use overdrive_hub::{HubOptions, data_paths};
///
/// let data = ["data/stories.jsonl", "books/*.txt"].map(PathBuf::from);
/// assert_eq!(data_paths(&data, &HubOptions::default())?, data);
/// # Ok::<(), overdrive_hub::Error>(())
/// ```
///
/// # Errors
/// As [`dataset_paths`], except that a name that the hub cannot have is kept instead of refused.
pub fn data_paths(data: &[PathBuf], options: &HubOptions) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::with_capacity(data.len());
    for path in data {
        match dataset_paths(path, options) {
            Err(Error::NoSuchPath { .. }) => paths.push(path.clone()),
            found => paths.extend(found?),
        }
    }
    Ok(paths)
}

/// The name of a dataset with what is wanted of it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DatasetName {
    hub: HubName,
    config: Option<String>,
    split: Option<String>,
}

impl DatasetName {
    /// Parses a name; `None` if the hub cannot have it.
    fn parse(text: &str) -> Option<DatasetName> {
        let (text, revision) = match text.split_once('@') {
            Some((text, revision)) => (text, Some(revision.to_owned())),
            None => (text, None),
        };
        let (text, split) = match text.split_once(':') {
            Some((text, split)) => (text, Some(split.to_owned())),
            None => (text, None),
        };
        let mut parts = text.split('/');
        let (organization, name) = (parts.next()?, parts.next()?);
        let config = parts.next().map(str::to_owned);
        let word = |text: &String| {
            let allowed = |letter: char| letter.is_ascii_alphanumeric() || "-_.+".contains(letter);
            !text.is_empty() && !text.starts_with('.') && text.chars().all(allowed)
        };
        // A file that is missing is no reason to ask the hub.
        let valid = !is_data(name)
            && parts.next().is_none()
            && [organization, name].into_iter().all(is_repository_part)
            && config.as_ref().is_none_or(word)
            && split.as_ref().is_none_or(word)
            && revision.as_deref().is_none_or(is_revision);
        valid.then(|| DatasetName {
            hub: HubName {
                kind: RepositoryKind::Dataset,
                repository: format!("{organization}/{name}"),
                file: None,
                quantization: None,
                revision,
            },
            config,
            split,
        })
    }

    fn choice(&self) -> Choice<'_> {
        Choice {
            repository: &self.hub.repository,
            config: self.config.as_deref(),
            split: self.split.as_deref(),
        }
    }
}

/// Returns the paths of a complete split in the cache, or the clause that names what is missing.
fn in_cache(snapshot: &Snapshot, name: &DatasetName) -> std::result::Result<Vec<PathBuf>, String> {
    let files = &snapshot.files;
    snapshot.check(&readme_of(files))?;
    let chosen = chosen(files, &snapshot.folder, name)
        .map_err(|error| format!("it is incomplete ({error})"))?;
    snapshot.check(&chosen)?;
    match shard_missing(&chosen, files) {
        Some(missing) if !snapshot.is_listed => Err(format!("{missing} is not")),
        _ => Ok(paths(&chosen, &snapshot.folder)),
    }
}

/// Downloads what the cache lacks of a split, and returns its paths.
fn complete(
    download: &Download<'_>,
    name: &DatasetName,
    options: &HubOptions,
) -> Result<Vec<PathBuf>> {
    let files = &download.listing.files;
    let mut meter = Meter::new(options.progress.as_ref());
    download.complete(&readme_of(files), &mut meter)?;
    let chosen = chosen(files, &download.folder, name)?;
    if let Some(missing) = shard_missing(&chosen, files) {
        // As in Python, the other files are used: many datasets are samples of larger ones.
        tracing::warn!(
            "`{}` has no file `{missing}`, which the names of its other files imply",
            name.hub.repository
        );
    }
    download.complete(&chosen, &mut meter)?;
    Ok(paths(&chosen, &download.folder))
}

/// Returns the README if a dataset has one: its files cannot be chosen without it.
fn readme_of(files: &[String]) -> Vec<String> {
    let readme = files.iter().filter(|file| *file == README);
    readme.cloned().collect()
}

/// Chooses among the files of a snapshot in `folder`.
fn chosen(files: &[String], folder: &Path, name: &DatasetName) -> Result<Vec<String>> {
    let readme = std::fs::read_to_string(folder.join(README)).ok();
    choose(files, readme.as_deref(), &name.choice())
}

fn paths(files: &[String], folder: &Path) -> Vec<PathBuf> {
    files.iter().map(|file| folder.join(file)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_configurations_splits_and_revisions() {
        let parsed = |text: &str| {
            let name = DatasetName::parse(text)?;
            let revision = name.hub.revision().to_owned();
            Some((name.hub.repository, name.config, name.split, revision))
        };
        let some = |text: &str| Some(text.to_owned());
        for (text, config, split, revision) in [
            ("org/name", None, None, "main"),
            ("org/name/20231101.en", some("20231101.en"), None, "main"),
            ("org/name:validation", None, some("validation"), "main"),
            ("org/name/main:test@v1", some("main"), some("test"), "v1"),
            (
                "org/name@refs/convert/parquet",
                None,
                None,
                "refs/convert/parquet",
            ),
        ] {
            let expected = ("org/name".to_owned(), config, split, revision.to_owned());
            assert_eq!(parsed(text), Some(expected), "{text}");
        }
        for text in [
            "",
            "name",
            "/a/b",
            "./a",
            "../a/b",
            "a//b",
            "org/name:",
            "org/name/a/b",
            "org/name/..",
            "org/name@../x",
            "a b/c",
            "data/*.jsonl",
            "data/train.jsonl",
            "data/text.txt.gz",
            "data/config.json",
            "data/LICENSE.txt",
        ] {
            assert_eq!(DatasetName::parse(text), None, "{text}");
        }
    }
}
