//! GGUF files for tests: metadata that are written again with changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_quantization::{GgufArray, GgufFile, GgufValue, GgufWriter};

pub(crate) fn fixture(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf");
    folder.join(name)
}

pub(crate) fn string(text: &str) -> GgufValue {
    GgufValue::String(text.to_owned())
}

pub(crate) fn strings(texts: &[&str]) -> GgufValue {
    GgufValue::Array(GgufArray::String(
        texts.iter().map(|&text| text.to_owned()).collect(),
    ))
}

/// Returns the fixture `name` with `changes` in its metadata; `None` removes a key.
pub(crate) fn changed(name: &str, changes: &[(&str, Option<GgufValue>)]) -> GgufFile {
    let mut metadata = GgufFile::open(fixture(name)).unwrap().metadata().clone();
    for (key, value) in changes {
        match value {
            Some(value) => metadata.insert((*key).to_owned(), value.clone()),
            None => metadata.remove(*key),
        };
    }
    let folder = tempfile::tempdir().unwrap();
    write(&metadata, &folder.path().join("model.gguf"))
}

/// Writes a file without tensors, and opens it.
pub(crate) fn write(metadata: &BTreeMap<String, GgufValue>, path: &Path) -> GgufFile {
    GgufWriter::create(path, metadata, Vec::new())
        .and_then(GgufWriter::finish)
        .unwrap();
    GgufFile::open(path).unwrap()
}
