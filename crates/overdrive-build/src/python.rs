//! The PyTorch of a Python interpreter.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Environment, Error, Libtorch, Result, Source};

/// Prints the folder of the package without importing it, because an import takes seconds. Headers and
/// libraries are in that folder, and the headers contain the version.
const SCRIPT: &str = "\
import importlib.util, os
spec = importlib.util.find_spec('torch')
if spec is None: raise SystemExit(\"No module named 'torch'\")
print('torch=' + os.path.dirname(os.path.abspath(spec.origin)))
";

/// Returns the interpreter that `torch-sys` uses: `python` in a virtual environment, where it is certain to be
/// the environment's own, else `python3`.
#[must_use]
pub fn interpreter(environment: &Environment) -> PathBuf {
    let name = match environment.is_set("VIRTUAL_ENV") {
        true => "python",
        false => "python3",
    };
    PathBuf::from(name)
}

/// Runs the interpreter of `environment` to find its PyTorch.
pub(crate) fn libtorch(environment: &Environment) -> Result<Libtorch> {
    let interpreter = interpreter(environment);
    let fail = |reason: String| Error::Python {
        interpreter: interpreter.clone(),
        reason,
    };
    let output = Command::new(&interpreter)
        .args(["-c", SCRIPT])
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
        return Err(fail(format!("it exited with {} ({last})", output.status)));
    }
    let root = folder(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| fail("it printed no folder".to_owned()))?;
    Ok(Libtorch::at(&root, Source::Python { interpreter }))
}

/// Returns the folder in the output, which may also contain warnings of site packages.
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
    fn the_interpreter_is_the_one_of_torch_sys() {
        let plain = Environment::made_up("linux", [("HOME", "/home/a")]);
        let venv = Environment::made_up("linux", [("VIRTUAL_ENV", "/home/a/venv")]);
        assert_eq!(interpreter(&plain), PathBuf::from("python3"));
        assert_eq!(interpreter(&venv), PathBuf::from("python"));
    }

    #[test]
    fn the_output_of_python_is_parsed() {
        let answer = "a warning\ntorch=/p/site packages/torch\n";
        assert_eq!(
            folder(answer),
            Some(PathBuf::from("/p/site packages/torch"))
        );
        assert_eq!(folder("a warning\n"), None);
    }
}
