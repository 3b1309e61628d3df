//! Every system call of a cache write and of an index build fails in turn: token stores, trained tokenizers, maps,
//! indexes, unpacked files. The files that are read lie below the same folder, so that reading fails too.
//! It is a program of its own, since it starts itself again under a preloaded library.
#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

mod common;
#[path = "../../../faults/mod.rs"]
mod faults;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use common::{fixture, text, tokenizer, write_files};
use faults::{Case, Fault, Faults, contents, under_injection};
use overdrive_datasets::{
    BpeOptions, BuildOptions, CacheOptions, Corpus, CorpusOptions, Dataset, Error, IndexLocation,
    IndexOptions, JsonLayout, JsonOptions, JsonRecords, MapCache, Result, TextLines, TextOptions,
    build_tokens, load_tokenizer, train_bpe_cached,
};
use serde_json::Value;

/// Runs `operation` on `data` and a cache folder, with a fault in each of its calls. A run with a fault gives an
/// error or the result of one without; the next run gives that result, and leaves the same files and no others.
fn check<T: PartialEq>(
    faults: &Faults,
    data: &Path,
    operation: impl Fn(&Path, &Path) -> Result<T>,
) {
    // This crate's folder in the user's cache, which `under_injection` has moved.
    let cache = faults.folder().join("cache/overdrive");
    let result = operation(data, &cache).unwrap();
    let files = cached(&cache);
    assert!(!files.is_empty(), "nothing is cached");
    let mut seen = BTreeSet::new();
    for fault in Fault::ALL {
        let calls = faults.every_call(fault, |case: &Case| {
            std::fs::remove_dir_all(&cache).unwrap();
            let (first, call) = faults.during(case, || operation(data, &cache));
            let place = format!("{case:?}, {call:?}");
            seen.extend(call.clone());
            match first {
                Ok(first) => assert!(first == result, "{place}: another result"),
                Err(error) => {
                    assert!(call.is_some() && fault != Fault::Short, "{place}: {error}");
                    // A full disk is no error of the data, and the remedy is that of the cache.
                    assert!(
                        fault != Fault::FullDisk || matches!(error, Error::CacheFolder { .. }),
                        "{place}: {error:?}"
                    );
                }
            }
            let again = operation(data, &cache).unwrap_or_else(|error| panic!("{place}: {error}"));
            assert!(again == result, "{place}: another result of the next run");
            assert!(cached(&cache) == files, "{place}: {:?}", names(&cache));
        });
        // Fewer would mean that the library does not see them. An index takes room five times, in two writes.
        let least = match fault {
            Fault::Error => 25,
            Fault::FullDisk => 5,
            Fault::Short => 1,
        };
        assert!(calls >= least, "{fault:?}: only {calls} calls");
    }
    // tempfile's own, which is trapped.
    if cfg!(target_arch = "x86_64") {
        assert!(seen.contains("renameat"), "{seen:?}");
    }
}

/// Returns everything in the cache but the locks, which stay, and the times beside the digests.
fn cached(cache: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut files = contents(cache, &[".lock"]);
    for (name, content) in &mut files {
        if name
            .extension()
            .is_some_and(|extension| extension == "digest")
        {
            let line = content.iter().position(|&byte| byte == b'\n').unwrap();
            content.truncate(line);
        }
    }
    files
}

fn names(cache: &Path) -> Vec<PathBuf> {
    let files = contents(cache, &[]);
    files.into_iter().map(|(name, _)| name).collect()
}

fn sources(faults: &Faults) -> PathBuf {
    let data = faults.folder().join("data");
    let files: Vec<_> = (0..3).map(|i| (format!("{i}.rs"), text(i))).collect();
    let files: Vec<_> = files
        .iter()
        .map(|(name, text)| (name.as_str(), text))
        .collect();
    write_files(&data, &files);
    data
}

fn corpus(data: &Path) -> Result<Corpus> {
    Corpus::from_paths([data], &CorpusOptions::default())
}

/// Returns options with an index in `folder`, built by one thread, so that the order of the calls is fixed.
fn index(folder: &Path) -> IndexOptions {
    IndexOptions {
        location: IndexLocation::Folder(folder.to_owned()),
        threads: Some(1),
        ..IndexOptions::default()
    }
}

#[test]
fn a_fault_in_any_call_of_a_token_store_is_an_error_or_harmless() {
    let name = "a_fault_in_any_call_of_a_token_store_is_an_error_or_harmless";
    under_injection(name, |faults| {
        let (data, tokenizer) = (sources(faults), tokenizer());
        let options = BuildOptions {
            threads: Some(1),
            ..BuildOptions::default()
        };
        check(faults, &data, |data, cache| {
            let built = build_tokens(&corpus(data)?, &tokenizer, &options, cache)?;
            built.store.verify()?;
            built.store.tokens(0..built.store.len())
        });
    });
}

#[test]
fn a_fault_in_any_call_of_a_trained_tokenizer_is_an_error_or_harmless() {
    let name = "a_fault_in_any_call_of_a_trained_tokenizer_is_an_error_or_harmless";
    under_injection(name, |faults| {
        let options = BpeOptions {
            vocab_size: 280,
            ..BpeOptions::default()
        };
        check(faults, &sources(faults), |data, cache| {
            let corpus = corpus(data)?;
            let texts = corpus.sample(1 << 20);
            let trained = train_bpe_cached(texts, corpus.digest(), &options, cache)?;
            Ok(trained.tokenizer.to_string(false).unwrap())
        });
    });
}

#[test]
fn a_fault_in_any_call_of_an_index_is_an_error_or_harmless() {
    let name = "a_fault_in_any_call_of_an_index_is_an_error_or_harmless";
    under_injection(name, |faults| {
        let lines: String = (0..60_000)
            .map(|line| format!("line {line} of the data\n"))
            .collect();
        // Smaller files get no index file.
        assert!(lines.len() > 1 << 20);
        let data = faults.folder().join("data.txt");
        std::fs::write(&data, lines).unwrap();
        check(faults, &data, |data, cache| {
            let options = TextOptions {
                index: index(cache),
                ..TextOptions::default()
            };
            let lines = TextLines::open([data], &options)?;
            let some = [0, 1, 29_999, 59_999].map(|line| lines.get(line));
            let some: Result<Vec<String>> = some.into_iter().collect();
            Ok((lines.len(), some?))
        });
    });
}

#[test]
fn a_fault_in_any_call_of_a_cached_map_is_an_error_or_harmless() {
    let name = "a_fault_in_any_call_of_a_cached_map_is_an_error_or_harmless";
    under_injection(name, |faults| {
        let lines: String = (0..50).map(|line| format!("{{\"n\": {line}}}\n")).collect();
        let data = faults.folder().join("data.jsonl");
        std::fs::write(&data, lines).unwrap();
        check(faults, &data, |data, cache| {
            let json = JsonOptions {
                layout: JsonLayout::Lines,
                index: index(cache),
            };
            let records = JsonRecords::<Value>::open([data], &json)?;
            let map = MapCache {
                input: records.records().fingerprint()?,
                name: "double",
                version: 1,
            };
            let options = CacheOptions {
                folder: Some(cache.to_owned()),
                threads: Some(1),
                index: index(cache),
            };
            let double = |value: Value| Ok(2 * value["n"].as_u64().unwrap());
            let doubled = map.map(&records, double, &options)?;
            (0..doubled.len())
                .map(|record| doubled.get(record))
                .collect::<Result<Vec<u64>>>()
        });
    });
}

#[test]
fn a_fault_in_any_call_of_unpacking_is_an_error_or_harmless() {
    let name = "a_fault_in_any_call_of_unpacking_is_an_error_or_harmless";
    under_injection(name, |faults| {
        let data = faults.folder().join("single.txt.gz");
        std::fs::copy(fixture("compressed/single_stream.txt.gz"), &data).unwrap();
        check(faults, &data, |data, cache| {
            let options = TextOptions {
                index: IndexOptions {
                    unpack: true,
                    ..index(cache)
                },
                ..TextOptions::default()
            };
            let lines = TextLines::open([data], &options)?;
            Ok((lines.len(), lines.get(lines.len() - 1)?))
        });
    });
}

#[test]
fn a_tokenizer_that_is_saved_is_whole_or_not_there() {
    under_injection(
        "a_tokenizer_that_is_saved_is_whole_or_not_there",
        |faults| {
            let tokenizer = tokenizer();
            let digest = overdrive_datasets::tokenizer_digest(&tokenizer).unwrap();
            let save = |folder: &Path| {
                overdrive_datasets::save_tokenizer(folder, &tokenizer, Some("<|endoftext|>"), 64)
            };
            for fault in Fault::ALL {
                faults.every_call(fault, |case| {
                    let folder = case.folder.join("tokenizer");
                    let (saved, call) = faults.during(case, || save(&folder));
                    assert!(saved.is_ok() || call.is_some(), "{case:?}: {saved:?}");
                    if saved.is_ok() || folder.join("tokenizer.json").exists() {
                        let read = load_tokenizer(&folder).unwrap();
                        let read = overdrive_datasets::tokenizer_digest(&read).unwrap();
                        assert!(read == digest, "{case:?}, {call:?}");
                    }
                    save(&folder).unwrap();
                    assert_eq!(names(&folder).len(), 2, "{case:?}, {call:?}");
                });
            }
        },
    );
}
