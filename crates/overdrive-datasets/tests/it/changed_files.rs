//! Files that are written to while their records are read, files that changed without their length and time, and files
//! of the cache whose bits changed.

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use overdrive_datasets::{
    BpeOptions, BuildOptions, CacheOptions, Corpus, CorpusOptions, CsvOptions, CsvRecords, Dataset,
    DatasetExt, DeduplicateOptions, Error, IndexLocation, IndexOptions, JsonOptions, JsonRecords,
    MapCache, Result, Selection, TextLines, TextOptions, build_dataset_tokens,
    build_dataset_tokens_to, train_bpe, train_bpe_cached,
};
use serde_json::Value;

use crate::common::tokenizer;

/// The number of records of a file.
const RECORDS: usize = 6000;

fn options() -> BuildOptions {
    BuildOptions {
        threads: Some(2),
        progress: false,
        ..BuildOptions::default()
    }
}

/// Returns the text of record `index` in version `a` or `b`, of the same length.
fn text(version: char, index: usize) -> String {
    format!("{version} document {index:05} has some words of text")
}

fn lines(line: impl Fn(usize) -> String) -> String {
    (0..RECORDS).map(|index| line(index) + "\n").collect()
}

fn json(version: char) -> impl Fn(usize) -> String {
    move |index| format!("{{\"text\": \"{}\"}}", text(version, index))
}

/// Writes `bytes` over the file without a new length, as an editor or `rsync --inplace` does, and sets its modification
/// time back.
fn write_in_place(path: &Path, bytes: &[u8]) {
    // The clock of the file system moves on every few milliseconds.
    std::thread::sleep(Duration::from_millis(30));
    let modified = std::fs::metadata(path).unwrap().modified().unwrap();
    let mut file = File::options().write(true).open(path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), bytes.len() as u64);
    file.seek(SeekFrom::Start(0)).unwrap();
    file.write_all(bytes).unwrap();
    file.set_modified(modified).unwrap();
}

/// Returns a function that writes `bytes` over the file when it is called for the 1000th time or later.
fn once_later(path: PathBuf, bytes: Vec<u8>) -> impl Fn() + Send + Sync {
    let (calls, done) = (
        std::sync::atomic::AtomicUsize::new(0),
        AtomicBool::new(false),
    );
    move || {
        let call = calls.fetch_add(1, Ordering::SeqCst);
        if call >= 1000 && !done.swap(true, Ordering::SeqCst) {
            write_in_place(&path, &bytes);
        }
    }
}

fn expect_changed<T>(result: Result<T>, path: &Path) {
    match result {
        Ok(_) => panic!("{} changed without an error", path.display()),
        Err(Error::FileChanged { path: found }) => assert_eq!(found, path),
        Err(error) => panic!("{error}"),
    }
}

/// Checks that tokens, cached maps and selections of `records` are refused if the file changes meanwhile, and that
/// none of them stays in a cache.
fn check_reader<D: Dataset<Item = String>>(
    path: &Path,
    versions: [&[u8]; 2],
    open: impl Fn() -> Result<D>,
) {
    let dir = tempfile::tempdir().unwrap();
    let reset = || std::fs::write(path, versions[0]).unwrap();
    let later = || once_later(path.to_owned(), versions[1].to_vec());
    let read = |records: D| {
        let change = later();
        records.map(move |text| {
            change();
            Ok(text)
        })
    };
    let store = dir.path().join("a.tokens");

    reset();
    let texts = read(open().unwrap());
    let built = build_dataset_tokens_to(&store, &texts, &tokenizer(), &options());
    expect_changed(built, path);
    assert!(!store.exists());

    reset();
    let texts = read(open().unwrap());
    let cache = MapCache {
        input: overdrive_datasets::Sha256Digest::of(b"input"),
        name: "texts",
        version: 1,
    };
    let maps = CacheOptions {
        folder: Some(dir.path().join("maps")),
        ..CacheOptions::default()
    };
    expect_changed(cache.map(&texts, Ok, &maps), path);
    reset();
    let texts = read(open().unwrap());
    expect_changed(cache.map_batched(&texts, 100, Ok, &maps), path);

    reset();
    let texts = read(open().unwrap());
    let key = |text: &String| text.clone().into_bytes();
    let unique = Selection::deduplicate(texts, key, &DeduplicateOptions::default());
    expect_changed(unique, path);

    // The change is found through every transform.
    reset();
    let texts = open().unwrap().shuffle(7);
    write_in_place(path, versions[1]);
    expect_changed(texts.check_unchanged(), path);

    // Unchanged files are read as before.
    reset();
    let records = open().unwrap();
    let built = build_dataset_tokens_to(&store, &records, &tokenizer(), &options());
    assert_eq!(built.unwrap().0.document_count(), RECORDS);
}

#[test]
fn records_of_a_file_that_changes_while_they_are_read_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let memory = || IndexOptions {
        location: IndexLocation::Memory,
        ..IndexOptions::default()
    };
    let path = dir.path().join("lines.txt");
    let versions = ['a', 'b'].map(|version| lines(|index| text(version, index)));
    check_reader(
        &path,
        [versions[0].as_bytes(), versions[1].as_bytes()],
        || {
            let index = memory();
            TextLines::open(
                [&path],
                &TextOptions {
                    index,
                    ..TextOptions::default()
                },
            )
        },
    );

    let text_of = |record: Value| Ok(record["text"].as_str().unwrap().to_owned());
    let path = dir.path().join("records.jsonl");
    let versions = ['a', 'b'].map(|version| lines(json(version)));
    let open = || {
        let index = memory();
        let records = JsonRecords::<Value>::open(
            [&path],
            &JsonOptions {
                index,
                ..JsonOptions::default()
            },
        );
        Ok(records?.map(text_of))
    };
    check_reader(
        &path,
        [versions[0].as_bytes(), versions[1].as_bytes()],
        open,
    );

    let path = dir.path().join("array.json");
    let versions = ['a', 'b'].map(|version| {
        let elements: Vec<_> = (0..RECORDS).map(json(version)).collect();
        format!("[{}]", elements.join(",\n"))
    });
    let open = || {
        let index = memory();
        let records = JsonRecords::<Value>::open(
            [&path],
            &JsonOptions {
                index,
                ..JsonOptions::default()
            },
        );
        Ok(records?.map(text_of))
    };
    check_reader(
        &path,
        [versions[0].as_bytes(), versions[1].as_bytes()],
        open,
    );

    let path = dir.path().join("rows.csv");
    let versions = ['a', 'b'].map(|version| {
        format!(
            "id,text\n{}",
            lines(|index| format!("{index},{}", text(version, index)))
        )
    });
    let open = || {
        let index = memory();
        let rows = CsvRecords::open(
            [&path],
            &CsvOptions {
                index,
                ..CsvOptions::default()
            },
        )?;
        Ok(rows.map(|row| Ok(row.get("text").unwrap().to_owned())))
    };
    check_reader(
        &path,
        [versions[0].as_bytes(), versions[1].as_bytes()],
        open,
    );
}

#[test]
fn a_record_that_is_half_of_a_new_version_is_reported_as_a_changed_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("records.jsonl");
    std::fs::write(&path, lines(json('a'))).unwrap();
    let records = JsonRecords::<Value>::open([&path], &JsonOptions::default()).unwrap();
    let length = std::fs::metadata(&path).unwrap().len() as usize;
    write_in_place(&path, &vec![b'x'; length]);
    expect_changed(records.get(3), &path);
}

#[test]
fn a_tokenizer_is_not_trained_on_a_corpus_that_changed_after_it_was_listed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    std::fs::write(&path, lines(|index| text('a', index))).unwrap();
    let corpus = Corpus::from_paths([&path], &CorpusOptions::default()).unwrap();
    write_in_place(&path, lines(|index| text('b', index)).as_bytes());
    let options = BpeOptions {
        vocab_size: 280,
        ..BpeOptions::default()
    };
    expect_changed(train_bpe(corpus.sample(1 << 20), &options), &path);
    let cache = dir.path().join("cache");
    expect_changed(
        train_bpe_cached(corpus.sample(1 << 20), corpus.digest(), &options, &cache),
        &path,
    );
}

#[test]
fn cached_tokens_belong_to_the_content_whatever_length_and_time_say() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("records.jsonl");
    let old = lines(json('a'));
    std::fs::write(&path, &old).unwrap();
    let cache = dir.path().join("cache");
    let build = || {
        let records = JsonRecords::<Value>::open([&path], &JsonOptions::default()).unwrap();
        let key = records.records().fingerprint().unwrap();
        let texts = records.map(|record| Ok(record["text"].as_str().unwrap().to_owned()));
        build_dataset_tokens(&texts, key, &tokenizer(), &options(), &cache).unwrap()
    };
    let before = build();
    assert!(!before.was_cached() && build().was_cached());

    // Another record than those of the first and the last page, and not in any of 16 pages.
    let mut new = old.clone().into_bytes();
    let at = new.windows(5).position(|found| found == b"00500").unwrap();
    new[at..at + 5].copy_from_slice(b"99999");
    write_in_place(&path, &new);
    let after = build();
    assert!(!after.was_cached(), "the old tokens are used");
    let all =
        |built: &overdrive_datasets::BuiltTokens| built.store.tokens(0..built.store.len()).unwrap();
    assert_ne!(all(&before), all(&after));

    // The same content at another time and under another name has the same tokens.
    let copy = dir.path().join("copy.jsonl");
    std::fs::write(&copy, &new).unwrap();
    let records = JsonRecords::<Value>::open([&copy], &JsonOptions::default()).unwrap();
    let key = records.records().fingerprint().unwrap();
    let texts = records.map(|record| Ok(record["text"].as_str().unwrap().to_owned()));
    let built = build_dataset_tokens(&texts, key, &tokenizer(), &options(), &cache).unwrap();
    assert!(built.was_cached());
}

/// Changes a byte of the file to another valid one.
fn change_a_byte(path: &Path, from: u8, to: u8) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    let at = middle
        + bytes[middle..]
            .iter()
            .position(|&byte| byte == from)
            .unwrap();
    bytes[at] = to;
    std::fs::write(path, bytes).unwrap();
}

fn only(folder: &Path, end: &str) -> PathBuf {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut paths = entries.map(|entry| entry.unwrap().path());
    paths
        .find(|path| path.to_string_lossy().ends_with(end))
        .unwrap()
}

#[test]
fn a_file_of_the_cache_whose_bits_changed_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines.txt");
    std::fs::write(&path, lines(|index| text('a', index))).unwrap();
    let folder = dir.path().join("cache");
    let read = || TextLines::open([&path], &TextOptions::default()).unwrap();

    // Tokens: the changed one is another of the vocabulary.
    let build = || {
        let records = read();
        let key = records.records().fingerprint().unwrap();
        build_dataset_tokens(&records, key, &tokenizer(), &options(), &folder).unwrap()
    };
    let tokens = build().store.path().to_owned();
    let sound = std::fs::read(&tokens).unwrap();
    assert!(build().was_cached());
    let mut damaged = sound.clone();
    damaged[sound.len() / 4 / 2 * 2] ^= 1;
    std::fs::write(&tokens, damaged).unwrap();
    assert!(!build().was_cached(), "the changed tokens are used");
    assert!(std::fs::read(&tokens).unwrap() == sound);

    // A tokenizer.
    let corpus = Corpus::from_paths([&path], &CorpusOptions::default()).unwrap();
    let bpe = BpeOptions {
        vocab_size: 280,
        ..BpeOptions::default()
    };
    let train = || {
        train_bpe_cached(corpus.sample(1 << 20), corpus.digest(), &bpe, &folder)
            .unwrap()
            .was_cached
    };
    assert!(!train() && train());
    let json = only(&folder, ".tokenizer.json");
    let sound = std::fs::read(&json).unwrap();
    change_a_byte(&json, b'e', b'f');
    assert!(!train(), "the changed tokenizer is used");
    assert!(std::fs::read(&json).unwrap() == sound);

    // The results of a map.
    let records = read();
    let cache = MapCache {
        input: records.records().fingerprint().unwrap(),
        name: "texts",
        version: 1,
    };
    let maps = CacheOptions {
        folder: Some(folder.join("maps")),
        ..CacheOptions::default()
    };
    let map = || cache.map(&records, Ok, &maps).unwrap();
    let sound = map().get(RECORDS / 2).unwrap();
    let results = only(&folder.join("maps"), ".jsonl");
    change_a_byte(&results, b'a', b'b');
    assert_eq!(map().get(RECORDS / 2).unwrap(), sound);
}
