//! The examples of Overdrive: one file each under `examples/`, run with
//! `cargo run --release -p overdrive-examples --example NAME` or `cargo xtask example NAME`.

use std::process::ExitCode;

/// The end of an example's `main`: an error is told in one line, without a stack backtrace, because
/// what went wrong is most often in what was asked for.
pub fn exit(result: anyhow::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
