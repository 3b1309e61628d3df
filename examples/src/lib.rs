//! The examples of Overdrive: one file each under `examples/`, run with
//! `cargo run --release -p overdrive-examples --example NAME` or `cargo xtask example NAME`.

mod generation_flags;

use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;
pub use generation_flags::GenerationFlags;
use overdrive::generation::Tokenizer;

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

/// `tokenizer.json` of a model's folder.
pub fn load_tokenizer(folder: &Path) -> anyhow::Result<Tokenizer> {
    let path = folder.join("tokenizer.json");
    let hint = "without a tokenizer use --prompt-ids and --print-ids";
    Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}; {hint}", path.display()))
}
