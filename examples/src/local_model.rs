//! Models by name.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use overdrive::generation::{ModelFiles, Tokenizer};
#[cfg(feature = "hub")]
use overdrive::hub::HubOptions;
use overdrive::quantization::GgufFile;

/// Returns the path of a model on this machine: `name` itself if it is a file or folder, else the path of the model
/// with this name on the Hugging Face hub, which is downloaded if it is not in the cache. Without the feature `hub`,
/// every name is a path.
pub fn local_model(name: &Path) -> Result<PathBuf> {
    #[cfg(feature = "hub")]
    let name = &overdrive::hub::model_path(name, &HubOptions::from_env()?)?;
    check_folder(name, "model", "config.json")?;
    Ok(name.to_owned())
}

/// Refuses a folder without the file that each `what` has. That of Python's `Trainer` has them in its folders `checkpoint-N`.
fn check_folder(folder: &Path, what: &str, file: &str) -> Result<()> {
    if !folder.is_dir() || folder.join(file).exists() {
        return Ok(());
    }
    let checkpoint = |path: PathBuf| {
        let step = path.file_name()?.to_str()?.strip_prefix("checkpoint-")?;
        let step = step.parse::<u64>().ok()?;
        path.join(file).exists().then_some((step, path))
    };
    let entries = std::fs::read_dir(folder)?.flatten();
    let checkpoints = entries.filter_map(|entry| checkpoint(entry.path()));
    if let Some((_, newest)) = checkpoints.max() {
        let (folder, newest) = (folder.display(), newest.display());
        bail!("{folder} has no {file}; give one of its checkpoints, such as {newest}");
    }
    bail!("{} holds no {what}: {file} is missing", folder.display())
}

/// Returns the tokenizer of the draft model at `path`; `None` for a folder without one.
pub fn assistant_tokenizer(path: &Path) -> Result<Option<Tokenizer>> {
    match path.is_file() || path.join("tokenizer.json").exists() {
        true => Ok(Some(ModelFiles::open(path)?.tokenizer()?)),
        false => Ok(None),
    }
}

/// Returns the path of an adapter, as [`local_model`] does.
pub fn local_adapter(name: &Path) -> Result<PathBuf> {
    #[cfg(feature = "hub")]
    let name = &overdrive::hub::adapter_path(name, &HubOptions::from_env()?)?;
    check_folder(name, "adapter", "adapter_config.json")?;
    Ok(name.to_owned())
}

/// Returns the path of a tokenizer: a file, a folder, or a name on the hub, as [`local_model`] does, without the weights.
pub fn local_tokenizer(name: &Path) -> Result<PathBuf> {
    #[cfg(feature = "hub")]
    let name = &overdrive::hub::tokenizer_path(name, &HubOptions::from_env()?)?;
    let ends = |known: &str| name.extension().is_some_and(|own| own == known);
    if name.is_file() && !ends("json") && !ends("gguf") && GgufFile::open(name).is_err() {
        let name = name.display();
        bail!(
            "{name} is no tokenizer: it is neither a tokenizer.json, a model folder nor a GGUF file"
        );
    }
    Ok(name.to_owned())
}

/// Returns the data of a run with the names of datasets on the hub replaced by the paths of their files, as
/// [`local_model`] does, and with URLs opened (feature `remote`).
pub fn local_data(data: &[PathBuf]) -> Result<Vec<PathBuf>> {
    #[cfg(feature = "hub")]
    let data = &overdrive::hub::data_paths(data, &HubOptions::from_env()?)?;
    #[cfg(feature = "remote")]
    {
        use overdrive::remote::{RemoteOptions, data_paths};
        Ok(data_paths(data, &RemoteOptions::from_env()?)?)
    }
    #[cfg(not(feature = "remote"))]
    Ok(data.to_vec())
}

/// Returns a name for the model at `path`: the repository that it was downloaded from, or else the file or folder.
pub fn model_name(path: &Path) -> String {
    if let Some(name) = repository(path) {
        return name;
    }
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let last = path.file_name().unwrap_or(path.as_os_str());
    last.to_string_lossy().into_owned()
}

/// Returns the name of the repository that `path` was downloaded from.
pub fn repository(path: &Path) -> Option<String> {
    #[cfg(feature = "hub")]
    return overdrive::hub::name_of_snapshot(path);
    #[cfg(not(feature = "hub"))]
    {
        let _ = path;
        None
    }
}
