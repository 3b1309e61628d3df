use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

/// The variable that selects other messages, as in most Rust programs.
const SELECTION: &str = "RUST_LOG";

/// Prints the warnings of the libraries on stderr, one line each. `RUST_LOG` selects other messages by level and crate:
/// `info`, or `warn,overdrive_datasets=debug`.
pub(crate) fn print_warnings() {
    let selection = std::env::var(SELECTION).unwrap_or_default();
    let warnings = Targets::new().with_default(LevelFilter::WARN);
    let selected = match selection.is_empty() {
        true => warnings,
        false => selection.parse().unwrap_or_else(|error| {
            eprintln!(
                "warning: {SELECTION} is {selection:?}: {error}; warnings are printed. Give a level (error, warn, \
                 info, debug, trace), or a list such as warn,overdrive_datasets=debug"
            );
            warnings
        }),
    };
    let lines = tracing_subscriber::fmt::layer()
        .compact()
        .without_time()
        // Stdout belongs to the results of a program.
        .with_writer(std::io::stderr);
    let subscriber = tracing_subscriber::registry().with(lines).with(selected);
    // It fails if there is one already, which then prints them.
    let _ = subscriber.try_init();
}
