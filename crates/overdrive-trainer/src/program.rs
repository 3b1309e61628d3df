//! The frame of a training program: its warnings, its error, its exit code.

use std::error::Error as StdError;
use std::iter::successors;
use std::process::ExitCode;

use overdrive_core::{INTERRUPTED_EXIT_CODE, LOST_PEER_EXIT_CODE, RunEnd, print_error_line};
use overdrive_sys::without_backtrace;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::error::{is_interrupted, of_group};
use crate::interrupt::end_at_signals;

/// Runs the program of a `main` function and returns its exit code: that of the [`RunEnd`], or 0. Warnings of the
/// libraries are printed on stderr (`RUST_LOG` selects other messages), and an error in one line, without a backtrace,
/// because the cause is usually in the arguments. Until [`Interrupt`](crate::Interrupt) is installed, Ctrl-C, SIGTERM,
/// SIGHUP and SIGQUIT end the program, and the files that it has not finished are removed. In a container, where it is process 1 and the system would keep signals from it, the
/// exit code is 130, as after [`Error::Interrupted`](crate::Error::Interrupted). After an error because another process of
/// the group was lost or failed it is 76.
///
/// `E` is `anyhow::Error` or `Box<dyn Error + Send + Sync>`.
///
/// ```
/// use std::process::ExitCode;
///
/// type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;
///
/// fn run() -> Result<()> {
///     // … train …
///     Ok(())
/// }
///
/// fn main() -> ExitCode {
///     overdrive_trainer::run_main(run)
/// }
/// ```
pub fn run_main<T, E>(program: impl FnOnce() -> Result<T, E>) -> ExitCode
where
    T: Into<RunEnd>,
    E: AsRef<dyn StdError + Send + Sync>,
{
    print_warnings();
    // Installed before anything else: data may be tokenized for an hour before the first step.
    if let Err(error) = end_at_signals() {
        tracing::warn!("signals are not handled, and unfinished files stay behind at one: {error}");
    }
    let error = match program() {
        Ok(end) => return ExitCode::from(end.into().exit_code()),
        Err(error) => error,
    };
    let error: &(dyn StdError + 'static) = error.as_ref();
    let mut text = error.to_string();
    // A context hides its cause, and many errors already end with theirs.
    for cause in successors(error.source(), |&cause| cause.source()).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    print_error_line(format_args!("error: {}", without_backtrace(&text)));
    match of_group(error) {
        Some(overdrive_distributed::Error::Collective { ranks, .. }) if !ranks.is_empty() => {
            ExitCode::from(LOST_PEER_EXIT_CODE)
        }
        _ if is_interrupted(error) => ExitCode::from(INTERRUPTED_EXIT_CODE),
        _ => ExitCode::FAILURE,
    }
}

/// The variable that selects other messages, as in most Rust programs.
const SELECTION: &str = "RUST_LOG";

/// Prints the warnings of the libraries on stderr, one line each. `RUST_LOG` selects other messages by level and crate:
/// `info`, or `warn,overdrive_datasets=debug`.
fn print_warnings() {
    let selection = std::env::var(SELECTION).unwrap_or_default();
    let warnings = Targets::new().with_default(LevelFilter::WARN);
    let selected = match selection.is_empty() {
        true => warnings,
        false => selection.parse().unwrap_or_else(|error| {
            print_error_line(format_args!(
                "warning: {SELECTION} is {selection:?}: {error}; warnings are printed. Give a level (error, warn, \
                 info, debug, trace), or a list such as warn,overdrive_datasets=debug"
            ));
            warnings
        }),
    };
    let lines = tracing_subscriber::fmt::layer()
        .compact()
        .without_time()
        // Stdout is reserved for the results of a program.
        .with_writer(std::io::stderr);
    let subscriber = tracing_subscriber::registry().with(lines).with(selected);
    // This call fails if the program has installed a subscriber already, which then prints the warnings.
    let _ = subscriber.try_init();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[derive(Debug, thiserror::Error)]
    #[error("a context")]
    struct Context(#[source] Error);

    #[test]
    fn an_error_after_a_signal_is_found_among_the_causes() {
        let what = "the search".to_owned();
        let error = Error::of_program(Context(Error::Interrupted { what }));
        assert!(is_interrupted(&error));
        assert!(!is_interrupted(&Error::of_program("another error")));
    }
}
