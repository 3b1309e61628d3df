//! Rows of Parquet and Arrow files, as pyarrow writes them.

use crate::common::{cases, fixture};
use arrow_array::{
    ArrayRef, Int64Array, LargeListArray, RecordBatch, StructArray, TimestampMicrosecondArray,
};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::writer::StreamWriter;
use overdrive_core::random::uniform_below;
use overdrive_datasets::{
    DataLoader, DataLoaderOptions, Dataset, Error, ErrorLog, ErrorPolicy, FieldRecords,
    LabeledTexts, RangeSource, Result, TableRecords, register_source,
};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const FILES: [&str; 9] = [
    "none.parquet",
    "snappy.parquet",
    "zstd.parquet",
    "gzip.parquet",
    "lz4.parquet",
    "file.arrow",
    "lz4.feather",
    "stream.arrow",
    "zstd_stream.arrow",
];

fn table(name: &str) -> TableRecords<Value> {
    TableRecords::open([fixture(&format!("tables/{name}"))]).unwrap()
}

fn expected() -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(fixture("tables/rows.json")).unwrap()).unwrap()
}

#[test]
fn every_row_of_every_format_has_the_written_values() {
    let expected = expected();
    for name in FILES {
        let rows = table(name);
        assert_eq!(rows.len(), 1000, "{name}");
        for (index, row) in expected.iter().enumerate() {
            assert_eq!(&rows.get(index).unwrap(), row, "{name}, row {index}");
        }
        for draw in 0..50 {
            let index = uniform_below(1000, 1, 0, draw) as usize;
            assert_eq!(
                rows.get(index).unwrap(),
                expected[index],
                "{name}, row {index}"
            );
        }
        assert!(matches!(
            rows.get(1000),
            Err(Error::NoSuchRecord {
                index: 1000,
                len: 1000
            })
        ));
    }
}

#[test]
fn fields_are_read_in_the_same_way_in_every_format() {
    let expected = expected();
    let dir = tempfile::tempdir().unwrap();
    let lines: String = expected.iter().map(|row| format!("{row}\n")).collect();
    let path = dir.path().join("rows.jsonl");
    std::fs::write(&path, lines).unwrap();
    let tables = ["snappy.parquet", "stream.arrow"].map(|name| fixture(&format!("tables/{name}")));
    for path in [path].into_iter().chain(tables) {
        let rows = FieldRecords::open([&path]).unwrap();
        assert_eq!(rows.len(), 1000);
        for (index, values) in expected.iter().enumerate() {
            let row = rows.row(index).unwrap();
            assert_eq!(
                row.text("text").unwrap().as_deref(),
                values["text"].as_str()
            );
            assert_eq!(row.required_text("id").unwrap(), values["id"].to_string());
            assert_eq!(row.number("id").unwrap(), values["id"].as_f64());
            assert_eq!(row.number("score").unwrap(), values["score"].as_f64());
        }
        let null = expected
            .iter()
            .position(|row| row["text"].is_null())
            .unwrap();
        let error = LabeledTexts::open(&path, "text", "id", None)
            .unwrap_err()
            .to_string();
        let problem = "`text` is null; it must be a string, a number or a boolean";
        assert!(
            error.contains(&format!("record {null} (byte ")) && error.ends_with(problem),
            "{error}"
        );
        let error = LabeledTexts::open(&path, "texts", "id", None)
            .unwrap_err()
            .to_string();
        match path.extension().is_some_and(|name| name == "jsonl") {
            true => assert!(
                error.contains("rows.jsonl, record 0 (byte 0): `texts` is missing; it must be "),
                "{error}"
            ),
            false => assert!(
                error.starts_with("`text_column` is texts; it must be one of "),
                "{error}"
            ),
        }
        let error = rows.row(0).unwrap().number("text").unwrap_err().to_string();
        assert!(error.ends_with("`text` is not a number"), "{error}");
    }
}

#[test]
fn rows_become_structs_and_one_that_does_not_fit_is_an_error_with_its_number() {
    #[derive(serde::Deserialize)]
    struct Row {
        id: u32,
        text: Option<String>,
        score: f32,
    }
    let rows = TableRecords::<Row>::open([fixture("tables/snappy.parquet")]).unwrap();
    let expected = expected();
    let row = rows.get(777).unwrap();
    assert_eq!(
        (row.id, row.text.as_deref()),
        (777, expected[777]["text"].as_str())
    );
    assert_eq!(
        f64::from(row.score),
        expected[777]["score"].as_f64().unwrap()
    );

    #[derive(Debug, serde::Deserialize)]
    struct Strict {
        #[allow(dead_code, reason = "read to see whether it can be")]
        text: String,
    }
    let rows = TableRecords::<Strict>::open([fixture("tables/snappy.parquet")]).unwrap();
    let missing = expected
        .iter()
        .position(|row| row["text"].is_null())
        .unwrap();
    let error = rows.get(missing).unwrap_err();
    assert!(error.is_about_record());
    let text = error.to_string();
    assert!(
        text.contains(&format!("snappy.parquet, record {missing} (byte 4)")),
        "{text}"
    );
    assert!(text.contains("expected a string"), "{text}");
}

#[test]
fn files_follow_one_another_and_workers_share_them() {
    let folder = fixture("tables/none.parquet").parent().unwrap().to_owned();
    let rows = TableRecords::<Value>::open([&folder]).unwrap();
    assert_eq!(rows.len(), 9000);
    let (batch, row) = rows.batch(4123).unwrap();
    assert!(row < batch.num_rows());
    let options = DataLoaderOptions {
        batch_size: 100,
        num_workers: 3,
        ..DataLoaderOptions::default()
    };
    let ids: Vec<i64> = DataLoader::new(rows, options)
        .unwrap()
        .epoch()
        .flat_map(Result::unwrap)
        .map(|row| row["id"].as_i64().unwrap())
        .collect();
    assert_eq!(ids, (0..9).flat_map(|_| 0..1000).collect::<Vec<_>>());
}

#[test]
fn times_of_named_zones_are_in_utc_wherever_they_are() {
    let instants = [Some(1_000_000), Some(1_600_000_000_123_456), None];
    let of = |zone: &str| -> ArrayRef {
        let times = TimestampMicrosecondArray::from(instants.to_vec());
        Arc::new(times.with_timezone(zone))
    };
    let batch = |columns: Vec<(&str, ArrayRef)>| RecordBatch::try_from_iter(columns).unwrap();
    let times = of("UTC");
    let numbers: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3]));
    let nested = StructArray::from(batch(vec![("at", Arc::clone(&times)), ("number", numbers)]));
    let item = batch(vec![("item", Arc::clone(&times))]).schema().fields()[0].clone();
    let offsets = OffsetBuffer::new(vec![0, 0, 1, 3].into());
    let list = LargeListArray::new(item, offsets, Arc::clone(&times), None);
    let table = batch(vec![
        ("utc", times),
        ("berlin", of("Europe/Berlin")),
        ("offset", of("+05:30")),
        ("nested", Arc::new(nested)),
        ("list", Arc::new(list)),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("times.arrow");
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = StreamWriter::try_new(file, &table.schema()).unwrap();
    writer.write(&table).unwrap();
    writer.finish().unwrap();

    let rows = TableRecords::<Value>::open([&path]).unwrap();
    let second = "2020-09-13T12:26:40.123456Z";
    assert_eq!(
        rows.get(1).unwrap(),
        json!({
            "utc": second, "berlin": second, "offset": "2020-09-13T17:56:40.123456+05:30",
            "nested": {"at": second, "number": 2}, "list": ["1970-01-01T00:00:01Z"],
        })
    );
    let third = rows.get(2).unwrap();
    assert_eq!(third["utc"], Value::Null);
    assert_eq!(third["nested"], json!({"at": null, "number": 3}));
    assert_eq!(third["list"], json!([second, null]));
}

#[test]
fn columns_are_returned_unconverted() {
    let rows = table("file.arrow");
    let (batch, row) = rows.batch(200).unwrap();
    assert_eq!((batch.num_rows(), row), (130, 70));
    assert_eq!(batch.schema().field(2).name(), "score");
    assert_ne!(
        table("stream.arrow").fingerprint().unwrap(),
        rows.fingerprint().unwrap()
    );
    assert_eq!(
        table("file.arrow").fingerprint().unwrap(),
        rows.fingerprint().unwrap()
    );
}

#[test]
fn a_file_that_is_written_in_place_is_reported_and_has_another_fingerprint() {
    for name in ["none.parquet", "file.arrow"] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::copy(fixture(&format!("tables/{name}")), &path).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        let rows = TableRecords::<Value>::open([&path]).unwrap();
        let fingerprint = rows.fingerprint().unwrap();
        rows.check_unchanged().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(30));
        // A byte of a value, which is in no footer and no header.
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        let mut file = std::fs::File::options().write(true).open(&path).unwrap();
        std::io::Write::write_all(&mut file, &bytes).unwrap();
        file.set_modified(modified).unwrap();
        let error = rows.check_unchanged().unwrap_err();
        assert!(
            matches!(&error, Error::FileChanged { path: found } if *found == path),
            "{error}"
        );
        if let Ok(rows) = TableRecords::<Value>::open([&path]) {
            assert_ne!(rows.fingerprint().unwrap(), fingerprint, "{name}");
        }
    }
}

#[test]
fn other_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.parquet");
    let open = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        TableRecords::<Value>::open([&path])
            .unwrap_err()
            .to_string()
    };
    assert!(open(b"").contains("neither Parquet nor Arrow"));
    assert!(open(b"id,text\n1,one\n").contains("neither Parquet nor Arrow"));
    let bytes = std::fs::read(fixture("tables/none.parquet")).unwrap();
    assert!(open(&bytes[..bytes.len() / 2]).contains("cannot be read: "));
    let bytes = std::fs::read(fixture("tables/stream.arrow")).unwrap();
    assert!(open(&bytes[..bytes.len() / 2]).contains("the file ends within the message"));
}

/// arrow-ipc would allocate as many bytes, and a failed allocation ends the process.
#[test]
fn a_damaged_length_of_a_compressed_column_is_an_error() {
    for name in ["lz4.feather", "zstd_stream.arrow"] {
        let bytes = std::fs::read(fixture(&format!("tables/{name}"))).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        let mut refused = 0;
        // The lengths are aligned to 8 bytes; those of other numbers are damaged as well.
        for at in (0..bytes.len() - 8).step_by(8) {
            let length = i64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
            if !(16..1 << 20).contains(&length) {
                continue;
            }
            let mut changed = bytes.clone();
            changed[at + 6] = 0x80;
            std::fs::write(&path, &changed).unwrap();
            // Some rows of each of the 8 batches.
            let read = TableRecords::<Value>::open([&path]).and_then(|rows| {
                (0..rows.len())
                    .step_by(50)
                    .map(|index| rows.get(index))
                    .collect::<overdrive_datasets::Result<Vec<_>>>()
            });
            if let Err(error) = read {
                refused += usize::from(error.to_string().contains("has a column of 3602879"));
            }
        }
        assert!(refused > 3, "{name}: {refused}");
    }
}

proptest! {
    #![proptest_config(cases(64))]

    #[test]
    fn changed_bytes_never_cause_a_panic(
        name in prop::sample::select(FILES.to_vec()),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        tail in any::<bool>(),
    ) {
        let mut bytes = std::fs::read(fixture(&format!("tables/{name}"))).unwrap();
        for (at, value) in changes {
            // Half of the time in the footer, where the structure is.
            let from = if tail { bytes.len().saturating_sub(2000) } else { 0 };
            let at = from + at.index(bytes.len() - from);
            bytes[at] = value;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, &bytes).unwrap();
        if let Ok(rows) = TableRecords::<Value>::open([&path]) {
            for index in (0..rows.len().min(2000)).step_by(97) {
                let _ = rows.get(index);
            }
        }
    }
}

/// A file on a server, in memory.
#[derive(Debug, Default)]
struct Object {
    bytes: Vec<u8>,
    read: AtomicUsize,
    has_changed: AtomicBool,
    is_down: AtomicBool,
}

impl RangeSource for Object {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn version(&self) -> &str {
        "1"
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check_unchanged()?;
        if self.is_down.load(Ordering::SeqCst) {
            return Err(Error::Remote {
                path: "https://host/down.parquet".into(),
                problem: "the server does not answer".to_owned(),
            });
        }
        self.read.fetch_add(out.len(), Ordering::SeqCst);
        out.copy_from_slice(&self.bytes[offset as usize..][..out.len()]);
        Ok(())
    }

    fn prefetch(&self, _: &[Range<u64>]) {}

    fn check_unchanged(&self) -> Result<()> {
        match self.has_changed.load(Ordering::SeqCst) {
            true => Err(Error::FileChanged {
                path: "https://host/a.parquet".into(),
            }),
            false => Ok(()),
        }
    }
}

fn object(url: &str, bytes: Vec<u8>) -> Arc<Object> {
    let object = Arc::new(Object {
        bytes,
        ..Object::default()
    });
    register_source(url, Arc::clone(&object) as Arc<dyn RangeSource>);
    object
}

#[test]
fn parquet_on_a_server_has_the_rows_of_the_local_file() {
    let expected = expected();
    for name in FILES {
        let bytes = std::fs::read(fixture(&format!("tables/{name}"))).unwrap();
        let url = format!("https://host/{name}");
        let object = object(&url, bytes);
        let opened = TableRecords::<Value>::open([&url]);
        if !name.ends_with(".parquet") {
            let error = opened.unwrap_err().to_string();
            assert!(
                error.contains(&url) && error.contains("download"),
                "{error}"
            );
            continue;
        }
        let rows = opened.unwrap();
        let footer = object.read.load(Ordering::SeqCst);
        assert!(footer < object.bytes.len() / 2, "{name}: {footer} bytes");
        assert_eq!(rows.len(), 1000, "{name}");
        for step in 0..1000 {
            let index = step * 79 % 1000;
            assert_eq!(rows.get(index).unwrap(), expected[index], "{name}");
        }
        let read = object.read.load(Ordering::SeqCst);
        rows.fingerprint().unwrap();
        assert_eq!(object.read.load(Ordering::SeqCst), read, "no content");
    }
}

#[test]
fn changed_and_damaged_parquet_on_a_server_is_an_error() {
    let bytes = std::fs::read(fixture("tables/none.parquet")).unwrap();
    let url = "https://host/a.parquet";
    let source = object(url, bytes.clone());
    let rows = TableRecords::<Value>::open([url]).unwrap();
    source.has_changed.store(true, Ordering::SeqCst);
    let error = rows.get(5).unwrap_err();
    assert!(matches!(error, Error::FileChanged { .. }), "{error}");
    for length in [0, 3, 4, 100, bytes.len() - 1] {
        object(url, bytes[..length].to_vec());
        let error = TableRecords::<Value>::open([url]).unwrap_err().to_string();
        assert!(error.contains(url), "{length} bytes: {error}");
    }
}

#[test]
fn a_failure_of_the_server_or_the_disk_is_not_an_error_of_the_rows() {
    let bytes = std::fs::read(fixture("tables/snappy.parquet")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("local.parquet");
    std::fs::write(&path, &bytes).unwrap();
    let url = "https://host/down.parquet";
    let source = object(url, bytes);
    let remote = TableRecords::<Value>::open([url]).unwrap();
    let local = TableRecords::<Value>::open([&path]).unwrap();
    source.is_down.store(true, Ordering::SeqCst);
    std::fs::remove_file(&path).unwrap();
    let log = ErrorLog::default();
    for policy in [ErrorPolicy::Stop, ErrorPolicy::Skip, ErrorPolicy::Replace] {
        let error = policy.get(&remote, 5, &log).unwrap_err();
        assert!(matches!(error, Error::Remote { .. }), "{error}");
        let error = policy.get(&local, 5, &log).unwrap_err();
        assert!(matches!(error, Error::Common(_)), "{error}");
    }
    assert_eq!(log.count(), 0);
    source.is_down.store(false, Ordering::SeqCst);
    remote.get(5).unwrap();
}
