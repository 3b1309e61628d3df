use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::{Error, Result};

const UNSET: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

/// A process-wide setting: on, off, or unset. An environment variable (1 or 0) sets it, and the program can override it.
#[derive(Debug)]
pub struct Switch {
    variable: &'static str,
    expected: &'static str,
    overridden: AtomicU8,
    /// The variable, which is read once; an error is a value that is neither 0 nor 1.
    read: OnceLock<std::result::Result<Option<bool>, String>>,
}

impl Switch {
    /// Returns a switch for an environment variable; `expected` explains 0 and 1 in the error.
    pub const fn new(variable: &'static str, expected: &'static str) -> Self {
        Self {
            variable,
            expected,
            overridden: AtomicU8::new(UNSET),
            read: OnceLock::new(),
        }
    }

    /// Returns the setting: the program's, else that of the variable, else `None`, also for an empty variable.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if the variable decides and is neither 0 nor 1.
    pub fn get(&self) -> Result<Option<bool>> {
        match setting(self.overridden.load(Ordering::Relaxed)) {
            None => {
                let read = self
                    .read
                    .get_or_init(|| match std::env::var_os(self.variable) {
                        None => Ok(None),
                        Some(value) => parse(&value.to_string_lossy()),
                    });
                read.clone()
                    .map_err(|value| Error::option(self.variable, value, self.expected))
            }
            set => Ok(set),
        }
    }

    /// Replaces the program's setting and returns the previous one; with `None`, the variable decides.
    pub fn replace(&self, on: Option<bool>) -> Option<bool> {
        let state = match on {
            None => UNSET,
            Some(false) => OFF,
            Some(true) => ON,
        };
        setting(self.overridden.swap(state, Ordering::Relaxed))
    }
}

fn setting(state: u8) -> Option<bool> {
    match state {
        UNSET => None,
        state => Some(state == ON),
    }
}

fn parse(value: &str) -> std::result::Result<Option<bool>, String> {
    match value {
        // Scripts that clear a variable often leave it empty.
        "" => Ok(None),
        "0" => Ok(Some(false)),
        "1" => Ok(Some(true)),
        other => Err(format!("{other:?}")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn a_variable_has_two_values() {
        assert_eq!(parse(""), Ok(None));
        assert_eq!(parse("0"), Ok(Some(false)));
        assert_eq!(parse("1"), Ok(Some(true)));
        for other in ["true", "on", "1 ", "2"] {
            assert_eq!(parse(other), Err(format!("{other:?}")));
        }
    }

    #[test]
    fn the_program_overrides_the_variable_until_it_takes_its_setting_back() {
        // It is set everywhere, to something else than 0 or 1.
        let switch = Switch::new("PATH", "0 or 1");
        let error = switch.get().unwrap_err().to_string();
        assert!(
            error.contains("PATH") && error.contains("0 or 1"),
            "{error}"
        );
        assert_eq!(switch.replace(Some(true)), None);
        assert_eq!(switch.get().unwrap(), Some(true));
        assert_eq!(switch.replace(Some(false)), Some(true));
        assert_eq!(switch.get().unwrap(), Some(false));
        assert_eq!(switch.replace(None), Some(false));
        assert!(switch.get().is_err());
        let unset = Switch::new("OVERDRIVE_NO_SUCH_SWITCH", "0 or 1");
        assert_eq!(unset.get().unwrap(), None);
    }
}
