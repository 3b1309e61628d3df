//! `.cargo/libtorch.toml`: the record through which Cargo finds libtorch.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_core::{Error, files};

use crate::failure::{Failure, Result};

/// The folder of libtorch, and the origin of that choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Record {
    /// The folder that holds `lib/` and `include/`.
    pub(crate) libtorch: PathBuf,
    pub(crate) choice: Choice,
}

/// The choice that a later `setup` without arguments returns to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The default: the cache, or the variables of that time.
    Cpu,
    /// The user chose CUDA.
    Cuda,
    /// The user chose this folder, by `LIBTORCH` or through Python.
    Own,
}

impl Choice {
    fn word(self) -> &'static str {
        match self {
            Choice::Cpu => "cpu",
            Choice::Cuda => "cuda",
            Choice::Own => "own",
        }
    }
}

const HEAD: &str = "\
# Written by `cargo xtask setup`: where libtorch is on this machine. Never committed.
# A variable that is set in the environment wins over the one here.
";

impl Record {
    /// Returns the record of a libtorch in the cache, which is not written.
    pub(crate) fn of_cache(libtorch: PathBuf) -> Self {
        Self {
            libtorch,
            choice: Choice::Cpu,
        }
    }

    pub(crate) fn path(workspace: &Path) -> PathBuf {
        workspace.join(".cargo/libtorch.toml")
    }

    /// Reads the record; `None` if there is none, or if it has another form.
    pub(crate) fn read(workspace: &Path) -> Option<Self> {
        let text = fs::read_to_string(Self::path(workspace)).ok()?;
        let value = text
            .lines()
            .find_map(|line| line.strip_prefix("LIBTORCH = "))?;
        let choice = text
            .lines()
            .find_map(|line| line.strip_prefix("# choice: "));
        let choice = [Choice::Cuda, Choice::Own]
            .into_iter()
            .find(|known| Some(known.word()) == choice)
            .unwrap_or(Choice::Cpu);
        Some(Self {
            libtorch: PathBuf::from(unquoted(value)?),
            choice,
        })
    }

    /// Writes the file by one rename, so that no reader sees half a file, and only if it changes. Returns
    /// `true` if it was written.
    pub(crate) fn write(&self, workspace: &Path) -> Result<bool> {
        let path = Self::path(workspace);
        let text = self.text();
        if fs::read_to_string(&path).is_ok_and(|old| old == text) {
            return Ok(false);
        }
        files::write(&path, text.as_bytes()).map_err(|error| match error {
            Error::Io { source, .. } => Failure::io("could not write", &path, &source),
            other => Failure::new(other.to_string()),
        })?;
        Ok(true)
    }

    fn text(&self) -> String {
        let root = self.libtorch.display().to_string();
        let flags: Vec<String> = overdrive_build::run_path(&self.libtorch.join("lib"))
            .iter()
            .map(|argument| quoted(&format!("-Clink-arg={argument}")))
            .collect();
        let flags = flags.join(", ");
        format!(
            "{HEAD}# choice: {}\n\n[env]\nLIBTORCH = {}\n\n\
             # Doctests are linked by rustdoc, which no build script reaches.\n\
             [build]\nrustdocflags = [{flags}]\n",
            self.choice.word(),
            quoted(&root),
        )
    }
}

/// Returns a basic string of TOML.
pub(crate) fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', r"\\").replace('"', "\\\""))
}

fn unquoted(text: &str) -> Option<String> {
    let inner = text.trim().strip_prefix('"')?.strip_suffix('"')?;
    let mut plain = String::new();
    let mut chars = inner.chars();
    while let Some(c) = chars.next() {
        plain.push(if c == '\\' { chars.next()? } else { c });
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(path: &str, choice: Choice) -> Record {
        Record {
            libtorch: PathBuf::from(path),
            choice,
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".cargo")).unwrap();
        assert_eq!(Record::read(folder.path()), None);
        for path in [
            "/c/libtorch",
            "/with space/l",
            "/with\"quote/l",
            "C:\\libtorch",
            "/a,b",
        ] {
            for choice in [Choice::Cpu, Choice::Cuda, Choice::Own] {
                let written = record(path, choice);
                assert!(written.write(folder.path()).unwrap());
                assert_eq!(Record::read(folder.path()), Some(written));
            }
        }
        let names: Vec<_> = fs::read_dir(folder.path().join(".cargo"))
            .unwrap()
            .collect();
        assert_eq!(names.len(), 1, "no temporary file is left");
    }

    #[test]
    fn an_unchanged_record_is_not_written_again() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".cargo")).unwrap();
        let same = record("/c/libtorch", Choice::Cpu);
        assert!(same.write(folder.path()).unwrap());
        assert!(!same.write(folder.path()).unwrap());
    }

    #[test]
    fn doctests_get_the_run_path() {
        let text = record("/c/libtorch", Choice::Cpu).text();
        assert!(text.contains("rustdocflags = [\"-Clink-arg=-Wl,-rpath,/c/libtorch/lib\"]"));
        let text = record("/a,b", Choice::Cpu).text();
        assert!(
            text.contains("\"-Clink-arg=-rpath\", \"-Clink-arg=-Xlinker\""),
            "{text}"
        );
    }
}
