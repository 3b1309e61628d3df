//! Compressed files are read block by block, or unpacked once (`unpacking.rs`), or refused with the remedy.

use std::path::Path;

use crate::common::fixture;
use overdrive_datasets::{
    CsvOptions, CsvRecords, DataLoader, DataLoaderOptions, Dataset, Error, IndexLocation,
    IndexOptions, JsonOptions, JsonRecords, LabeledTexts, TextLines, TextOptions,
};

fn open(path: &Path, unpack: bool) -> overdrive_datasets::Result<TextLines> {
    let index = IndexOptions {
        unpack,
        location: IndexLocation::Memory,
        ..IndexOptions::default()
    };
    TextLines::open(
        [path],
        &TextOptions {
            index,
            ..TextOptions::default()
        },
    )
}

fn lines() -> Vec<String> {
    (0..3000)
        .map(|i| format!("line {i} {}", "abc".repeat(i % 11)))
        .collect()
}

#[test]
fn lines_in_blocks_are_read_in_any_order_by_any_number_of_workers() {
    for name in ["blocks.txt.gz", "frames.txt.zst", "plain_frames.txt.zst"] {
        let open = || open(&fixture(&format!("compressed/{name}")), false).unwrap();
        let read = open();
        assert_eq!(read.len(), 3000, "{name}");
        for (index, line) in lines().iter().enumerate().rev() {
            assert_eq!(&read.get(index).unwrap(), line, "{name}");
        }
        let options = DataLoaderOptions {
            batch_size: 7,
            shuffle: true,
            num_workers: 3,
            ..DataLoaderOptions::default()
        };
        let mut loader = DataLoader::new(open(), options).unwrap();
        let mut all: Vec<String> = loader.epoch().flat_map(Result::unwrap).collect();
        all.sort();
        let mut expected = lines();
        expected.sort();
        assert_eq!(all, expected, "{name}");
    }
}

#[test]
fn files_of_other_compressions_are_refused_with_the_remedy() {
    let cases = [
        ("lines.txt.bz2", "bzip2 is not supported here; unpack it"),
        ("lines.txt.xz", "xz is not supported here; unpack it"),
    ];
    for (name, text) in cases {
        let error = open(&fixture(&format!("compressed/{name}")), false).unwrap_err();
        assert!(matches!(error, Error::InvalidFile { .. }));
        assert!(error.to_string().contains(text), "{error}");
    }
}

#[test]
fn damage_is_detected_on_opening_the_file_or_reading_the_record() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["blocks.txt.gz", "frames.txt.zst"] {
        let bytes = std::fs::read(fixture(&format!("compressed/{name}"))).unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes[..bytes.len() - 40]).unwrap();
        let error = open(&path, false).unwrap_err().to_string();
        assert!(
            error.contains("it was truncated") || error.contains("ends within"),
            "{error}"
        );
        // In the middle of what is compressed.
        let mut damaged = bytes.clone();
        damaged[300] ^= 0x10;
        std::fs::write(&path, &damaged).unwrap();
        assert!(open(&path, false).is_err());
    }
}

#[test]
fn a_block_that_unpacks_to_more_than_its_header_says_is_refused_before_it_fills_the_disk() {
    let bytes = std::fs::read(fixture("compressed/blocks.txt.gz")).unwrap();
    // The size of the first block, minus one, in its header; the unpacked size in its last four bytes.
    let size = usize::from(u16::from_le_bytes([bytes[16], bytes[17]])) + 1;
    let mut block = bytes[..size].to_vec();
    block[size - 4..].copy_from_slice(&1_u32.to_le_bytes());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("block.txt.gz");
    std::fs::write(&path, block).unwrap();
    let error = open(&path, false).unwrap_err().to_string();
    assert!(
        error.contains("it unpacks to more than the 1 bytes that its headers declare"),
        "{error}"
    );
}

/// Writes one block, as bgzip writes a small file: with an extra field that says the block's size.
fn write_packed(path: &Path, text: &[u8]) {
    use std::io::Write;
    let mut packed = Vec::new();
    let mut encoder = flate2::GzBuilder::new()
        .extra(*b"BC\x02\x00\x00\x00")
        .write(&mut packed, flate2::Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap();
    let size = (packed.len() as u16 - 1).to_le_bytes();
    packed[16..18].copy_from_slice(&size);
    std::fs::write(path, &packed).unwrap();
}

#[test]
fn compressed_tables_have_the_delimiter_of_the_name_before_the_compression() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.tsv.gz");
    write_packed(&path, b"text\tlabel\none, two\tgood\nthree\tbad\n");
    let rows = CsvRecords::open([&path], &CsvOptions::default()).unwrap();
    assert_eq!(rows.columns().names(), ["text", "label"]);
    assert_eq!(rows.get(0).unwrap().get("text"), Some("one, two"));
    let labeled = LabeledTexts::open(&path, "text", "label", None).unwrap();
    assert_eq!(labeled.labels, ["bad", "good"]);
}

#[test]
fn compressed_json_arrays_are_recognized_by_their_content() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("values.json.gz");
    write_packed(&path, b" [{\"a\": 1}, {\"a\": 2}]");
    let records =
        JsonRecords::<serde_json::Value>::open([dir.path()], &JsonOptions::default()).unwrap();
    assert_eq!(records.len(), 2);
    assert_eq!(records.get(1).unwrap()["a"], 2);
}
