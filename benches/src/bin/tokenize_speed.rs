//! Tokenizes the lines of a text file into a token store, and prints the speed as one line of JSON.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin tokenize_speed -- \
//!     FILE TOKENIZER.json [THREADS]
//! ```
//!
//! `benches/pytorch/compare_data.py --tokenize` runs it beside `datasets.map(num_proc)` with the same tokenizer.

use overdrive::datasets::{
    BuildOptions, TextLines, TextOptions, build_dataset_tokens_to, load_tokenizer,
};
use overdrive::profiling::MemoryUsage;
use tch::Device;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, tokenizer, threads @ ..] = arguments.as_slice() else {
        return Err("usage: tokenize_speed FILE TOKENIZER.json [THREADS]".into());
    };
    let tokenizer = load_tokenizer(tokenizer)?;
    let lines = TextLines::open([path], &TextOptions::default())?;
    let options = BuildOptions {
        end_of_document: None,
        progress: false,
        threads: threads.first().map(|text| text.parse()).transpose()?,
        ..BuildOptions::default()
    };
    let dir = tempfile::tempdir()?;
    let out = dir.path().join("lines.tokens");
    let (_, report) = build_dataset_tokens_to(&out, &lines, &tokenizer, &options)?;
    let peak = MemoryUsage::of(Device::Cpu).peak_resident_bytes;
    let line = serde_json::json!({
        "side": "Overdrive",
        "tokens": report.tokens,
        "text_mb": report.text_bytes as f64 / 1e6,
        "mb_per_s": report.text_bytes as f64 / 1e6 / report.elapsed.as_secs_f64(),
        "peak_mib": peak.map(|bytes| bytes >> 20),
    });
    println!("{line}");
    Ok(())
}
