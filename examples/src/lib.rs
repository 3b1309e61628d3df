//! Code shared by several examples: flags and the end of `main`. Each example is one file beside `src`, run with `cargo
//! xtask example NAME`; `README.md` recommends an order for reading them.

mod cache_flags;
#[cfg(feature = "constraints")]
mod constraint_flags;
mod files;
mod generation_flags;
mod image_flags;
mod local_model;
mod memory_limit;
mod model_flags;
mod model_text;
mod onnx_comparison;
pub mod pictures;
mod progress;
mod speed;
mod template_flags;
mod text_tokens;
mod tuned;
pub mod words;

use std::io::{Write, stdout};

pub use cache_flags::{Cache, CacheFlags};
#[cfg(feature = "constraints")]
pub use constraint_flags::ConstraintFlags;
pub use files::{JsonLines, check_output_file, open_input};
pub use generation_flags::{CompletionFlags, GenerationFlags, generation_config};
pub use image_flags::{ImageFlags, grids};
pub use local_model::{
    assistant_tokenizer, local_adapter, local_data, local_model, local_tokenizer, model_name,
    repository,
};
pub use memory_limit::MemoryLimit;
pub use model_flags::{ModelFlags, load_model, scheme_help, unpack_model};
pub use model_text::ModelText;
pub use onnx_comparison::OnnxComparison;
pub use overdrive::core::print_error_line;
pub use overdrive::trainer::{RunEnd, print_line, run_main};
pub use progress::ByteProgress;
pub use speed::{GreedySpeed, decode_tokens_per_second};
pub use template_flags::TemplateFlags;
pub use text_tokens::TextTokens;
pub use tuned::write_tuned;

/// Writes `text` to stdout and flushes it, so that each token appears as it is generated.
pub fn print_now(text: &str) -> std::io::Result<()> {
    let mut out = stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|error| {
        let message = format!("cannot write to standard output: {error}");
        std::io::Error::new(error.kind(), message)
    })
}
