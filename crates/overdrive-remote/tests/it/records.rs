//! Records of files on a server are those of a local copy.

use std::path::{Path, PathBuf};

use overdrive_datasets::{
    Corpus, CorpusOptions, CsvOptions, CsvRecords, Dataset, Error, IndexLocation, IndexOptions,
    JsonOptions, JsonRecords, RecordFiles, SampleBy, TextLines, TextOptions, WebDataset,
};
use overdrive_remote::open;

use crate::server::{Server, options};

fn index(folder: &Path) -> IndexOptions {
    IndexOptions {
        location: IndexLocation::Folder(folder.join("indexes")),
        ..IndexOptions::default()
    }
}

/// Returns about 60 KB of JSON Lines: many blocks, and records across their borders.
pub(crate) fn json_lines() -> String {
    let line = |i: usize| {
        let text = "word ".repeat(i * 7919 % 40);
        format!("{{\"id\": {i}, \"text\": \"{text}ä\"}}\n")
    };
    (0..500).map(line).collect()
}

/// Compares all records with those of the local file, in the order of a walk through them that jumps.
fn assert_same(remote: &RecordFiles, local: &RecordFiles, what: &str) {
    assert_eq!(remote.len(), local.len(), "{what}");
    assert!(local.len() > 2, "{what}");
    for step in 0..local.len() {
        let index = step * 7919 % local.len();
        assert_eq!(
            remote.bytes(index).unwrap(),
            local.bytes(index).unwrap(),
            "{what}, record {index}"
        );
        let (one, other) = (
            remote.location(index).unwrap(),
            local.location(index).unwrap(),
        );
        assert_eq!(
            (one.record, one.offset),
            (other.record, other.offset),
            "{what}"
        );
    }
}

fn tar(samples: usize) -> Vec<u8> {
    let mut data = Vec::new();
    for sample in 0..samples {
        for (extension, bytes) in [("txt", 20 + sample), ("bin", sample * 977 % 9000)] {
            let name = format!("{sample:04}.{extension}");
            let mut header = vec![0_u8; 512];
            header[..name.len()].copy_from_slice(name.as_bytes());
            header[124..135].copy_from_slice(format!("{bytes:011o}").as_bytes());
            header[156] = b'0';
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
            header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            data.extend(header);
            data.extend((0..bytes).map(|at| (at + sample) as u8));
            data.resize(data.len().next_multiple_of(512), 0);
        }
    }
    data.resize(data.len() + 1024, 0);
    data
}

#[test]
fn records_of_every_format_are_those_of_a_local_copy() {
    let folder = tempfile::tempdir().unwrap();
    let lines = json_lines();
    let array = format!("[{}]", lines.trim_end().replace('\n', ",\n "));
    let csv: String = (0..700)
        .map(|i| format!("{i},\"a \"\"{i}\"\"\nline, {}\"\r\n", "x".repeat(i % 90)))
        .collect();
    let csv = format!("\u{feff}id,text\r\n{csv}");
    let text: String = (0..900)
        .map(|i| format!("line {i}\n{}", if i % 5 == 0 { " \n" } else { "" }))
        .collect();
    let tar = tar(40);
    let files: [(&str, &[u8]); 5] = [
        ("a.jsonl", lines.as_bytes()),
        ("a.json", array.as_bytes()),
        ("a.csv", csv.as_bytes()),
        ("a.txt", text.as_bytes()),
        ("a.tar", &tar),
    ];
    let server = Server::new(&files);
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let path = |name: &str| open(&server.url(name), &options(folder.path())).unwrap();
    let local = |name: &str| folder.path().join(name);
    let indexed = index(folder.path());
    let json = JsonOptions {
        index: indexed.clone(),
        ..JsonOptions::default()
    };
    // Built in the first turn, opened in the second.
    for turn in 0..2 {
        for name in ["a.jsonl", "a.json"] {
            let open =
                |path: PathBuf| JsonRecords::<serde_json::Value>::open([path], &json).unwrap();
            let (remote, local) = (open(path(name)), open(local(name)));
            assert_same(remote.records(), local.records(), name);
            assert_eq!(remote.get(77).unwrap(), local.get(77).unwrap());
            let built = remote.records().report().built_bytes;
            assert_eq!(built > 0, turn == 0, "{name}: the index is kept");
        }
        let options = CsvOptions {
            index: indexed.clone(),
            ..CsvOptions::default()
        };
        let open = |path: PathBuf| CsvRecords::open([path], &options).unwrap();
        let (remote, copy) = (open(path("a.csv")), open(local("a.csv")));
        assert_same(remote.records(), copy.records(), "a.csv");
        assert_eq!(remote.get(600).unwrap(), copy.get(600).unwrap());
        for sample_by in [SampleBy::Line, SampleBy::Paragraph] {
            let options = TextOptions {
                sample_by,
                index: indexed.clone(),
                ..TextOptions::default()
            };
            let open = |path: PathBuf| TextLines::open([path], &options).unwrap();
            assert_same(
                open(path("a.txt")).records(),
                open(local("a.txt")).records(),
                "a.txt",
            );
        }
        let options = TextOptions {
            sample_by: SampleBy::Document,
            index: indexed.clone(),
            ..TextOptions::default()
        };
        let document = TextLines::open([path("a.txt")], &options).unwrap();
        assert_eq!(document.get(0).unwrap(), text);
        let open = |path: PathBuf| WebDataset::open([path], &indexed).unwrap();
        let (remote, copy) = (open(path("a.tar")), open(local("a.tar")));
        assert_same(remote.records(), copy.records(), "a.tar");
        assert_eq!(remote.get(33).unwrap(), copy.get(33).unwrap());
    }
    // Each of these files was smaller than the cache, so that every byte was requested once.
    let mut bytes: Vec<(String, usize)> = Vec::new();
    for request in server.reads() {
        let (start, end) = request.range().unwrap();
        bytes.extend(
            (start..end)
                .step_by(4096)
                .map(|at| (request.path.clone(), at)),
        );
    }
    let requested = bytes.len();
    bytes.sort();
    bytes.dedup();
    assert_eq!(requested, bytes.len(), "a block was requested twice");
}

#[test]
fn a_corpus_of_remote_files_has_the_digest_of_the_local_ones() {
    let folder = tempfile::tempdir().unwrap();
    let text = "A document of some length, with ümläuts. ".repeat(1000);
    let lines = json_lines();
    let files: [(&str, &[u8]); 2] = [("book.txt", text.as_bytes()), ("b.jsonl", lines.as_bytes())];
    let server = Server::new(&files);
    let mut local = Vec::new();
    let mut remote = Vec::new();
    for (name, bytes) in files {
        local.push(folder.path().join(name));
        std::fs::write(folder.path().join(name), bytes).unwrap();
        remote.push(open(&server.url(name), &options(folder.path())).unwrap());
    }
    let corpus = |paths: &[PathBuf]| Corpus::from_paths(paths, &CorpusOptions::default()).unwrap();
    let (local, remote) = (corpus(&local), corpus(&remote));
    assert_eq!(local.digest(), remote.digest());
    assert_eq!(local.total_bytes(), remote.total_bytes());
    remote.check_unchanged().unwrap();
    server.set("book.txt", b"another text", "\"version-2\"");
    assert!(
        matches!(remote.check_unchanged(), Err(Error::FileChanged { path }) if path.ends_with("book.txt"))
    );
}

#[test]
fn a_fingerprint_is_the_name_and_the_version() {
    let folder = tempfile::tempdir().unwrap();
    let lines = json_lines();
    let server = Server::new(&[("a.jsonl", lines.as_bytes())]);
    let fingerprint = || {
        let path = open(&server.url("a.jsonl"), &options(folder.path())).unwrap();
        let json = JsonOptions {
            index: index(folder.path()),
            ..JsonOptions::default()
        };
        let records = JsonRecords::<serde_json::Value>::open([path], &json).unwrap();
        let reads = server.reads().len();
        let fingerprint = records.records().fingerprint().unwrap();
        assert_eq!(server.reads().len(), reads, "no content is read");
        (records.len(), fingerprint)
    };
    let first = fingerprint();
    assert_eq!(fingerprint(), first);
    // A file of the same length.
    server.set(
        "a.jsonl",
        lines.replace("word", "WORD").as_bytes(),
        "\"version-2\"",
    );
    let second = fingerprint();
    assert_eq!(second.0, first.0);
    assert_ne!(second.1, first.1);
}

/// It runs in a process of its own, whose cache folder is temporary.
#[test]
fn compressed_files_are_unpacked_once() {
    const CHILD: &str = "OVERDRIVE_TEST_UNPACKED";
    let name = "records::compressed_files_are_unpacked_once";
    let folder = tempfile::tempdir().unwrap();
    if std::env::var_os(CHILD).is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(CHILD, "1")
            .env("XDG_CACHE_HOME", folder.path())
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout).into_owned();
        assert!(
            child.status.success() && output.contains("1 passed"),
            "{output}"
        );
        return;
    }
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../overdrive-datasets/tests/fixtures/compressed");
    for name in [
        "single_stream.txt.gz",
        "blocks.txt.gz",
        "no_size.txt.zst",
        "frames.txt.zst",
    ] {
        let bytes = std::fs::read(fixtures.join(name)).unwrap();
        let server = Server::new(&[(name, &bytes)]);
        let path = open(&server.url(name), &options(folder.path())).unwrap();
        for _ in 0..2 {
            let lines = TextLines::open([&path], &TextOptions::default()).unwrap();
            assert_eq!(lines.len(), 3000, "{name}");
            assert_eq!(
                lines.get(2999).unwrap(),
                format!("line 2999 {}", "abc".repeat(2999 % 11))
            );
            assert_eq!(lines.records().location(0).unwrap().path, path);
        }
        // A truncated file is an error.
        let server = Server::new(&[(name, &bytes[..bytes.len() / 2])]);
        let path = open(&server.url(name), &options(folder.path())).unwrap();
        assert!(
            TextLines::open([&path], &TextOptions::default()).is_err(),
            "{name}"
        );
    }
}

#[test]
fn an_empty_file_has_no_records() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(&[("a.jsonl", b"")]);
    let path = open(&server.url("a.jsonl"), &options(folder.path())).unwrap();
    let json = JsonOptions {
        index: index(folder.path()),
        ..JsonOptions::default()
    };
    assert_eq!(
        JsonRecords::<serde_json::Value>::open([path], &json)
            .unwrap()
            .len(),
        0
    );
}

#[test]
fn a_url_that_was_not_opened_is_an_error_with_the_way_out_and_without_its_secrets() {
    let path = "https://host/a.jsonl?signature=secret";
    let error = JsonRecords::<serde_json::Value>::open([path], &JsonOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("https://host/a.jsonl") && error.contains("download"),
        "{error}"
    );
    assert!(!error.contains("secret"), "{error}");
}
