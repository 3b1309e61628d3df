//! Opens data files of any size and shows single records without reading the others.
//!
//! A path is a file, a folder or a pattern such as 'data/*.jsonl'. The first time a file is opened, one pass finds its
//! records (at most about a second per gigabyte and core); later runs use the index in the cache folder.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example lazy_data -- PATH --get 123456
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Parser;
use overdrive::datasets::prelude::*;
use overdrive::datasets::{
    CsvOptions, CsvRecords, IndexOptions, JsonLayout, JsonOptions, JsonRecords, RecordFiles,
    SampleBy, TextLines, TextOptions, WebDataset, find_files,
};
use overdrive_examples::{print_line, run_main};
use serde_json::Value;

/// Shows records of text, JSON, CSV, tar and Parquet files of any size
#[derive(Parser)]
struct Flags {
    /// Files, folders or glob patterns
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Print this record, counted from 0; may be given several times
    #[arg(long)]
    get: Vec<usize>,
    /// Format: text, paragraphs, jsonl, json (an array), csv, tsv, tar, parquet [default: from the extensions]
    #[arg(long)]
    format: Option<String>,
    /// Unpack all compressed files into the cache, including those whose blocks can be read separately
    #[arg(long)]
    unpack: bool,
    /// Rebuild the index even if it exists
    #[arg(long)]
    rebuild: bool,
    /// Number of threads [default: one per core]
    #[arg(long)]
    threads: Option<usize>,
}

fn main() -> ExitCode {
    run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    // Before the format, which the name of a missing file may not determine. Finds files by patterns as well.
    find_files(&flags.paths, &[])?;
    let format = flags
        .format
        .as_deref()
        .or_else(|| ending(flags.paths.first()?))
        .context("the file extensions do not determine the format; set it with --format")?;
    let index = IndexOptions {
        rebuild: flags.rebuild,
        unpack: flags.unpack,
        threads: flags.threads,
        ..IndexOptions::default()
    };
    let started = Instant::now();
    match format {
        "txt" | "text" | "md" | "log" | "paragraphs" => {
            let sample_by = match format {
                "paragraphs" => SampleBy::Paragraph,
                _ => SampleBy::Line,
            };
            let options = TextOptions {
                index,
                sample_by,
                ..TextOptions::default()
            };
            let texts = TextLines::open(&flags.paths, &options)?;
            report(texts.records(), started);
            show(flags, &texts, print_line)
        }
        "jsonl" | "ndjson" | "json" => {
            let layout = match format {
                "json" => JsonLayout::Array,
                _ => JsonLayout::Lines,
            };
            let records = JsonRecords::<Value>::open(&flags.paths, &JsonOptions { layout, index })?;
            report(records.records(), started);
            show(flags, &records, |record| {
                print_line(format_args!("{record:#}"))
            })
        }
        "csv" | "tsv" | "tab" => {
            let options = CsvOptions {
                index,
                delimiter: (format != "csv").then_some('\t'),
                ..CsvOptions::default()
            };
            let rows = CsvRecords::open(&flags.paths, &options)?;
            report(rows.records(), started);
            show(flags, &rows, |row| {
                for (name, field) in row.columns().names().iter().zip(row.fields()) {
                    print_line(format_args!("{name}: {field}"));
                }
            })
        }
        "tar" => {
            let samples = WebDataset::open(&flags.paths, &index)?;
            report(samples.records(), started);
            show(flags, &samples, |sample| {
                print_line(format_args!("{}", sample.key()));
                for (extension, bytes) in sample.files() {
                    print_line(format_args!("  .{extension}: {} bytes", bytes.len()));
                }
            })
        }
        #[cfg(feature = "parquet")]
        "parquet" | "arrow" | "feather" => {
            let rows = overdrive::datasets::TableRecords::<Value>::open(&flags.paths)?;
            print_line(format_args!(
                "{} records, open after {:.1?}",
                rows.len(),
                started.elapsed()
            ));
            show(flags, &rows, |row| print_line(format_args!("{row:#}")))
        }
        #[cfg(not(feature = "parquet"))]
        "parquet" | "arrow" | "feather" => bail!(
            "the format {format} needs the feature `parquet`, without which the program was built: \
             cargo run --release -p overdrive-examples --features parquet --example lazy_data -- …"
        ),
        other => bail!("`--format {other}` is unknown; `--help` lists the formats"),
    }
}

/// Returns the extension of a path or pattern, without a compression suffix.
fn ending(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    match name.rsplit_once('.')? {
        (name, "gz" | "bgz" | "zst") => Some(name.rsplit_once('.')?.1),
        (_, ending) => Some(ending),
    }
}

fn report(records: &RecordFiles, started: Instant) {
    let report = records.report();
    let megabytes = report.data_bytes as f64 / 1e6;
    let (records, files, time) = (report.records, report.files, started.elapsed());
    print_line(format_args!(
        "{records} records in {files} file(s) of {megabytes:.1} MB, open after {time:.1?}"
    ));
    match report.build_gb_per_s() {
        Some(speed) => print_line(format_args!(
            "index built in {:.1?}, {speed:.2} GB/s",
            report.build_time
        )),
        None => print_line(format_args!("index found in the cache")),
    }
    print_line(format_args!(
        "{:.2} bytes of index per record",
        report.bytes_per_record()
    ));
}

fn show<D: Dataset>(flags: &Flags, dataset: &D, print: impl Fn(D::Item)) -> Result<()> {
    for &index in &flags.get {
        let started = Instant::now();
        let record = dataset.get(index)?;
        print_line(format_args!(
            "\nrecord {index}, read in {:.1?}:",
            started.elapsed()
        ));
        print(record);
    }
    Ok(())
}
