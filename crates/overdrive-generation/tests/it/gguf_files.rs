//! GGUF files for tests: metadata that are written again with changes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_quantization::{GgufArray, GgufFile, GgufValue};

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
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(0u64.to_le_bytes());
    bytes.extend((metadata.len() as u64).to_le_bytes());
    for (key, value) in metadata {
        text(key, &mut bytes);
        put(value, &mut bytes);
    }
    std::fs::write(path, bytes).unwrap();
    GgufFile::open(path).unwrap()
}

fn text(text: &str, bytes: &mut Vec<u8>) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn put(value: &GgufValue, bytes: &mut Vec<u8>) {
    let kind = |kind: u32| kind.to_le_bytes();
    match value {
        GgufValue::U32(number) => bytes.extend([kind(4), number.to_le_bytes()].concat()),
        GgufValue::I32(number) => bytes.extend([kind(5), number.to_le_bytes()].concat()),
        GgufValue::F32(number) => bytes.extend([kind(6), number.to_le_bytes()].concat()),
        GgufValue::Bool(value) => {
            bytes.extend(kind(7));
            bytes.push(u8::from(*value));
        }
        GgufValue::String(value) => {
            bytes.extend(kind(8));
            text(value, bytes);
        }
        GgufValue::Array(array) => {
            bytes.extend(kind(9));
            let mut head = |of: u32, count: usize| {
                bytes.extend(kind(of));
                bytes.extend((count as u64).to_le_bytes());
            };
            match array {
                GgufArray::U8(all) => {
                    head(0, all.len());
                    bytes.extend(all);
                }
                GgufArray::I32(all) => {
                    head(5, all.len());
                    bytes.extend(all.iter().flat_map(|number| number.to_le_bytes()));
                }
                GgufArray::F32(all) => {
                    head(6, all.len());
                    bytes.extend(all.iter().flat_map(|number| number.to_le_bytes()));
                }
                GgufArray::String(all) => {
                    head(8, all.len());
                    all.iter().for_each(|each| text(each, bytes));
                }
                other => panic!("{other:?} is not needed yet"),
            }
        }
        other => panic!("{other:?} is not needed yet"),
    }
}
