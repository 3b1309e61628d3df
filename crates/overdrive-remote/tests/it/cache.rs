//! Requests are few, and the cache keeps what they brought.

use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use overdrive_datasets::{RangeSource, registered_source};
use overdrive_remote::{RemoteOptions, open};

use crate::server::{Reply, Request, Server, options};

const BLOCK: usize = 4096;

fn content(blocks: usize) -> Vec<u8> {
    (0..blocks * BLOCK)
        .map(|at| (at * 31 + at / BLOCK) as u8)
        .collect()
}

fn source(server: &Server, options: &RemoteOptions) -> Arc<dyn RangeSource> {
    registered_source(open(&server.url("a"), options).unwrap()).unwrap()
}

fn read(source: &dyn RangeSource, start: usize, end: usize) -> Vec<u8> {
    let mut out = vec![0; end - start];
    source.read_at(start as u64, &mut out).unwrap();
    out
}

#[test]
fn neighbouring_blocks_are_one_request_and_each_block_is_requested_once() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = content(100);
    let server = Server::new(&[("a", &bytes)]);
    let source = source(&server, &options(folder.path()));
    // Blocks 10 to 19 and block 50, announced in any order and twice.
    let block = |number: u64| number * BLOCK as u64..number * BLOCK as u64 + 100;
    let mut ranges: Vec<_> = (10..20).rev().map(block).collect();
    ranges.push(block(50));
    source.prefetch(&ranges);
    source.prefetch(&ranges);
    for number in [50, 10, 19, 15] {
        let at = number * BLOCK;
        assert_eq!(
            read(source.as_ref(), at + 7, at + 90),
            bytes[at + 7..at + 90]
        );
    }
    let mut asked: Vec<_> = server
        .reads()
        .iter()
        .map(|request| request.range().unwrap())
        .collect();
    asked.sort();
    assert_eq!(asked, [(10 * BLOCK, 20 * BLOCK), (50 * BLOCK, 51 * BLOCK)]);
}

#[test]
fn announced_ranges_are_requested_at_the_same_time() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = content(100);
    let waiting = Arc::new((Mutex::new(0), Condvar::new()));
    let held = Arc::clone(&waiting);
    // No answer before four requests are there; without them the test fails after a minute.
    let together = move |request: &Request, reply: Reply| {
        if !request.is_opening() {
            let mut count = held.0.lock().unwrap();
            *count += 1;
            held.1.notify_all();
            let (count, _) = held
                .1
                .wait_timeout_while(count, Duration::from_secs(60), |count| *count < 4)
                .unwrap();
            assert!(*count >= 4);
        }
        reply
    };
    let server = Server::with_faults(&[("a", &bytes)], together);
    let source = source(&server, &options(folder.path()));
    let ranges: Vec<_> = [5, 20, 40, 90]
        .map(|block: u64| block * BLOCK as u64..block * BLOCK as u64 + 1)
        .into();
    source.prefetch(&ranges);
    assert_eq!(
        read(source.as_ref(), 40 * BLOCK, 40 * BLOCK + 1),
        bytes[40 * BLOCK..40 * BLOCK + 1]
    );
    assert_eq!(*waiting.0.lock().unwrap(), 4);
}

#[test]
fn a_reader_in_order_has_the_next_blocks_requested_ahead() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = content(200);
    let server = Server::new(&[("a", &bytes)]);
    let source = source(&server, &options(folder.path()));
    for (number, part) in bytes.chunks(500).enumerate() {
        assert_eq!(
            read(source.as_ref(), number * 500, number * 500 + part.len()),
            part
        );
    }
    let requests = server.reads().len();
    assert!(requests < 60, "{requests} requests of 200 blocks");
}

#[test]
fn random_reads_request_only_their_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = content(200);
    let server = Server::new(&[("a", &bytes)]);
    let source = source(&server, &options(folder.path()));
    for step in 1..20 {
        let at = step * 79 % 200 * BLOCK + 9;
        assert_eq!(read(source.as_ref(), at, at + 20), bytes[at..at + 20]);
    }
    assert_eq!(server.reads().len(), 19);
    // Across a border, both.
    assert_eq!(
        read(source.as_ref(), 50 * BLOCK - 5, 50 * BLOCK + 5),
        bytes[50 * BLOCK - 5..50 * BLOCK + 5]
    );
}

#[test]
fn a_second_run_reads_from_the_cache_and_a_new_version_is_read_anew() {
    const CHILD: &str = "OVERDRIVE_TEST_SECOND_RUN";
    let name = "cache::a_second_run_reads_from_the_cache_and_a_new_version_is_read_anew";
    let bytes = content(20);
    // The second run, in a process of its own.
    if let Ok(given) = std::env::var(CHILD) {
        let (host, folder) = given.split_once('|').unwrap();
        let path = open(&format!("http://{host}/a"), &options(Path::new(folder))).unwrap();
        let source = registered_source(path).unwrap();
        assert!(read(source.as_ref(), 0, bytes.len()) == bytes);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let server = Server::new(&[("a", &bytes)]);
    let first = source(&server, &options(folder.path()));
    assert!(read(first.as_ref(), 0, bytes.len()) == bytes);
    let second_run = || {
        let before = server.reads().len();
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(
                CHILD,
                format!("{}|{}", server.host, folder.path().display()),
            )
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&child.stdout).into_owned();
        assert!(
            child.status.success() && output.contains("1 passed"),
            "{output}"
        );
        server.reads().len() - before
    };
    assert_eq!(second_run(), 0);
    // The same bytes as another version: the cache cannot know that they are the same.
    server.set("a", &bytes, "\"version-2\"");
    assert!(second_run() > 0);
}

#[test]
fn a_small_cache_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = content(200);
    let server = Server::new(&[("a", &bytes)]);
    let mut options = options(folder.path());
    options.cache_bytes = 10 * BLOCK as u64;
    let source = source(&server, &options);
    for step in 0..400 {
        let at = step * 79 % 199 * BLOCK + 9;
        assert_eq!(read(source.as_ref(), at, at + BLOCK), bytes[at..at + BLOCK]);
        let size: u64 = std::fs::read_dir(folder.path().join("blocks"))
            .into_iter()
            .flatten()
            .flat_map(|object| {
                std::fs::read_dir(object.unwrap().path())
                    .into_iter()
                    .flatten()
            })
            .filter_map(|block| Some(block.ok()?.metadata().ok()?.len()))
            .sum();
        assert!(size <= options.cache_bytes, "{size} bytes");
    }
}

#[test]
fn a_cache_that_cannot_be_written_costs_only_time() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = content(20);
    let server = Server::new(&[("a", &bytes)]);
    // A file in place of the folder.
    std::fs::write(folder.path().join("blocks"), "").unwrap();
    let source = source(&server, &options(folder.path()));
    assert!(read(source.as_ref(), 0, bytes.len()) == bytes);
    assert!(read(source.as_ref(), 5 * BLOCK, 6 * BLOCK) == bytes[5 * BLOCK..6 * BLOCK]);
}

#[test]
fn a_block_whose_file_cannot_be_read_is_requested_again() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = content(20);
    let server = Server::new(&[("a", &bytes)]);
    let source = source(&server, &options(folder.path()));
    assert_eq!(read(source.as_ref(), 0, 9), bytes[..9]);
    let objects: Vec<_> = std::fs::read_dir(folder.path().join("blocks"))
        .unwrap()
        .map(|object| object.unwrap().path())
        .collect();
    // The cache has something with the name of block 10, and it can neither be read nor replaced.
    std::fs::create_dir_all(objects[0].join("00000010/x")).unwrap();
    let at = 10 * BLOCK;
    assert_eq!(read(source.as_ref(), at, at + 9), bytes[at..at + 9]);
}
