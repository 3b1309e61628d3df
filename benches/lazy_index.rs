//! Claim: a file is indexed about as fast as `memchr` finds its line feeds, and reading a random record takes
//! about a microsecond.
//!
//! Analysis: text of 54 bytes per line is searched once by one core; besides the search, each line costs one
//! push of 4 bytes and a few bit operations for its one byte of index. A random read touches three or four
//! cache lines of the index and one or two of the text: a few hundred nanoseconds of cache misses.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use overdrive::core::random::uniform_below;
use overdrive::datasets::{
    CsvOptions, CsvRecords, Dataset, IndexLocation, IndexOptions, JsonLayout, JsonOptions,
    JsonRecords, TextLines, TextOptions,
};

fn in_memory(threads: Option<usize>) -> IndexOptions {
    IndexOptions {
        location: IndexLocation::Memory,
        threads,
        ..IndexOptions::default()
    }
}

fn lazy_index(criterion: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a folder for temporary files");
    let text: String = (0..1_000_000_u64)
        .map(|i| {
            format!(
                "{i:08} {}\n",
                "x".repeat(uniform_below(90, 1, 0, i) as usize)
            )
        })
        .collect();
    let path = dir.path().join("lines.txt");
    std::fs::write(&path, &text).expect("room in the temporary folder");
    let text_lines = |threads| {
        let index = in_memory(threads);
        let options = TextOptions {
            index,
            ..TextOptions::default()
        };
        TextLines::open([&path], &options).expect("a file of lines")
    };

    let mut group = criterion.benchmark_group("lazy_index");
    group.sample_size(20);
    group.throughput(Throughput::Bytes(text.len() as u64));
    group.bench_function("memchr_alone", |bencher| {
        bencher.iter(|| memchr::memchr_iter(b'\n', text.as_bytes()).fold(0, |sum, at| sum ^ at));
    });
    for (name, threads) in [("one_thread", Some(1)), ("all_cores", None)] {
        group.bench_function(BenchmarkId::new("lines", name), |bencher| {
            bencher.iter(|| text_lines(threads));
        });
        group.bench_function(BenchmarkId::new("csv", name), |bencher| {
            let index = in_memory(threads);
            let options = CsvOptions {
                index,
                ..CsvOptions::default()
            };
            bencher.iter(|| CsvRecords::open([&path], &options).expect("rows of one field"));
        });
    }
    let json = dir.path().join("objects.json");
    let objects: Vec<_> = (0..50_000_u64)
        .map(|i| serde_json::json!({"id": i, "text": &text[..1 + i as usize % 2000], "list": [1, {"a": []}]}))
        .collect();
    let objects = serde_json::to_string(&objects).expect("values are JSON");
    std::fs::write(&json, &objects).expect("room in the temporary folder");
    group.throughput(Throughput::Bytes(objects.len() as u64));
    group.bench_function("json_array", |bencher| {
        let options = JsonOptions {
            layout: JsonLayout::Array,
            index: in_memory(Some(1)),
        };
        bencher
            .iter(|| JsonRecords::<serde_json::Value>::open([&json], &options).expect("an array"));
    });

    group.throughput(Throughput::Elements(1));
    let lines = text_lines(None);
    let mut draw = 0;
    group.bench_function("random_read", |bencher| {
        bencher.iter(|| {
            draw += 1;
            let index = uniform_below(lines.len() as u64, 1, 0, draw) as usize;
            lines.get(index).expect("a readable line")
        });
    });
    group.finish();
}

criterion_group!(benches, lazy_index);
criterion_main!(benches);
