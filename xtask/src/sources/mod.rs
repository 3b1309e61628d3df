//! The sources of libtorch, and the files of them that are needed.

pub(crate) mod archive;
pub(crate) mod wheels;

use std::path::PathBuf;

use overdrive_build::cache::Variant;

use crate::failure::{Failure, Result};

/// The systems that PyTorch is built for and that this project supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Platform {
    LinuxX86,
    LinuxArm,
    MacArm,
}

impl Platform {
    pub(crate) fn of(os: &str, arch: &str) -> Result<Self> {
        match (os, arch) {
            ("linux", "x86_64") => Ok(Platform::LinuxX86),
            ("linux", "aarch64") => Ok(Platform::LinuxArm),
            ("macos", "aarch64") => Ok(Platform::MacArm),
            _ => Err(
                Failure::new(format!("no prebuilt libtorch exists for {os} on {arch}"))
                    .remedy("Build PyTorch from source and set LIBTORCH to its folder `torch`."),
            ),
        }
    }

    pub(crate) fn here() -> Result<Self> {
        Self::of(std::env::consts::OS, std::env::consts::ARCH)
    }
}

/// The reason why a source failed.
#[derive(Debug)]
pub(crate) enum SourceError {
    /// This source is not available here; another one may be.
    Unavailable(String),
    /// Another source would not help: the disk is full, or a hash is wrong.
    Fatal(Failure),
}

impl From<Failure> for SourceError {
    fn from(failure: Failure) -> Self {
        SourceError::Fatal(failure)
    }
}

/// Returns the path of an archive's file relative to the folder of the libtorch; `None` for the nine tenths that
/// a build does not need (Python code, tools, test data).
///
/// The same rules apply to the official archive (`libtorch/lib/…`), PyTorch's wheels
/// (`torch/lib/…`) and NVIDIA's (`nvidia/cu13/lib/…`).
pub(crate) fn destination(name: &str, variant: Variant, platform: Platform) -> Option<PathBuf> {
    // An archive must not write outside the target folder.
    if name.ends_with('/') || name.split('/').any(|part| part.is_empty() || part == "..") {
        return None;
    }
    if let Some(licence) = licence(name) {
        return Some(licence);
    }
    for root in ["torch/", "libtorch/"] {
        let Some(rest) = name.strip_prefix(root) else {
            continue;
        };
        if rest.starts_with("include/") {
            return Some(PathBuf::from(rest));
        }
        if root == "libtorch/" && rest == "build-version" {
            return Some(PathBuf::from(rest));
        }
        let file = rest.strip_prefix("lib/")?;
        let own_torch = root == "libtorch/";
        return wanted_of_torch(file, variant, platform, own_torch)
            .then(|| PathBuf::from("lib").join(file));
    }
    let (folder, file) = name.strip_prefix("nvidia/")?.rsplit_once('/')?;
    let library = folder.split('/').any(|part| part == "lib") && is_library(file);
    let wanted = match variant {
        // libtorch_cpu.so of the CUDA build is linked with these two, even without a GPU.
        Variant::Cpu => file.starts_with("libcudart.so") || file.starts_with("libcupti.so"),
        Variant::Cuda13 => true,
    };
    (library && wanted).then(|| PathBuf::from("lib").join(file))
}

/// Returns the path of a licence such as `torch-2.11.0.dist-info/licenses/LICENSE` of a wheel. A distribution
/// of the libraries (`cargo xtask dist`) must include these texts.
fn licence(name: &str) -> Option<PathBuf> {
    let (package, file) = name.split_once(".dist-info/")?;
    let file = file.rsplit('/').next()?;
    let lower = file.to_lowercase();
    let is_text = ["license", "notice", "copying"]
        .iter()
        .any(|start| lower.starts_with(start));
    (is_text && !package.contains('/')).then(|| ["licences", package, file].iter().collect())
}

/// Returns the destination of a library. `own_torch`: the archive's own `libtorch.so` needs no library that is
/// left out.
pub(crate) fn wanted_of_torch(
    file: &str,
    variant: Variant,
    platform: Platform,
    own_torch: bool,
) -> bool {
    if !is_library(file) {
        return false;
    }
    let stem = file.split('.').next().unwrap_or(file);
    match stem {
        "libtorch_python" | "libshm" | "libtorch_global_deps" => false,
        "libtorch_cuda"
        | "libtorch_cuda_linalg"
        | "libc10_cuda"
        | "libcaffe2_nvrtc"
        | "libtorch_nvshmem" => variant == Variant::Cuda13,
        // In the CUDA build it needs libtorch_cuda.so; a linker script replaces it.
        "libtorch" => own_torch || variant == Variant::Cuda13 || platform == Platform::MacArm,
        _ => true,
    }
}

/// Returns `true` for `libx.so`, `libx.so.1`, `libx.dylib`, but not for `libx.a`, which is for static builds.
fn is_library(file: &str) -> bool {
    !file.contains('/')
        && file.starts_with("lib")
        && (file.ends_with(".so") || file.contains(".so.") || file.ends_with(".dylib"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(name: &str) -> Option<String> {
        destination(name, Variant::Cpu, Platform::LinuxX86).map(|p| p.display().to_string())
    }

    fn cuda(name: &str) -> Option<String> {
        destination(name, Variant::Cuda13, Platform::LinuxX86).map(|p| p.display().to_string())
    }

    #[test]
    fn of_the_wheels_a_cpu_build_takes_headers_and_seven_libraries() {
        for (name, to) in [
            ("torch/include/ATen/ATen.h", "include/ATen/ATen.h"),
            ("torch/lib/libtorch_cpu.so", "lib/libtorch_cpu.so"),
            ("torch/lib/libc10.so", "lib/libc10.so"),
            ("torch/lib/libgomp.so.1", "lib/libgomp.so.1"),
            ("torch/lib/libarm_compute.so", "lib/libarm_compute.so"),
            ("nvidia/cu13/lib/libcudart.so.13", "lib/libcudart.so.13"),
            ("nvidia/cu13/lib/libcupti.so.13", "lib/libcupti.so.13"),
        ] {
            assert_eq!(cpu(name).as_deref(), Some(to), "{name}");
        }
        for name in [
            "torch/lib/libtorch.so",
            "torch/lib/libtorch_cuda.so",
            "torch/lib/libc10_cuda.so",
            "torch/lib/libtorch_python.so",
            "torch/lib/libshm/libshm.h",
            "torch/nn/functional.py",
            "torch/_C.cpython-311-x86_64-linux-gnu.so",
            "torch-2.11.0.dist-info/METADATA",
            "nvidia/cu13/lib/libnvperf_host.so",
            "nvidia/cu13/include/cupti.h",
            "torch/include/",
        ] {
            assert_eq!(cpu(name), None, "{name}");
        }
    }

    #[test]
    fn a_cuda_build_takes_the_cuda_libraries_of_torch_and_of_nvidia() {
        for name in [
            "torch/lib/libtorch_cuda.so",
            "torch/lib/libtorch_nvshmem.so",
            "torch/lib/libtorch.so",
        ] {
            assert!(cuda(name).is_some(), "{name}");
        }
        assert_eq!(
            cuda("nvidia/cudnn/lib/libcudnn.so.9").as_deref(),
            Some("lib/libcudnn.so.9")
        );
        assert_eq!(cuda("nvidia/cu13/include/cuda.h"), None);
        assert_eq!(cuda("torch/lib/libtorch_python.so"), None);
    }

    #[test]
    fn of_the_official_archive_its_own_libtorch_so_is_taken_and_no_static_library() {
        assert_eq!(
            cpu("libtorch/lib/libtorch.so").as_deref(),
            Some("lib/libtorch.so")
        );
        assert_eq!(
            cpu("libtorch/build-version").as_deref(),
            Some("build-version")
        );
        assert_eq!(
            cpu("libtorch/lib/libgomp-98b21ff3.so.1").as_deref(),
            Some("lib/libgomp-98b21ff3.so.1")
        );
        assert_eq!(cpu("libtorch/lib/libdnnl.a"), None);
        assert_eq!(cpu("libtorch/share/cmake/Torch/TorchConfig.cmake"), None);
    }

    #[test]
    fn the_licences_of_wheels_are_kept_by_package() {
        for (name, to) in [
            (
                "torch-2.11.0.dist-info/licenses/LICENSE",
                "licences/torch-2.11.0/LICENSE",
            ),
            (
                "torch-2.11.0.dist-info/licenses/NOTICE",
                "licences/torch-2.11.0/NOTICE",
            ),
            (
                "nvidia_cuda_cupti-13.0.85.dist-info/licenses/License.txt",
                "licences/nvidia_cuda_cupti-13.0.85/License.txt",
            ),
        ] {
            assert_eq!(cpu(name).as_deref(), Some(to));
        }
        assert_eq!(cpu("torch-2.11.0.dist-info/RECORD"), None);
    }

    #[test]
    fn on_a_mac_libraries_end_in_dylib() {
        let mac = |name: &str| destination(name, Variant::Cpu, Platform::MacArm);
        for name in [
            "libtorch.dylib",
            "libtorch_cpu.dylib",
            "libc10.dylib",
            "libomp.dylib",
        ] {
            assert!(mac(&format!("torch/lib/{name}")).is_some(), "{name}");
        }
        assert_eq!(mac("torch/lib/libtorch_python.dylib"), None);
    }

    #[test]
    fn no_archive_writes_outside_its_folder() {
        for name in [
            "torch/include/../../../.bashrc",
            "/etc/passwd",
            "torch/include//a.h",
        ] {
            assert_eq!(cpu(name), None, "{name}");
        }
    }

    #[test]
    fn a_platform_without_a_build_is_told_the_way_out() {
        assert_eq!(
            Platform::of("linux", "aarch64").unwrap(),
            Platform::LinuxArm
        );
        let text = Platform::of("macos", "x86_64").unwrap_err().to_string();
        assert!(
            text.contains("macos") && text.contains("LIBTORCH"),
            "{text}"
        );
    }
}
