//! The library of a product of the sizes of training, by the table in the user's cache.
//! A test target of its own, because it runs itself with another cache folder.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::process::Command;

use overdrive_build::Environment;
use overdrive_build::measured::Processor;
use overdrive_sys::gemm::{GemmLibrary, library_for};
use overdrive_sys::{build_info, threads};
use tch::{Device, Kind, Tensor};

const FORWARD: &str = "the library of x · wᵀ: ";

/// Started by the test below: prints the library for 512 x 384 x 384.
#[test]
#[ignore = "a child process of the test below"]
fn child() {
    let zeros = |size: [i64; 2]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let (x, w) = (zeros([512, 384]), zeros([384, 384]));
    println!("{FORWARD}{:?}", library_for(&x, &w.tr()).unwrap());
}

fn child_with(cache: &Path, variable: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env("XDG_CACHE_HOME", cache)
        .env("OVERDRIVE_GEMM", variable)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text
        .split(FORWARD)
        .nth(1)
        .unwrap_or_else(|| panic!("{text}"));
    line.split_whitespace().next().unwrap().to_owned()
}

#[test]
fn the_stored_table_chooses_in_every_process_and_the_variable_overrides_it() {
    let cache = std::env::temp_dir().join(format!("overdrive-gemm-{}", std::process::id()));
    std::fs::create_dir_all(&cache).unwrap();
    let environment = Environment::made_up("linux", [("XDG_CACHE_HOME", &cache)]);
    let version = build_info::libtorch_version().unwrap();
    let processor = Processor::detect(&version, threads::intra_op());
    let path = processor.file(&environment, "matmul-libraries").unwrap();
    let has_choice = GemmLibrary::OneDnn.is_available();
    let faster = if has_choice { "OneDnn" } else { "Torch" };
    for (ratio, library) in [(2.0, faster), (0.5, "Torch")] {
        let _ = std::fs::remove_file(&path);
        let figures = vec![("forward 384 384".to_owned(), ratio)];
        processor
            .read_or_measure(&environment, "matmul-libraries", || Some(figures))
            .unwrap();
        assert_eq!(child_with(&cache, ""), library);
        // The same again: nothing was measured anew.
        assert_eq!(child_with(&cache, "auto"), library);
        assert_eq!(child_with(&cache, "torch"), "Torch");
        if has_choice {
            assert_eq!(child_with(&cache, "onednn"), "OneDnn");
        }
    }
    // Without a table it is measured and stored; a busy machine stores fewer classes.
    std::fs::remove_file(&path).unwrap();
    let chosen = child_with(&cache, "");
    let stored = processor.read(&environment, "matmul-libraries");
    assert_eq!(stored.is_some(), has_choice);
    assert_eq!(child_with(&cache, ""), chosen);
    assert_eq!(processor.read(&environment, "matmul-libraries"), stored);
    std::fs::remove_dir_all(&cache).unwrap();
}
