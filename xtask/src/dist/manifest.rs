//! The contents of the folder, for programs (`manifest.json`, `SHA256SUMS`) and for people (`README.md`).

use std::fs;
use std::path::Path;
use std::process::Command;

use overdrive_build::Libtorch;
use serde_json::{Value, json};

use super::program::Program;
use super::{MANIFEST, output_of, write};
use crate::failure::{Failure, Result};
use crate::{cargo, hash, space};

pub(super) const FORMAT: &str = "overdrive-dist";
/// The version of the manifest; it is raised if a reader of the old form would misread the new one.
const FORMAT_VERSION: u64 = 1;
const SUMS: &str = "SHA256SUMS";
const README: &str = "README.md";

/// The files of a folder, and their requirements on the target machine.
#[derive(Debug)]
pub(crate) struct Manifest {
    files: Vec<Entry>,
    libtorch: String,
    cuda: bool,
    needs: Needs,
    commit: Option<String>,
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    path: String,
    bytes: u64,
    sha256: String,
}

/// The newest symbol versions of the system's libraries that a file needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// glibc 2.`n`.
    glibc: Option<u32>,
    /// `GLIBCXX_3.4.n` of libstdc++.
    libstdcxx: Option<u32>,
}

/// Returns `true` if `folder` has a manifest of this format.
pub(super) fn is_in(folder: &Path, format: &str) -> bool {
    fs::read_to_string(folder.join(MANIFEST))
        .ok()
        .and_then(|text| serde_json::from_str::<Value>(&text).ok())
        .is_some_and(|manifest| manifest["format"] == format)
}

impl Manifest {
    /// Reads every file of `folder`.
    pub(crate) fn of(folder: &Path, torch: &Libtorch) -> Result<Self> {
        let mut files = Vec::new();
        let mut needs = Needs::default();
        entries(folder, "", &mut files, &mut needs)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Self {
            files,
            libtorch: torch.version.clone().unwrap_or_default(),
            cuda: torch.cuda,
            needs,
            commit: commit(),
        })
    }

    /// Returns the size of all files in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Writes the three files. The manifest has no entry for them.
    pub(crate) fn write(&self, folder: &Path, programs: &[Program]) -> Result<()> {
        let sums: String = self
            .files
            .iter()
            .map(|file| format!("{}  {}\n", file.sha256, file.path))
            .collect();
        for (name, text) in [
            (README, self.readme(programs)),
            (SUMS, sums),
            (MANIFEST, format!("{:#}\n", self.json())),
        ] {
            write(&folder.join(name), &text)?;
        }
        Ok(())
    }

    fn json(&self) -> Value {
        let files = self.files.iter();
        let files: Vec<Value> = files
            .map(|file| json!({"path": file.path, "bytes": file.bytes, "sha256": file.sha256}))
            .collect();
        json!({
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "version": env!("CARGO_PKG_VERSION"),
            "commit": self.commit,
            "os": std::env::consts::OS,
            "arch": std::env::consts::ARCH,
            "libtorch": {"version": self.libtorch, "cuda": self.cuda},
            "needs": {"glibc": self.needs.glibc(), "libstdcxx": self.needs.libstdcxx()},
            "bytes": self.bytes(),
            "files": files,
        })
    }

    fn readme(&self, programs: &[Program]) -> String {
        let list: String = programs
            .iter()
            .map(|program| format!("| `{}` | {} |\n", program.file, program.about))
            .collect();
        let system = match (self.needs.glibc(), self.needs.libstdcxx()) {
            (Some(glibc), Some(libstdcxx)) => format!(
                "Linux with glibc {glibc} or newer and a libstdc++ with `{libstdcxx}`; no Rust, no Python, no \
                 compiler"
            ),
            _ => "no Rust, no Python, no compiler".to_owned(),
        };
        let cuda = if self.cuda {
            "The libraries in `lib/` are built with CUDA: a GPU is used if the machine has a driver for it.\n"
        } else {
            &CUDA_OF_PYTORCH.replace("VERSION", &self.libtorch)
        };
        format!(
            "# Overdrive {}\n\nTraining and serving with libtorch {}, {} on {}, {}.\n\n\
             Needs: {system}.\n\nThe folder can be put anywhere: each program finds `lib/` beside itself. Every \
             program has `--help`.\n\n| program | what it does |\n|---|---|\n{list}\n\
             `./train --data my-text/ --out runs/mine` trains; `./launch --nproc 2 train …` does so with two \
             processes.\n\n## GPUs\n\n{cuda}\n## Verifying the files\n\n```sh\nsha256sum --check --quiet {SUMS}\n```\n\n\
             `{MANIFEST}` lists the same checksums with sizes, the versions and the commit. Licences: `LICENSE` \
             (Overdrive), `licences/` (the libraries and crates that it is linked with).\n",
            env!("CARGO_PKG_VERSION"),
            self.libtorch,
            std::env::consts::ARCH,
            std::env::consts::OS,
            space::megabytes(self.bytes()),
        )
    }
}

const CUDA_OF_PYTORCH: &str = "\
The libraries in `lib/` are built for CPUs. The same programs use a GPU with the libraries of an installed PyTorch
VERSION with CUDA, which take precedence over `lib/`:

```sh
export LD_LIBRARY_PATH=$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), \"lib\"))')
./train --data my-text/
```

`OVERDRIVE_NO_CUDA=1` turns CUDA off again.
";

impl Needs {
    /// Returns the versions that `bytes` of a binary name.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self {
            glibc: newest(bytes, b"GLIBC_2."),
            libstdcxx: newest(bytes, b"GLIBCXX_3.4."),
        }
    }

    fn and(self, other: Self) -> Self {
        Self {
            glibc: self.glibc.max(other.glibc),
            libstdcxx: self.libstdcxx.max(other.libstdcxx),
        }
    }

    pub(crate) fn glibc(self) -> Option<String> {
        self.glibc.map(|minor| format!("2.{minor}"))
    }

    pub(crate) fn libstdcxx(self) -> Option<String> {
        self.libstdcxx.map(|patch| format!("GLIBCXX_3.4.{patch}"))
    }
}

/// Returns the largest number directly after `prefix` anywhere in `bytes`.
fn newest(bytes: &[u8], prefix: &[u8]) -> Option<u32> {
    let mut largest = None;
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|byte| *byte == prefix[0]) {
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix(prefix) {
            let digits = after.iter().take_while(|byte| byte.is_ascii_digit());
            let number: String = digits.take(4).map(|byte| char::from(*byte)).collect();
            largest = largest.max(number.parse().ok());
        }
        rest = &rest[1..];
    }
    largest
}

fn entries(folder: &Path, prefix: &str, files: &mut Vec<Entry>, needs: &mut Needs) -> Result<()> {
    let fail = |error: std::io::Error| Failure::io("could not read", folder, &error);
    for entry in fs::read_dir(folder).map_err(fail)? {
        let entry = entry.map_err(fail)?;
        let path = entry.path();
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if path.is_dir() {
            entries(&path, &format!("{name}/"), files, needs)?;
            continue;
        }
        let bytes =
            fs::read(&path).map_err(|error| Failure::io("could not read", &path, &error))?;
        if bytes.starts_with(b"\x7fELF") {
            *needs = needs.and(Needs::of(&bytes));
        }
        files.push(Entry {
            path: name,
            bytes: bytes.len() as u64,
            sha256: hash::of_bytes(&bytes),
        });
    }
    Ok(())
}

/// Returns the commit that is checked out, with a `+` if files differ from it; `None` without git.
pub(crate) fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command.args(arguments).current_dir(cargo::workspace());
        output_of(&mut command).ok()
    };
    let head = git(&["rev-parse", "HEAD"])?;
    let changed = git(&["status", "--porcelain"])?;
    let mark = if changed.trim().is_empty() { "" } else { "+" };
    Some(format!("{}{mark}", head.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        Manifest {
            files: vec![Entry {
                path: "lib/libc10.so".to_owned(),
                bytes: 3,
                sha256: "ba78".to_owned(),
            }],
            libtorch: "2.11.0".to_owned(),
            cuda: false,
            needs: Needs {
                glibc: Some(34),
                libstdcxx: Some(29),
            },
            commit: None,
        }
    }

    #[test]
    fn every_file_is_listed_with_size_and_hash() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("lib")).unwrap();
        fs::write(folder.path().join("lib/abc"), "abc").unwrap();
        fs::write(
            folder.path().join("elf"),
            b"\x7fELF GLIBC_2.34\0GLIBCXX_3.4.29\0",
        )
        .unwrap();
        let (mut files, mut needs) = (Vec::new(), Needs::default());
        entries(folder.path(), "", &mut files, &mut needs).unwrap();
        files.sort_by(|a, b| a.path.cmp(&b.path));
        assert_eq!(files.len(), 2);
        assert_eq!(
            files[1],
            Entry {
                path: "lib/abc".to_owned(),
                bytes: 3,
                // The SHA-256 of "abc", from FIPS 180-2.
                sha256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
                    .to_owned(),
            }
        );
        assert_eq!((needs.glibc, needs.libstdcxx), (Some(34), Some(29)));
    }

    #[test]
    fn the_newest_version_counts_by_number_and_not_by_letters() {
        let bytes = b"x\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.4\0GLIBC_PRIVATE\0GLIBCXX_3.4.30\0";
        let needs = Needs::of(bytes);
        assert_eq!(needs.glibc().as_deref(), Some("2.34"));
        assert_eq!(needs.libstdcxx().as_deref(), Some("GLIBCXX_3.4.30"));
        assert_eq!(Needs::of(b"nothing"), Needs::default());
        let both = needs.and(Needs::of(b"GLIBC_2.35"));
        assert_eq!((both.glibc, both.libstdcxx), (Some(35), Some(30)));
    }

    #[test]
    fn what_is_written_is_known_again_and_read_by_sha256sum() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!is_in(folder.path(), FORMAT));
        let program = Program {
            file: "train".to_owned(),
            built: "/t/train".into(),
            about: "Trains".to_owned(),
        };
        manifest().write(folder.path(), &[program]).unwrap();
        assert!(is_in(folder.path(), FORMAT));
        assert!(!is_in(folder.path(), "overdrive-gpu-bundle"));
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(read(SUMS), "ba78  lib/libc10.so\n");
        let readme = read(README);
        assert!(readme.contains("| `train` | Trains |"), "{readme}");
        assert!(
            readme.contains("glibc 2.34 or newer") && readme.contains("LD_LIBRARY_PATH"),
            "{readme}"
        );
        let json: Value = serde_json::from_str(&read(MANIFEST)).unwrap();
        assert_eq!(json["files"][0]["bytes"], 3);
        assert_eq!(json["needs"]["glibc"], "2.34");
        assert_eq!(json["libtorch"]["cuda"], false);
    }
}
