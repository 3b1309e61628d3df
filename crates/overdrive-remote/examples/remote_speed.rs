//! Records per second of a file on a server beside those of a local copy. The server is one of this machine that waits 5 ms
//! before each answer.
//!
//! ```text
//! cargo run --release -p overdrive-remote --example remote_speed [RECORDS]
//! cargo run --release -p overdrive-remote --example remote_speed serve FILE      # the server alone, for other readers
//! ```
#![allow(clippy::unwrap_used, reason = "a program that measures may panic")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use overdrive_core::print_line;
use overdrive_datasets::{
    DataLoader, DataLoaderOptions, IndexLocation, IndexOptions, JsonOptions, JsonRecords,
};
use overdrive_remote::{RemoteOptions, open};
use serde_json::Value;

use server::{Reply, Server};

#[allow(dead_code, reason = "the tests use all of it")]
#[path = "../tests/it/server.rs"]
mod server;

const LATENCY: Duration = Duration::from_millis(5);
/// The measurement of one process: `PATH|FOLDER|CACHE_BYTES|BLOCK_BYTES|WORKERS|SHUFFLE`.
const MEASURE: &str = "OVERDRIVE_REMOTE_SPEED";

fn main() {
    if let Ok(given) = std::env::var(MEASURE) {
        return measure(&given);
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [command, path] = arguments.as_slice()
        && command == "serve"
    {
        let name = Path::new(path).file_name().unwrap().to_string_lossy();
        let server = start(&name, &std::fs::read(path).unwrap());
        print_line(server.url(&name));
        loop {
            std::thread::park();
        }
    }
    let records = arguments
        .first()
        .map_or(100_000, |text| text.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| {
        format!(
            "{{\"id\": {i}, \"text\": \"{}\"}}\n",
            "word ".repeat(60 + i * 7919 % 80)
        )
    };
    let text: String = (0..records).map(line).collect();
    let local = folder.path().join("data.jsonl");
    std::fs::write(&local, &text).unwrap();
    let server = start("data.jsonl", text.as_bytes());
    let url = server.url("data.jsonl");
    let megabytes = text.len() as f64 / 1e6;
    print_line(format_args!(
        "{records} records, {megabytes:.0} MB, {} before each answer\n{}",
        "5 ms",
        processor()
    ));
    let (all, quarter) = (64_u64 << 30, text.len() as u64 / 4);
    let local = local.display().to_string();
    for workers in [0, 4] {
        let run = |what: &str, path: &str, cache: &str, limit: u64, block: u64, shuffle: bool| {
            let cache = folder.path().join(cache);
            let before = server.requests().len();
            let given = format!(
                "{path}|{}|{limit}|{block}|{workers}|{shuffle}",
                cache.display()
            );
            let output = Command::new(std::env::current_exe().unwrap())
                .env(MEASURE, given)
                .output();
            let output = String::from_utf8_lossy(&output.unwrap().stdout).into_owned();
            let requests = server.requests().len() - before;
            print_line(format_args!(
                "{what:56} {workers} workers  {}, {requests} requests",
                output.trim()
            ));
        };
        let name = |text: &str| format!("{text}{workers}");
        run("local file, shuffled", &local, "local", all, 1 << 20, true);
        run(
            "server, no index and no cache yet, shuffled",
            &url,
            &name("a"),
            all,
            1 << 20,
            true,
        );
        run(
            "server, the second run, shuffled",
            &url,
            &name("a"),
            all,
            1 << 20,
            true,
        );
        std::fs::remove_dir_all(folder.path().join(name("a")).join("blocks")).unwrap();
        run(
            "server, an index but an empty cache, in order",
            &url,
            &name("a"),
            all,
            1 << 20,
            false,
        );
        std::fs::remove_dir_all(folder.path().join(name("a")).join("blocks")).unwrap();
        run(
            "server, an index but an empty cache, shuffled",
            &url,
            &name("a"),
            all,
            1 << 20,
            true,
        );
        run(
            "server, a cache of a quarter, blocks of 64 KiB, shuffled",
            &url,
            &name("b"),
            quarter,
            64 << 10,
            true,
        );
    }
}

fn start(name: &str, bytes: &[u8]) -> Server {
    Server::with_faults(&[(name, bytes)], |_, reply| Reply {
        delay: LATENCY,
        ..reply
    })
}

/// Reads an epoch and prints the records per second, and the time until the first batch.
fn measure(given: &str) {
    let words: Vec<&str> = given.split('|').collect();
    let [path, folder, cache_bytes, block_bytes, workers, shuffle] = words[..] else {
        panic!("{given}");
    };
    let folder = Path::new(folder);
    let mut options = RemoteOptions::new(folder.join("blocks"));
    options.cache_bytes = cache_bytes.parse().unwrap();
    options.block_bytes = block_bytes.parse().unwrap();
    let started = Instant::now();
    let path = match path.contains("://") {
        true => open(path, &options).unwrap(),
        false => PathBuf::from(path),
    };
    let json = JsonOptions {
        index: IndexOptions {
            location: IndexLocation::Folder(folder.join("indexes")),
            ..IndexOptions::default()
        },
        ..JsonOptions::default()
    };
    std::fs::create_dir_all(folder.join("indexes")).unwrap();
    let records = JsonRecords::<Value>::open([path], &json).unwrap();
    let opened = started.elapsed();
    let loading = DataLoaderOptions {
        batch_size: 32,
        shuffle: shuffle == "true",
        num_workers: workers.parse().unwrap(),
        ..DataLoaderOptions::default()
    };
    let mut loader = DataLoader::new(records, loading).unwrap();
    let started = Instant::now();
    let count: usize = loader.epoch().map(|batch| batch.unwrap().len()).sum();
    let seconds = started.elapsed().as_secs_f64();
    print_line(format_args!(
        "{:8.0} records/s, opened in {:6.2} s",
        count as f64 / seconds,
        opened.as_secs_f64()
    ));
}

fn processor() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model.map_or("unknown processor", |text| {
        text.trim_start_matches([' ', '\t', ':'])
    });
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{model}, {cores} cores")
}
