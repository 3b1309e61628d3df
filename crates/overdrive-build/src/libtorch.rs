//! A libtorch installation: its folders, version and build.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{Environment, Error, Release, Result};

/// A libtorch installation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Libtorch {
    /// The folder of the shared libraries, which the run path must contain.
    pub lib_dir: PathBuf,
    /// The folders for a C++ compiler's `-I`, in order: `include` and
    /// `include/torch/csrc/api/include`.
    pub include_dirs: Vec<PathBuf>,
    /// The version without the build's suffix, `2.11.0` and not `2.11.0+cpu`; `None` if neither
    /// `build-version` nor the headers contain it.
    pub version: Option<String>,
    /// If `true`, `libtorch_cuda` is in [`lib_dir`](Self::lib_dir).
    pub cuda: bool,
    /// The rule that found it.
    pub source: Source,
}

/// The rule that found a libtorch.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// `DEP_TCH_LIBTORCH_LIB`, which `torch-sys` passes to this build script.
    TorchSys,
    /// `LIBTORCH_USE_PYTORCH`: the PyTorch of this interpreter.
    Python {
        /// The interpreter, for example `python3`.
        interpreter: PathBuf,
    },
    /// The variables `LIBTORCH`, `LIBTORCH_LIB`, `LIBTORCH_INCLUDE`.
    Variable,
    /// `/usr/lib/libtorch.so`.
    System,
    /// The download of `torch-sys` in the target folder.
    TorchSysDownload,
    /// Overdrive's cache.
    Cache,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::TorchSys => write!(f, "torch-sys"),
            Source::Python { interpreter } => {
                write!(f, "LIBTORCH_USE_PYTORCH ({})", interpreter.display())
            }
            Source::Variable => write!(f, "LIBTORCH"),
            Source::System => write!(f, "/usr/lib"),
            Source::TorchSysDownload => write!(f, "the download of torch-sys"),
            Source::Cache => write!(f, "Overdrive's cache"),
        }
    }
}

impl Libtorch {
    /// Returns the libtorch in the folder `root`, with the layout of the official archives and PyTorch's
    /// wheels: `lib/`, `include/` and, in archives, `build-version`. Reads the version, but does not check
    /// that the installation is complete (see [`missing`](Self::missing)).
    #[must_use]
    pub fn at(root: &Path, source: Source) -> Self {
        Self::split(root, &root.join("lib"), root, source)
    }

    /// Returns a libtorch with libraries in `lib_dir` and headers under `include_root`.
    pub(crate) fn split(root: &Path, lib_dir: &Path, include_root: &Path, source: Source) -> Self {
        let include = include_root.join("include");
        let version = version_file(root).or_else(|| version_header(&include));
        Self {
            lib_dir: lib_dir.to_path_buf(),
            include_dirs: vec![include.clone(), include.join("torch/csrc/api/include")],
            version,
            cuda: has_cuda(lib_dir),
            source,
        }
    }

    /// Returns the missing files that a build against it needs: the CPU library, `libc10`, the target of
    /// `-ltorch`, and the headers.
    #[must_use]
    pub fn missing(&self) -> Vec<PathBuf> {
        let mut missing = Vec::new();
        for stem in ["torch", "torch_cpu", "c10"] {
            if library(&self.lib_dir, stem).is_none() {
                missing.push(self.lib_dir.join(format!("lib{stem}.{}", extension())));
            }
        }
        for header in ["torch/csrc/autograd/engine.h", "torch/torch.h"] {
            if !self
                .include_dirs
                .iter()
                .any(|dir| dir.join(header).is_file())
            {
                let dir = self.include_dirs.first().cloned().unwrap_or_default();
                missing.push(dir.join(header));
            }
        }
        missing
    }

    /// Checks that Overdrive works with this version. As for `torch-sys`, a libtorch of unknown version passes, and
    /// so does any one if `LIBTORCH_BYPASS_VERSION_CHECK` is set.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownRelease`] with the versions that it works with.
    pub fn require_release(&self, environment: &Environment) -> Result<()> {
        match &self.version {
            Some(version)
                if !environment.is_set("LIBTORCH_BYPASS_VERSION_CHECK")
                    && Release::of_libtorch(version).is_none() =>
            {
                Err(Error::UnknownRelease {
                    source: self.source.to_string(),
                    lib_dir: self.lib_dir.clone(),
                    version: version.clone(),
                })
            }
            _ => Ok(()),
        }
    }
}

/// Returns `true` if `libtorch_cuda` is in `lib_dir`.
pub(crate) fn has_cuda(lib_dir: &Path) -> bool {
    library(lib_dir, "torch_cuda").is_some()
}

/// Returns the file of the library `stem` in `dir`, with the extension of any system.
pub(crate) fn library(dir: &Path, stem: &str) -> Option<PathBuf> {
    [
        format!("lib{stem}.so"),
        format!("lib{stem}.dylib"),
        format!("{stem}.lib"),
    ]
    .into_iter()
    .map(|name| dir.join(name))
    .find(|path| path.is_file())
}

fn extension() -> &'static str {
    if cfg!(target_os = "macos") {
        "dylib"
    } else {
        "so"
    }
}

/// Returns the version without the build's suffix: `2.11.0` for `2.11.0+cu130`.
pub(crate) fn without_suffix(version: &str) -> &str {
    let version = version.trim();
    version
        .split_once('+')
        .map_or(version, |(version, _)| version)
}

/// Reads `build-version`, which the official archives contain and `cargo xtask setup` writes.
fn version_file(root: &Path) -> Option<String> {
    let text = fs::read_to_string(root.join("build-version")).ok()?;
    Some(without_suffix(&text).to_owned()).filter(|version| !version.is_empty())
}

/// Reads the version from `torch/headeronly/version.h` (before 2.9 from `torch/version.h`).
fn version_header(include: &Path) -> Option<String> {
    let text = [
        "torch/headeronly/version.h",
        "torch/csrc/api/include/torch/version.h",
    ]
    .iter()
    .find_map(|header| {
        let text = fs::read_to_string(include.join(header)).ok()?;
        text.contains("TORCH_VERSION_MAJOR").then_some(text)
    })?;
    let number = |name: &str| {
        text.lines().find_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some("#define") && words.next() == Some(name))
                .then(|| words.next()?.parse::<u32>().ok())
                .flatten()
        })
    };
    Some(format!(
        "{}.{}.{}",
        number("TORCH_VERSION_MAJOR")?,
        number("TORCH_VERSION_MINOR")?,
        number("TORCH_VERSION_PATCH")?
    ))
}
