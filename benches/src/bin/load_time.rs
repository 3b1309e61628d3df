//! The time of loading a checkpoint of 100 million parameters that is in the page cache.
//!
//!     cargo run --release -p overdrive-benches --bin load_time
//!
//! Prints the time and the bytes per second, for each dtype and number of threads, beside a plain read of the
//! file into one buffer.

use std::time::Instant;

use overdrive::transformer::{CausalLm, InitOptions, LlamaConfig, LoadOptions};
use tch::Kind;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let config = LlamaConfig {
        hidden_size: 768,
        intermediate_size: 2048,
        num_hidden_layers: 12,
        num_attention_heads: 12,
        num_key_value_heads: Some(4),
        tie_word_embeddings: true,
        ..LlamaConfig::default()
    };
    let dir = std::env::temp_dir().join(format!("overdrive-time-load-{}", std::process::id()));
    let model = CausalLm::new(&config.into(), &InitOptions::default())?;
    let bytes = 4.0 * model.num_parameters() as f64;
    let started = Instant::now();
    model.save_pretrained(&dir, &Default::default())?;
    let say = |what: &str, seconds: f64| {
        println!(
            "{what:28} {:7.1} ms {:6.2} GB/s",
            seconds * 1e3,
            bytes / seconds / 1e9
        );
    };
    say("save, flushed to the disk", started.elapsed().as_secs_f64());
    drop(model);
    let best = |run: &dyn Fn() -> Result<(), Box<dyn std::error::Error>>| {
        (0..5).try_fold(f64::INFINITY, |best, _| {
            let started = Instant::now();
            run()?;
            Ok::<f64, Box<dyn std::error::Error>>(best.min(started.elapsed().as_secs_f64()))
        })
    };
    let file = dir.join("model.safetensors");
    say(
        "read into a buffer",
        best(&|| {
            let bytes = std::hint::black_box(std::fs::read(&file)?);
            drop(bytes);
            Ok(())
        })?,
    );
    for threads in [1, 2] {
        tch::set_num_threads(threads);
        for kind in [None, Some(Kind::BFloat16)] {
            let options = LoadOptions {
                kind,
                ..LoadOptions::default()
            };
            let name = kind.map_or("as it is".to_owned(), |kind| format!("to {kind:?}"));
            let load = || {
                let model = CausalLm::from_pretrained(&dir, &options)?;
                drop(model);
                Ok(())
            };
            say(&format!("load {name}, {threads} threads"), best(&load)?);
        }
    }
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
