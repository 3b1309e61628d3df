//! The search for a libtorch that is there: named by a variable, chosen earlier, or in the cache.

use overdrive_build::cache::{self, Variant};
use overdrive_build::{Environment, Libtorch, Release, Source, locate};

use super::{Found, Request, manifest};
use crate::failure::{Failure, Result};
use crate::record::{Choice, Record};
use crate::torch;

/// Returns the build that a request means: without one, that of the record.
pub(super) fn variant(wish: Request, recorded: Option<&Record>) -> Variant {
    match (wish, recorded.map(|record| record.choice)) {
        (Request::Cuda, _) | (Request::Any, Some(Choice::Cuda)) => Variant::Cuda13,
        _ => Variant::Cpu,
    }
}

/// Returns an existing libtorch: that of a variable, an earlier choice of the user, or the cache.
pub(super) fn existing(
    environment: &Environment,
    release: Release,
    recorded: Option<&Record>,
    wish: Request,
    force: bool,
) -> Result<Option<Found>> {
    if let Some(found) = named(environment, release)? {
        return suits(found, wish).map(Some);
    }
    // An explicit `--cpu` or `--cuda` replaces an earlier choice of a folder.
    if wish == Request::Any
        && !force
        && torch::other().is_none()
        && let Some(record) = recorded.filter(|record| record.choice == Choice::Own)
    {
        let libtorch = Libtorch::at(&record.libtorch, Source::Variable);
        if libtorch.missing().is_empty() && version_fits(environment, release, &libtorch) {
            let how = "chosen earlier; `cargo xtask setup --cpu` goes back to Overdrive's own";
            return Ok(Some(Found {
                how: how.to_owned(),
                ..Found::new(libtorch, Choice::Own)
            }));
        }
        eprintln!(
            "warning: the libtorch that was chosen earlier, {}, is no longer usable and is \
             ignored",
            record.libtorch.display()
        );
    }
    if force {
        return Ok(None);
    }
    Ok(cached(environment, release, variant(wish, recorded)))
}

/// Returns the libtorch of the user's variables. torch-sys always follows them, so an invalid value is an
/// error.
fn named(environment: &Environment, release: Release) -> Result<Option<Found>> {
    let python = environment.is_set("LIBTORCH_USE_PYTORCH");
    if !python && environment.path("LIBTORCH").is_none() {
        return Ok(None);
    }
    if python && environment.path("LIBTORCH").is_some() {
        eprintln!(
            "note: LIBTORCH_USE_PYTORCH and LIBTORCH are both set; torch-sys follows the first"
        );
    }
    // That variable would only be set for a build script of torch-sys's dependents.
    let libtorch = locate(&environment.clone().without("DEP_TCH_LIBTORCH_LIB"))
        .map_err(|error| Failure::new(error.to_string()))?;
    if !version_fits(environment, release, &libtorch) {
        let version = libtorch.version.as_deref().unwrap_or_default();
        let choose = Release::of_libtorch(version).map_or(String::new(), |other| {
            format!(
                " or choose its tch (`cargo update tch --precise {}`);",
                other.tch
            )
        });
        return Err(Failure::new(format!(
            "{} names libtorch {version} at {}, but tch {} needs {}",
            libtorch.source,
            libtorch.lib_dir.display(),
            release.tch,
            release.libtorch,
        ))
        .remedy(format!(
            "Unset the variable and let `cargo xtask setup` fetch the right one;{choose} or set \
             LIBTORCH_BYPASS_VERSION_CHECK=1 if you know that it fits.",
        )));
    }
    Ok(Some(Found::new(libtorch, Choice::Own)))
}

fn suits(found: Found, wish: Request) -> Result<Found> {
    if wish == Request::Cuda && !found.libtorch.cuda {
        return Err(Failure::new(format!(
            "{} names {}, which has no CUDA",
            found.libtorch.source,
            found.root.display()
        ))
        .remedy("Unset it, and `cargo xtask setup --cuda` fetches a build with CUDA."));
    }
    Ok(found)
}

fn version_fits(environment: &Environment, release: Release, libtorch: &Libtorch) -> bool {
    environment.is_set("LIBTORCH_BYPASS_VERSION_CHECK")
        || libtorch
            .version
            .as_deref()
            // Source builds may have no version file; torch-sys accepts them too.
            .is_none_or(|version| release.accepts(version))
}

/// Returns the libtorch in the cache, if it is complete.
pub(super) fn cached(
    environment: &Environment,
    release: Release,
    variant: Variant,
) -> Option<Found> {
    let root = cache::libtorch_dir(environment, release, variant)?;
    let libtorch = Libtorch::at(&root, Source::Cache);
    let whole = libtorch.missing().is_empty()
        // The folder's name contains the version, but the folder may have been filled by hand.
        && libtorch.version.as_deref() == Some(release.libtorch)
        && manifest::holds(&root);
    whole.then(|| Found::new(libtorch, choice(variant)))
}

fn choice(variant: Variant) -> Choice {
    match variant {
        Variant::Cpu => Choice::Cpu,
        Variant::Cuda13 => Choice::Cuda,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;
    use crate::setup::install::tests::TORCH;

    #[test]
    fn a_plain_setup_keeps_to_cuda_once_it_was_asked_for() {
        let record = |choice| Record {
            libtorch: PathBuf::from("/c"),
            choice,
        };
        assert_eq!(variant(Request::Any, None), Variant::Cpu);
        assert_eq!(
            variant(Request::Any, Some(&record(Choice::Cuda))),
            Variant::Cuda13
        );
        assert_eq!(
            variant(Request::Cpu, Some(&record(Choice::Cuda))),
            Variant::Cpu
        );
        assert_eq!(
            variant(Request::Cuda, Some(&record(Choice::Cpu))),
            Variant::Cuda13
        );
    }

    #[test]
    fn a_libtorch_named_by_the_user_must_have_the_version() {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in TORCH {
            let path = folder.path().join(name.trim_start_matches("torch/"));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let environment = Environment::made_up("linux", [("LIBTORCH", folder.path())]);
        let [release, other] = Release::ALL;
        let version = folder.path().join("build-version");
        fs::write(&version, format!("{}+cpu", release.libtorch)).unwrap();
        let found = named(&environment, release).unwrap().unwrap();
        assert_eq!(found.choice, Choice::Own);
        assert!(
            suits(found, Request::Cuda).is_ok(),
            "it holds libtorch_cuda.so"
        );

        // That of another release is told with its tch.
        let text = named(&environment, other).unwrap_err().to_string();
        for part in [
            release.libtorch,
            other.libtorch,
            &format!("--precise {}", release.tch),
        ] {
            assert!(text.contains(part), "{part:?} is not in: {text}");
        }

        fs::write(version, "2.9.0").unwrap();
        let text = named(&environment, release).unwrap_err().to_string();
        assert!(
            text.contains("2.9.0") && text.contains(release.libtorch),
            "{text}"
        );
    }
}
