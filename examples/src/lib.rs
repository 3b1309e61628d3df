//! What several examples share: their flags and the end of their `main`. Each example is one file beside
//! `src`, run with `cargo xtask example NAME`; `README.md` says which to read first.

mod cache_flags;
#[cfg(feature = "constraints")]
mod constraint_flags;
pub mod finetuning;
mod generation_flags;
mod model_flags;
mod model_text;
mod onnx_comparison;
pub mod pictures;
mod progress;
mod speed;
pub mod training;

use std::io::{Write, stdout};
use std::process::ExitCode;

pub use cache_flags::{Cache, CacheFlags};
#[cfg(feature = "constraints")]
pub use constraint_flags::ConstraintFlags;
pub use generation_flags::GenerationFlags;
pub use model_flags::{ModelFlags, load_model};
pub use model_text::ModelText;
pub use onnx_comparison::OnnxComparison;
pub use progress::ByteProgress;
pub use speed::{GreedySpeed, decode_tokens_per_second};

/// The end of the `main` of an example that may be interrupted: code 75 says that it was, and that it resumes
/// from what it saved.
pub fn exit_or_resume(result: anyhow::Result<bool>) -> ExitCode {
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

/// Writes `text` to stdout and flushes it, so that a reader sees each token as it comes.
pub fn print_now(text: &str) -> std::io::Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
