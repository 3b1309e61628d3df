//! The search for libtorch, in the order of `torch-sys`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache::{self, Variant};
use crate::{Environment, Error, Libtorch, Release, Result, Source, python};

/// The variables that determine the result; a change of one runs the build script again.
pub(crate) const VARIABLES: [&str; 8] = [
    "DEP_TCH_LIBTORCH_LIB",
    "LIBTORCH_USE_PYTORCH",
    "LIBTORCH",
    "LIBTORCH_LIB",
    "LIBTORCH_INCLUDE",
    "LIBTORCH_CXX11_ABI",
    "XDG_CACHE_HOME",
    "VIRTUAL_ENV",
];

/// Returns the libtorch of this build. For build scripts: it prints the variables on which the result depends
/// for Cargo, then calls [`locate`].
///
/// # Errors
///
/// As [`locate`].
pub fn libtorch() -> Result<Libtorch> {
    for name in VARIABLES {
        println!("cargo:rerun-if-env-changed={name}");
    }
    locate(&Environment::process())
}

/// Returns the libtorch of a build in `environment`, without printing anything.
///
/// # Errors
///
/// [`Error::Incomplete`] if a variable names a folder without a libtorch, [`Error::Python`] if Python
/// does not return a folder, [`Error::NotFound`] if no location has one, [`Error::OldAbi`] for
/// `LIBTORCH_CXX11_ABI=0`. A variable with an invalid value is an error and not skipped, because `torch-sys` uses it too.
pub fn locate(environment: &Environment) -> Result<Libtorch> {
    if environment
        .get("LIBTORCH_CXX11_ABI")
        .is_some_and(|abi| abi == "0")
    {
        return Err(Error::OldAbi);
    }
    match environment.path("DEP_TCH_LIBTORCH_LIB") {
        Some(lib_dir) => Ok(from_torch_sys(environment, &lib_dir)),
        None => search(environment),
    }
}

/// Returns the libtorch of `torch-sys`, which passes on the library folder only. The headers are those of the
/// search if it finds the same libraries, else those beside the library folder.
fn from_torch_sys(environment: &Environment, lib_dir: &Path) -> Libtorch {
    let searched = search(environment).ok();
    if let Some(same) = searched.filter(|torch| torch.lib_dir == lib_dir) {
        return Libtorch {
            source: Source::TorchSys,
            ..same
        };
    }
    let root = lib_dir.parent().unwrap_or(lib_dir);
    Libtorch::split(root, lib_dir, root, Source::TorchSys)
}

fn search(environment: &Environment) -> Result<Libtorch> {
    if environment.is_set("LIBTORCH_USE_PYTORCH") {
        return complete(python::libtorch(environment)?, "LIBTORCH_USE_PYTORCH");
    }
    if let Some(root) = environment.path("LIBTORCH") {
        return complete(at(environment, &root, Source::Variable), "LIBTORCH");
    }
    let mut tried = vec![
        "LIBTORCH_USE_PYTORCH: not set".into(),
        "LIBTORCH: not set".into(),
    ];
    if environment.os() == "linux" {
        if Path::new("/usr/lib/libtorch.so").exists() {
            return complete(at(environment, Path::new("/usr"), Source::System), "/usr");
        }
        tried.push("/usr/lib/libtorch.so: does not exist".into());
    }
    if let Some(root) = torch_sys_download(environment) {
        return complete(Libtorch::at(&root, Source::TorchSysDownload), "torch-sys");
    }
    if cache::dir(environment).is_none() {
        tried.push("Overdrive's cache: neither XDG_CACHE_HOME nor HOME is set".into());
    }
    for (release, variant) in cached() {
        let Some(root) = cache::libtorch_dir(environment, release, variant) else {
            break;
        };
        let torch = Libtorch::at(&root, Source::Cache);
        if torch.missing().is_empty() {
            return Ok(torch);
        }
        tried.push(format!("{}: missing or incomplete", root.display()));
    }
    Err(Error::NotFound { tried })
}

/// Returns what may be in the cache, in the order of the search: the default release first.
fn cached() -> impl Iterator<Item = (Release, Variant)> {
    let others = Release::ALL
        .into_iter()
        .filter(|release| *release != Release::DEFAULT);
    [Release::DEFAULT]
        .into_iter()
        .chain(others)
        .flat_map(|release| [Variant::Cpu, Variant::Cuda13].map(|variant| (release, variant)))
}

/// Returns the libtorch in `root`. `LIBTORCH_LIB` and `LIBTORCH_INCLUDE` name roots too: `torch-sys` appends
/// `lib` and `include`.
fn at(environment: &Environment, root: &Path, source: Source) -> Libtorch {
    let lib_root = environment
        .path("LIBTORCH_LIB")
        .unwrap_or_else(|| root.to_path_buf());
    let include_root = environment
        .path("LIBTORCH_INCLUDE")
        .unwrap_or_else(|| root.to_path_buf());
    Libtorch::split(root, &lib_root.join("lib"), &include_root, source)
}

fn complete(torch: Libtorch, source: &str) -> Result<Libtorch> {
    let missing = torch.missing();
    if missing.is_empty() {
        return Ok(torch);
    }
    let root = torch
        .lib_dir
        .parent()
        .unwrap_or(&torch.lib_dir)
        .to_path_buf();
    Err(Error::Incomplete {
        source: source.to_owned(),
        root,
        missing,
    })
}

/// Returns the libtorch that torch-sys downloaded. With its feature `download-libtorch` it unpacks to
/// `libtorch/libtorch` in its own `OUT_DIR`, a sibling of this one: `…/build/torch-sys-<hash>/out`.
fn torch_sys_download(environment: &Environment) -> Option<PathBuf> {
    let out_dir = environment.path("OUT_DIR")?;
    let build = out_dir
        .ancestors()
        .find(|dir| dir.file_name().is_some_and(|n| n == "build"))?;
    let mut found: Vec<(std::time::SystemTime, PathBuf)> = fs::read_dir(build)
        .ok()?
        .filter_map(|entry| {
            let entry = entry.ok()?;
            if !entry.file_name().to_str()?.starts_with("torch-sys-") {
                return None;
            }
            let root = entry.path().join("out/libtorch/libtorch");
            let unpacked = fs::metadata(root.join("lib")).ok()?.modified().ok()?;
            Some((unpacked, root))
        })
        .collect();
    // There is one folder per configuration of torch-sys; the newest is the one in use.
    found.sort();
    found.pop().map(|(_, root)| root)
}
