//! Where Overdrive keeps what it downloads.

use std::path::PathBuf;

use crate::{Environment, TORCH_VERSION};

/// Which build of libtorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// For the CPU only: about 500 MB on disk.
    Cpu,
    /// For NVIDIA GPUs, CUDA 13: several gigabytes.
    Cuda13,
}

impl Variant {
    /// The end of the folder's name: `cpu` or `cuda13`.
    #[must_use]
    pub fn suffix(self) -> &'static str {
        match self {
            Variant::Cpu => "cpu",
            Variant::Cuda13 => "cuda13",
        }
    }
}

/// Overdrive's folder in the user's cache: `$XDG_CACHE_HOME/overdrive`, else
/// `~/Library/Caches/overdrive` on macOS, `%LOCALAPPDATA%\overdrive` on Windows and
/// `~/.cache/overdrive` elsewhere. `None` where the environment names no home.
///
/// A relative `XDG_CACHE_HOME` is ignored, as the XDG specification demands.
#[must_use]
pub fn dir(environment: &Environment) -> Option<PathBuf> {
    let xdg = environment
        .path("XDG_CACHE_HOME")
        .filter(|path| path.is_absolute());
    let base = xdg.or_else(|| match environment.os() {
        "windows" => environment.path("LOCALAPPDATA"),
        "macos" => environment
            .path("HOME")
            .map(|home| home.join("Library/Caches")),
        _ => environment.path("HOME").map(|home| home.join(".cache")),
    })?;
    Some(base.join("overdrive"))
}

/// The folder of one libtorch in the cache, for example `…/overdrive/libtorch/2.11.0-cpu`.
/// It holds `lib/`, `include/` and `build-version`, and appears whole or not at all.
#[must_use]
pub fn libtorch_dir(environment: &Environment, variant: Variant) -> Option<PathBuf> {
    let name = format!("{TORCH_VERSION}-{}", variant.suffix());
    Some(dir(environment)?.join("libtorch").join(name))
}
