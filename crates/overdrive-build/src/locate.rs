//! The search for libtorch, in the order of `torch-sys`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache::{self, Variant};
use crate::{Environment, Error, Libtorch, Result, Source, python};

/// The variables that decide the answer; a change of one runs the build script again.
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

/// The libtorch that this build uses. For build scripts: it tells Cargo which variables the answer
/// depends on (on standard output), then asks [`locate`].
///
/// # Errors
///
/// Those of [`locate`].
pub fn libtorch() -> Result<Libtorch> {
    for name in VARIABLES {
        println!("cargo:rerun-if-env-changed={name}");
    }
    locate(&Environment::process())
}

/// The libtorch that a build in `environment` uses. Prints nothing.
///
/// # Errors
///
/// [`Error::Incomplete`] where a variable names a folder without a libtorch, [`Error::Python`]
/// where Python was to be asked and did not answer, [`Error::NotFound`] where no place has one.
/// A variable that is set and wrong is an error and not skipped: `torch-sys` follows it too.
pub fn locate(environment: &Environment) -> Result<Libtorch> {
    let mut found = match environment.path("DEP_TCH_LIBTORCH_LIB") {
        Some(lib_dir) => told_by_torch_sys(environment, &lib_dir),
        None => by_the_rules_of_torch_sys(environment)?,
    };
    if environment
        .get("LIBTORCH_CXX11_ABI")
        .is_some_and(|abi| abi == "0")
        && !matches!(found.source, Source::Python { .. })
    {
        found.cxx11_abi = false;
    }
    Ok(found)
}

/// `torch-sys` says the library folder only; the headers are where the rules find them, provided
/// that they lead to the same libraries, else beside that folder.
fn told_by_torch_sys(environment: &Environment, lib_dir: &Path) -> Libtorch {
    let by_rules = by_the_rules_of_torch_sys(environment).ok();
    if let Some(same) = by_rules.filter(|torch| torch.lib_dir == lib_dir) {
        return Libtorch {
            source: Source::TorchSys,
            ..same
        };
    }
    let root = lib_dir.parent().unwrap_or(lib_dir);
    Libtorch::split(root, lib_dir, root, Source::TorchSys)
}

fn by_the_rules_of_torch_sys(environment: &Environment) -> Result<Libtorch> {
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
        tried.push("/usr/lib/libtorch.so: not there".into());
    }
    if let Some(root) = torch_sys_download(environment) {
        return complete(Libtorch::at(&root, Source::TorchSysDownload), "torch-sys");
    }
    for variant in [Variant::Cpu, Variant::Cuda13] {
        let Some(root) = cache::libtorch_dir(environment, variant) else {
            tried.push("Overdrive's cache: neither XDG_CACHE_HOME nor HOME is set".into());
            break;
        };
        let torch = Libtorch::at(&root, Source::Cache);
        if torch.missing().is_empty() {
            return Ok(torch);
        }
        tried.push(format!("{}: not there or not complete", root.display()));
    }
    Err(Error::NotFound { tried })
}

/// `LIBTORCH_LIB` and `LIBTORCH_INCLUDE` name roots, too: `torch-sys` appends `lib` and `include`.
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

/// With its feature `download-libtorch` torch-sys unpacks to `libtorch/libtorch` in its own
/// `OUT_DIR`, a neighbour of ours: `…/build/torch-sys-<hash>/out`. The newest is the one in use.
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
    found.sort();
    found.pop().map(|(_, root)| root)
}
