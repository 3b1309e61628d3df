//! Saving caches to files, such as the cached prompt of a service or a conversation to resume later.

use std::collections::BTreeMap;
use std::path::Path;

use overdrive_safetensors::MappedFile;
use tch::Device;

use crate::{Error, KvCache, Result};

// Raised when the names or the meaning of the stored tensors change.
const VERSION: &str = "1";

/// Writes the tokens that `cache` holds to a safetensors file, atomically, with the kind of cache and
/// its settings in the metadata. Free capacity is not written.
///
/// # Errors
/// If the file cannot be written; an existing file is then unchanged.
pub fn save(cache: &dyn KvCache, path: impl AsRef<Path>) -> Result<()> {
    let mut metadata: BTreeMap<String, String> = cache
        .settings()
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value))
        .collect();
    metadata.insert("format_version".to_owned(), VERSION.to_owned());
    overdrive_safetensors::write(path, &cache.state()?, &metadata)?;
    Ok(())
}

/// Loads a file of [`save`] into `cache` and replaces its tokens; the tensors are placed on `device`.
///
/// # Errors
/// If the file cannot be read or is damaged; [`Error::OtherCache`] if it holds another kind of cache or a
/// cache with other settings. The cache is then unchanged.
///
/// ```
/// use overdrive_kv_cache::{DynamicCache, KvCache, load, save};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = std::env::temp_dir().join(format!("kv-cache-doc-{}.safetensors", std::process::id()));
/// let mut cache = DynamicCache::new(1);
/// let prompt = Tensor::f_randn([1, 2, 5, 8], (Kind::Float, Device::Cpu))?;
/// cache.append(0, &prompt, &prompt)?;
/// save(&cache, &path)?;
///
/// let mut again = DynamicCache::new(1);
/// load(&mut again, &path, Device::Cpu)?;
/// assert_eq!(again.len(), 5);
/// # std::fs::remove_file(path)?;
/// # Ok(())
/// # }
/// ```
pub fn load(cache: &mut dyn KvCache, path: impl AsRef<Path>, device: Device) -> Result<()> {
    let file = MappedFile::open(&path)?;
    let version = ("format_version", VERSION.to_owned());
    // Compares the settings before it reads any tensor: two kinds of cache may have tensors of the same
    // names and shapes but different meanings.
    for (key, expected) in cache.settings().into_iter().chain([version]) {
        let found = file.metadata().get(key).cloned().unwrap_or_default();
        if found != expected {
            return Err(Error::OtherCache {
                path: path.as_ref().display().to_string(),
                key: key.to_owned(),
                found,
                expected,
            });
        }
    }
    let mut state = Vec::new();
    for stored in file.tensors() {
        let tensor = stored.copy_to_tensor(None, device)?;
        state.push((stored.name().to_owned(), tensor));
    }
    cache.load_state(&state)
}
