//! The order of a shuffled run, and its resume.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use overdrive_datasets::{
    DataLoader, DataLoaderOptions, Dataset, DatasetExt, IndexLocation, IndexOptions, JsonOptions,
    JsonRecords,
};
use overdrive_remote::open;
use serde_json::Value;

use crate::records::json_lines;
use crate::server::{Server, options};

fn loader(path: PathBuf, options: DataLoaderOptions) -> DataLoader<Vec<Value>> {
    let json = JsonOptions {
        index: IndexOptions {
            location: IndexLocation::Memory,
            ..IndexOptions::default()
        },
        ..JsonOptions::default()
    };
    DataLoader::new(JsonRecords::open([path], &json).unwrap(), options).unwrap()
}

#[test]
fn a_shuffled_run_and_its_resume_are_those_of_a_local_copy() {
    let folder = tempfile::tempdir().unwrap();
    let lines = json_lines();
    let server = Server::new(&[("a.jsonl", lines.as_bytes())]);
    let local = folder.path().join("a.jsonl");
    std::fs::write(&local, &lines).unwrap();
    let remote = open(&server.url("a.jsonl"), &options(folder.path())).unwrap();
    for world_size in [1, 2] {
        for rank in 0..world_size {
            let of = |num_workers| DataLoaderOptions {
                batch_size: 16,
                shuffle: true,
                seed: 5,
                num_workers,
                rank,
                world_size,
                ..DataLoaderOptions::default()
            };
            let mut expected = loader(local.clone(), of(0));
            let expected: Vec<Vec<Value>> = (0..2)
                .flat_map(|_| expected.epoch().map(Result::unwrap).collect::<Vec<_>>())
                .collect();
            for workers in [0, 1, 4] {
                let mut whole = loader(remote.clone(), of(workers));
                let mut found: Vec<Vec<Value>> = Vec::new();
                for _ in 0..2 {
                    found.extend(whole.epoch().map(Result::unwrap));
                }
                assert_eq!(
                    found, expected,
                    "rank {rank} of {world_size}, {workers} workers"
                );
                // Stopped in the middle of an epoch, and resumed with another number of workers.
                let mut first = loader(remote.clone(), of(workers));
                let batches = 7;
                for batch in &expected[..batches] {
                    assert_eq!(first.next_batch().unwrap().unwrap(), *batch);
                }
                let mut second = loader(remote.clone(), of(4 - workers));
                second.load_state_dict(first.state_dict()).unwrap();
                drop(first);
                let rest: Vec<Vec<Value>> = second.epoch().map(Result::unwrap).collect();
                assert_eq!(rest, expected[batches..expected.len() / 2]);
            }
        }
    }
}

/// Numbers that note what is announced and what is read.
#[derive(Default)]
struct Noted(Mutex<Vec<Vec<usize>>>);

impl Dataset for Noted {
    type Item = usize;

    fn len(&self) -> usize {
        10
    }

    fn get(&self, index: usize) -> overdrive_datasets::Result<usize> {
        self.0.lock().unwrap().push(vec![index]);
        Ok(index)
    }

    fn prefetch(&self, indices: &[usize]) {
        self.0.lock().unwrap().push(indices.to_vec());
    }
}

#[test]
fn a_loader_announces_the_records_of_a_batch_before_it_reads_them() {
    let noted = Arc::new(Noted::default());
    let options = DataLoaderOptions {
        batch_size: 3,
        ..DataLoaderOptions::default()
    };
    // Through a transform, which passes the call on.
    let later = Arc::clone(&noted).skip(2);
    let mut loader = DataLoader::new(later, options).unwrap();
    assert_eq!(loader.next_batch().unwrap().unwrap(), [2, 3, 4]);
    let expected: [&[usize]; 4] = [&[2, 3, 4], &[2], &[3], &[4]];
    assert_eq!(*noted.0.lock().unwrap(), expected);
}
