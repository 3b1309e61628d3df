//! Checks that compiled code can run in this process: the version of libtorch, the device, the processor.

use std::path::Path;

use overdrive_sys::{build_info, cuda};
use tch::Cuda;

use crate::{Error, ModelInfo, Result};

/// Compares the metadata of a model with this process and machine.
pub(crate) fn check(path: &Path, model: &ModelInfo, allow_unknown_version: bool) -> Result<()> {
    check_version(path, model, allow_unknown_version)?;
    let mismatch = |compiled_for: String, running: String| {
        Err(Error::MachineMismatch {
            path: path.to_owned(),
            model: model.name.clone(),
            compiled_for,
            running,
        })
    };
    // A missing key is no mismatch: packages of older PyTorch versions lack some keys.
    let differs = |key: &str, running: &str| {
        let compiled_for = model.metadata(key);
        (!compiled_for.is_empty() && compiled_for != running).then(|| compiled_for.to_owned())
    };
    if let Some(compiled_for) = differs("AOTI_PLATFORM", platform()) {
        return mismatch(compiled_for, format!("a process on {}", platform()));
    }
    if let Some(compiled_for) = differs("AOTI_MACHINE", machine()) {
        return mismatch(
            format!("{compiled_for} processors"),
            format!("a process on {}", machine()),
        );
    }
    match model.device() {
        "cpu" => {
            let missing = missing_instructions(model);
            if !missing.is_empty() {
                let compiled_for = format!("a processor with {}", missing.join(", "));
                return mismatch(compiled_for, "a processor without".to_owned());
            }
            Ok(())
        }
        "cuda" => {
            if !Cuda::is_available() {
                return mismatch(
                    "the device cuda".to_owned(),
                    "a process without a CUDA device".to_owned(),
                );
            }
            check_capability(model, mismatch)
        }
        "mps" if cfg!(target_os = "macos") && tch::utils::has_mps() => Ok(()),
        "" => mismatch(
            "a device that it does not name".to_owned(),
            "cpu or cuda".to_owned(),
        ),
        device => mismatch(
            format!("the device {device}"),
            "a process with cpu or cuda".to_owned(),
        ),
    }
}

fn check_version(path: &Path, model: &ModelInfo, allow_unknown: bool) -> Result<()> {
    let running = build_info::libtorch_version()?;
    // In `2.11.0+cpu`, the build's suffix does not change the ABI.
    let running = running.split('+').next().unwrap_or_default().to_owned();
    match &model.manifest {
        Some(manifest) if manifest.torch == running => Ok(()),
        Some(manifest) => Err(Error::VersionMismatch {
            path: path.to_owned(),
            model: model.name.clone(),
            compiled_for: manifest.torch.clone(),
            running,
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
                "" => "its metadata is empty".to_owned(),
                known => format!("its metadata has only: {known}"),
            };
            Err(Error::UnknownVersion {
                path: path.to_owned(),
                model: model.name.clone(),
                known,
                running,
            })
        }
    }
}

/// Checks the compute capability, which the metadata stores as `90` for 9.0.
fn check_capability(
    model: &ModelInfo,
    mismatch: impl Fn(String, String) -> Result<()>,
) -> Result<()> {
    // A package holds the machine code (cubin) of one compute capability, and no PTX that the driver could
    // compile for another one.
    let compiled_for = model.metadata("AOTI_COMPUTE_CAPABILITY");
    let (major, minor) = cuda::compute_capability(0)?;
    let running = format!("{major}{minor}");
    if compiled_for.is_empty() || compiled_for == running {
        return Ok(());
    }
    mismatch(
        format!("GPUs of compute capability {compiled_for}"),
        format!("a GPU of compute capability {running}"),
    )
}

/// Returns this system's name in Python's `sys.platform`.
fn platform() -> &'static str {
    match std::env::consts::OS {
        "macos" => "darwin",
        "windows" => "win32",
        other => other,
    }
}

/// Returns this processor's name in Python's `platform.machine()`.
fn machine() -> &'static str {
    match (std::env::consts::ARCH, std::env::consts::OS) {
        ("aarch64", "macos") => "arm64",
        (other, _) => other,
    }
}

/// Returns the instruction sets that the code may use and this processor lacks, from the vector instructions that
/// PyTorch chose and from everything that the compiler was allowed to use.
fn missing_instructions(model: &ModelInfo) -> Vec<String> {
    // An instruction that the processor lacks would kill the process (SIGILL) before it could return an error.
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

/// Returns `true` if this processor has the instruction set that GCC calls `name`; `None` for names that are not
/// instruction sets (`glibc`) or that Rust cannot detect.
#[cfg(target_arch = "x86_64")]
fn has(name: &str) -> Option<bool> {
    use std::arch::is_x86_feature_detected as detected;
    Some(match name {
        // PyTorch's name for the set that its AVX-512 kernels need.
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
