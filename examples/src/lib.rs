//! The examples of Overdrive: one file each under `examples/`, run with
//! `cargo run --release -p overdrive-examples --example NAME` or `cargo xtask example NAME`.

mod generation_flags;

use std::path::Path;
use std::process::ExitCode;

use anyhow::anyhow;
pub use generation_flags::GenerationFlags;
use indicatif::{ProgressBar, ProgressStyle};
use overdrive::generation::Tokenizer;
use overdrive::transformer::{CausalLm, LoadOptions, LoadProgress};
use tch::{Device, Kind};

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
    Tokenizer::from_file(&path).map_err(|error| anyhow!("{}: {error}", path.display()))
}

/// The model in `folder`, on a GPU where there is one, in `kind` or as it is stored; with a progress bar
/// where somebody watches.
pub fn load_model(folder: &Path, kind: Option<Kind>) -> anyhow::Result<CausalLm> {
    let bar = ProgressBar::no_length().with_style(ProgressStyle::with_template(
        "loading {wide_bar} {bytes} of {total_bytes}",
    )?);
    let progress = {
        let bar = bar.clone();
        LoadProgress::new(move |done, all| {
            bar.set_length(all);
            bar.set_position(done);
        })
    };
    let options = LoadOptions {
        device: Device::cuda_if_available(),
        kind,
        progress: Some(progress),
    };
    let model = CausalLm::from_pretrained(folder, &options);
    bar.finish_and_clear();
    Ok(model?)
}
