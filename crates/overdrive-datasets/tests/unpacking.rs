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
fn files_without_blocks_are_unpacked_once_and_files_in_blocks_by_the_option() {
    let cache = tempfile::tempdir().unwrap();
    // SAFETY: this is the only test of this process, so no other thread reads the environment.
    unsafe { std::env::set_var("XDG_CACHE_HOME", cache.path()) };
    let unpacked = || {
        let unpacked = std::fs::read_dir(cache.path().join("overdrive/unpacked"));
        let entries = unpacked.into_iter().flatten();
        entries
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .filter(|name| name.ends_with(".unpacked"))
            .count()
    };
    for (name, unpack, count) in [
        ("blocks.txt.gz", false, 0),
        ("frames.txt.zst", false, 0),
        ("single_stream.txt.gz", false, 1),
        ("no_size.txt.zst", false, 2),
        ("frames.txt.zst", true, 3),
        ("blocks.txt.gz", true, 4),
    ] {
        let index = IndexOptions {
            unpack,
            ..IndexOptions::default()
        };
        let options = TextOptions {
            index,
            ..TextOptions::default()
        };
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
        assert_eq!(unpacked(), count, "{name}");
    }
}
