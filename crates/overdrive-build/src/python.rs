//! The PyTorch of a Python interpreter.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Environment, Error, Libtorch, Result, Source};

/// Prints the folder of the package without importing it: that would take seconds, each time. The
/// headers and libraries lie in it, and the version is in the headers.
const QUESTION: &str = "\
import importlib.util, os
spec = importlib.util.find_spec('torch')
if spec is None: raise SystemExit(\"No module named 'torch'\")
print('torch=' + os.path.dirname(os.path.abspath(spec.origin)))
";

/// The interpreter that `torch-sys` would ask: `python` inside a virtual environment, where it is
/// sure to be the environment's own, else `python3`.
#[must_use]
pub fn interpreter(environment: &Environment) -> PathBuf {
    let name = match (environment.os(), environment.is_set("VIRTUAL_ENV")) {
        ("windows", _) => "python.exe",
        (_, true) => "python",
        (_, false) => "python3",
    };
    PathBuf::from(name)
}

/// Asks the interpreter of `environment` for its PyTorch.
pub(crate) fn libtorch(environment: &Environment) -> Result<Libtorch> {
    let interpreter = interpreter(environment);
    let fail = |reason: String| Error::Python {
        interpreter: interpreter.clone(),
        reason,
    };
    let output = Command::new(&interpreter)
        .args(["-c", QUESTION])
        .output()
        .map_err(|error| fail(format!("it could not be started ({error})")))?;
    if !output.status.success() {
        let words = String::from_utf8_lossy(&output.stderr);
        let last = words
            .lines()
            .last()
            .unwrap_or("no message")
            .trim()
            .to_owned();
        return Err(fail(format!("it ended with {} ({last})", output.status)));
    }
    let root = folder(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| fail("it did not name a folder".to_owned()))?;
    Ok(Libtorch::at(&root, Source::Python { interpreter }))
}

/// The folder in the answer, which warnings of site packages may stand around.
fn folder(answer: &str) -> Option<PathBuf> {
    let path = answer
        .lines()
        .find_map(|line| line.strip_prefix("torch="))?;
    Some(Path::new(path.trim_end()).to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn python_is_asked_by_the_name_that_torch_sys_uses() {
        let plain = Environment::made_up("linux", [("HOME", "/home/a")]);
        let venv = Environment::made_up("linux", [("VIRTUAL_ENV", "/home/a/venv")]);
        let windows = Environment::made_up("windows", [("VIRTUAL_ENV", "C:\\venv")]);
        assert_eq!(interpreter(&plain), PathBuf::from("python3"));
        assert_eq!(interpreter(&venv), PathBuf::from("python"));
        assert_eq!(interpreter(&windows), PathBuf::from("python.exe"));
    }

    #[test]
    fn the_answer_of_python_is_read() {
        let answer = "a warning\ntorch=/p/site packages/torch\n";
        assert_eq!(
            folder(answer),
            Some(PathBuf::from("/p/site packages/torch"))
        );
        assert_eq!(folder("a warning\n"), None);
    }
}
