//! `OVERDRIVE_SIMD` decides for every kernel. It is read once, so each value has a process of its own.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::process::Command;

use overdrive_kernels::{InstructionSet, instruction_set};

/// Returns the set that a process runs with where the variable is `value`.
fn set_of_a_process(value: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "--nocapture",
            "the_set_of_this_process_is_printed",
        ])
        .env("OVERDRIVE_SIMD", value)
        .output()
        .unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    let (_, rest) = output.split_once("set of this process: ").unwrap();
    rest.split_whitespace().next().unwrap().to_owned()
}

#[test]
fn the_set_of_this_process_is_printed() {
    println!("set of this process: {} ", instruction_set());
}

#[test]
fn the_variable_names_the_set() {
    for set in InstructionSet::available() {
        assert_eq!(set_of_a_process(set.name()), set.name());
    }
}

#[test]
fn a_value_that_names_no_set_leaves_the_widest() {
    let widest = InstructionSet::available().next().unwrap().name();
    assert_eq!(set_of_a_process(""), widest);
    assert_eq!(set_of_a_process("avx9000"), widest);
}

/// A kernel that detected instructions by itself would not obey the variable.
#[test]
fn no_kernel_detects_instructions_by_itself() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for name in ["attention", "fused", "kv-cache", "optim", "quantization"] {
        let mut folders = vec![crates.join(format!("overdrive-{name}/src"))];
        let mut files = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                files += 1;
                let source = std::fs::read_to_string(&path).unwrap();
                // overdrive-fused asks for BF16 to know which kernel libtorch has, not to run one of ours.
                let detects = |line: &str| {
                    line.contains("is_x86_feature_detected") && !line.contains("avx512bf16")
                };
                let line = source.lines().find(|line| detects(line));
                assert_eq!(line, None, "{}", path.display());
            }
        }
        assert!(files > 10, "the sources of overdrive-{name} were found");
    }
}
