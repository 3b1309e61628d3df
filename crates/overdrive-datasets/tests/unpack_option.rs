//! Unpacking into the cache. It is a target of its own, since it sets the environment variable of the cache.
#![allow(
    clippy::unwrap_used,
    unsafe_code,
    reason = "a test fails by panicking, and this one sets a variable of its process"
)]

mod common;

use common::fixture;
use overdrive_datasets::{Dataset, IndexOptions, TextLines, TextOptions};

#[test]
fn files_without_blocks_are_unpacked_once_and_read_from_there() {
    let cache = tempfile::tempdir().unwrap();
    // SAFETY: this is the only test of this process, so no other thread reads the environment.
    unsafe { std::env::set_var("XDG_CACHE_HOME", cache.path()) };
    let index = IndexOptions {
        unpack: true,
        ..IndexOptions::default()
    };
    let options = TextOptions {
        index,
        ..TextOptions::default()
    };
    for name in [
        "single_stream.txt.gz",
        "no_size.txt.zst",
        "frames.txt.zst",
        "blocks.txt.gz",
    ] {
        for _ in 0..2 {
            let lines =
                TextLines::open([fixture(&format!("compressed/{name}"))], &options).unwrap();
            assert_eq!(lines.len(), 3000, "{name}");
            assert_eq!(
                lines.get(2999).unwrap(),
                format!("line 2999 {}", "abc".repeat(2999 % 11))
            );
            // Places name the file that was opened.
            assert!(lines.records().location(0).unwrap().path.ends_with(name));
        }
    }
    let unpacked = std::fs::read_dir(cache.path().join("overdrive/unpacked")).unwrap();
    let names: Vec<String> = unpacked
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".unpacked"))
        .collect();
    assert_eq!(names.len(), 4);
}
