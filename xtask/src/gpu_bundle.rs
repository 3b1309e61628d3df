//! `cargo xtask gpu-bundle`: the GPU check in a folder that runs on another machine, with the libtorch of that machine's
//! Python.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use overdrive_core::print_line;
use serde_json::json;

use crate::dist::manifest::{Needs, commit};
use crate::dist::program::{self, Program};
use crate::dist::{
    MANIFEST, copy, copy_own_licences, create, failed, make, name, replaceable, target_of, write,
};
use crate::failure::{Failure, Result};
use crate::setup::{self, Request};
use crate::{cargo, hash, space, torch};

const FORMAT: &str = "overdrive-gpu-bundle";
const FORMAT_VERSION: u64 = 1;
/// The comparison with PyTorch.
const SCRIPTS: [&str; 4] = [
    "gpu_decode.py",
    "gpu_finetune.py",
    "gpu_step.py",
    "llama.py",
];
/// The PyTorch release that the bundle is for; run.sh refuses any other.
const BUILT_FOR: &str = "2.11";
const RUN: &str = include_str!("gpu_bundle/run.sh");

/// Builds and collects the files; the output folder is created by one rename.
pub(crate) fn gpu_bundle(out: Option<&Path>) -> Result<()> {
    let target = target_of(out, "dist/gpu-check")?;
    torch::choose(BUILT_FOR)?;
    let series = torch::release()?.series();
    if series != BUILT_FOR {
        return Err(Failure::new(format!(
            "the bundle needs a build for PyTorch {BUILT_FOR}, but this build is for {series}"
        ))
        .remedy(format!("cargo xtask gpu-bundle --torch {BUILT_FOR}")));
    }
    // Before the build, which takes minutes.
    replaceable("gpu-bundle", FORMAT, &target)?;
    setup::setup(Request::Any, false)?;
    let built = program::of_kind(&cargo::gpu_check_program().output()?, "bin")?;
    let built = built.iter().find(|program| program.file == "gpu-check");
    let built = built.ok_or_else(|| Failure::new("cargo did not build `gpu-check`"))?;

    let (needs, bytes) = make(&target, |folder| gather(folder, built))?;
    print_line(format_args!(
        "{}, {}; it needs {}",
        target.display(),
        space::megabytes(bytes),
        system(needs)
    ));
    print_line(format_args!(
        "copy the folder to the machine with the GPU, and run {}/run.sh",
        name(&target)
    ));
    Ok(())
}

/// Writes the files and returns what the program needs of the system, and its bytes.
fn gather(made: &Path, built: &Program) -> Result<(Needs, u64)> {
    let scripts = made.join("python");
    create(&scripts)?;
    let program = made.join(&built.file);
    built.copy_stripped(&program)?;
    let workspace = cargo::workspace();
    for script in SCRIPTS {
        copy(
            &workspace.join("benches/pytorch").join(script),
            &scripts.join(script),
        )?;
    }
    copy_own_licences(made)?;
    let run = made.join("run.sh");
    write(&run, RUN)?;
    fs::set_permissions(&run, fs::Permissions::from_mode(0o755))
        .map_err(|error| failed("could not make executable", &run, &error))?;
    let bytes =
        fs::read(&program).map_err(|error| Failure::io("could not read", &program, &error))?;
    let needs = Needs::of(&bytes);
    write(&made.join("README.md"), &readme(needs))?;
    let commit = commit();
    write(&made.join("commit"), commit.as_deref().unwrap_or("unknown"))?;
    let manifest = json!({
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "commit": commit,
        "needs": {"glibc": needs.glibc(), "libstdcxx": needs.libstdcxx()},
        "program": {"bytes": bytes.len(), "sha256": hash::of_bytes(&bytes)},
    });
    write(&made.join(MANIFEST), &format!("{manifest:#}\n"))?;
    Ok((needs, bytes.len() as u64))
}

fn system(needs: Needs) -> String {
    format!(
        "glibc {} and libstdc++ {} or newer, and a Python with torch {BUILT_FOR}",
        needs.glibc().as_deref().unwrap_or("of any version"),
        needs.libstdcxx().as_deref().unwrap_or("of any version")
    )
}

fn readme(needs: Needs) -> String {
    format!(
        "# Overdrive's GPU check\n\n`./run.sh` checks and measures everything that Overdrive does on this machine's \
         GPU, in at most nine minutes, and writes `gpu-check.json` and `gpu-check.md` to the current folder. `./run.sh \
         --list` prints the sections, `./run.sh --section doctor tiny` runs some of them, `./run.sh --help` prints all \
         options.\n\nNeeds: {}. No Rust, no compiler, no network. `OVERDRIVE_PYTHON` names the Python interpreter \
         (default: `python3`).\n",
        system(needs)
    )
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    /// Returns a Python's site-packages with a torch of `version`, as pip leaves it.
    fn site(version: &str) -> tempfile::TempDir {
        let site = tempfile::tempdir().unwrap();
        for folder in [
            "torch/lib",
            "nvidia/cu13/lib",
            "nvidia/cudnn/lib",
            &format!("torch-{version}.dist-info"),
        ] {
            fs::create_dir_all(site.path().join(folder)).unwrap();
        }
        fs::write(
            site.path().join("torch/__init__.py"),
            "raise SystemExit('imported')",
        )
        .unwrap();
        fs::write(site.path().join("torch/lib/libtorch_cpu.so"), "").unwrap();
        let metadata = format!("Metadata-Version: 2.1\nName: torch\nVersion: {version}\n");
        let path = format!("torch-{version}.dist-info/METADATA");
        fs::write(site.path().join(path), metadata).unwrap();
        site
    }

    /// Runs `run.sh` beside a program that prints its arguments and variables.
    fn run(site: &Path) -> Output {
        let bundle = tempfile::tempdir().unwrap();
        let executable = |name: &str, text: &str| {
            let path = bundle.path().join(name);
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        };
        executable("run.sh", RUN);
        executable(
            "gpu-check",
            "#!/bin/sh\necho \"$@\"\necho \"$LD_LIBRARY_PATH\"\necho \"$OVERDRIVE_OUTER_LIBRARY_PATH\"\n\
             echo \"$OVERDRIVE_COMMIT\"\n",
        );
        fs::write(bundle.path().join("commit"), "abc+").unwrap();
        Command::new("sh")
            .arg(bundle.path().join("run.sh"))
            .args(["--section", "doctor"])
            .env("PYTHONPATH", site)
            .env("LD_LIBRARY_PATH", "/driver/lib")
            .env_remove("OVERDRIVE_PYTHON")
            .output()
            .unwrap()
    }

    #[test]
    fn the_script_finds_the_libraries_of_that_machines_torch_without_importing_it() {
        let site = site("2.11.0+cu130");
        let output = run(site.path());
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        let root = fs::canonicalize(site.path()).unwrap();
        let root = root.display();
        let first = format!("{root}/torch/lib:{root}/nvidia/cu13/lib:{root}/nvidia/cudnn/lib:");
        let [arguments, libraries, outer, commit] = lines[..] else {
            panic!("{text}{}", String::from_utf8_lossy(&output.stderr));
        };
        // This machine's own packages of `nvidia` may follow those of the site.
        assert!(
            libraries.starts_with(&first) && libraries.ends_with(":/driver/lib"),
            "{libraries}"
        );
        assert_eq!(
            (arguments, outer, commit),
            ("--section doctor", "/driver/lib", "abc+")
        );
    }

    #[test]
    fn another_version_of_torch_is_refused_by_its_name() {
        let site = site("2.10.1");
        let output = run(site.path());
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && text.contains("2.10.1") && text.contains("2.11"),
            "{text}"
        );
    }

    #[test]
    fn the_scripts_of_the_comparison_are_in_the_repository() {
        for script in SCRIPTS {
            assert!(
                cargo::workspace()
                    .join("benches/pytorch")
                    .join(script)
                    .exists(),
                "{script}"
            );
        }
    }
}
