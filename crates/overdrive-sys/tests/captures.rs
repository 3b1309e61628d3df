//! Captures that fail, against a stand-in for libtorch's CUDA library. A process of its own, because the stand-in
//! registers a device.
#![cfg(all(feature = "compiled", target_os = "linux"))]
#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code, reason = "the stand-in is a library in C++")]

use std::ffi::{CStr, CString, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive_sys::compiled::{CaptureError, Graph};
use overdrive_sys::cuda::{self, CudaLibrary};

/// Compiles the stand-in.
fn compiled(folder: &Path) -> PathBuf {
    let torch = overdrive_build::libtorch().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stand_in/cuda.cpp");
    let library = folder.join("stand_in.so");
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-shared", "-fPIC", "-O0"]);
    for include in &torch.include_dirs {
        command.arg("-isystem").arg(include);
    }
    let output = command
        .arg(&source)
        .arg("-o")
        .arg(&library)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    library
}

/// The loaded stand-in.
struct StandIn(*mut c_void);

impl StandIn {
    fn load(library: &Path) -> Self {
        let path = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: a library of this test, which is never unloaded. Global, as libtorch's, so that its names are found.
        let loaded = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if loaded.is_null() {
            // SAFETY: an error was found, so there is a text.
            panic!("{:?}", unsafe { CStr::from_ptr(libc::dlerror()) });
        }
        let stand_in = Self(loaded);
        stand_in.call(c"stand_in_install");
        stand_in
    }

    /// Calls one of its functions; the result of one without a result means nothing.
    fn call(&self, name: &CStr) -> c_int {
        // SAFETY: the library is loaded.
        let function = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        assert!(!function.is_null(), "{name:?}");
        // SAFETY: all functions of the stand-in take nothing, and return an int or nothing.
        let function: unsafe extern "C" fn() -> c_int = unsafe { std::mem::transmute(function) };
        // SAFETY: the test calls them from one thread.
        unsafe { function() }
    }

    /// Asserts that the process is as it was before a capture that failed, beside `pools` pools in use, each of them
    /// on the device and on the host.
    fn assert_recovered(&self, pools: c_int) {
        assert_eq!(
            self.call(c"stand_in_recording"),
            0,
            "an allocator still records"
        );
        assert_eq!(self.call(c"stand_in_pools"), 2 * pools, "pools are kept");
        assert_eq!(self.call(c"stand_in_generator_is_captured"), 0);
    }
}

#[test]
fn a_capture_that_fails_leaves_allocators_and_generator_as_they_were() {
    const CHILD: &str = "OVERDRIVE_TEST_STAND_IN";
    if overdrive_build::libtorch().unwrap().cuda {
        // This binary is linked against libtorch's own CUDA library, whose names are found before the stand-in's.
        return;
    }
    if std::env::var_os(CHILD).is_none() {
        // Again without libtorch's own CUDA library, where there is one.
        let status = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("a_capture_that_fails_leaves_allocators_and_generator_as_they_were")
            .env(CHILD, "1")
            .env("OVERDRIVE_NO_CUDA", "1")
            .status();
        assert!(status.unwrap().success());
        return;
    }
    assert!(matches!(
        cuda::library().unwrap(),
        CudaLibrary::Absent { .. }
    ));
    let folder = tempfile::tempdir().unwrap();
    let stand_in = StandIn::load(&compiled(folder.path()));

    captures_that_fail(&stand_in);
    // As with libtorch 2.13.
    stand_in.call(c"stand_in_tell_allocators_first");
    captures_that_fail(&stand_in);
}

fn captures_that_fail(stand_in: &StandIn) {
    let replays = stand_in.call(c"stand_in_replays");
    // The operation invalidates the capture and reports it.
    let mut graph = Graph::new(0).unwrap();
    let error = graph.capture(None, || {
        stand_in.call(c"stand_in_invalidate");
        Err::<(), _>("cannot be captured")
    });
    assert!(
        matches!(error, Err(CaptureError::Work("cannot be captured"))),
        "{error:?}"
    );
    stand_in.assert_recovered(0);
    drop(graph);
    stand_in.assert_recovered(0);

    // Nobody reports it before the end of the capture.
    let mut graph = Graph::new(0).unwrap();
    let error = graph.capture(None, || {
        stand_in.call(c"stand_in_invalidate");
        Ok::<_, ()>(())
    });
    let text = format!("{error:?}");
    assert!(text.contains("previous error during capture"), "{text}");
    stand_in.assert_recovered(0);
    assert!(graph.replay().is_err());

    // The same graph captures later.
    graph.capture(None, || Ok::<_, ()>(())).unwrap();
    graph.replay().unwrap();
    assert_eq!(stand_in.call(c"stand_in_replays"), replays + 1);
    stand_in.assert_recovered(1);

    // A capture that fails in the pool of another graph leaves the pool to that graph, before and after it began.
    for name in [c"stand_in_invalidate", c"stand_in_refuse_to_begin"] {
        let mut second = Graph::new(0).unwrap();
        if name == c"stand_in_refuse_to_begin" {
            stand_in.call(name);
        }
        let error = second.capture(Some(&graph), || {
            stand_in.call(c"stand_in_invalidate");
            Err::<(), _>(())
        });
        assert!(error.is_err());
        stand_in.assert_recovered(1);
        drop(second);
        stand_in.assert_recovered(1);
    }
    graph.replay().unwrap();
    drop(graph);
    stand_in.assert_recovered(0);
}
