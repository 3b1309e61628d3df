//! The findings about the machine, with their remedies.

use overdrive_build::cache::{self, Variant};
use overdrive_build::cpu::CpuFeatures;
use overdrive_build::{Environment, Libtorch, Release, locate};

use super::{Findings, gpu, machine};
use crate::record::Record;
use crate::{cargo, space, torch};

/// The peak memory of compiling torch-sys, the largest single compilation.
const COMPILING_BYTES: u64 = 1_500_000_000;
/// The size of target/ with the development and the release build.
const TARGET_BYTES: u64 = 6_000_000_000;

pub(super) fn processor(findings: &mut Findings, features: CpuFeatures) {
    let cpu = machine::cpu();
    findings.say("processor", &cpu.model);
    findings.say(
        "cores",
        format!(
            "{} physical, {} logical",
            cpu.physical_cores, cpu.logical_cores
        ),
    );
    let by_default = cpu.threads();
    let mut threads = format!("{by_default} for libtorch by default");
    // By the affinity of the process and the quota of its container; libtorch does not see the quota.
    let usable = std::thread::available_parallelism().map_or(cpu.logical_cores, usize::from);
    if usable < cpu.logical_cores {
        threads += &format!("; this process may use {usable} CPUs");
    }
    let asked = std::env::var("OMP_NUM_THREADS").ok();
    threads += &match &asked {
        Some(value) => format!("; OMP_NUM_THREADS={value}"),
        None => "; OMP_NUM_THREADS is not set".to_owned(),
    };
    let started = asked.and_then(|value| value.parse().ok());
    let started: usize = started.unwrap_or(by_default);
    if started > usable {
        findings.warn(
            format!(
                "libtorch starts {started} threads, and this process may use {usable} CPUs: they would wait for one another"
            ),
            format!("export OMP_NUM_THREADS={}", by_default.min(usable)),
        );
    }
    findings.say("threads", threads);
    findings.say("instructions", machine::features_line(features));
    if cfg!(target_arch = "x86_64") && !(features.avx2 && features.fma) {
        findings.warn(
            "the processor has no AVX2 and FMA: matmuls are several times slower",
            "none on this machine; in a virtual machine pass the host's CPU through (\"host\")",
        );
    }
}

pub(super) fn gpus(findings: &mut Findings) -> Vec<gpu::Gpu> {
    match gpu::list() {
        Ok(gpus) if gpus.is_empty() => {
            findings.say("GPU", "none (nvidia-smi lists none)");
            gpus
        }
        Ok(gpus) => {
            for gpu in &gpus {
                findings.say("GPU", gpu);
                if gpu.driver_major < gpu::DRIVER_FOR_CUDA_13 {
                    findings.warn(
                        format!("driver {} is too old for CUDA 13", gpu.driver),
                        format!(
                            "install an NVIDIA driver {} or newer",
                            gpu::DRIVER_FOR_CUDA_13
                        ),
                    );
                }
            }
            gpus
        }
        Err(gpu::Absence::NoTool) => {
            findings.say("GPU", "none (there is no nvidia-smi)");
            Vec::new()
        }
        Err(gpu::Absence::Failed(reason)) => {
            findings.say("GPU", format!("unknown (nvidia-smi: {reason})"));
            findings.warn(
                format!("nvidia-smi exists but fails: {reason}"),
                "reinstall the NVIDIA driver, or load it (modprobe nvidia); in a container start \
                 it with the GPU (--gpus all)",
            );
            Vec::new()
        }
    }
}

pub(super) fn memory(findings: &mut Findings) {
    let memory = machine::memory();
    let gigabytes = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
    let mut line = match (memory.available, memory.total) {
        (Some(free), Some(total)) => format!("{} free of {}", gigabytes(free), gigabytes(total)),
        (None, Some(total)) => gigabytes(total),
        _ => "unknown".to_owned(),
    };
    if let Some(limit) = memory.limit {
        line += &format!("; the container allows {}", gigabytes(limit));
    }
    findings.say("memory", line);
    let free = [memory.available, memory.limit].into_iter().flatten().min();
    if free.is_some_and(|free| free < COMPILING_BYTES) {
        findings.warn(
            "less memory is free than compiling torch-sys takes (about 1.5 GB)",
            "close programs or add swap; build with CARGO_BUILD_JOBS=1",
        );
    }
}

pub(super) fn libtorch(findings: &mut Findings, environment: &Environment) -> Option<Libtorch> {
    // The environment of a plain cargo in this folder, with the record of setup.
    let recorded = match torch::other() {
        None => Record::read(&cargo::workspace()),
        // `--torch` builds with the one in the cache, and without the record.
        Some(release) => [Variant::Cuda13, Variant::Cpu]
            .into_iter()
            .filter_map(|variant| cache::libtorch_dir(environment, release, variant))
            .find(|root| root.is_dir())
            .map(Record::of_cache),
    };
    let by_record = environment.path("LIBTORCH").is_none()
        && !environment.is_set("LIBTORCH_USE_PYTORCH")
        && recorded.is_some();
    let seen = match &recorded {
        Some(record) if by_record => environment.clone().with("LIBTORCH", &record.libtorch),
        _ => environment.clone(),
    };
    match locate(&seen) {
        Ok(torch) => {
            let version = torch.version.as_deref().unwrap_or("of unknown version");
            let kind = if torch.cuda { "CUDA" } else { "CPU" };
            let how = if by_record && torch::other().is_some() {
                "in the cache".to_owned()
            } else if by_record {
                "by .cargo/libtorch.toml".to_owned()
            } else {
                format!("by {}", torch.source)
            };
            findings.say(
                "libtorch",
                format!(
                    "{version} ({kind}) in {}, found {how}",
                    torch.lib_dir.display()
                ),
            );
            if torch.version.is_some() {
                matching(findings, version);
            }
            if recorded.is_none() {
                findings.warn(
                    "Cargo does not know the path of libtorch (there is no .cargo/libtorch.toml)",
                    "cargo xtask setup",
                );
            }
            Some(torch)
        }
        Err(error) => {
            findings.say("libtorch", "not found");
            let (what, remedy) = match error {
                overdrive_build::Error::NotFound { .. } => (
                    "libtorch has not been fetched yet".to_owned(),
                    "cargo xtask setup",
                ),
                other => (
                    other.to_string(),
                    "unset that variable, then cargo xtask setup",
                ),
            };
            findings.fatal(what, remedy);
            None
        }
    }
}

/// Compares the version of libtorch with what the tch of `Cargo.lock` needs.
fn matching(findings: &mut Findings, version: &str) {
    let release = match torch::release() {
        Ok(release) => release,
        Err(failure) => return findings.fatal(failure.to_string(), "see above"),
    };
    findings.say(
        "tch",
        format!("{}, which needs libtorch {}", release.tch, release.libtorch),
    );
    if release.accepts(version) {
        return;
    }
    let mut remedy = "unset LIBTORCH and LIBTORCH_USE_PYTORCH, then cargo xtask setup".to_owned();
    if let Some(other) = torch::other() {
        remedy += &format!(" --torch {}", other.series());
    }
    if let Some(other) = Release::of_libtorch(version) {
        remedy += &format!(
            "; or choose the tch of this libtorch: cargo update tch --precise {}",
            other.tch
        );
    }
    findings.fatal(
        format!(
            "tch {} needs libtorch {}, but this is {version}",
            release.tch, release.libtorch
        ),
        remedy,
    );
}

pub(super) fn tools(findings: &mut Findings, environment: &Environment, have_libtorch: bool) {
    match super::tools::rustc() {
        Some(version) => findings.say("Rust", version),
        None => findings.fatal("rustc cannot be started", "install Rust: https://rustup.rs"),
    }
    match super::tools::compiler(environment) {
        Ok(version) => findings.say("C++ compiler", version),
        Err(super::tools::CompilerFault { what, remedy }) => {
            findings.say("C++ compiler", "not usable");
            findings.fatal(what, remedy);
        }
    }
    let python = overdrive_build::python_interpreter(environment);
    match super::tools::python(&python) {
        Some((version, Some(pip))) => findings.say("Python", format!("{version}, {pip}")),
        Some((version, None)) => {
            findings.say("Python", format!("{version}, no pip"));
            if !have_libtorch {
                findings.warn(
                    format!("{} has no pip, which setup may need", python.display()),
                    format!("{} -m ensurepip, or install python3-pip", python.display()),
                );
            }
        }
        None => {
            findings.say("Python", "none");
            if !have_libtorch {
                findings.warn(
                    "there is no Python, which setup may need",
                    "install python3-pip",
                );
            }
        }
    }
}

pub(super) fn disk(findings: &mut Findings, environment: &Environment, have_libtorch: bool) {
    let target = cargo::target_folder();
    let Some(cache) = cache::dir(environment) else {
        findings.warn("there is no cache folder", "set HOME or XDG_CACHE_HOME");
        return;
    };
    let free = |path: &std::path::Path| {
        space::free(path).map_or_else(|| "unknown".to_owned(), space::megabytes)
    };
    findings.say(
        "cache",
        format!("{}, {} free", cache.display(), free(&cache)),
    );
    findings.say(
        "target",
        format!("{}, {} free", target.display(), free(&target)),
    );
    let needed = crate::sources::Platform::here().map_or(0, |platform| {
        crate::sources::wheels::room(platform, Variant::Cpu)
    });
    if !have_libtorch && space::free(&cache).is_some_and(|free| free < needed) {
        findings.warn(
            format!(
                "the cache's disk has no room for libtorch ({})",
                space::megabytes(needed)
            ),
            "make room, or set XDG_CACHE_HOME to a folder on a larger disk",
        );
    }
    if space::free(&target).is_some_and(|free| free < TARGET_BYTES)
        && !target.join("debug").exists()
    {
        findings.warn(
            format!(
                "building everything takes about {}",
                space::megabytes(TARGET_BYTES)
            ),
            "make room, or set CARGO_TARGET_DIR to a folder on a larger disk",
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_libtorch_of_another_release_is_a_problem_with_the_tch_that_would_go_with_it() {
        let release = torch::release().unwrap();
        let mut findings = Findings::default();
        matching(&mut findings, &format!("{}+cpu", release.libtorch));
        assert!(findings.problems.is_empty());

        let other = Release::ALL.into_iter().find(|other| *other != release);
        let other = other.unwrap();
        matching(&mut findings, other.libtorch);
        matching(&mut findings, "2.9.0");
        let [known, unknown] = &findings.problems[..] else {
            panic!("{findings:?}")
        };
        assert!(known.fatal && unknown.fatal);
        for part in [release.tch, release.libtorch, other.libtorch] {
            assert!(known.what.contains(part), "{known:?}");
        }
        let choice = format!("cargo update tch --precise {}", other.tch);
        assert!(known.remedy.ends_with(&choice), "{known:?}");
        assert!(!unknown.remedy.contains("precise"), "{unknown:?}");
    }
}
