use std::path::{Path, PathBuf};

use crate::cache::Snapshot;
use crate::download::{Download, Meter, entry};
use crate::locate::locate;
use crate::name::{HubName, is_commit};
use crate::select::{Selection, Wanted, select, shards};
use crate::{Error, HubOptions, Result};

/// Returns the path of a model on this machine: `name` itself if it is a file or folder, else the path of the hub's
/// model with this name, which is downloaded unless the cache has it.
///
/// Without a revision, or for a branch or tag, the hub is asked for the newest commit. If it does not answer, the
/// previously downloaded snapshot is returned, with a warning in the log.
///
/// # Errors
/// [`Error::NoSuchPath`], [`Error::NoRepository`], [`Error::NoAccess`], [`Error::Offline`],
/// [`Error::UnreachableName`], [`Error::Unreachable`], [`Error::Damaged`] and others; their messages say what is missing and what to do.
pub fn model_path(name: impl AsRef<Path>, options: &HubOptions) -> Result<PathBuf> {
    find(name.as_ref(), options, Wanted::Model)
}

/// Returns the path of an adapter in PEFT's format, as [`model_path`] does for a model.
///
/// # Errors
/// As [`model_path`].
pub fn adapter_path(name: impl AsRef<Path>, options: &HubOptions) -> Result<PathBuf> {
    find(name.as_ref(), options, Wanted::Adapter)
}

/// Returns the path of a folder with a tokenizer, as [`model_path`] does for a model, without downloading the weights.
/// If the repository has no `tokenizer.json`, returns the path of a GGUF file or of the whole model.
///
/// # Errors
/// As [`model_path`].
pub fn tokenizer_path(name: impl AsRef<Path>, options: &HubOptions) -> Result<PathBuf> {
    find(name.as_ref(), options, Wanted::Tokenizer)
}

/// Returns the repository of a path that [`model_path`] returned from the cache; `None` for any other path.
///
/// ```
/// use overdrive_hub::name_of_snapshot;
/// let path = "/cache/models--org--name/snapshots/ce013625030ba8dba906f756967f9e9ca394464a/a.gguf";
/// assert_eq!(name_of_snapshot(path).as_deref(), Some("org/name"));
/// assert_eq!(name_of_snapshot("runs/tiny/model"), None);
/// ```
pub fn name_of_snapshot(path: impl AsRef<Path>) -> Option<String> {
    let mut folder = path.as_ref();
    loop {
        let (commit, parent) = (folder.file_name()?.to_str()?, folder.parent()?);
        if is_commit(commit) && parent.ends_with("snapshots") {
            let repository = parent.parent()?.file_name()?.to_str()?;
            return Some(repository.strip_prefix("models--")?.replace("--", "/"));
        }
        folder = parent;
    }
}

fn find(path: &Path, options: &HubOptions, wanted: Wanted) -> Result<PathBuf> {
    if path.exists() {
        return Ok(path.to_owned());
    }
    let text = path.to_string_lossy().into_owned();
    let Some(name) = HubName::parse(&text) else {
        return Err(Error::NoSuchPath { name: text });
    };
    locate(
        &text,
        &name,
        options,
        |snapshot| in_cache(snapshot, &name, wanted),
        |download| complete(download, &name, wanted, options),
    )
}

/// Returns the path of a complete model in the cache, or the clause that names what is missing.
fn in_cache(
    snapshot: &Snapshot,
    name: &HubName,
    wanted: Wanted,
) -> std::result::Result<PathBuf, String> {
    let missing = |error: Error| format!("it is incomplete ({error})");
    let selection = select(&snapshot.files, name, wanted).map_err(missing)?;
    snapshot.check(&selection.files)?;
    if let Some(index) = &selection.index {
        snapshot.check(&shards(&snapshot.folder.join(index)).map_err(missing)?)?;
    }
    match absent_split(&selection) {
        Some(absent) => Err(format!("{absent} is not")),
        None => Ok(entry(snapshot.folder.clone(), selection.entry.as_deref())),
    }
}

/// Returns the first file of a split model that a selection lacks.
fn absent_split(selection: &Selection) -> Option<String> {
    let entry = selection.entry.as_deref()?;
    let (stem, count) = entry.strip_suffix(".gguf")?.split_once("-00001-of-")?;
    let files: usize = count.parse().ok()?;
    (1..=files)
        .map(|number| format!("{stem}-{number:05}-of-{count}.gguf"))
        .find(|name| !selection.files.contains(name))
}

/// Downloads what the cache lacks of a model, and returns its path.
fn complete(
    download: &Download<'_>,
    name: &HubName,
    wanted: Wanted,
    options: &HubOptions,
) -> Result<PathBuf> {
    let names = &download.listing.files;
    let selection = select(names, name, wanted)?;
    if let Some(absent) = absent_split(&selection) {
        return Err(no_file(name, &absent));
    }
    let mut meter = Meter::new(options.progress.as_ref());
    download.complete(&selection.files, &mut meter)?;
    if let Some(index) = &selection.index {
        let shards = shards(&download.folder.join(index))?;
        if let Some(absent) = shards.iter().find(|shard| !names.contains(shard)) {
            return Err(no_file(name, absent));
        }
        download.complete(&shards, &mut meter)?;
    }
    Ok(entry(download.folder.clone(), selection.entry.as_deref()))
}

fn no_file(name: &HubName, file: &str) -> Error {
    Error::NoFile {
        repository: name.repository.clone(),
        file: format!("file `{file}`"),
        found: "other parts of the model, so the upload is incomplete".to_owned(),
    }
}
