//! A program that prints, to a pipe without a reader and to a full disk. It has no test harness, which would print too.
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

use std::fs::File;
use std::process::{Command, Output, Stdio};

use overdrive_core::{print_error_line, print_line};

const CHILD: &str = "OVERDRIVE_TEST_PRINTS";

fn main() {
    if std::env::var_os(CHILD).is_some() {
        for line in 0..10_000 {
            print_line(format_args!("line {line}"));
            print_error_line(format_args!("line {line}"));
        }
        std::process::exit(7);
    }
    if cfg!(target_os = "linux") {
        neither_a_closed_pipe_nor_a_full_disk_ends_a_program();
    }
}

fn neither_a_closed_pipe_nor_a_full_disk_ends_a_program() {
    let full = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    let closed = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    let warning = "warning: lines are missing on standard output, which cannot be written";

    let output = run(closed(), closed());
    assert_eq!(output.status.code(), Some(7));

    let output = run(closed(), Stdio::piped());
    assert_eq!(output.status.code(), Some(7));
    assert!(!String::from_utf8(output.stderr).unwrap().contains(warning));

    let output = run(full(), Stdio::piped());
    assert_eq!(output.status.code(), Some(7));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.matches(warning).count(), 1, "{said}");

    let output = run(Stdio::piped(), full());
    assert_eq!(output.status.code(), Some(7));
}

fn run(out: Stdio, error: Stdio) -> Output {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(CHILD, "1").stdout(out).stderr(error);
    command.output().unwrap()
}
