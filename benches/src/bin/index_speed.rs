//! Indexes 10 million lines, a million CSV rows and 100,000 JSON objects, and prints the speed and the memory
//! per record.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin index_speed
//! ```
//!
//! The files are generated in the temporary folder (about 0.9 GB) and removed at the end. Each is first read
//! without the page cache, at the disk's speed, if the system has `O_DIRECT`; then, from the page cache, by
//! `memchr` alone on one thread, which only counts line feeds; then it is indexed by one thread and by one per
//! core. `B/record` is the index file, which is mapped: at most that much of it is resident, and the system can
//! evict it at any time. `private` is the additional memory of this process for opening it. `guide` is the
//! size of the lists of offsets (8 bytes) and of ranges (16) that other libraries keep.

use std::fs::File;
use std::hint::black_box;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use overdrive::core::random::{random_u64, uniform_below};
use overdrive::datasets::{
    CsvOptions, CsvRecords, Dataset, IndexLocation, IndexOptions, IndexReport, JsonOptions,
    JsonRecords, TextLines, TextOptions,
};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let dir = tempfile::tempdir()?;
    println!(
        "{:<16} {:>10} {:>8} {:>10} {:>10} {:>10} {:>10} {:>9} {:>8} {:>6} {:>10}",
        "",
        "records",
        "MB",
        "disk",
        "memchr",
        "1 thread",
        "all cores",
        "B/record",
        "private",
        "guide",
        "reads/s"
    );
    let path = dir.path().join("lines.txt");
    write_lines(&path, 10_000_000)?;
    measure_lines("lines", &path)?;
    // Records so long that their lengths need more than two bytes; a file with holes.
    let path = dir.path().join("long.txt");
    write_long_lines(&path, 20_000)?;
    measure_lines("lines of 64 KiB", &path)?;
    std::fs::remove_file(&path)?;
    let path = dir.path().join("rows.csv");
    write_rows(&path, 1_000_000)?;
    measure("CSV rows", &path, 8, |index| {
        let options = CsvOptions {
            index,
            ..CsvOptions::default()
        };
        let rows = CsvRecords::open([&path], &options)?;
        Ok((rows.records().report(), reads_a_second(&rows)?))
    })?;
    for (name, file, is_array) in [
        ("JSON Lines", "o.jsonl", false),
        ("JSON array", "o.json", true),
    ] {
        let path = dir.path().join(file);
        write_objects(&path, 100_000, is_array)?;
        measure(name, &path, 16, |index| {
            let options = JsonOptions {
                index,
                ..JsonOptions::default()
            };
            let objects = JsonRecords::<serde_json::Value>::open([&path], &options)?;
            Ok((objects.records().report(), reads_a_second(&objects)?))
        })?;
    }
    Ok(())
}

fn measure_lines(name: &str, path: &Path) -> Outcome<()> {
    measure(name, path, 8, |index| {
        let options = TextOptions {
            index,
            ..TextOptions::default()
        };
        let lines = TextLines::open([path], &options)?;
        Ok((lines.records().report(), reads_a_second(&lines)?))
    })
}

fn measure(
    name: &str,
    path: &Path,
    list_bytes: u64,
    open: impl Fn(IndexOptions) -> Outcome<(IndexReport, f64)>,
) -> Outcome<()> {
    let bytes = std::fs::metadata(path)?.len();
    let speed = |time: Duration| format!("{:.2} GB/s", bytes as f64 / 1e9 / time.as_secs_f64());
    let disk = disk_alone(path).map_or("-".to_owned(), speed);
    let alone = memchr_alone(path)?;
    let index = |threads, rebuild| IndexOptions {
        location: IndexLocation::Folder(path.with_extension("index")),
        threads,
        rebuild,
        ..IndexOptions::default()
    };
    let mut speeds = Vec::new();
    let mut last = (IndexReport::default(), 0.0);
    for threads in [Some(1), None] {
        // The best of three: the first one also waits until the generated file is written to the disk.
        let mut best = 0_f64;
        for _ in 0..3 {
            last = open(index(threads, true))?;
            best = best.max(last.0.build_gb_per_s().unwrap_or(0.0));
        }
        speeds.push(best);
    }
    let (report, reads) = last;
    let before = private_bytes();
    open(index(None, false))?;
    let private = before
        .zip(private_bytes())
        .map_or("-".to_owned(), |(before, now)| {
            format!(
                "{:.3}",
                now.saturating_sub(before) as f64 / report.records as f64
            )
        });
    println!(
        "{name:<16} {:>10} {:>8.1} {disk:>10} {:>10} {:>5.2} GB/s {:>5.2} GB/s {:>9.3} {private:>8} {:>6} {:>10.0}",
        report.records,
        bytes as f64 / 1e6,
        speed(alone),
        speeds[0],
        speeds[1],
        report.bytes_per_record(),
        list_bytes,
        reads,
    );
    Ok(())
}

/// Returns the memory of this process that no file backs; `None` if the system does not report it.
fn private_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Returns the time of reading the file from the disk; `None` if the page cache cannot be bypassed.
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
fn disk_alone(path: &Path) -> Option<Duration> {
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;
    const O_DIRECT: i32 = if cfg!(target_arch = "x86_64") {
        0o40_000
    } else {
        0o200_000
    };
    const BLOCK: usize = 4 << 20;
    const PAGE: usize = 4096;
    File::open(path).ok()?.sync_all().ok()?;
    let mut file = File::options()
        .read(true)
        .custom_flags(O_DIRECT)
        .open(path)
        .ok()?;
    // `O_DIRECT` needs a buffer that is aligned to a page.
    let mut buffer = vec![0_u8; BLOCK + PAGE];
    let start = buffer.as_ptr().align_offset(PAGE);
    let block = &mut buffer[start..start + BLOCK];
    let started = Instant::now();
    while file.read(block).ok()? > 0 {}
    Some(started.elapsed())
}

#[cfg(not(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
)))]
fn disk_alone(_path: &Path) -> Option<Duration> {
    None
}

/// Returns the time in which `memchr` counts the line feeds of a file, read in blocks of a megabyte.
fn memchr_alone(path: &Path) -> Outcome<Duration> {
    use std::io::Read;
    let mut block = vec![0; 1 << 20];
    let mut best = Duration::MAX;
    for _ in 0..3 {
        let mut file = File::open(path)?;
        let started = Instant::now();
        let mut feeds = 0;
        loop {
            let read = file.read(&mut block)?;
            if read == 0 {
                break;
            }
            feeds += memchr::memchr_iter(b'\n', &block[..read]).count();
        }
        black_box(feeds);
        best = best.min(started.elapsed());
    }
    Ok(best)
}

/// Returns the random records per second on one thread, each converted by `get`.
fn reads_a_second<D: Dataset>(dataset: &D) -> Outcome<f64> {
    let started = Instant::now();
    let mut reads = 0;
    while started.elapsed() < Duration::from_millis(500) {
        for _ in 0..1000 {
            let index = uniform_below(dataset.len() as u64, 1, 0, reads);
            black_box(dataset.get(index as usize)?);
            reads += 1;
        }
    }
    Ok(reads as f64 / started.elapsed().as_secs_f64())
}

/// Lines of 54 bytes on average, as long as those of a book.
fn write_lines(path: &Path, count: u64) -> Outcome<()> {
    let mut out = BufWriter::new(File::create(path)?);
    for i in 0..count {
        writeln!(out, "{i:08} {}", words(i, 44))?;
    }
    Ok(out.flush()?)
}

/// Lines of 48 to 80 KiB, most of which is a hole in the file.
fn write_long_lines(path: &Path, count: u64) -> Outcome<()> {
    use std::io::{Seek, SeekFrom};
    let mut file = File::create(path)?;
    let mut end = 0;
    for i in 0..count {
        end += (48 << 10) + uniform_below(32 << 10, 5, 0, i);
        file.seek(SeekFrom::Start(end))?;
        file.write_all(b"\n")?;
        end += 1;
    }
    Ok(())
}

/// Rows of which one in eight has a quoted field with a line end and quotes in it.
fn write_rows(path: &Path, count: u64) -> Outcome<()> {
    let mut out = BufWriter::new(File::create(path)?);
    writeln!(out, "id,file,text,seconds")?;
    for i in 0..count {
        let text = words(i, 60);
        let seconds = uniform_below(30_000, 2, 0, i) as f64 / 1000.0;
        if i % 8 == 0 {
            writeln!(
                out,
                "{i},clip-{i}.wav,\"{text},\n\"\"{text}\"\"\",{seconds}"
            )?;
        } else {
            writeln!(out, "{i},clip-{i}.wav,{text},{seconds}")?;
        }
    }
    Ok(out.flush()?)
}

/// Objects with text, a list and an object in them, about 1.2 kB each.
fn write_objects(path: &Path, count: u64, is_array: bool) -> Outcome<()> {
    let mut out = BufWriter::new(File::create(path)?);
    if is_array {
        writeln!(out, "[")?;
    }
    for i in 0..count {
        let text = words(i, 1000);
        let tags: Vec<_> = (0..5).map(|tag| words(i + tag, 12)).collect();
        let value =
            serde_json::json!({"id": i, "text": text, "tags": tags, "meta": {"quote": "\"[{"}});
        let separator = if is_array && i + 1 < count { "," } else { "" };
        writeln!(out, "{value}{separator}")?;
    }
    if is_array {
        writeln!(out, "]")?;
    }
    Ok(out.flush()?)
}

/// ASCII words, half to one and a half times `bytes` long.
fn words(seed: u64, bytes: u64) -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let source = include_str!("index_speed.rs");
        let is_plain = |c: &char| c.is_ascii_alphanumeric() || *c == ' ';
        source.chars().filter(is_plain).collect()
    });
    let length = (bytes / 2 + uniform_below(bytes, 3, 0, seed)) as usize;
    let start = random_u64(4, 0, seed) as usize % (TEXT.len() - length);
    &TEXT[start..start + length]
}
