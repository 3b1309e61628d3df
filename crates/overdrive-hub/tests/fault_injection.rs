//! Every system call of a download on the cache fails in turn.
//! It is a program of its own, since it starts itself again under a preloaded library.
#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

#[path = "../../../faults/mod.rs"]
mod faults;
#[path = "it/server.rs"]
#[allow(dead_code, reason = "the other tests use the rest")]
mod server;

use std::fs;
use std::path::Path;

use faults::{Case, Fault, contents, under_injection};
use overdrive_hub::{Result, model_path};
use server::{Hub, NAME, weights};

/// Larger than a buffer of the download, so that it takes several writes.
const LENGTH: usize = 600_000;

/// Downloads the model and compares it; no other name than that of a complete file may be there.
fn download(hub: &Hub, cache: &Path) -> Result<()> {
    let path = model_path(NAME, &hub.options(cache))?;
    assert!(fs::read(path.join("model.safetensors")).unwrap() == weights(LENGTH));
    assert_eq!(fs::read(path.join("config.json")).unwrap(), b"{}");
    Ok(())
}

#[test]
fn a_fault_in_any_call_of_a_download_is_an_error_or_harmless() {
    let name = "a_fault_in_any_call_of_a_download_is_an_error_or_harmless";
    under_injection(name, |faults| {
        let hub = Hub::new(&[
            ("config.json", b"{}"),
            ("model.safetensors", &weights(LENGTH)),
        ]);
        for fault in Fault::ALL {
            let calls = faults.every_call(fault, |case: &Case| {
                let cache = case.folder.join("hub");
                fs::create_dir(&cache).unwrap();
                let (first, call) =
                    faults.during(case, || model_path(NAME, &hub.options(&cache)).map(drop));
                let place = format!("{case:?}, {call:?}");
                if let Err(error) = &first {
                    assert!(call.is_some() && fault != Fault::Short, "{place}: {error}");
                }
                // A file with its final name is complete, whatever failed.
                for (name, bytes) in contents(&cache, &[".lock", ".incomplete", ".tmp"]) {
                    let is_listing = || serde_json::from_slice::<Vec<String>>(&bytes).is_ok();
                    let complete = [b"{}".to_vec(), weights(LENGTH)].contains(&bytes)
                        || name.ends_with("refs/main")
                        || is_listing();
                    assert!(complete, "{place}: {name:?} has {} bytes", bytes.len());
                }
                download(&hub, &cache).unwrap_or_else(|error| panic!("{place}: {error}"));
                let left = contents(&cache, &[".lock"]);
                let left = left.iter().filter(|(name, _)| {
                    name.extension()
                        .is_some_and(|end| end == "incomplete" || end == "tmp")
                });
                assert_eq!(left.count(), 0, "{place}");
            });
            let least = match fault {
                Fault::Error => 25,
                Fault::FullDisk => 5,
                Fault::Short => 1,
            };
            assert!(calls >= least, "{fault:?}: only {calls} calls");
        }
    });
}
