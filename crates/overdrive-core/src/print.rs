//! Lines on standard output and standard error.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};

/// Prints a line on standard output. A line that cannot be written does not end the program, as `println!` would: its
/// reader is gone (`| head -1`), or standard output is a file on a full disk, which the first such line reports on
/// standard error.
pub fn print_line(line: impl Display) {
    static REPORTED: AtomicBool = AtomicBool::new(false);
    let problem = problem(writeln!(stdout(), "{line}"));
    if let Some(problem) = problem.filter(|_| !REPORTED.swap(true, Ordering::SeqCst)) {
        print_error_line(format_args!(
            "warning: lines are missing on standard output, which cannot be written: {problem}"
        ));
    }
}

/// Prints a line on standard error. A line that cannot be written does not end the program, as `eprintln!` would.
pub fn print_error_line(line: impl Display) {
    let _ = writeln!(stderr(), "{line}");
}

/// Returns the error of a write that the user has to know of: not that of a reader that has read enough.
fn problem(written: io::Result<()>) -> Option<io::Error> {
    written
        .err()
        .filter(|error| error.kind() != ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_that_is_gone_is_no_problem_and_a_full_disk_is_one() {
        assert!(problem(Ok(())).is_none());
        assert!(problem(Err(ErrorKind::BrokenPipe.into())).is_none());
        let full = problem(Err(ErrorKind::StorageFull.into()));
        assert_eq!(full.map(|error| error.kind()), Some(ErrorKind::StorageFull));
    }
}
