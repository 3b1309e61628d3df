//! Every system call of unpacking a libtorch, of replacing one and of recording one fails in turn.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_build::cache::{self, Variant};
use overdrive_build::{Environment, Release};

use super::install::{install, tests};
use super::search::cached;
use crate::failure::{Failure, Result};
use crate::faults::{Case, Fault, Faults, contents, under_injection};
use crate::record::{Choice, Record};
use crate::sources::Platform;
use crate::unpack;

/// The archives of a small libtorch, in a folder of their own.
fn archives(folder: &Path) -> Vec<PathBuf> {
    let (torch, cuda) = (folder.join("t.whl"), folder.join("c.whl"));
    tests::wheel(&torch, &tests::TORCH);
    tests::wheel(&cuda, &[("nvidia/cu13/lib/libcudart.so.13", "rt")]);
    vec![torch, cuda]
}

fn environment(folder: &Path) -> Environment {
    Environment::made_up("linux", [("XDG_CACHE_HOME", folder)])
}

/// Unpacks as `fetch` does with what it has downloaded.
fn install_again(archives: &[PathBuf], target: &Path) -> Result<()> {
    fs::create_dir_all(target.parent().unwrap()).map_err(|e| Failure::io("create", target, &e))?;
    unpack::sweep(target);
    install(
        archives,
        target,
        Release::DEFAULT,
        Platform::LinuxX86,
        Variant::Cpu,
    )
}

fn check(faults: &Faults, replaces: bool) {
    let archives = archives(faults.folder());
    let reference = faults.folder().join("reference");
    install_again(&archives, &reference).unwrap();
    let files = contents(&reference, &[]);
    for fault in Fault::ALL {
        let calls = faults.every_call(fault, |case: &Case| {
            let environment = environment(&case.folder);
            let target = cache::libtorch_dir(&environment, Release::DEFAULT, Variant::Cpu).unwrap();
            if replaces {
                install_again(&archives, &target).unwrap();
            }
            let (done, call) = faults.during(case, || install_again(&archives, &target));
            let place = format!("{case:?}, {call:?}");
            if call.is_none() || fault == Fault::Short {
                done.as_ref()
                    .unwrap_or_else(|error| panic!("{place}: {error}"));
            }
            // A libtorch that builds can see is whole, and one that was there before still is.
            assert!(
                target.exists() || !(done.is_ok() || replaces),
                "{place}: none is there"
            );
            if target.exists() {
                assert!(contents(&target, &[]) == files, "{place}: half of it");
                assert!(
                    cached(&environment, Release::DEFAULT, Variant::Cpu).is_some(),
                    "{place}"
                );
            }
            // A disk that fails is no reason to download half a gigabyte again.
            assert!(
                archives.iter().all(|archive| archive.exists()),
                "{place}: removed"
            );
            install_again(&archives, &target).unwrap_or_else(|error| panic!("{place}: {error}"));
            let all = contents(target.parent().unwrap(), &[]);
            assert_eq!(all.len(), files.len(), "{place}: leftovers");
            assert!(contents(&target, &[]) == files, "{place}: other bytes");
        });
        assert!(calls > 5, "{fault:?}: only {calls} calls");
    }
}

#[test]
fn a_fault_in_any_call_of_unpacking_leaves_no_half_of_a_libtorch() {
    let name =
        "setup::fault_injection::a_fault_in_any_call_of_unpacking_leaves_no_half_of_a_libtorch";
    under_injection(name, |faults| check(faults, false));
}

#[test]
fn a_fault_in_any_call_of_replacing_a_libtorch_keeps_the_old_or_the_new_one() {
    let name = "setup::fault_injection::\
                a_fault_in_any_call_of_replacing_a_libtorch_keeps_the_old_or_the_new_one";
    under_injection(name, |faults| check(faults, true));
}

#[test]
fn a_libtorch_that_is_not_whole_is_not_used_whatever_fails_while_it_is_looked_at() {
    let name = "setup::fault_injection::\
                a_libtorch_that_is_not_whole_is_not_used_whatever_fails_while_it_is_looked_at";
    under_injection(name, |faults| {
        let archives = archives(faults.folder());
        let calls = faults.every_call(Fault::Error, |case| {
            let environment = environment(&case.folder);
            let target = cache::libtorch_dir(&environment, Release::DEFAULT, Variant::Cpu).unwrap();
            install_again(&archives, &target).unwrap();
            fs::write(target.join("lib/libc10.so"), "c").unwrap();
            let (found, call) = faults.during(case, || {
                cached(&environment, Release::DEFAULT, Variant::Cpu)
            });
            assert!(found.is_none(), "{case:?}, {call:?}");
        });
        assert!(calls > 5, "only {calls} calls");
    });
}

#[test]
fn a_fault_in_any_call_of_recording_keeps_the_old_or_the_new_record() {
    let name =
        "setup::fault_injection::a_fault_in_any_call_of_recording_keeps_the_old_or_the_new_record";
    under_injection(name, |faults| {
        let record = |path: &str| Record {
            libtorch: PathBuf::from(path),
            choice: Choice::Cpu,
        };
        let (old, new) = (record("/old"), record("/new"));
        for fault in Fault::ALL {
            faults.every_call(fault, |case| {
                fs::create_dir(case.folder.join(".cargo")).unwrap();
                old.write(&case.folder).unwrap();
                let (written, call) = faults.during(case, || new.write(&case.folder));
                let read = Record::read(&case.folder).unwrap();
                match written {
                    Ok(_) => assert_eq!(read, new, "{case:?}, {call:?}"),
                    Err(error) => assert!(
                        call.is_some() && (read == old || read == new),
                        "{case:?}, {call:?}: {error}"
                    ),
                }
                new.write(&case.folder).unwrap();
                assert_eq!(contents(&case.folder, &[]).len(), 1, "{case:?}, {call:?}");
            });
        }
    });
}
