//! Environment variables as a value, so that the rules can be tested without changing the process.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// A snapshot of environment variables, and the target operating system.
#[derive(Debug, Clone)]
pub struct Environment {
    variables: BTreeMap<OsString, OsString>,
    os: String,
}

impl Environment {
    /// Returns the variables of this process. The operating system is the build target: Cargo's
    /// `CARGO_CFG_TARGET_OS` in a build script, else the system that this code was compiled for.
    #[must_use]
    pub fn process() -> Self {
        let variables: BTreeMap<_, _> = std::env::vars_os().collect();
        let os = variables
            .get(OsStr::new("CARGO_CFG_TARGET_OS"))
            .and_then(|os| os.to_str())
            .unwrap_or(std::env::consts::OS)
            .to_owned();
        Self { variables, os }
    }

    /// Returns an artificial environment on the system `os` (`"linux"`, `"macos"`).
    #[must_use]
    pub fn made_up<K: Into<OsString>, V: Into<OsString>>(
        os: &str,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        let variables = variables
            .into_iter()
            .map(|(k, v)| (k.into(), v.into()))
            .collect();
        Self {
            variables,
            os: os.to_owned(),
        }
    }

    /// Returns this environment without the variable `name`.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        self.variables.remove(OsStr::new(name));
        self
    }

    /// Returns this environment with the variable `name` set to `value`.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.variables.insert(name.into(), value.into());
        self
    }

    /// Returns `true` if `name` is set, even to an empty value, as `torch-sys` checks `LIBTORCH_USE_PYTORCH`.
    #[must_use]
    pub fn is_set(&self, name: &str) -> bool {
        self.variables.contains_key(OsStr::new(name))
    }

    /// Returns the value of `name`; `None` if it is not set or empty.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.variables
            .get(OsStr::new(name))
            .map(OsString::as_os_str)
            .filter(|v| !v.is_empty())
    }

    /// Returns the value of `name` as a path; `None` if it is not set or empty.
    #[must_use]
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.get(name).map(PathBuf::from)
    }

    /// Returns the operating system, as in `std::env::consts::OS`.
    #[must_use]
    pub fn os(&self) -> &str {
        &self.os
    }
}
