//! Programs that do without CUDA, because they were told to or because its library does not load. The tests run
//! themselves again, because both are decided when a process starts.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Command, Output};

use overdrive_sys::cuda::{self, CudaLibrary};

const CHILD: &str = "OVERDRIVE_TEST_CHILD";

/// Runs the test `name` in a process of its own with these variables; `None` in that process.
fn again(name: &str, variables: &[(&str, &str)]) -> Option<Output> {
    if std::env::var_os(CHILD).is_some() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "--nocapture", name]);
    command.env(CHILD, "1").envs(variables.iter().copied());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    Some(output)
}

#[test]
fn without_cuda_no_gpu_is_visible_and_the_library_is_not_used() {
    let variables = [("OVERDRIVE_NO_CUDA", "1"), ("CUDA_VISIBLE_DEVICES", "0")];
    let name = "without_cuda_no_gpu_is_visible_and_the_library_is_not_used";
    if again(name, &variables).is_some() {
        return;
    }
    // Also for a binary that is linked against the CUDA libraries, which the loader has then loaded.
    assert_eq!(std::env::var("CUDA_VISIBLE_DEVICES").unwrap(), "");
    assert!(!tch::Cuda::is_available());
    let CudaLibrary::Absent { detail } = cuda::library().unwrap() else {
        panic!("it is used");
    };
    assert!(detail.contains("OVERDRIVE_NO_CUDA"), "{detail}");
}

#[test]
fn a_cuda_library_that_does_not_load_is_reported_when_the_program_starts() {
    let folder = tempfile::tempdir().unwrap();
    let libtorch = overdrive_build::libtorch().unwrap();
    if libtorch.cuda {
        // A program that is linked against the library does not start without it: the loader reports it.
        return;
    }
    for entry in fs::read_dir(libtorch.lib_dir).unwrap() {
        let entry = entry.unwrap();
        symlink(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let broken = folder.path().join("libtorch_cuda.so");
    fs::write(&broken, "no library").unwrap();
    let path = folder.path().to_str().unwrap();
    let name = "a_cuda_library_that_does_not_load_is_reported_when_the_program_starts";
    match again(name, &[("LD_LIBRARY_PATH", path)]) {
        Some(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(
                errors.contains("overdrive: no GPU is used") && errors.contains("libtorch_cuda.so"),
                "{errors}"
            );
        }
        None => {
            let library = cuda::library().unwrap();
            assert!(matches!(library, CudaLibrary::Failed { .. }), "{library:?}");
        }
    }
}
