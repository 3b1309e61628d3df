//! The download of a libtorch into the cache.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_build::cache::{self, Variant};
use overdrive_build::{Environment, Release};

use super::search::cached;
use super::{Found, install};
use crate::failure::{Failure, Result};
use crate::lock;
use crate::sources::{Platform, SourceError, archive, wheels};
use crate::{space, unpack};

/// Fetches libtorch into the cache, one process at a time.
pub(super) fn fetch(
    environment: &Environment,
    release: Release,
    variant: Variant,
    force: bool,
) -> Result<Found> {
    let cache = cache::dir(environment).ok_or_else(|| {
        Failure::new("there is no cache folder: neither XDG_CACHE_HOME nor HOME is set")
            .remedy("Set XDG_CACHE_HOME to a writable folder.")
    })?;
    let target = cache::libtorch_dir(environment, release, variant)
        .ok_or_else(|| Failure::new("there is no cache folder"))?;
    let platform = Platform::here()?;
    let plan = wheels::plan(release, platform, variant)?;
    let downloads = cache.join("downloads");
    // Set by the callback, which the lock calls only if it has to wait for more than two seconds.
    let mut waited = false;
    let doing = "fetching libtorch into the same cache";
    let _lock = lock::take(&cache.join("setup.lock"), doing, |text| {
        waited = true;
        eprintln!("{text}");
    })
    .map_err(|failure| Failure::new(format!("the cache cannot be used: {}", failure.in_cache())))?;
    // The process that held the lock may just have created it, even if this run was to create it again.
    if (!force || waited)
        && let Some(found) = cached(environment, release, variant)
    {
        return Ok(found);
    }
    for folder in [&downloads, &cache.join("libtorch")] {
        fs::create_dir_all(folder)
            .map_err(|error| Failure::io("could not create", folder, &error))?;
    }
    let mut swept = unpack::sweep(&target);
    swept.extend(unpack::remove_beginning_with(&downloads, wheels::PARTIAL));
    for name in swept {
        eprintln!("removed leftovers of an earlier run: {name}");
    }
    // Wheels that are already there need no room again.
    let there: u64 = plan
        .iter()
        .filter_map(|wheel| fs::metadata(downloads.join(wheel.file)).ok())
        .map(|metadata| metadata.len())
        .sum();
    space::require(
        &cache,
        wheels::room(platform, variant).saturating_sub(there),
    )?;

    eprintln!(
        "fetching libtorch {} ({}) into {}",
        release.libtorch,
        variant.suffix(),
        target.display()
    );
    let archives = fetch_archives(environment, release, platform, variant, &plan, &downloads)?;
    install::install(&archives, &target, release, platform, variant)?;
    // Downloads are kept until now, so that a killed run need not fetch them again.
    for archive in archives {
        let _ = fs::remove_file(archive);
    }
    cached(environment, release, variant).ok_or_else(|| {
        Failure::new(format!(
            "{} was created but is incomplete",
            target.display()
        ))
        .remedy("Run `cargo xtask setup --force`.")
    })
}

/// Fetches from the first source that is complete: the official archive, else the wheels.
fn fetch_archives(
    environment: &Environment,
    release: Release,
    platform: Platform,
    variant: Variant,
    plan: &[wheels::Wheel],
    downloads: &Path,
) -> Result<Vec<PathBuf>> {
    // All failures are kept: the last one alone rarely explains why no source worked.
    let mut tried = Vec::new();
    // The official CUDA archives differ from the wheels (they contain CUDA); the wheels are what PyTorch
    // users run on GPUs. Wheels that an earlier run has started to fetch are continued.
    let begun = plan
        .iter()
        .any(|wheel| downloads.join(wheel.file).is_file());
    let url = archive::url(release, platform).filter(|_| variant == Variant::Cpu && !begun);
    if let Some(url) = url {
        eprintln!("trying {url}");
        match archive::fetch(&url, downloads) {
            Ok(file) => {
                eprintln!(
                    "note: no hash is published for this archive; it is checked by TLS, its own \
                     checksums and its version"
                );
                return Ok(vec![file]);
            }
            Err(SourceError::Unavailable(reason)) => {
                eprintln!("  not available here ({reason}); trying the wheels through pip");
                tried.push(format!("{url}: {reason}"));
            }
            Err(SourceError::Fatal(failure)) => return Err(failure),
        }
    }
    let mut files = Vec::new();
    for wheel in plan {
        match wheels::fetch(wheel, downloads, environment) {
            Ok(file) => files.push(file),
            Err(SourceError::Unavailable(reason)) => {
                tried.push(format!("pip, {}: {reason}", wheel.file));
                let list: String = tried.iter().map(|line| format!("\n  - {line}")).collect();
                let version = release.libtorch;
                return Err(Failure::new(format!("libtorch could not be fetched:{list}")).remedy(
                    format!(
                        "Solve one of these problems and run the command again (it resumes where it \
                         stopped), or set LIBTORCH to a libtorch {version}, or LIBTORCH_USE_PYTORCH=1 if \
                         Python has PyTorch {version}.",
                    ),
                ));
            }
            Err(SourceError::Fatal(failure)) => return Err(failure),
        }
    }
    Ok(files)
}
