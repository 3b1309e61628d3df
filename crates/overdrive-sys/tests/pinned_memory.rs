//! Page-locked memory without libtorch's warnings. The tests run themselves again, because libtorch writes its
//! warnings to the standard error of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::Command;

use overdrive_sys::transfer::{empty_pinned, is_pinned, pin_memory, to_device};
use tch::{Device, Kind, Tensor};

const CHILD: &str = "OVERDRIVE_TEST_CHILD";

/// Runs the test `name` in a process of its own, and returns its standard error; `None` in that process.
fn again(name: &str) -> Option<String> {
    if std::env::var_os(CHILD).is_some() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command
        .args(["--exact", "--nocapture", name])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    Some(text)
}

#[test]
fn pinning_prints_no_warning() {
    let Some(text) = again("pinning_prints_no_warning") else {
        let host = Tensor::from_slice(&[1_f32, 2.0]);
        assert!(!is_pinned(&host).unwrap());
        // Without a GPU there is no such memory, which is an error after the place of the warning.
        if let Ok(pinned) = pin_memory(&host) {
            assert!(is_pinned(&pinned).unwrap());
        }
        let _there = to_device(host, Device::Cuda(0));
        let _empty = empty_pinned(&[2], Kind::Float);
        return;
    };
    assert!(!text.contains("Warning"), "{text}");
    assert!(!text.contains("deprecated"), "{text}");
}

#[test]
#[allow(
    clippy::disallowed_methods,
    reason = "they show what the test above would find"
)]
fn the_methods_of_tch_print_a_warning() {
    let Some(text) = again("the_methods_of_tch_print_a_warning") else {
        let host = Tensor::from_slice(&[1_f32, 2.0]);
        let _pinned = host.f_pin_memory(Device::Cuda(0));
        let _is_pinned = host.f_is_pinned(Device::Cuda(0));
        return;
    };
    for method in ["pin_memory", "is_pinned"] {
        assert!(
            text.contains(&format!("Tensor.{method}() is deprecated")),
            "{text}"
        );
    }
}
