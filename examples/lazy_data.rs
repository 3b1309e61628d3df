//! Opens data of any size and shows a record of it, reading nothing else.
//!
//! A path is a file, a folder or a pattern such as 'data/*.jsonl'. The first time a file is opened, its
//! records are found in one pass (about a second a gigabyte and core, or less); after that the index in
//! the cache folder is used.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example lazy_data -- PATH --get 123456
//! ```

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use overdrive::datasets::{
    CsvOptions, CsvRecords, Dataset, IndexOptions, JsonLayout, JsonOptions, JsonRecords,
    RecordFiles, SampleBy, TextLines, TextOptions, WebDataset,
};
use serde_json::Value;

/// Shows records of text, JSON, CSV, tar and Parquet files of any size
#[derive(Parser)]
struct Flags {
    /// Files, folders or patterns
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// Prints this record, counted from 0; more than once for several
    #[arg(long)]
    get: Vec<usize>,
    /// How the files hold their records; by default as their names end
    #[arg(long)]
    format: Option<Format>,
    /// Unpacks compressed files into the cache where their blocks cannot be read alone
    #[arg(long)]
    unpack: bool,
    /// Finds the records again even where an index is there
    #[arg(long)]
    rebuild: bool,
    /// Threads that search; one a core by default
    #[arg(long)]
    threads: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    /// Lines of text
    Text,
    /// Texts between empty lines
    Paragraphs,
    /// One JSON value a line
    Jsonl,
    /// An array of JSON values
    Json,
    /// Rows with a header, by RFC 4180
    Csv,
    /// The same, with tabs
    Tsv,
    /// Samples of WebDataset's shards
    Tar,
    /// Rows of Parquet and Arrow files
    #[cfg(feature = "parquet")]
    Parquet,
}

fn main() -> ExitCode {
    overdrive_examples::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let format = flags
        .format
        .or_else(|| format_of(&flags.paths))
        .context("the paths do not say of what format the files are; pass --format")?;
    let index = IndexOptions {
        rebuild: flags.rebuild,
        unpack: flags.unpack,
        threads: flags.threads,
        ..IndexOptions::default()
    };
    let started = Instant::now();
    match format {
        Format::Text | Format::Paragraphs => {
            let sample_by = match format {
                Format::Paragraphs => SampleBy::Paragraph,
                _ => SampleBy::Line,
            };
            let options = TextOptions {
                index,
                sample_by,
                ..TextOptions::default()
            };
            let lines = TextLines::open(&flags.paths, &options)?;
            report(lines.records(), started);
            show(flags, &lines, |line| println!("{line}"))
        }
        Format::Jsonl | Format::Json => {
            let layout = match format {
                Format::Json => JsonLayout::Array,
                _ => JsonLayout::Lines,
            };
            let records = JsonRecords::<Value>::open(&flags.paths, &JsonOptions { layout, index })?;
            report(records.records(), started);
            show(flags, &records, |record| println!("{record:#}"))
        }
        Format::Csv | Format::Tsv => {
            let delimiter = matches!(format, Format::Tsv).then_some('\t');
            let options = CsvOptions {
                delimiter,
                index,
                ..CsvOptions::default()
            };
            let rows = CsvRecords::open(&flags.paths, &options)?;
            report(rows.records(), started);
            show(flags, &rows, |row| {
                for (name, field) in row.columns().names().iter().zip(row.fields()) {
                    println!("{name}: {field}");
                }
            })
        }
        Format::Tar => {
            let samples = WebDataset::open(&flags.paths, &index)?;
            report(samples.records(), started);
            show(flags, &samples, |sample| {
                println!("{}", sample.key());
                for (extension, bytes) in sample.files() {
                    println!("  .{extension}: {} bytes", bytes.len());
                }
            })
        }
        #[cfg(feature = "parquet")]
        Format::Parquet => {
            let rows = overdrive::datasets::TableRecords::<Value>::open(&flags.paths)?;
            let milliseconds = started.elapsed().as_secs_f64() * 1e3;
            println!("{} records, open after {milliseconds:.1} ms", rows.len());
            show(flags, &rows, |row| println!("{row:#}"))
        }
    }
}

/// By the end of the first path's name, which a pattern has too; that of a compressed file is under its
/// compression.
fn format_of(paths: &[PathBuf]) -> Option<Format> {
    let path = paths.first()?;
    let path = match path.extension()?.to_str()? {
        "gz" | "bgz" | "zst" => path.with_extension(""),
        _ => path.clone(),
    };
    match path.extension()?.to_str()? {
        "txt" | "text" | "md" | "log" => Some(Format::Text),
        "jsonl" | "ndjson" => Some(Format::Jsonl),
        "json" => Some(Format::Json),
        "csv" => Some(Format::Csv),
        "tsv" | "tab" => Some(Format::Tsv),
        "tar" => Some(Format::Tar),
        #[cfg(feature = "parquet")]
        "parquet" | "arrow" | "feather" => Some(Format::Parquet),
        _ => None,
    }
}

fn report(records: &RecordFiles, started: Instant) {
    let report = records.report();
    println!(
        "{} records in {} file(s) of {:.1} MB, open after {:.1} ms",
        report.records,
        report.files,
        report.data_bytes as f64 / 1e6,
        started.elapsed().as_secs_f64() * 1e3,
    );
    match report.build_gb_per_s() {
        Some(speed) => println!(
            "index built in {:.1} ms, {speed:.2} GB/s",
            report.build_time.as_secs_f64() * 1e3
        ),
        None => println!("index found in the cache"),
    }
    println!("{:.2} bytes of index a record", report.bytes_per_record());
}

fn show<D: Dataset>(flags: &Flags, dataset: &D, print: impl Fn(D::Item)) -> Result<()> {
    for &index in &flags.get {
        let started = Instant::now();
        let record = dataset.get(index)?;
        println!(
            "\nrecord {index}, read in {:.1} us:",
            started.elapsed().as_secs_f64() * 1e6
        );
        print(record);
    }
    if dataset.is_empty() && !flags.get.is_empty() {
        bail!("there are no records");
    }
    Ok(())
}
