//! Corpora: the files that are found, filtered and limited.

use std::path::Path;

use crate::common::{corpus, text_folder, write_files};
use overdrive_datasets::{Corpus, CorpusOptions};

#[test]
fn a_folder_gives_its_text_files_in_order_and_says_what_it_left_out() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[
            ("b.txt", b"b".as_slice()),
            ("a/z.md", b"z"),
            ("a/picture.png", b"\x89PNG\xff"),
            ("cut.txt", "ü".as_bytes().split_at(1).0),
            ("empty.txt", b""),
            ("data.parquet", b"PAR1"),
            ("questions.jsonl", b"\n{\"question\": \"3 + 3\"}\n"),
            ("texts.jsonl", b"\xef\xbb\xbf{\"text\": \"t\"}\n"),
            (".hidden/x.txt", b"x"),
            ("big.txt", &[b'x'; 100]),
            ("copy.txt", b"b"),
        ],
    );
    let options = CorpusOptions {
        max_file_bytes: Some(50),
        skip_duplicates: true,
        ..CorpusOptions::default()
    };
    let corpus = Corpus::from_paths([dir.path()], &options).unwrap();
    let names: Vec<_> = corpus
        .files()
        .iter()
        .map(|file| file.name.as_str())
        .collect();
    assert_eq!(names, ["a/z.md", "b.txt", "texts.jsonl"]);
    let skipped = corpus.skipped().to_string();
    let expected = "2 not UTF-8, 1 of an unsupported format, 1 JSON Lines without the text field, 1 too large, \
                    1 duplicates, 1 empty (such as ";
    assert!(skipped.starts_with(expected), "{skipped}");
    // The same file is an error when it is named, at the time when its records are read.
    let named = Corpus::from_paths([dir.path().join("questions.jsonl")], &options).unwrap();
    assert_eq!(named.files().len(), 1);

    let only = CorpusOptions {
        extensions: Some(vec![".MD".to_owned()]),
        ..Default::default()
    };
    let corpus = Corpus::from_paths([dir.path(), &dir.path().join("a")], &only).unwrap();
    assert_eq!(corpus.files().len(), 1, "the same file twice is one file");
}

#[test]
fn a_file_that_is_reached_by_two_paths_is_taken_once() {
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("a.txt", "a"), ("folder/b.txt", "b")]);
    let link = tempfile::tempdir().unwrap();
    let mut paths = vec![
        dir.path().to_owned(),
        dir.path().join("folder/../a.txt"),
        dir.path().join("./folder"),
    ];
    #[cfg(unix)]
    {
        let link = link.path().join("link");
        std::os::unix::fs::symlink(dir.path(), &link).unwrap();
        paths.push(link);
    }
    let corpus = Corpus::from_paths(&paths, &CorpusOptions::default()).unwrap();
    let names: Vec<_> = corpus.files().iter().map(|file| &file.name).collect();
    assert_eq!(names, ["a.txt", "folder/b.txt"]);
}

#[cfg(unix)]
#[test]
fn a_folder_of_links_is_read_as_one_of_files() {
    use std::os::unix::fs::symlink;
    // A snapshot in Hugging Face's cache, with a link to a folder around it.
    let dir = tempfile::tempdir().unwrap();
    write_files(dir.path(), &[("blobs/1", "a"), ("blobs/2", "b")]);
    let snapshot = dir.path().join("snapshots/x");
    std::fs::create_dir_all(snapshot.join("folder")).unwrap();
    symlink("../../blobs/1", snapshot.join("a.txt")).unwrap();
    symlink("../../../blobs/2", snapshot.join("folder/b.txt")).unwrap();
    symlink("..", snapshot.join("folder/loop")).unwrap();
    let corpus = corpus(&snapshot);
    let names: Vec<_> = corpus.files().iter().map(|file| &file.name).collect();
    assert_eq!(names, ["a.txt", "folder/b.txt"]);
    let found = overdrive_datasets::find_files([&snapshot], &[]).unwrap();
    assert_eq!(
        found,
        ["a.txt", "folder/b.txt"].map(|name| snapshot.join(name))
    );
    // Links to nothing are left out, unless the caller names one.
    let broken = snapshot.join("0.txt");
    symlink("../../blobs/3", &broken).unwrap();
    symlink("a.txt/4", snapshot.join("folder/c.txt")).unwrap();
    assert_eq!(
        overdrive_datasets::find_files([&snapshot], &[]).unwrap(),
        found
    );
    let both = Corpus::from_paths([&snapshot], &CorpusOptions::default()).unwrap();
    assert_eq!(both.files().len(), 2);
    let error = Corpus::from_paths([&broken], &CorpusOptions::default()).unwrap_err();
    assert!(error.to_string().contains("0.txt"), "{error}");
}

#[test]
fn large_files_are_checked_for_utf8_across_blocks() {
    let dir = tempfile::tempdir().unwrap();
    // Three bytes a character never fit the blocks' length evenly.
    let good = "語".repeat(200_000);
    let mut bad = good.clone().into_bytes();
    bad[400_001] = b'x';
    write_files(
        dir.path(),
        &[("bad.txt", &bad), ("good.txt", &good.into_bytes())],
    );
    let corpus = corpus(dir.path());
    let names: Vec<_> = corpus
        .files()
        .iter()
        .map(|file| file.name.as_str())
        .collect();
    assert_eq!(names, ["good.txt"]);
    assert_eq!(corpus.total_bytes(), 600_000);
}

#[test]
fn unsupported_formats_are_errors_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[("data.parquet", "PAR1"), ("a.txt.gz", "\u{1f}")],
    );
    let options = CorpusOptions::default();
    let error = |path: &Path| {
        Corpus::from_paths([path], &options)
            .unwrap_err()
            .to_string()
    };
    let parquet = error(&dir.path().join("data.parquet"));
    assert!(
        parquet.contains("Parquet is not supported here; convert it to JSON Lines"),
        "{parquet}"
    );
    assert!(error(&dir.path().join("a.txt.gz")).contains("unpack it first"));
    let nothing = error(dir.path());
    assert!(
        nothing.contains("left out: 2 of an unsupported format"),
        "{nothing}"
    );
    assert!(error(&dir.path().join("missing")).starts_with("cannot read "));
}

#[test]
fn a_limited_corpus_is_a_stable_mixture() {
    let dir = text_folder();
    let limited = |max_bytes| {
        let options = CorpusOptions {
            max_bytes: Some(max_bytes),
            ..Default::default()
        };
        Corpus::from_paths([dir.path()], &options).unwrap()
    };
    let all = corpus(dir.path());
    let half = limited(all.total_bytes() / 2);
    let names = |corpus: &Corpus| {
        corpus
            .files()
            .iter()
            .map(|f| f.name.clone())
            .collect::<Vec<_>>()
    };
    let largest = all.files().iter().map(|file| file.bytes).max().unwrap();
    assert!((all.total_bytes() / 2..all.total_bytes() / 2 + largest).contains(&half.total_bytes()));
    // In the order of the whole, from all folders, and a larger limit only adds.
    assert!(names(&half).is_sorted());
    let folders: std::collections::HashSet<_> = half
        .files()
        .iter()
        .map(|file| file.name.split('/').next().unwrap())
        .collect();
    assert_eq!(folders.len(), 3);
    let more = names(&limited(all.total_bytes() * 3 / 4));
    assert!(names(&half).iter().all(|name| more.contains(name)));
    assert_eq!(limited(u64::MAX).digest(), all.digest());
    assert_ne!(half.digest(), all.digest());
}

#[test]
fn the_cargo_registry_is_a_corpus_of_rust() {
    let corpus = match Corpus::cargo_registry(200_000) {
        Ok(corpus) => corpus,
        // A vendored build has no registry; the error then names the remedy.
        Err(error) => {
            assert!(error.to_string().contains("cargo fetch"), "{error}");
            return;
        }
    };
    assert!((200_000..200_000 + (512 << 10)).contains(&corpus.total_bytes()));
    assert!(
        corpus
            .files()
            .iter()
            .all(|file| file.name.ends_with(".rs") && file.bytes <= 512 << 10)
    );
    let digests: std::collections::HashSet<_> = corpus.files().iter().map(|f| f.digest).collect();
    assert_eq!(digests.len(), corpus.files().len());
    assert_eq!(
        corpus.digest(),
        Corpus::cargo_registry(200_000).unwrap().digest()
    );
}
