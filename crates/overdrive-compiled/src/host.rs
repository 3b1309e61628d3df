//! Whether code that was compiled elsewhere can run here.

use std::path::Path;

use overdrive_sys::{build_info, cuda};
use tch::Cuda;

use crate::{Error, ModelInfo, Result};

/// Holds what a model says of itself against this process and machine.
pub(crate) fn check(path: &Path, model: &ModelInfo, allow_unknown_version: bool) -> Result<()> {
    check_version(path, model, allow_unknown_version)?;
    let other = |package: String, here: String| {
        Err(Error::OtherMachine {
            path: path.to_owned(),
            model: model.name.clone(),
            package,
            here,
        })
    };
    let said = |key: &str, here: &str| {
        let package = model.metadata(key);
        (!package.is_empty() && package != here).then(|| package.to_owned())
    };
    if let Some(platform) = said("AOTI_PLATFORM", platform()) {
        return other(platform, platform_here());
    }
    if let Some(package) = said("AOTI_MACHINE", machine()) {
        return other(
            format!("{package} processors"),
            format!("a process on {}", machine()),
        );
    }
    match model.device() {
        "cpu" => {
            let missing = missing_instructions(model);
            if !missing.is_empty() {
                let package = format!("a processor with {}", missing.join(", "));
                return other(package, "a processor without".to_owned());
            }
            Ok(())
        }
        "cuda" => {
            if !Cuda::is_available() {
                return other(
                    "the device cuda".to_owned(),
                    "a process without a CUDA device".to_owned(),
                );
            }
            check_capability(model, other)
        }
        "mps" if cfg!(target_os = "macos") && tch::utils::has_mps() => Ok(()),
        "" => other(
            "a device that it does not name".to_owned(),
            "cpu or cuda".to_owned(),
        ),
        device => other(
            format!("the device {device}"),
            "a process with cpu or cuda".to_owned(),
        ),
    }
}

fn check_version(path: &Path, model: &ModelInfo, allow_unknown: bool) -> Result<()> {
    let here = build_info::libtorch_version()?;
    let here = here.split('+').next().unwrap_or_default().to_owned();
    match &model.manifest {
        Some(manifest) if manifest.torch == here => Ok(()),
        Some(manifest) => Err(Error::OtherVersion {
            path: path.to_owned(),
            model: model.name.clone(),
            package: manifest.torch.clone(),
            here,
        }),
        None if allow_unknown => Ok(()),
        None => {
            let known = [
                "AOTI_DEVICE_KEY",
                "AOTI_PLATFORM",
                "AOTI_MACHINE",
                "AOTI_CPU_ISA",
            ]
            .map(|key| model.metadata(key))
            .join(" ");
            let known = match known.trim() {
                "" => "it says nothing of itself".to_owned(),
                known => format!("it says only: {known}"),
            };
            Err(Error::UnknownVersion {
                path: path.to_owned(),
                model: model.name.clone(),
                known,
                here,
            })
        }
    }
}

/// Code for a GPU runs on one of its compute capability: `90` for 9.0.
fn check_capability(model: &ModelInfo, other: impl Fn(String, String) -> Result<()>) -> Result<()> {
    let package = model.metadata("AOTI_COMPUTE_CAPABILITY");
    let (major, minor) = cuda::compute_capability(0)?;
    let here = format!("{major}{minor}");
    if package.is_empty() || package == here {
        return Ok(());
    }
    other(
        format!("GPUs of compute capability {package}"),
        format!("a GPU of compute capability {here}"),
    )
}

/// `sys.platform` of Python.
fn platform() -> &'static str {
    match std::env::consts::OS {
        "macos" => "darwin",
        "windows" => "win32",
        other => other,
    }
}

fn platform_here() -> String {
    format!("a process on {}", platform())
}

/// `platform.machine()` of Python.
fn machine() -> &'static str {
    match (std::env::consts::ARCH, std::env::consts::OS) {
        ("aarch64", "macos") => "arm64",
        (other, _) => other,
    }
}

/// What the code uses and this processor has not: of the vector instructions that PyTorch chose, and of
/// all that the compiler was allowed. Without them the process would be killed by an illegal instruction.
fn missing_instructions(model: &ModelInfo) -> Vec<String> {
    let chosen = model.metadata("AOTI_CPU_ISA").to_ascii_lowercase();
    let chosen = chosen
        .split_ascii_whitespace()
        .map(|word| word.replace('_', ""));
    let allowed = model
        .manifest
        .iter()
        .flat_map(|manifest| manifest.processor.iter().cloned());
    let mut missing: Vec<String> = chosen
        .chain(allowed)
        .filter(|name| has(name) == Some(false))
        .collect();
    missing.sort();
    missing.dedup();
    missing
}

/// Whether this processor has what GCC calls `name`; `None` for what is no such question (`glibc`), or
/// not told by name.
#[cfg(target_arch = "x86_64")]
fn has(name: &str) -> Option<bool> {
    use std::arch::is_x86_feature_detected as detected;
    Some(match name {
        // PyTorch's word for the pair.
        "avx512" => detected!("avx512f") && detected!("avx512dq") && detected!("avx512vl"),
        "avx2" => detected!("avx2"),
        "avx" => detected!("avx"),
        "fma" => detected!("fma"),
        "f16c" => detected!("f16c"),
        "bmi" => detected!("bmi1"),
        "bmi2" => detected!("bmi2"),
        "lzcnt" | "abm" => detected!("lzcnt"),
        "popcnt" => detected!("popcnt"),
        "movbe" => detected!("movbe"),
        "adx" => detected!("adx"),
        "aes" => detected!("aes"),
        "pclmul" => detected!("pclmulqdq"),
        "sha" => detected!("sha"),
        "sse4a" => detected!("sse4a"),
        "sse4.1" => detected!("sse4.1"),
        "sse4.2" => detected!("sse4.2"),
        "ssse3" => detected!("ssse3"),
        "gfni" => detected!("gfni"),
        "vaes" => detected!("vaes"),
        "vpclmulqdq" => detected!("vpclmulqdq"),
        "avx512f" => detected!("avx512f"),
        "avx512bw" => detected!("avx512bw"),
        "avx512cd" => detected!("avx512cd"),
        "avx512dq" => detected!("avx512dq"),
        "avx512vl" => detected!("avx512vl"),
        "avx512ifma" => detected!("avx512ifma"),
        "avx512vbmi" => detected!("avx512vbmi"),
        "avx512vbmi2" => detected!("avx512vbmi2"),
        "avx512vnni" => detected!("avx512vnni"),
        "avx512bitalg" => detected!("avx512bitalg"),
        "avx512vpopcntdq" => detected!("avx512vpopcntdq"),
        "avx512bf16" => detected!("avx512bf16"),
        "avx512fp16" => detected!("avx512fp16"),
        "avxvnni" => detected!("avxvnni"),
        "avxifma" => detected!("avxifma"),
        _ => return None,
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn has(_name: &str) -> Option<bool> {
    None
}
