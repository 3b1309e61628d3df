//! The loss of quality by caches that drop or quantize entries: the perplexity of a text with each kind of
//! cache, and its bytes per token.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin cache_perplexity -- runs/tiny-001/model FILE
//! ```

use overdrive::kv_cache::{CacheImplementation, CacheShape};
use overdrive::transformer::{CausalLm, LoadOptions};
use overdrive_benches::Windows;

/// The number of tokens in a chunk; all later tokens read the cached form of a chunk.
const CHUNK: i64 = 16;
/// The number of tokens in a window of text, if the model's context is not shorter.
const LENGTH: usize = 1024;
/// The maximum number of windows.
const WINDOWS: usize = 8;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, file] = arguments.as_slice() else {
        return Err("give a model's folder or GGUF file, and a text file".into());
    };
    let model = CausalLm::from_pretrained(path, &LoadOptions::default())?;
    let length = usize::try_from(model.config().max_position_embeddings())?.min(LENGTH);
    let windows = Windows::of_text(path, file.as_ref(), length, WINDOWS)?;
    let mut exact = None;
    // A static cache holds the same values as a dynamic one.
    let differ = |kind: &CacheImplementation| *kind != CacheImplementation::Static;
    for kind in CacheImplementation::ALL.into_iter().filter(differ) {
        let shape = CacheShape {
            windows: model.layer_windows(),
            window: Some(length as i64 / 2),
            sinks: 4,
            ..CacheShape::default()
        };
        let measured = windows.perplexity(&model, CHUNK, (&kind, &shape))?;
        let (perplexity, bytes) = (measured.value, measured.bytes_per_token);
        let change = (perplexity / *exact.get_or_insert(perplexity) - 1.0) * 100.0;
        let name = kind.to_string();
        println!(
            "{name:<16}{bytes:>7.0} bytes per token, perplexity {perplexity:9.4} {change:+.3} %"
        );
    }
    Ok(())
}
