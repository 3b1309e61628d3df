//! Overdrive's cache folder for downloads.

use std::path::PathBuf;

use crate::{Environment, Release};

/// A build of libtorch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// The CPU build: about 500 MB on disk.
    Cpu,
    /// The CUDA 13 build, for NVIDIA GPUs: several gigabytes.
    Cuda13,
}

impl Variant {
    /// Returns the end of the folder's name: `cpu` or `cuda13`.
    #[must_use]
    pub fn suffix(self) -> &'static str {
        match self {
            Variant::Cpu => "cpu",
            Variant::Cuda13 => "cuda13",
        }
    }
}

/// Returns Overdrive's folder in the user's cache: `$XDG_CACHE_HOME/overdrive`, else
/// `~/Library/Caches/overdrive` on macOS and `~/.cache/overdrive` elsewhere; `None` if the environment has no home folder.
///
/// A relative `XDG_CACHE_HOME` is ignored, as the XDG specification requires.
#[must_use]
pub fn dir(environment: &Environment) -> Option<PathBuf> {
    let xdg = environment
        .path("XDG_CACHE_HOME")
        .filter(|path| path.is_absolute());
    let base = xdg.or_else(|| match environment.os() {
        "macos" => environment
            .path("HOME")
            .map(|home| home.join("Library/Caches")),
        _ => environment.path("HOME").map(|home| home.join(".cache")),
    })?;
    Some(base.join("overdrive"))
}

/// Returns the folder of a libtorch in the cache, for example `…/overdrive/libtorch/2.11.0-cpu`. It holds
/// `lib/`, `include/` and `build-version`, and is created by one rename, so it is always complete.
#[must_use]
pub fn libtorch_dir(
    environment: &Environment,
    release: Release,
    variant: Variant,
) -> Option<PathBuf> {
    let name = format!("{}-{}", release.libtorch, variant.suffix());
    Some(dir(environment)?.join("libtorch").join(name))
}
