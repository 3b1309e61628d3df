//! The shared libraries of the folder, and the check that the programs need no others.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive_build::Libtorch;
use overdrive_build::cache::Variant;

use super::output_of;
use super::program::Program;
use crate::failure::{Failure, Result};
use crate::sources::{Platform, wanted_of_torch};

/// Returns the libraries of `torch` that programs need at run time, by name: all that setup has installed,
/// without the linker script in place of `libtorch.so`.
pub(crate) fn of(torch: &Libtorch) -> Result<Vec<PathBuf>> {
    let folder = &torch.lib_dir;
    let variant = if torch.cuda {
        Variant::Cuda13
    } else {
        Variant::Cpu
    };
    let platform = Platform::here()?;
    let mut libraries = Vec::new();
    let entries =
        fs::read_dir(folder).map_err(|error| Failure::io("could not list", folder, &error))?;
    for entry in entries {
        let entry = entry.map_err(|error| Failure::io("could not list", folder, &error))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        if wanted_of_torch(&name, variant, platform, true) && is_binary(&path)? {
            libraries.push(path);
        }
    }
    libraries.sort();
    Ok(libraries)
}

/// Returns `true` if the file is binary code, and not a linker script.
fn is_binary(path: &Path) -> Result<bool> {
    const ELF: [u8; 4] = *b"\x7fELF";
    const MACH_O: [u8; 4] = [0xcf, 0xfa, 0xed, 0xfe];
    const MACH_O_OF_TWO_KINDS: [u8; 4] = [0xca, 0xfe, 0xba, 0xbe];
    let mut start = Vec::new();
    File::open(path)
        .and_then(|file| file.take(4).read_to_end(&mut start))
        .map_err(|error| Failure::io("could not read", path, &error))?;
    Ok([ELF, MACH_O, MACH_O_OF_TWO_KINDS]
        .iter()
        .any(|magic| start == magic))
}

/// Starts each program of the finished folder in an empty environment, and asks the loader for the path of each
/// library: otherwise the libtorch of this machine would hide a library that is missing in the folder.
pub(crate) fn check(made: &Path, programs: &[Program], torch: &Libtorch) -> Result<()> {
    for program in programs {
        program.starts(made)?;
        if cfg!(all(target_os = "linux", target_env = "gnu")) {
            let mut loader = Command::new(made.join(&program.file));
            loader.env_clear().env("LD_TRACE_LOADED_OBJECTS", "1");
            judge(
                &program.file,
                &output_of(&mut loader)?,
                made,
                &torch.lib_dir,
            )?;
        }
    }
    Ok(())
}

const IN_ONE_FOLDER: &str = "Unset LIBTORCH and LIBTORCH_USE_PYTORCH, so that `cargo xtask setup` uses a \
                             libtorch that has all its libraries in one folder.";

const RUN_PATH: &str = "Call overdrive_build::link() in the program's build script before it passes other \
                        linker arguments: the run path must begin with $ORIGIN/lib.";

/// Parses the list of the loader, one `name => path (address)` per line.
fn judge(program: &str, list: &str, made: &Path, outside: &Path) -> Result<()> {
    for line in list.lines() {
        let Some((library, place)) = line.trim().split_once(" => ") else {
            continue;
        };
        let path = place.rsplit_once(" (").map_or(place, |(path, _)| path);
        let (problem, remedy) = if path == "not found" {
            ("is not found by".to_owned(), IN_ONE_FOLDER)
        } else if Path::new(path).starts_with(outside) {
            let problem = format!(
                "is loaded from {} instead of the folder by",
                outside.display()
            );
            (problem, RUN_PATH)
        } else if made.join("lib").join(library).exists() && !Path::new(path).starts_with(made) {
            let problem = format!("is loaded from {path}, although the folder contains it, by");
            (problem, RUN_PATH)
        } else {
            continue;
        };
        return Err(Failure::new(format!("{library} {problem} {program}")).remedy(remedy));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use overdrive_build::Source;

    use super::*;

    #[test]
    fn libraries_are_taken_and_headers_python_and_the_linker_script_are_not() {
        let folder = tempfile::tempdir().unwrap();
        let lib = folder.path().join("lib");
        fs::create_dir(&lib).unwrap();
        for name in [
            "libtorch_cpu.so",
            "libc10.so",
            "libcudart.so.13",
            "libtorch_python.so",
            "libdnnl.a",
        ] {
            fs::write(lib.join(name), b"\x7fELF\x02\x01").unwrap();
        }
        fs::write(lib.join("libtorch.so"), "INPUT(libtorch_cpu.so)\n").unwrap();
        let torch = Libtorch::at(folder.path(), Source::Variable);
        let names: Vec<_> = of(&torch)
            .unwrap()
            .iter()
            .map(|path| path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(names, ["libc10.so", "libcudart.so.13", "libtorch_cpu.so"]);
    }

    #[test]
    fn the_loaders_list_is_good_when_every_library_is_in_the_folder_or_the_systems() {
        let list = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibc10.so => /made/lib/libc10.so (0x00007f01)\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f02)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f03)\n";
        let judge = |list: &str| judge("train", list, Path::new("/made"), Path::new("/cache/lib"));
        assert!(judge(list).is_ok());
        let missing = judge("\tlibcudart.so.13 => not found\n")
            .unwrap_err()
            .to_string();
        assert!(
            missing.contains("libcudart.so.13 is not found by train")
                && missing.contains("LIBTORCH"),
            "{missing}"
        );
        let outside = judge("\tlibc10.so => /cache/lib/libc10.so (0x1)\n").unwrap_err();
        let outside = outside.to_string();
        assert!(
            outside.contains("/cache/lib") && outside.contains("$ORIGIN/lib"),
            "{outside}"
        );
    }

    #[test]
    fn a_library_of_the_folder_that_is_taken_from_elsewhere_is_found_out() {
        let made = tempfile::tempdir().unwrap();
        fs::create_dir(made.path().join("lib")).unwrap();
        fs::write(made.path().join("lib/libgomp.so.1"), "").unwrap();
        let list = "\tlibgomp.so.1 => /usr/lib/libgomp.so.1 (0x1)\n";
        let text = judge("train", list, made.path(), Path::new("/cache/lib"))
            .unwrap_err()
            .to_string();
        assert!(text.contains("/usr/lib/libgomp.so.1"), "{text}");
    }
}
