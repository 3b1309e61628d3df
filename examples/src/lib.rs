//! The examples of Overdrive: one file each under `examples/`, run with
//! `cargo run --release -p overdrive-examples --example NAME` or `cargo xtask example NAME`.

mod generation_flags;
mod model_flags;
mod model_text;
mod onnx_comparison;

use std::process::ExitCode;

pub use generation_flags::GenerationFlags;
pub use model_flags::{ModelFlags, load_model};
pub use model_text::ModelText;
pub use onnx_comparison::OnnxComparison;

/// The end of the `main` of an example that may be interrupted: whether it was, and can go on from what it
/// saved.
pub fn exit_or_go_on(result: anyhow::Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::from(overdrive::trainer::Interrupt::SAVED_EXIT_CODE),
        other => exit(other.map(drop)),
    }
}

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
