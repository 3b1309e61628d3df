//! The PyTorch of a Python interpreter.

use std::path::PathBuf;
use std::process::Command;

use crate::libtorch::{has_cuda, without_suffix};
use crate::{Environment, Error, Libtorch, Result, Source};

/// Prints one `key=value` a line. Starting PyTorch takes seconds; nothing cheaper knows editable
/// installations and `PYTHONPATH`.
const QUESTION: &str = "\
import torch
from torch.utils import cpp_extension as c
print('version=' + torch.__version__)
print('abi=' + str(int(torch._C._GLIBCXX_USE_CXX11_ABI)))
for p in c.include_paths(): print('include=' + p)
for p in c.library_paths(): print('lib=' + p)
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
    parse(&String::from_utf8_lossy(&output.stdout), &interpreter)
        .ok_or_else(|| fail("its answer names no library folder".to_owned()))
}

fn parse(answer: &str, interpreter: &std::path::Path) -> Option<Libtorch> {
    let values = |key: &str| {
        answer
            .lines()
            .filter_map(|line| line.split_once('='))
            .filter(|(k, _)| *k == key)
            .map(|(_, value)| value.trim().to_owned())
            .collect::<Vec<_>>()
    };
    // Several with CUDA: torch-sys keeps the last it reads, PyTorch's own folder is the first.
    // The one that holds the libraries is meant.
    let dirs: Vec<PathBuf> = values("lib").into_iter().map(PathBuf::from).collect();
    let lib_dir = dirs
        .iter()
        .find(|dir| crate::libtorch::library(dir, "torch_cpu").is_some())
        .or(dirs.first())?
        .clone();
    Some(Libtorch {
        cuda: has_cuda(&lib_dir),
        lib_dir,
        include_dirs: values("include").into_iter().map(PathBuf::from).collect(),
        version: values("version")
            .first()
            .map(|v| without_suffix(v).to_owned()),
        cxx11_abi: values("abi").first().is_none_or(|abi| abi != "0"),
        source: Source::Python {
            interpreter: interpreter.to_path_buf(),
        },
    })
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
        let answer = "a warning\nversion=2.11.0+cu130\nabi=1\ninclude=/p/torch/include\n\
                      include=/p/torch/include/torch/csrc/api/include\nlib=/p/torch/lib\n";
        let torch = parse(answer, "python3".as_ref()).unwrap();
        assert_eq!(torch.version.as_deref(), Some("2.11.0"));
        assert_eq!(torch.lib_dir, PathBuf::from("/p/torch/lib"));
        assert_eq!(torch.include_dirs.len(), 2);
        assert!(torch.cxx11_abi);
        assert!(!torch.cuda);
        assert!(parse("version=2.11.0\n", "python3".as_ref()).is_none());
    }
}
