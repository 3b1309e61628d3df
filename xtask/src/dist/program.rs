//! The programs of the folder: the examples without symbols.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{copy, output_of};
use crate::cargo::{Artifact, artifacts};
use crate::failure::{Failure, Result};

/// An example that Cargo has built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// The file name in the folder.
    pub(crate) file: String,
    /// The path of Cargo's build.
    pub(crate) built: PathBuf,
    /// The description: the first sentence of the source file.
    pub(crate) about: String,
}

/// Returns the examples in Cargo's messages (`--message-format=json`), by name.
pub(crate) fn of_messages(messages: &str) -> Result<Vec<Program>> {
    of_kind(messages, "example")
}

/// Returns the programs of the kind `example` or `bin` in Cargo's messages, by name.
pub(crate) fn of_kind(messages: &str, kind: &str) -> Result<Vec<Program>> {
    let built = artifacts(messages).into_iter();
    let built = built.filter(|program| program.kinds.iter().any(|of| of == kind));
    let mut programs: Vec<Program> = built.filter_map(of_artifact).collect();
    programs.sort_by(|a, b| a.file.cmp(&b.file));
    if programs.is_empty() {
        return Err(Failure::new(format!("cargo built no {kind}")));
    }
    Ok(programs)
}

fn of_artifact(artifact: Artifact) -> Option<Program> {
    let source = fs::read_to_string(artifact.source).unwrap_or_default();
    Some(Program {
        file: artifact.executable.file_name()?.to_str()?.to_owned(),
        about: first_sentence(&source),
        built: artifact.executable,
    })
}

/// Returns the first sentence of a source file's module documentation, without its full stop.
fn first_sentence(source: &str) -> String {
    let lines = source.lines().map_while(|line| line.strip_prefix("//!"));
    let paragraph: Vec<&str> = lines
        .map(str::trim)
        .take_while(|line| !line.is_empty())
        .collect();
    let text = paragraph.join(" ");
    let end = text.find(". ").unwrap_or(text.trim_end_matches('.').len());
    text[..end].trim_end_matches(':').to_owned()
}

impl Program {
    /// Copies the program without its symbols, which are a fifth of it and are not needed there.
    pub(crate) fn copy_stripped(&self, to: &Path) -> Result<()> {
        let mut strip = Command::new("strip");
        if cfg!(target_os = "macos") {
            // The loader of macOS does not start a program without global symbols.
            strip.arg("-x");
        }
        match strip.arg("-o").arg(to).arg(&self.built).output() {
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => Err(Failure::new(format!(
                "could not strip {}: {}",
                self.built.display(),
                String::from_utf8_lossy(&output.stderr).trim_end()
            ))),
            Err(error) => {
                eprintln!(
                    "note: `strip` is not available ({error}); {} keeps its symbols",
                    self.file
                );
                copy(&self.built, to)
            }
        }
    }

    /// Starts the program briefly in an empty environment.
    pub(crate) fn starts(&self, folder: &Path) -> Result<()> {
        let mut command = Command::new(folder.join(&self.file));
        output_of(command.arg("--help").env_clear().current_dir("/")).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_examples_are_found_among_cargos_messages_by_name() {
        let artifact = |kind: &str, executable: &str| {
            let target = format!(r#"{{"kind":["{kind}"],"src_path":""}}"#);
            format!(
                r#"{{"manifest_path":"/w/Cargo.toml","target":{target},"profile":{{"test":false}},"executable":{executable}}}"#
            )
        };
        let messages = [
            artifact("lib", "null"),
            artifact("example", r#""/t/release/examples/train""#),
            artifact("custom-build", r#""/t/release/build/x""#),
            artifact("example", r#""/t/release/examples/chat""#),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ];
        let files: Vec<String> = of_messages(&messages.join("\n"))
            .unwrap()
            .into_iter()
            .map(|program| program.file)
            .collect();
        assert_eq!(files, ["chat", "train"]);
        assert!(of_messages("").is_err());
    }

    #[test]
    fn a_program_is_described_by_the_first_sentence_of_its_file() {
        let source = "//! Trains a small Llama\n//! on real text: by default\n//! Rust. In minutes.\n\
                      //!\n//! More.\nfn main() {}";
        assert_eq!(
            first_sentence(source),
            "Trains a small Llama on real text: by default Rust"
        );
        assert_eq!(first_sentence("//! One line.\n"), "One line");
        assert_eq!(first_sentence("fn main() {}"), "");
    }

    #[cfg(unix)]
    #[test]
    fn a_program_that_does_not_start_is_an_error_with_its_last_words() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("train");
        fs::write(&path, "#!/bin/sh\necho no libtorch here >&2\nexit 127\n").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let program = Program {
            file: "train".to_owned(),
            built: path,
            about: String::new(),
        };
        let text = program.starts(folder.path()).unwrap_err().to_string();
        assert!(
            text.contains("no libtorch here") && text.contains("127"),
            "{text}"
        );
    }
}
