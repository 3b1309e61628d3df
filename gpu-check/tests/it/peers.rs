//! The programs of the comparison, without the packages that they need.

use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Each script runs with the arguments of its section, and says which package is missing.
#[test]
fn a_package_that_is_missing_is_named_in_json() {
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/pytorch");
    let shape =
        "--vocab 100 --dim 32 --layers 1 --heads 2 --kv-heads 1 --hidden 32 --context 16 --batch 1";
    // Packages that cannot be imported, before those of this machine.
    let folder = tempfile::tempdir().unwrap();
    for package in ["torch", "transformers", "peft", "bitsandbytes"] {
        let text = "raise ImportError('it is not here')";
        std::fs::write(folder.path().join(format!("{package}.py")), text).unwrap();
    }
    for (script, arguments) in [
        (
            "gpu_decode.py",
            "--variant dynamic --prompt 8 --new 2 --streams 1 2",
        ),
        ("gpu_finetune.py", "--rank 16"),
    ] {
        let output = Command::new("python3")
            .arg(scripts.join(script))
            .args(["--device", "cpu", "--seconds", "30"])
            .args(arguments.split(' ').chain(shape.split(' ')))
            .env("PYTHONPATH", folder.path())
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{script}: {errors}");
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let missing = found["missing"].as_str().unwrap();
        assert!(missing.ends_with("it is not here"), "{script}: {missing}");
    }
}
