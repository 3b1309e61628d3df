//! Records of text, JSON and CSV files, read by index from disk.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::{cases, fixture, write_files};
use overdrive_datasets::{
    CsvOptions, CsvRecords, Dataset, Error, JsonLayout, JsonOptions, JsonRecords, TextLines,
    TextOptions, find_files,
};
use proptest::prelude::*;
use serde_json::{Value, json};

fn all<D: Dataset>(dataset: &D) -> Vec<D::Item> {
    (0..dataset.len())
        .map(|i| dataset.get(i).unwrap())
        .collect()
}

#[derive(serde::Deserialize)]
struct CsvCase {
    delimiter: char,
    quote: char,
    csv: String,
    rows: Vec<Vec<String>>,
}

#[test]
fn csv_rows_are_those_that_python_reads() {
    let cases: BTreeMap<String, CsvCase> =
        serde_json::from_slice(&std::fs::read(fixture("csv_rows.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 6);
    let dir = tempfile::tempdir().unwrap();
    for (name, case) in cases {
        let path = dir.path().join(&name);
        std::fs::write(&path, &case.csv).unwrap();
        let options = CsvOptions {
            delimiter: Some(case.delimiter),
            quote: Some(case.quote),
            has_header: false,
            ..CsvOptions::default()
        };
        let rows = CsvRecords::open([&path], &options).unwrap();
        let read: Vec<Vec<String>> = all(&rows)
            .iter()
            .map(|row| row.fields().map(str::to_owned).collect())
            .collect();
        assert_eq!(read, case.rows, "{name}");
    }
}

#[test]
fn columns_have_the_names_of_the_header_and_rows_of_all_files_follow_one_another() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[
            ("a.tsv", "\u{feff}id\tname\r\n1\tone\r\n\r\n2\ttwo\r\n"),
            ("b.tsv", ""),
            ("c.tsv", "id\tname\n3\t\"th\tree\""),
        ],
    );
    let rows = CsvRecords::open([dir.path()], &CsvOptions::default()).unwrap();
    assert_eq!(rows.columns().names(), ["id", "name"]);
    let ids: Vec<u32> = all(&rows)
        .iter()
        .map(|row| row.parse("id").unwrap())
        .collect();
    assert_eq!(ids, [1, 2, 3]);
    assert_eq!(rows.get(2).unwrap().get("name"), Some("th\tree"));
    assert_eq!(rows.get(2).unwrap().get("none"), None);
    let error = rows.get(0).unwrap().parse::<u32>("name").unwrap_err();
    let problem = "the field \"one\" of column `name` is not a valid u32";
    assert_eq!(error.to_string(), problem);
    assert!(error.is_about_record());
    // A column that the file does not have is a mistake of the program, which no policy skips.
    let error = rows.get(0).unwrap().parse::<u32>("nam").unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("a column of the file: id, name"),
        "{error}"
    );
    assert!(!error.is_about_record());
    let location = rows.records().location(2).unwrap();
    assert_eq!(
        (location.path, location.offset),
        (dir.path().join("c.tsv"), 8)
    );
}

#[test]
fn a_row_with_a_missing_field_is_an_error_with_its_position() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows.csv");
    std::fs::write(&path, "a,b\n1,2\n3\n4,\"5\n").unwrap();
    let rows = CsvRecords::open([&path], &CsvOptions::default()).unwrap();
    assert_eq!(rows.len(), 3);
    let error = rows.get(1).unwrap_err();
    assert!(error.is_about_record());
    let text = error.to_string();
    assert!(
        text.contains("rows.csv, record 1 (byte 8): 1 field(s), but the header has 2"),
        "{text}"
    );
    let text = rows.get(2).unwrap_err().to_string();
    assert!(
        text.contains("record 2 (byte 10): a quoted field does not end"),
        "{text}"
    );
    let flexible = CsvOptions {
        flexible: true,
        ..CsvOptions::default()
    };
    let rows = CsvRecords::open([&path], &flexible).unwrap();
    assert_eq!(rows.get(1).unwrap().len(), 1);
}

#[test]
fn a_quote_that_does_not_end_is_an_error_of_its_line_and_not_a_row_of_the_whole_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("stray.csv");
    let open = |rows: &str, max_row_bytes: u64| {
        std::fs::write(&path, rows).unwrap();
        let options = CsvOptions {
            max_row_bytes,
            ..CsvOptions::default()
        };
        CsvRecords::open([&path], &options)
    };
    // Lines 1 to 3 are whole; the quote of line 4 takes all others with it, more than a chunk of the search.
    let stray = format!("a,b\n1,2\n3,4\n5,\"6\n{}", "7,8\n".repeat(1 << 19));
    let error = open(&stray, 1 << 20).unwrap_err().to_string();
    let line = error.contains("stray.csv, line 4 (byte 12): the row that begins here");
    assert!(line && error.contains("more than 1048576 bytes"), "{error}");
    // The same quotes, closed: every row is short.
    let closed = stray.replace("\"6", "\"6\"");
    assert_eq!(open(&closed, 1 << 20).unwrap().len(), 3 + (1 << 19));
    // The limit is exact, and counts the end of the line.
    assert_eq!(open("a,b\n12,34\n", 6).unwrap().len(), 1);
    let error = open("a,b\n12,345\n", 6).unwrap_err().to_string();
    assert!(error.contains("line 2 (byte 4)"), "{error}");
    let error = open("a\n", 0).unwrap_err().to_string();
    assert!(
        error.contains("`max_row_bytes` is 0; it must be at least 1"),
        "{error}"
    );
}

#[test]
fn files_with_other_columns_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[("a.csv", "a,b\n1,2\n"), ("b.csv", "b,a\n1,2\n")],
    );
    let error = CsvRecords::open([dir.path()], &CsvOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("b.csv") && error.contains(r#"["b", "a"]"#),
        "{error}"
    );
    let same = CsvOptions {
        quote: Some(','),
        ..CsvOptions::default()
    };
    let error = CsvRecords::open([dir.path()], &same)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("another character than the delimiter"),
        "{error}"
    );
    let odd = CsvOptions {
        delimiter: Some('é'),
        ..CsvOptions::default()
    };
    assert!(CsvRecords::open([dir.path()], &odd).is_err());
}

#[test]
fn json_lines_and_arrays_hold_the_same_records() {
    let dir = tempfile::tempdir().unwrap();
    let values = [
        json!({"a": [1, {"b": "]}\n\\\""}]}),
        json!({"text": "ü"}),
        json!({}),
    ];
    let lines: String = values
        .iter()
        .map(|value| format!("{value} \r\n \n"))
        .collect();
    let array = format!(" [\n{} , {},\n{}\n] ", values[0], values[1], values[2]);
    let nested = format!("{{\"n\": [1], \"data\": {array}, \"m\": 2}}");
    write_files(
        dir.path(),
        &[("l.jsonl", lines), ("a.json", array), ("n.json", nested)],
    );
    for (name, layout) in [
        ("l.jsonl", JsonLayout::Guess),
        ("l.jsonl", JsonLayout::Lines),
        ("a.json", JsonLayout::Guess),
        ("a.json", JsonLayout::Array),
        ("n.json", JsonLayout::ArrayIn("data".to_owned())),
    ] {
        let options = JsonOptions {
            layout,
            ..JsonOptions::default()
        };
        let records = JsonRecords::<Value>::open([dir.path().join(name)], &options).unwrap();
        assert_eq!(all(&records), values, "{name}");
    }
}

#[test]
fn a_line_that_is_not_json_is_an_error_with_its_position() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("records.jsonl");
    std::fs::write(&path, "{\"a\": 1}\n{\"a\": \n{\"a\": 3}\n").unwrap();
    let records = JsonRecords::<Value>::open([&path], &JsonOptions::default()).unwrap();
    assert_eq!(records.get(2).unwrap(), json!({"a": 3}));
    let text = records.get(1).unwrap_err().to_string();
    assert!(
        text.contains("records.jsonl, record 1 (byte 9): unexpected JSON: EOF"),
        "{text}"
    );
    let error = records.get(3).unwrap_err();
    assert!(matches!(error, Error::NoSuchRecord { index: 3, len: 3 }));
}

#[test]
fn paths_that_do_not_exist_and_folders_without_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let missing = TextLines::open([dir.path().join("none.txt")], &TextOptions::default());
    assert!(matches!(
        missing,
        Err(Error::Common(overdrive_core::Error::Io {
            action: "open",
            ..
        }))
    ));
    let empty = TextLines::open([dir.path()], &TextOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        empty.starts_with("no data found in ") && empty.contains("no files match"),
        "{empty}"
    );
    let pattern = find_files([dir.path().join("*.txt")], &[]).unwrap_err();
    assert!(matches!(pattern, Error::NoData { .. }));
    assert!(matches!(
        find_files([dir.path().join("[")], &[]),
        Err(Error::Common(overdrive_core::Error::InvalidOption { .. }))
    ));
    assert!(
        find_files::<&Path>([], &[])
            .unwrap_err()
            .to_string()
            .contains("an empty list")
    );
}

#[test]
fn blank_lines_are_records_unless_they_are_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines.txt");
    std::fs::write(&path, "\none \r\n \t\r\n\ntwo\r\n\n").unwrap();
    let open = |skip_blank| {
        let options = TextOptions {
            skip_blank,
            ..TextOptions::default()
        };
        all(&TextLines::open([&path], &options).unwrap())
    };
    assert_eq!(open(false), ["", "one ", " \t", "", "two", ""]);
    assert_eq!(open(true), ["one ", "two"]);
}

#[test]
fn empty_files_have_no_records() {
    let dir = tempfile::tempdir().unwrap();
    write_files(
        dir.path(),
        &[
            ("a.txt", "one"),
            ("b.txt", ""),
            ("c.txt", "\u{feff}"),
            ("d.txt", "two\n"),
        ],
    );
    let lines = TextLines::open([dir.path()], &TextOptions::default()).unwrap();
    assert_eq!(all(&lines), ["one", "two"]);
    let none = TextLines::open([dir.path().join("b.txt")], &TextOptions::default()).unwrap();
    assert!(none.is_empty());
    assert!(none.get(0).is_err());
    let none = CsvRecords::open([dir.path().join("b.txt")], &CsvOptions::default()).unwrap();
    assert!(none.is_empty() && none.columns().names().is_empty());
}

proptest! {
    #![proptest_config(cases(48))]

    #[test]
    fn any_lines_come_back(lines in prop::collection::vec("[^\n\r\u{feff}]{0,20}", 1..40), ending in "\r?\n") {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lines.txt");
        std::fs::write(&path, lines.iter().map(|line| format!("{line}{ending}")).collect::<String>()).unwrap();
        let read = TextLines::open([&path], &TextOptions::default()).unwrap();
        prop_assert_eq!(all(&read), lines);
    }

    #[test]
    fn any_rows_come_back(rows in prop::collection::vec(prop::collection::vec("[a,\"\n\r ;]{0,6}", 3), 1..20)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rows.csv");
        let quote = |field: &String| format!("\"{}\"", field.replace('"', "\"\""));
        let line = |row: &Vec<String>| row.iter().map(quote).collect::<Vec<_>>().join(",") + "\r\n";
        std::fs::write(&path, rows.iter().map(line).collect::<String>()).unwrap();
        let options = CsvOptions { has_header: false, ..CsvOptions::default() };
        let read = CsvRecords::open([&path], &options).unwrap();
        let read: Vec<Vec<String>> =
            all(&read).iter().map(|row| row.fields().map(str::to_owned).collect()).collect();
        prop_assert_eq!(read, rows);
    }

    #[test]
    fn any_json_texts_come_back(texts in prop::collection::vec("\\PC{0,12}|[\\\\\"\\[\\]{},:\n]{0,8}", 0..20)) {
        let dir = tempfile::tempdir().unwrap();
        let values: Vec<Value> = texts.iter().map(|text| json!({text: [text, {"n": {}}]})).collect();
        let path = dir.path().join("values.json");
        std::fs::write(&path, serde_json::to_string_pretty(&values).unwrap()).unwrap();
        let read = JsonRecords::<Value>::open([&path], &JsonOptions::default()).unwrap();
        prop_assert_eq!(all(&read), values);
    }

    #[test]
    fn any_bytes_give_records_or_errors_and_no_panic(
        bytes in prop::collection::vec(prop_oneof![3 => prop::sample::select(b"[]{}\",:\\ \n\r\t1a\xff\xef\xbb\xbf".to_vec()), 1 => any::<u8>()], 0..80),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("bytes");
        std::fs::write(&path, &bytes).unwrap();
        let read_all = |dataset: &dyn Dataset<Item = ()>| (0..dataset.len() + 1).for_each(|i| { let _ = dataset.get(i); });
        if let Ok(lines) = TextLines::open([&path], &TextOptions::default()) {
            read_all(&Discard(lines));
        }
        for has_header in [false, true] {
            let options = CsvOptions { has_header, ..CsvOptions::default() };
            if let Ok(rows) = CsvRecords::open([&path], &options) {
                read_all(&Discard(rows));
            }
        }
        for layout in [JsonLayout::Guess, JsonLayout::Lines, JsonLayout::Array, JsonLayout::ArrayIn("a".to_owned())] {
            let options = JsonOptions { layout, ..JsonOptions::default() };
            if let Ok(records) = JsonRecords::<Value>::open([&path], &options) {
                read_all(&Discard(records));
            }
        }
    }
}

/// A dataset whose records are read and thrown away.
struct Discard<D>(D);

impl<D: Dataset> Dataset for Discard<D> {
    type Item = ();

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> overdrive_datasets::Result<()> {
        self.0.get(index).map(drop)
    }
}
