//! The interpreter of tests that compare with Python. They have `on_python` in their names and
//! `#[ignore = "needs Python with …"]`: a summary counts them as ignored, not as passed, unless they are selected.

use std::process::Command;

/// Returns the interpreter that `OVERDRIVE_PYTHON` names, else `python3`, if it imports `modules`.
///
/// # Panics
/// If it does not, with the reason and what to install.
pub(crate) fn python(modules: &[&str]) -> String {
    let python = std::env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let modules = modules.join(", ");
    let import = format!("import {modules}");
    let reason = match Command::new(&python).args(["-c", &import]).output() {
        Ok(output) if output.status.success() => return python,
        Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
        Err(error) => error.to_string(),
    };
    panic!(
        "{python} cannot import {modules}: install them, or set OVERDRIVE_PYTHON to an interpreter \
         that has them. {reason}"
    );
}
