//! Samples of tar archives, as Python's tarfile writes them.

use crate::common::fixture;
use overdrive_datasets::{Dataset, IndexOptions, WebDataset};

fn open(bytes: &[u8]) -> overdrive_datasets::Result<WebDataset> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard.tar");
    std::fs::write(&path, bytes).unwrap();
    // Linux and macOS let a mapped file go.
    WebDataset::open([&path], &IndexOptions::default())
}

#[test]
fn samples_of_all_formats_of_tar_come_back() {
    for format in ["ustar", "gnu", "pax"] {
        let path = fixture(&format!("shard_{format}.tar"));
        let samples = WebDataset::open([&path], &IndexOptions::default()).unwrap();
        assert_eq!(samples.len(), 3, "{format}");
        // In any order.
        for index in [2, 0, 1] {
            let sample = samples.get(index).unwrap();
            assert_eq!(sample.text("txt").unwrap(), format!("caption {index}"));
            let json: serde_json::Value = sample.json("json").unwrap();
            assert_eq!(json["id"], index);
            let all: Vec<u8> = (0..=255).collect();
            assert_eq!(sample.get("seg.bin").unwrap(), all.repeat(3 * index));
            assert_eq!(sample.files().count(), 3);
        }
        assert_eq!(samples.get(1).unwrap().key(), "train/0001");
        let long = "deep/".repeat(12) + &"x".repeat(if format == "ustar" { 60 } else { 90 });
        assert_eq!(samples.get(2).unwrap().key(), long);
        assert!(samples.get(3).is_err());
    }
}

#[test]
fn a_missing_file_of_a_sample_is_an_error_that_names_the_others() {
    let samples = WebDataset::open([fixture("shard_pax.tar")], &IndexOptions::default()).unwrap();
    let sample = samples.get(1).unwrap();
    assert_eq!(sample.get("png"), None);
    let error = sample.text("png").unwrap_err();
    assert!(error.is_about_record());
    let text = error.to_string();
    assert!(
        text.ends_with("the sample train/0001: it is missing; the sample has txt, json, seg.bin"),
        "{text}"
    );
    assert!(
        sample
            .text("seg.bin")
            .unwrap_err()
            .to_string()
            .contains("invalid utf-8")
    );
    assert!(sample.json::<u32>("txt").is_err());
}

/// Returns an archive of files with these names; the content of each is its name.
fn archive(names: &[&str]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for name in names {
        let mut header = [0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{:011o}", name.len()).as_bytes());
        header[148..156].fill(b' ');
        header[156] = b'0';
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        bytes.extend_from_slice(&header);
        bytes.extend_from_slice(name.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

#[test]
fn files_that_belong_to_no_sample_are_left_out_and_extensions_are_in_lower_case() {
    let bytes = archive(&[
        "README",
        "./._a/0001.jpg",
        "a/0001.JPG",
        "a/._0001.txt",
        "a/0001.Txt",
        "a/LICENSE",
        "a/0001.seg.PNG",
        "v1.2/0002.jpg",
        "v1.2/notes",
        ".hidden.jpg",
    ]);
    let samples = open(&bytes).unwrap();
    let found: Vec<(String, Vec<String>)> = (0..samples.len())
        .map(|index| {
            let sample = samples.get(index).unwrap();
            let files = sample.files().map(|(extension, bytes)| {
                format!("{extension}={}", String::from_utf8_lossy(bytes))
            });
            (sample.key().to_owned(), files.collect())
        })
        .collect();
    let sample = |key: &str, files: &[&str]| {
        let files = files.iter().map(|&file| file.to_owned()).collect();
        (key.to_owned(), files)
    };
    assert_eq!(
        found,
        [
            sample("._a/0001", &["jpg=./._a/0001.jpg"]),
            sample(
                "a/0001",
                &["jpg=a/0001.JPG", "txt=a/0001.Txt", "seg.png=a/0001.seg.PNG"]
            ),
            sample("v1.2/0002", &["jpg=v1.2/0002.jpg"]),
        ]
    );
    assert!(open(&archive(&["README", "._a.jpg"])).unwrap().is_empty());
    let twice = open(&archive(&["a.jpg", "a.JPG"])).unwrap();
    let error = twice.get(0).unwrap_err().to_string();
    assert!(error.contains("has two files jpg"), "{error}");
}

#[test]
fn truncated_and_damaged_archives_are_refused_with_the_offset() {
    let bytes = std::fs::read(fixture("shard_gnu.tar")).unwrap();
    let error = open(&bytes[..700]).unwrap_err().to_string();
    assert!(
        error.contains("at byte 512, the archive ends within a header"),
        "{error}"
    );
    let error = open(&bytes[..1024 + 5]).unwrap_err().to_string();
    assert!(
        error.contains("at byte 512, the archive ends within a file"),
        "{error}"
    );
    let mut damaged = bytes.clone();
    damaged[512] ^= 1;
    let error = open(&damaged).unwrap_err().to_string();
    assert!(
        error.contains("at byte 512, the checksum of the header is wrong"),
        "{error}"
    );
    let error = open(b"not a tar archive").unwrap_err().to_string();
    assert!(error.contains("ends within a header"), "{error}");
    assert!(open(b"").unwrap().is_empty());
    // Without the blocks of zeros at the end it is whole all the same.
    let end = bytes
        .iter()
        .rposition(|&byte| byte != 0)
        .unwrap()
        .next_multiple_of(512);
    assert_eq!(open(&bytes[..end]).unwrap().len(), 3);
}
