//! Code that several examples share: their flags and the end of their `main`. Each example is one file beside
//! `src`, run with `cargo xtask example NAME`; `README.md` recommends an order for reading them.

mod cache_flags;
mod classification;
#[cfg(feature = "constraints")]
mod constraint_flags;
pub mod finetuning;
mod generation_flags;
mod local_model;
mod model_flags;
mod model_text;
mod onnx_comparison;
pub mod pairs;
pub mod pictures;
mod progress;
mod speed;
mod template_flags;
mod text_tokens;
pub mod training;
pub mod tuning;
mod warnings;

use std::fmt::Display;
use std::io::{Write, stdout};
use std::process::ExitCode;

pub use cache_flags::{Cache, CacheFlags};
pub use classification::Classification;
#[cfg(feature = "constraints")]
pub use constraint_flags::ConstraintFlags;
pub use generation_flags::GenerationFlags;
pub use local_model::{local_adapter, local_model, local_tokenizer, model_name, repository};
pub use model_flags::{ModelFlags, load_model, unpack_model};
pub use model_text::ModelText;
pub use onnx_comparison::OnnxComparison;
pub use progress::ByteProgress;
pub use speed::{GreedySpeed, decode_tokens_per_second};
pub use template_flags::TemplateFlags;
pub use text_tokens::TextTokens;

/// The way in which a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunEnd {
    /// It is done.
    Finished,
    /// A signal ended it, and there is a snapshot of its last step, from which it resumes.
    Saved,
    /// A signal ended it, and its last step is in no snapshot.
    NotSaved,
}

impl RunEnd {
    /// Returns the exit code: 75 tells a supervisor that the same command resumes the run where it stopped.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Finished => 0,
            Self::Saved => overdrive::core::SAVED_EXIT_CODE,
            Self::NotSaved => overdrive::core::INTERRUPTED_EXIT_CODE,
        }
    }
}

/// Runs an example that may be interrupted, as [`exit`] does, and returns its exit code.
pub fn exit_or_resume(program: impl FnOnce() -> anyhow::Result<RunEnd>) -> ExitCode {
    exit_with(|| Ok(ExitCode::from(program()?.exit_code())))
}

/// Runs an example and returns its exit code. Warnings of the libraries are printed on stderr, and an error in one
/// line, without a stack backtrace, because the cause is usually in the arguments.
pub fn exit(program: impl FnOnce() -> anyhow::Result<()>) -> ExitCode {
    exit_with(|| program().map(|()| ExitCode::SUCCESS))
}

fn exit_with(program: impl FnOnce() -> anyhow::Result<ExitCode>) -> ExitCode {
    warnings::print_warnings();
    program().unwrap_or_else(|error| {
        let mut text = error.to_string();
        // A context hides its cause, and many errors already end with theirs.
        for cause in error.chain().skip(1).map(ToString::to_string) {
            if !text.contains(&cause) {
                text = format!("{text}: {cause}");
            }
        }
        eprintln!("error: {text}");
        ExitCode::FAILURE
    })
}

/// Prints a line. One that cannot be written, because stdout is a file on a full disk or nobody reads it, does not
/// end a run as `println!` would.
pub fn print_line(line: impl Display) {
    let _ = writeln!(stdout(), "{line}");
}

/// Writes `text` to stdout and flushes it, so that each token appears as it is generated.
pub fn print_now(text: &str) -> std::io::Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
