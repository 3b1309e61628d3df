//! The stand-in for the CUDA driver that computes in plain C, for the tests of the crates that launch kernels.
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code)]

use std::path::PathBuf;
use std::process::Command;

/// Makes launches for tensors on the CPU run plain loops in C; returns the file to which the names of the kernels are
/// written. It serves the whole process from then on.
pub(crate) fn install() -> PathBuf {
    // Kept until the process ends, because the library in it writes there.
    let folder = tempfile::tempdir().unwrap().keep();
    let (log, library) = (folder.join("log"), folder.join("libcuda.so.1"));
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../overdrive-gpu/tests/stand_in/driver.c"
    );
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(compiler)
        .args([
            "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o",
        ])
        .arg(&library)
        .arg(source)
        .args(["-DCOMPUTE", "-DCAPABILITY=103"])
        .arg(format!("-DLOG=\"{}\"", log.display()))
        .arg("-lm")
        .status()
        .unwrap();
    assert!(status.success());
    // SAFETY: the library was made of the source above, which has the functions of the driver with their types.
    unsafe { overdrive_gpu::serve_cpu_with(&library) }.unwrap();
    log
}
