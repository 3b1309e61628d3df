//! Datasets: files of a split, downloaded once.

use std::fs;

use overdrive_hub::{Error, data_paths, dataset_paths};

use crate::server::{COMMIT, Hub, NAME, Reply, weights};

const README: &[u8] = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: data/part-*.parquet\n  - split: validation\n    path: data/held.parquet\n---\n";

fn hub(files: &[(&str, &[u8])]) -> Hub {
    Hub::of_dataset(files)
}

#[test]
fn the_files_of_a_split_are_downloaded_once_into_the_cache_of_python() {
    let (first, second) = (weights(1000), weights(2000));
    let hub = hub(&[
        ("README.md", README),
        ("data/part-0.parquet", &first),
        ("data/part-1.parquet", &second),
        ("data/held.parquet", b"held"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let options = hub.options(folder.path());
    let snapshot = folder
        .path()
        .join("datasets--org--name/snapshots")
        .join(COMMIT);
    let train = dataset_paths(NAME, &options).unwrap();
    assert_eq!(
        train,
        ["data/part-0.parquet", "data/part-1.parquet"].map(|file| snapshot.join(file))
    );
    assert_eq!(fs::read(&train[1]).unwrap(), second);
    assert!(!snapshot.join("data/held.parquet").exists());
    hub.requests();
    assert_eq!(dataset_paths(NAME, &options).unwrap(), train);
    assert_eq!(hub.requests().len(), 1, "only the commit is asked for");

    // Another split completes the snapshot; offline, both are there, and a third is an error.
    let held = dataset_paths(format!("{NAME}:validation"), &options).unwrap();
    assert_eq!(held, [snapshot.join("data/held.parquet")]);
    let mut offline = hub.options(folder.path());
    offline.offline = true;
    assert_eq!(dataset_paths(NAME, &offline).unwrap(), train);
    assert_eq!(
        dataset_paths(format!("{NAME}:validation"), &offline).unwrap(),
        held
    );
    assert!(matches!(
        dataset_paths("org/other", &offline),
        Err(Error::Offline { .. })
    ));
    let error = dataset_paths(format!("{NAME}:test"), &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("no split `test`; it has train, validation"),
        "{error}"
    );
    assert_eq!(
        dataset_paths(folder.path(), &options).unwrap(),
        [folder.path()]
    );
    let error = dataset_paths("data/missing.jsonl", &options).unwrap_err();
    assert!(matches!(error, Error::NoSuchPath { .. }), "{error}");
}

#[test]
fn a_download_that_was_cut_short_is_no_complete_split() {
    let part = weights(1000);
    let shard = |number| format!("data/train-{number:05}-of-00002.jsonl");
    let names = [shard(0), shard(1)];
    let files = [
        (names[0].as_str(), &part[..]),
        (names[1].as_str(), &part[1..]),
    ];
    let second = names[1].clone();
    let broken = Hub::of_dataset_with_faults(&files, move |request, reply| {
        match request.is("GET", &second) {
            true => Reply::status(404).with("X-Error-Code", "EntryNotFound"),
            false => reply,
        }
    });
    let folder = tempfile::tempdir().unwrap();
    assert!(dataset_paths(NAME, &broken.options(folder.path())).is_err());
    let hub = hub(&files);
    let mut offline = hub.options(folder.path());
    offline.offline = true;
    assert!(matches!(
        dataset_paths(NAME, &offline),
        Err(Error::Offline { .. })
    ));
    let paths = dataset_paths(NAME, &hub.options(folder.path())).unwrap();
    assert_eq!(fs::read(&paths[1]).unwrap(), part[1..]);
}

#[test]
fn a_part_of_a_pinned_dataset_is_not_taken_for_all_of_it() {
    let hub = hub(&[
        ("de/train.jsonl", b"{\"text\": \"de\"}\n"),
        ("en/train.jsonl", b"{\"text\": \"en\"}\n"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let options = hub.options(folder.path());
    let one = dataset_paths(format!("{NAME}/de@{COMMIT}"), &options).unwrap();
    assert_eq!(one.len(), 1);
    let mut offline = hub.options(folder.path());
    offline.offline = true;
    let whole = format!("{NAME}@{COMMIT}");
    let error = dataset_paths(&whole, &offline).unwrap_err().to_string();
    assert!(
        error.contains("en/train.jsonl is not in the cache"),
        "{error}"
    );
    let all = dataset_paths(&whole, &options).unwrap();
    assert_eq!((all.len(), &all[0]), (2, &one[0]));
    hub.requests();
    // Now the cache has all of it, and its listing: nothing is asked for.
    assert_eq!(dataset_paths(&whole, &options).unwrap(), all);
    assert_eq!(dataset_paths(&whole, &offline).unwrap(), all);
    assert!(hub.requests().is_empty());
}

#[test]
fn a_download_of_files_without_numbers_that_was_cut_short_is_no_complete_split() {
    let files: [(&str, &[u8]); 2] = [("a.jsonl", b"{}\n"), ("b.jsonl", b"{} \n")];
    let broken = Hub::of_dataset_with_faults(&files, |request, reply| {
        match request.is("GET", "b.jsonl") {
            true => Reply::status(404).with("X-Error-Code", "EntryNotFound"),
            false => reply,
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let pinned = format!("{NAME}@{COMMIT}");
    assert!(dataset_paths(&pinned, &broken.options(folder.path())).is_err());
    let hub = hub(&files);
    let mut offline = hub.options(folder.path());
    offline.offline = true;
    assert!(matches!(
        dataset_paths(&pinned, &offline),
        Err(Error::Offline { .. })
    ));
    let paths = dataset_paths(&pinned, &hub.options(folder.path())).unwrap();
    assert_eq!(paths.len(), 2);
}

#[test]
fn the_data_of_a_run_keeps_paths_and_patterns() {
    let hub = hub(&[
        ("train.jsonl", b"{\"text\": \"a\"}\n"),
        ("validation.jsonl", b"{}\n"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let options = hub.options(folder.path());
    let local = folder.path().join("a.txt");
    fs::write(&local, "text").unwrap();
    let data = [
        local.clone(),
        format!("{NAME}:train").into(),
        "b/*.txt".into(),
        "https://host/a.jsonl".into(),
    ];
    let found = data_paths(&data, &options).unwrap();
    let file = folder
        .path()
        .join("datasets--org--name/snapshots")
        .join(COMMIT)
        .join("train.jsonl");
    let expected = [local, file, "b/*.txt".into(), "https://host/a.jsonl".into()];
    assert_eq!(found, expected);
}
