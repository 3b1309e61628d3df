//! The programs that a build needs.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use overdrive_build::Environment;

/// Returns the first line of a program's output.
fn first_line(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().next()?.trim().to_owned();
    output.status.success().then_some(line)
}

pub(super) fn rustc() -> Option<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    first_line(Path::new(&rustc), &["--version"])
}

/// Returns the version of Python, and of its pip if there is one.
pub(super) fn python(python: &Path) -> Option<(String, Option<String>)> {
    let version = first_line(python, &["--version"])?;
    let pip = first_line(python, &["-m", "pip", "--version"]).map(|line| {
        line.split_whitespace()
            .take(2)
            .collect::<Vec<_>>()
            .join(" ")
    });
    Some((version, pip))
}

/// A problem of the compiler, and the remedy.
#[derive(Debug)]
pub(super) struct CompilerFault {
    pub(super) what: String,
    pub(super) remedy: String,
}

/// Returns the version of the C++ compiler of the build scripts, after it has compiled C++17 code with the
/// standard library: a compiler without its headers is common in containers.
pub(super) fn compiler(environment: &Environment) -> Result<String, CompilerFault> {
    const INSTALL: &str = "install one: apt install g++ (Debian, Ubuntu), dnf install gcc-c++ \
                           (Fedora), xcode-select --install (macOS)";
    let name = environment.path("CXX").unwrap_or_else(|| "c++".into());
    // CXX may hold a wrapper and flags: `ccache g++`.
    let line = name.to_string_lossy().into_owned();
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or("c++");
    let flags: Vec<&str> = words.collect();
    let fault = |what: String, remedy: &str| CompilerFault {
        what,
        remedy: remedy.to_owned(),
    };
    let version = Command::new(program)
        .args(&flags)
        .arg("--version")
        .output()
        .map_err(|error| {
            fault(
                format!("there is no C++ compiler `{line}` ({error})"),
                INSTALL,
            )
        })?;
    let version = String::from_utf8_lossy(&version.stdout)
        .lines()
        .next()
        .unwrap_or("")
        .to_owned();
    let mut child = Command::new(program)
        .args(&flags)
        .args(["-std=c++17", "-fsyntax-only", "-x", "c++", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| fault(format!("`{line}` cannot be started ({error})"), INSTALL))?;
    if let Some(mut input) = child.stdin.take() {
        // A compiler that exits before it has read everything prints the reason to standard error.
        let _ = input.write_all(b"#include <optional>\n#include <string>\nint main() {}\n");
    }
    let output = child
        .wait_with_output()
        .map_err(|error| fault(format!("`{line}` did not end ({error})"), INSTALL))?;
    if output.status.success() {
        return Ok(version);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let error = said
        .lines()
        .find(|line| line.contains("error"))
        .unwrap_or("it says nothing");
    Err(fault(
        format!(
            "`{line}` ({version}) does not compile C++17: {}",
            error.trim()
        ),
        "install its standard library (libstdc++-dev) or a newer compiler; CXX names another",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_that_is_not_there_is_named_with_the_remedy() {
        let environment = Environment::made_up("linux", [("CXX", "no-such-compiler -O2")]);
        let fault = compiler(&environment).unwrap_err();
        assert!(fault.what.contains("no-such-compiler -O2"), "{fault:?}");
        assert!(fault.remedy.contains("g++"), "{fault:?}");
    }

    #[test]
    fn a_compiler_that_fails_is_quoted() {
        // `false` is a program without output that fails.
        let environment = Environment::made_up("linux", [("CXX", "false")]);
        let fault = compiler(&environment).unwrap_err();
        assert!(fault.what.contains("does not compile C++17"), "{fault:?}");
    }

    #[test]
    fn a_python_that_is_not_there_is_none() {
        assert!(python(Path::new("no-such-python")).is_none());
    }
}
