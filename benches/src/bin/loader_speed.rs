//! The random lines per second from a text file, with the loader and without it. Prints one JSON line.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin loader_speed -- \
//!     FILE [WORKERS [BATCH_SIZE [SAMPLES]]]
//! ```
//!
//! `benches/pytorch/compare_data.py` runs it beside PyTorch's `DataLoader` and Hugging Face `datasets`.

use std::hint::black_box;
use std::time::Instant;

use overdrive::datasets::{
    DataLoader, DataLoaderOptions, Dataset, IndexLocation, IndexOptions, RandomSampler, Sampler,
    TextLines, TextOptions,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments
        .next()
        .ok_or("usage: loader_speed FILE [WORKERS [BATCH_SIZE [SAMPLES]]]")?;
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse());
    let (workers, batch_size, samples) = (number(2)?, number(256)?, number(2_000_000)?);

    // In memory, so that this run builds the index.
    let index = IndexOptions {
        location: IndexLocation::Memory,
        ..IndexOptions::default()
    };
    let options = TextOptions {
        index,
        ..TextOptions::default()
    };
    let lines = TextLines::open([&path], &options)?;
    let report = lines.records().report();

    let order = RandomSampler::new(lines.len(), 1);
    let count = samples.min(lines.len());
    let started = Instant::now();
    for place in 0..count {
        black_box(lines.get(order.index(0, place))?);
    }
    let reads = count as f64 / started.elapsed().as_secs_f64();

    let options = DataLoaderOptions {
        batch_size,
        shuffle: true,
        num_workers: workers,
        ..DataLoaderOptions::default()
    };
    let mut loader = DataLoader::new(lines, options)?;
    let started = Instant::now();
    let mut given = 0;
    for batch in loader.epoch() {
        given += black_box(batch?).len();
        if given >= count {
            break;
        }
    }
    let loaded = given as f64 / started.elapsed().as_secs_f64();
    let line = serde_json::json!({
        "side": "Overdrive",
        "records": report.records,
        "bytes": report.data_bytes,
        "index_gb_per_s": report.build_gb_per_s(),
        "index_bytes_per_record": report.bytes_per_record(),
        "reads_per_s": reads,
        "workers": workers,
        "batch_size": batch_size,
        "loader_samples_per_s": loaded,
        "mean_queue_depth": loader.stats().mean_queue_depth(),
    });
    println!("{line}");
    Ok(())
}
