use std::io::{Read, Write};
use std::path::Path;

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

/// Entries of an archive, by name.
pub(crate) type Entries = Vec<(String, Vec<u8>)>;

/// Writes an archive as PyTorch does: nothing compressed.
pub(crate) fn write_archive(path: &Path, entries: &Entries) {
    let mut writer = ZipWriter::new(std::fs::File::create(path).unwrap());
    let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, bytes) in entries {
        writer.start_file(name.as_str(), options).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap();
}

pub(crate) fn read_archive(path: &Path) -> Entries {
    let mut archive = ZipArchive::new(std::fs::File::open(path).unwrap()).unwrap();
    (0..archive.len())
        .map(|index| {
            let mut entry = archive.by_index(index).unwrap();
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (entry.name().unwrap().into_owned(), bytes)
        })
        .collect()
}

/// A package whose code is never loaded: it is refused before.
pub(crate) fn package_with(metadata: &serde_json::Value) -> Entries {
    let text = serde_json::to_vec(metadata).unwrap();
    let model = "p/data/aotinductor/model";
    vec![
        (format!("{model}/a.wrapper.so"), b"no library".to_vec()),
        (format!("{model}/a.wrapper_metadata.json"), text),
        ("p/archive_format".to_owned(), b"pt2".to_vec()),
        ("p/archive_version".to_owned(), b"0".to_vec()),
    ]
}

/// The manifest of a model that was made for libtorch `torch`.
pub(crate) fn manifest(torch: &str) -> serde_json::Value {
    serde_json::json!({
        "format_version": 1, "torch": torch, "kind": "logits", "inputs": [], "outputs": [],
    })
}
