//! Files that are refused before any code of them is loaded. No Python is needed.

use std::io::Write;
use std::path::PathBuf;

use crate::common::{Entries, manifest, package_with, write_archive};
use overdrive_packages::{CompiledModel, Error, LoadOptions, PackageInfo};
use serde_json::{Value, json};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

struct File {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

fn file(entries: &Entries) -> File {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("p.pt2");
    write_archive(&path, entries);
    File {
        _folder: folder,
        path,
    }
}

fn refused(entries: &Entries) -> Error {
    CompiledModel::load(&file(entries).path, &LoadOptions::default()).unwrap_err()
}

/// The error of a package with this metadata and manifest.
fn refused_with(mut metadata: Value, manifest: &Value) -> Error {
    metadata["overdrive"] = Value::String(manifest.to_string());
    refused(&package_with(&metadata))
}

fn here() -> String {
    let version = overdrive_sys::build_info::libtorch_version().unwrap();
    version.split('+').next().unwrap().to_owned()
}

#[test]
fn a_package_for_another_libtorch_is_refused_with_both_versions_named() {
    let error = refused_with(json!({"AOTI_DEVICE_KEY": "cpu"}), &manifest("2.9.1"));
    assert!(matches!(error, Error::VersionMismatch { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("libtorch 2.9.1") && text.contains(&format!("libtorch {}", here())),
        "{text}"
    );
}

#[test]
fn a_package_without_a_version_is_refused_with_its_metadata() {
    let entries = package_with(&json!({"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": "x86_64"}));
    let error = refused(&entries);
    assert!(matches!(error, Error::UnknownVersion { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("cpu") && text.contains("x86_64"), "{text}");
    assert!(
        text.contains("allow_unknown_version") && text.contains(&here()),
        "{text}"
    );
}

#[test]
fn code_that_is_no_library_is_an_error_of_the_loader_and_no_crash() {
    let metadata = json!({"AOTI_DEVICE_KEY": "cpu", "overdrive": manifest(&here()).to_string()});
    let error = refused(&package_with(&metadata));
    assert!(matches!(error, Error::Sys(_)), "{error:?}");
}

#[test]
fn a_package_for_a_device_that_is_not_here_is_refused_with_both_named() {
    // A machine with a GPU has the device, so it refuses such a package later and for another reason.
    if !tch::Cuda::is_available() {
        let error = refused_with(json!({"AOTI_DEVICE_KEY": "cuda"}), &manifest(&here()));
        assert!(matches!(error, Error::MachineMismatch { .. }), "{error:?}");
        let text = error.to_string();
        assert!(
            text.contains("the device cuda") && text.contains("without a CUDA device"),
            "{text}"
        );
    }
    let error = refused_with(json!({"AOTI_DEVICE_KEY": "xpu"}), &manifest(&here()));
    assert!(error.to_string().contains("the device xpu"), "{error}");
    let error = refused_with(json!({}), &manifest(&here()));
    assert!(error.to_string().contains("does not name"), "{error}");
}

#[test]
fn a_package_for_another_system_or_processor_is_refused_with_both_named() {
    let cases = [
        (
            json!({"AOTI_DEVICE_KEY": "cpu", "AOTI_PLATFORM": "plan9"}),
            "plan9",
        ),
        (
            json!({"AOTI_DEVICE_KEY": "cpu", "AOTI_MACHINE": "vax"}),
            "vax processors",
        ),
    ];
    for (metadata, expected) in cases {
        let error = refused_with(metadata, &manifest(&here()));
        assert!(matches!(error, Error::MachineMismatch { .. }), "{error:?}");
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn instructions_that_this_processor_lacks_are_named() {
    if std::arch::is_x86_feature_detected!("avx512fp16") {
        eprintln!("SKIPPED: this processor has avx512fp16");
        return;
    }
    let mut manifest = manifest(&here());
    manifest["processor"] = json!(["sse4.2", "avx512fp16", "glibc"]);
    let error = refused_with(json!({"AOTI_DEVICE_KEY": "cpu"}), &manifest);
    let text = error.to_string();
    assert!(
        text.contains("avx512fp16") && !text.contains("glibc"),
        "{text}"
    );
}

#[test]
fn metadata_of_a_later_format_is_refused() {
    let mut later = manifest(&here());
    later["format_version"] = json!(2);
    let error = refused_with(json!({"AOTI_DEVICE_KEY": "cpu"}), &later);
    assert!(matches!(error, Error::InvalidManifest { .. }), "{error:?}");
    let text = error.to_string();
    assert!(
        text.contains("format_version 2") && text.contains("up to 1"),
        "{text}"
    );
    let error = refused_with(json!({}), &json!("no object"));
    assert!(matches!(error, Error::InvalidManifest { .. }), "{error:?}");
}

#[test]
fn a_file_that_is_not_a_package_is_refused_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let load = |path: PathBuf| CompiledModel::load(path, &LoadOptions::default()).unwrap_err();

    let error = load(folder.path().join("absent.pt2"));
    let absent = matches!(error, Error::Common(overdrive_core::Error::Io { .. }));
    assert!(absent, "{error:?}");
    let error = load(folder.path().to_owned());
    assert!(error.to_string().contains("it is a folder"), "{error}");
    let text = folder.path().join("text.pt2");
    std::fs::write(&text, "no archive at all").unwrap();
    assert!(matches!(load(text), Error::Damaged { .. }));

    let other = vec![("p/readme".to_owned(), b"text".to_vec())];
    let error = refused(&other);
    assert!(error.to_string().contains("archive_format"), "{error}");
    let exported = vec![
        ("p/archive_format".to_owned(), b"pt2".to_vec()),
        ("p/models/model.json".to_owned(), b"{}".to_vec()),
    ];
    assert!(refused(&exported).to_string().contains("no compiled model"));
}

#[test]
fn a_model_has_one_library_and_one_metadata_file() {
    let whole = package_with(&json!({"AOTI_DEVICE_KEY": "cpu"}));
    let without = |end: &str| -> Entries {
        let kept = whole.iter().filter(|(name, _)| !name.ends_with(end));
        kept.cloned().collect()
    };
    assert!(refused(&without(".so")).to_string().contains("0 libraries"));
    assert!(
        refused(&without(".json"))
            .to_string()
            .contains("no metadata")
    );
    let mut twice = whole.clone();
    twice.push((
        "p/data/aotinductor/model/b.wrapper.so".to_owned(),
        Vec::new(),
    ));
    assert!(refused(&twice).to_string().contains("2 libraries"));
    let mut later = whole.clone();
    later[3].1 = b"7".to_vec();
    assert!(refused(&later).to_string().contains("version 7"));
    let mut spoilt = whole;
    spoilt[1].1 = b"{".to_vec();
    assert!(refused(&spoilt).to_string().contains("metadata of model"));
}

#[test]
fn metadata_that_unpack_to_more_than_their_limit_are_refused_by_declared_and_by_real_size() {
    let bomb = |declared: Option<u32>| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bomb.pt2");
        let mut writer = ZipWriter::new(std::fs::File::create(&path).unwrap());
        let packed = SimpleFileOptions::default().compression_method(CompressionMethod::Deflated);
        let name = "p/data/aotinductor/model/a.wrapper_metadata.json";
        writer.start_file(name, packed).unwrap();
        let spaces = vec![b' '; 1 << 20];
        (0..40).for_each(|_| writer.write_all(&spaces).unwrap());
        writer.finish().unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        assert!(
            bytes.len() < 1 << 20,
            "{} bytes of zip for 40 MiB",
            bytes.len()
        );
        if let Some(declared) = declared {
            // The unpacked size, in the header of the entry and in the directory at the end.
            for at in 0..bytes.len() - 4 {
                if bytes[at..at + 4] == (40_u32 << 20).to_le_bytes() {
                    bytes[at..at + 4].copy_from_slice(&declared.to_le_bytes());
                }
            }
            std::fs::write(&path, bytes).unwrap();
        }
        PackageInfo::read(&path).unwrap_err().to_string()
    };
    let error = bomb(None);
    assert!(
        error.contains("metadata to more than 16777216 bytes"),
        "{error}"
    );
    // Declared as one byte: what is read counts, or the reader itself finds the difference.
    let error = bomb(Some(1));
    assert!(error.contains("a.wrapper_metadata.json"), "{error}");
}

#[test]
fn an_entry_that_leads_out_of_the_folder_is_refused() {
    let mut entries = package_with(&json!({"AOTI_DEVICE_KEY": "cpu"}));
    entries.push(("p/../../../outside".to_owned(), Vec::new()));
    let error = refused(&entries);
    assert!(error.to_string().contains("leads out"), "{error}");
}

#[test]
fn a_flipped_bit_anywhere_in_the_code_is_found() {
    let file = file(&package_with(&json!({"AOTI_DEVICE_KEY": "cpu"})));
    let mut bytes = std::fs::read(&file.path).unwrap();
    let place = bytes
        .windows(10)
        .position(|part| part == b"no library")
        .unwrap();
    bytes[place + 3] ^= 1;
    std::fs::write(&file.path, bytes).unwrap();
    let error = PackageInfo::read(&file.path).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(error, Error::Damaged { .. }) && text.contains("a.wrapper.so"),
        "{text}"
    );
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let file = file(&package_with(&json!({"AOTI_DEVICE_KEY": "cpu"})));
    let whole = std::fs::read(&file.path).unwrap();
    for len in 0..whole.len() {
        std::fs::write(&file.path, &whole[..len]).unwrap();
        let error = PackageInfo::read(&file.path).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{len}: {error:?}");
    }
}

#[test]
fn a_model_is_chosen_by_name_and_only_a_single_one_without() {
    let mut entries = package_with(&json!({"AOTI_DEVICE_KEY": "cpu"}));
    let file_of_one = file(&entries);
    let one = PackageInfo::read(&file_of_one.path).unwrap();
    assert_eq!(one.model(None).unwrap().name, "model");
    let second: Entries = entries[..2]
        .iter()
        .map(|(name, bytes)| (name.replace("/model/", "/model2/"), bytes.clone()))
        .collect();
    entries.extend(second);
    let file_of_two = file(&entries);
    let two = PackageInfo::read(&file_of_two.path).unwrap();
    assert_eq!(two.models().len(), 2);
    assert_eq!(two.model(Some("model2")).unwrap().name, "model2");
    for name in [None, Some("other")] {
        let error = two.model(name).unwrap_err();
        assert!(error.to_string().contains("model, model2"), "{error}");
    }
}
