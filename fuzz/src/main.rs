//! One fuzzer for all readers of foreign bytes; `OVERDRIVE_FUZZ_TARGET` selects the reader, `list` prints their
//! names. It is one program and not one for each reader, because each would be linked with everything again.
//! `cargo xtask fuzz` builds and runs it.
#![no_main]

#[path = "../../crates/overdrive-datasets/tests/common/fuzz.rs"]
#[allow(dead_code, reason = "the tests of the crate use the rest")]
mod datasets;
mod readers;
mod seeds;

use std::path::PathBuf;
use std::sync::OnceLock;

use readers::{Reader, readers};

static READER: OnceLock<Reader> = OnceLock::new();

/// Returns the reader that the environment names. Writes its valid inputs into the folder that
/// `OVERDRIVE_FUZZ_CORPUS` names, from which the search starts.
fn chosen() -> Reader {
    // libFuzzer's hook ends the process at every panic; a reader may catch those of a library that it uses. One that
    // leaves the reader still ends the process.
    drop(std::panic::take_hook());
    let name = std::env::var("OVERDRIVE_FUZZ_TARGET").unwrap_or_else(|_| "list".to_owned());
    let folder = std::env::var_os("OVERDRIVE_FUZZ_SCRATCH").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| std::env::temp_dir().join("overdrive-fuzz"));
    std::fs::create_dir_all(&folder).expect("a folder for temporary files");
    let mut all = readers(&folder);
    let Some(at) = all.iter().position(|reader| reader.name == name) else {
        let names: Vec<&str> = all.iter().map(|reader| reader.name).collect();
        println!("{}", names.join("\n"));
        std::process::exit(i32::from(name != "list"));
    };
    let reader = all.swap_remove(at);
    if let Some(corpus) = std::env::var_os("OVERDRIVE_FUZZ_CORPUS").map(PathBuf::from) {
        for (number, seed) in reader.seeds.iter().enumerate() {
            std::fs::write(corpus.join(format!("seed-{number}")), seed).expect("a corpus folder");
        }
    }
    reader
}

libfuzzer_sys::fuzz_target!(
    init: {
        READER.get_or_init(chosen);
    },
    |bytes: &[u8]| {
        (READER.get_or_init(chosen).read)(bytes);
    }
);
