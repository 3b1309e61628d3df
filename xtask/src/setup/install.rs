//! A libtorch in the cache, made from downloaded archives.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_build::cache::Variant;
use overdrive_build::{Libtorch, Release, Source};

use super::manifest;
use crate::failure::{Failure, Result};
use crate::sources::{Platform, destination};
use crate::unpack;

/// Creates `target` from archives, under a temporary name until it is complete, so that no build sees half of it.
pub(super) fn install(
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
            "the fetched files are not a complete libtorch {version}: their version is {}, and \
             {} files are missing{names}",
            libtorch.version.as_deref().unwrap_or("unknown"),
            missing.len(),
        ))
        .remedy(format!(
            "Set LIBTORCH to an installed libtorch {version}, and report this."
        )));
    }
    let manifest = manifest::of(made)?;
    // Last, because it lists the files of `lib`, including the linker script.
    write(manifest::FILE, &manifest)?;
    eprintln!("writing it to disk");
    unpack::sync(made)
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write;

    use overdrive_build::{Environment, cache, locate};

    use super::*;
    use crate::setup::search::cached;

    pub(in crate::setup) fn wheel(path: &Path, files: &[(&str, &str)]) {
        let mut zip = zip::ZipWriter::new(fs::File::create(path).unwrap());
        let options = zip::write::SimpleFileOptions::default()
            .compression_method(zip::CompressionMethod::Stored);
        for (name, text) in files {
            zip.start_file(*name, options).unwrap();
            zip.write_all(text.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
    }

    pub(in crate::setup) const TORCH: [(&str, &str); 6] = [
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
}
