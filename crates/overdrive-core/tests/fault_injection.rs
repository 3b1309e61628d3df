//! A program that writes an output folder is killed in place of each of its system calls, and each call fails in turn.
//! It is a program of its own, since it starts itself again under a preloaded library.
#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

#[path = "../../../faults/mod.rs"]
mod faults;

use std::path::{Path, PathBuf};

use faults::{Fault, contents, killed_at_every_call, under_injection};
use overdrive_core::{OutputFolder, Result, files};

/// The files of a model in the order in which a program writes them: the configuration before the tokenizer.
const OLD: [&str; 4] = [
    "config.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
];
const NEW: [&str; 3] = ["config.json", "model.safetensors", "tokenizer.json"];

fn write(out: &Path, names: &[&str], content: &str) -> Result<()> {
    let unfinished = OutputFolder::check("merge", "--out", out, &[])?.begin()?;
    for name in names {
        files::write(unfinished.path().join(name), content.as_bytes())?;
    }
    unfinished.finish()
}

/// Returns the files of a folder with their contents, but for the mark.
fn found(out: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    contents(out, &[".overdrive-output"])
}

fn expected(names: &[&str], content: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let files = names.iter().map(|name| (name.into(), content.into()));
    files.collect()
}

/// Checks that a folder which is recognized as a model is a whole one, the old or the new.
fn check_whole(out: &Path, place: &str) {
    if out.join("config.json").exists() {
        let visible: Vec<_> = found(out)
            .into_iter()
            .filter(|(path, _)| !path.to_string_lossy().starts_with('.'))
            .collect();
        let is_old = visible == expected(&OLD, "old");
        assert!(
            is_old || visible == expected(&NEW, "new"),
            "{place}: {visible:?}"
        );
    }
}

#[test]
fn a_program_that_is_killed_at_any_call_leaves_a_whole_folder_or_one_that_is_no_model() {
    let test = "a_program_that_is_killed_at_any_call_leaves_a_whole_folder_or_one_that_is_no_model";
    for is_new in [false, true] {
        // The process that is killed runs this test too.
        let prepare = |folder: &Path| {
            if !is_new {
                write(&folder.join("out"), &OLD, "old").unwrap();
            }
        };
        let calls = killed_at_every_call(
            test,
            |folder| write(&folder.join("out"), &NEW, "new").unwrap(),
            prepare,
            |folder, ended| {
                let out = folder.join("out");
                check_whole(&out, if ended { "ended" } else { "killed" });
                // The same command has the same result, and removes what the killed one left.
                write(&out, &NEW, "new").unwrap();
                assert_eq!(found(&out), expected(&NEW, "new"));
            },
        );
        if std::env::var_os("OVERDRIVE_FAULTS").is_some() {
            return;
        }
        assert!(calls > 20, "only {calls} calls");
    }
}

#[test]
fn a_fault_in_any_call_of_an_output_folder_is_an_error_or_harmless() {
    let name = "a_fault_in_any_call_of_an_output_folder_is_an_error_or_harmless";
    under_injection(name, |faults| {
        for fault in Fault::ALL {
            faults.every_call(fault, |case| {
                let out = case.folder.join("out");
                write(&out, &OLD, "old").unwrap();
                let (written, call) = faults.during(case, || write(&out, &NEW, "new"));
                let place = format!("{case:?}, {call:?}");
                assert!(written.is_ok() || call.is_some(), "{place}: {written:?}");
                check_whole(&out, &place);
                write(&out, &NEW, "new").unwrap();
                assert_eq!(found(&out), expected(&NEW, "new"), "{place}");
            });
        }
    });
}
