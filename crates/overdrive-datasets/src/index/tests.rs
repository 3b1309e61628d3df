//! Offsets survive a round trip, and every scan finds the records that a slow reference finds.

use std::path::Path;

use proptest::prelude::*;

use super::offsets::BLOCK_VALUES;
use super::*;
use crate::{Error, Result};

/// Returns a configuration with `count` cases, or with `PROPTEST_CASES` for a longer search by hand.
fn cases(count: u32) -> ProptestConfig {
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => ProptestConfig::with_cases(count),
    }
}

const CSV: CsvScan = CsvScan {
    delimiter: b',',
    quote: Some(b'"'),
    max_row_bytes: u64::MAX,
};

/// Returns the blocks, the directory and the count of `values`.
fn encode(values: &[u64]) -> (Vec<u8>, Vec<u8>, usize) {
    let mut writer = OffsetsWriter::new(Vec::new());
    for &value in values {
        writer.push(value).unwrap();
    }
    let (bytes, finished) = writer.finish().unwrap();
    let (blocks, directory) = bytes.split_at(finished.blocks_bytes as usize);
    (blocks.to_vec(), directory.to_vec(), finished.count as usize)
}

fn check(values: &[u64]) {
    let (blocks, directory, count) = encode(values);
    let table = OffsetTable::new(&blocks, &directory, count);
    assert_eq!(count, values.len());
    for (i, &value) in values.iter().enumerate() {
        assert_eq!(table.get(i), Some(value), "value {i}");
    }
    for (i, pair) in values.windows(2).enumerate() {
        assert_eq!(table.pair(i), Some(pair[0]..pair[1]), "pair {i}");
    }
    assert_eq!(table.get(count), None);
    assert_eq!(table.pair(count.saturating_sub(1)), None);
    let last = values.last().copied().unwrap_or(0);
    assert_eq!(table.first_damaged_block(last), None);
}

fn sums(gaps: impl IntoIterator<Item = u64>) -> Vec<u64> {
    gaps.into_iter()
        .scan(0_u64, |sum, gap| {
            *sum = sum.saturating_add(gap);
            Some(*sum)
        })
        .collect()
}

#[test]
fn offsets_at_the_edges_of_blocks_and_of_numbers_come_back() {
    check(&[]);
    check(&[0]);
    check(&[u64::MAX]);
    check(&[0, u64::MAX]);
    check(&[5; 200]);
    for count in [
        63,
        64,
        65,
        BLOCK_VALUES - 1,
        BLOCK_VALUES,
        BLOCK_VALUES + 1,
        3 * BLOCK_VALUES,
    ] {
        check(&sums((0..count as u64).map(|i| i % 7)));
    }
    // One record of nearly 2^63 bytes among tiny ones, at each end of a block.
    let mut gaps = vec![1; BLOCK_VALUES + 10];
    gaps[1] = u64::MAX / 2;
    check(&sums(gaps.clone()));
    gaps.rotate_left(10);
    check(&sums(gaps));
}

#[test]
fn offsets_of_lines_take_one_byte_and_of_16_kib_records_two() {
    let bytes_a_value = |gap: u64| {
        let values = sums((0..100_000).map(|i| gap / 2 + i * 7919 % gap));
        let (blocks, directory, count) = encode(&values);
        (blocks.len() + directory.len()) as f64 / count as f64
    };
    // 2 + log2 of the mean, a quarter of a bit for samples, a twentieth for the directory.
    assert!(bytes_a_value(54) < 1.1, "{}", bytes_a_value(54));
    assert!(
        bytes_a_value(16 << 10) < 2.06,
        "{}",
        bytes_a_value(16 << 10)
    );
    assert!(bytes_a_value(8 << 10) < 2.0, "{}", bytes_a_value(8 << 10));
}

fn scan(scan: &dyn Scan, data: &[u8], threads: usize) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    let end = scan.scan(Path::new("data"), Part::whole(data), threads, &mut |at| {
        found.push(at);
        Ok(())
    })?;
    found.push(end);
    Ok(found)
}

/// As [`scan`], in parts of a stream.
fn stream(scan: &dyn Scan, mut data: &[u8], part_bytes: usize) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    let end = scan_stream(
        scan,
        Path::new("data"),
        &mut data,
        part_bytes,
        1,
        &mut |at| {
            found.push(at);
            Ok(())
        },
    )?;
    found.push(end);
    Ok(found)
}

/// Finds the rows by a state machine that reads one byte at a time.
fn csv_reference(data: &[u8], delimiter: u8, quote: u8) -> Vec<u64> {
    let first = if data.starts_with(b"\xef\xbb\xbf") {
        3
    } else {
        0
    };
    let (mut rows, mut inside, mut at, mut row) = (Vec::new(), false, first, first);
    let mut end_row = |start: usize, end: usize| {
        if start < end && !matches!(&data[start..end], b"\n" | b"\r\n" | b"\r") {
            rows.push(start as u64);
        }
    };
    while at < data.len() {
        let byte = data[at];
        let field_starts = at == row || data[at - 1] == delimiter;
        if inside && byte == quote && data.get(at + 1) == Some(&quote) {
            at += 1;
        } else if inside {
            inside = byte != quote;
        } else if byte == quote && field_starts {
            inside = true;
        } else if byte == b'\n' || byte == b'\r' {
            at += usize::from(data[at..].starts_with(b"\r\n"));
            end_row(row, at + 1);
            row = at + 1;
        }
        at += 1;
    }
    end_row(row, data.len());
    rows.push(data.len() as u64);
    rows
}

/// Returns data of more than three chunks, with `filler` bytes first, so that `tail` crosses a border.
fn across_a_border(filler: u8, shift: usize, tail: &[u8]) -> Vec<u8> {
    let mut data = vec![filler; (1 << 20) - shift];
    data.extend(tail);
    data.resize(data.len() + (2 << 20), filler);
    data.extend(tail);
    data
}

proptest! {
    #![proptest_config(cases(256))]

    #[test]
    fn any_offsets_come_back(gaps in prop::collection::vec(
        prop_oneof![4 => 0_u64..100, 2 => 0_u64..100_000, 1 => 0_u64..1 << 50], 1..300)) {
        check(&sums(gaps));
    }

    #[test]
    fn damaged_offsets_give_no_panic_and_are_noticed(
        gaps in prop::collection::vec(0_u64..1000, 1..300),
        at in any::<prop::sample::Index>(),
        xor in 1_u8..,
        cut in any::<prop::sample::Index>(),
    ) {
        let values = sums(gaps);
        let (mut blocks, mut directory, count) = encode(&values);
        let place = at.index(blocks.len());
        blocks[place] ^= xor;
        let last = *values.last().unwrap();
        let table = OffsetTable::new(&blocks, &directory, count);
        prop_assert_eq!(table.first_damaged_block(last), Some(0));
        let all = |table: OffsetTable<'_>| (0..count + 2).for_each(|i| { table.pair(i); table.get(i); });
        all(table);
        all(OffsetTable::new(&blocks[..cut.index(blocks.len())], &directory, count));
        let place = at.index(directory.len());
        directory[place] ^= xor;
        all(OffsetTable::new(&blocks, &directory, count));
        all(OffsetTable::new(&blocks, &directory[..cut.index(directory.len())], count));
        all(OffsetTable::new(&directory, &blocks, usize::MAX));
    }

    #[test]
    fn lines_are_those_of_a_split_at_line_feeds(data in "[a \n\r\t]{0,60}", mark in any::<bool>()) {
        let data = if mark { format!("\u{feff}{data}") } else { data };
        let first = if mark { 3 } else { 0 };
        for skip_blank in [false, true] {
            let mut at = first as u64;
            let mut expected = Vec::new();
            for line in data[first..].split_inclusive('\n') {
                let is_blank = line.bytes().all(|byte| b" \t\r\n".contains(&byte));
                if !(skip_blank && is_blank) {
                    expected.push(at);
                }
                at += line.len() as u64;
            }
            expected.push(data.len() as u64);
            prop_assert_eq!(scan(&LineScan { skip_blank }, data.as_bytes(), 2).unwrap(), expected);
        }
    }

    #[test]
    fn csv_rows_are_those_of_a_state_machine_over_single_bytes(data in "[a,\"\n\r;]{0,60}", mark in any::<bool>()) {
        let data = if mark { format!("\u{feff}{data}") } else { data };
        let found = scan(&CSV, data.as_bytes(), 2);
        prop_assert_eq!(found.unwrap(), csv_reference(data.as_bytes(), b',', b'"'));
    }

    #[test]
    fn a_stream_has_the_records_of_the_whole_file(
        data in "[a,\"\n\r \u{feff}]{0,80}", mark in any::<bool>(), part in 1_usize..40,
    ) {
        let data = if mark { format!("\u{feff}{data}") } else { data };
        let lines = LineScan { skip_blank: false };
        let records = LineScan { skip_blank: true };
        let scans: [&dyn Scan; 4] = [&lines, &records, &ParagraphScan, &CSV];
        for one in scans {
            let whole = scan(one, data.as_bytes(), 1).unwrap();
            prop_assert_eq!(stream(one, data.as_bytes(), part).unwrap(), whole);
        }
    }

    #[test]
    fn json_arrays_of_any_bytes_give_an_error_or_records(data in prop::collection::vec(
        prop::sample::select(b"[]{}\",:\\ \n1a".to_vec()), 0..60)) {
        let _ = scan(&JsonArrayScan { field: None }, &data, 1);
        let _ = scan(&JsonArrayScan { field: Some("a".to_owned()) }, &data, 1);
    }
}

proptest! {
    // Each case is megabytes.
    #![proptest_config(cases(16))]

    #[test]
    fn records_across_the_borders_of_chunks_are_found_by_any_number_of_threads(
        tail in "[a,\"\n\r]{0,24}",
        shift in 0_usize..30,
        quoted in any::<bool>(),
        filler in prop::sample::select(b"x\"".to_vec()),
    ) {
        let mut data = across_a_border(filler, shift, tail.as_bytes());
        if quoted {
            data[0] = b'"';
        }
        let lines = LineScan { skip_blank: true };
        let csv = CSV;
        let expected = csv_reference(&data, b',', b'"');
        let all_lines: Vec<u64> = scan(&lines, &data, 1).unwrap();
        for threads in [1, 2, 5] {
            prop_assert_eq!(&scan(&csv, &data, threads).unwrap(), &expected);
            prop_assert_eq!(&scan(&lines, &data, threads).unwrap(), &all_lines);
        }
    }
}

#[test]
fn elements_of_arrays_are_found_whatever_is_in_them() {
    let data = br#" [ {"a": [1, {"b": "]},[\"\\"}]} , [], "x,y]" ,null,-1.5e3
        , {} ] "#;
    let found = scan(&JsonArrayScan { field: None }, data, 1).unwrap();
    let text = |at: u64| std::str::from_utf8(&data[at as usize..]).unwrap();
    let starts = ["{\"a\"", "[], \"x", "\"x,y]", "null", "-1.5", "{} ]", "] "];
    assert_eq!(found.len(), starts.len());
    for (at, start) in found.into_iter().zip(starts) {
        assert!(text(at).starts_with(start), "{start}: {}", text(at));
    }
    assert_eq!(
        scan(&JsonArrayScan { field: None }, b"[ ]", 1).unwrap(),
        [2]
    );
}

#[test]
fn the_array_in_a_field_is_found_after_other_fields() {
    let data = br#"{"version": {"data": [9]}, "s": "\"data\"", "d\u0061ta": [1, 2], "rest": }"#;
    let scan_field = |field: &str| {
        scan(
            &JsonArrayScan {
                field: Some(field.to_owned()),
            },
            data,
            1,
        )
    };
    assert_eq!(scan_field("data").unwrap().len(), 3);
    let error = scan_field("other").unwrap_err().to_string();
    assert!(error.contains("expected a value"), "{error}");
    let error = scan(
        &JsonArrayScan {
            field: Some("x".to_owned()),
        },
        br#"{"a": 1}"#,
        1,
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("at byte 7, the object has no field \"x\""),
        "{error}"
    );
}

#[test]
fn an_invalid_array_is_an_error_with_its_offset() {
    for (data, problem) in [
        (
            "",
            "at byte 0, found the end of the file, expected an array ([)",
        ),
        ("{}", "at byte 0, found '{', expected an array ([)"),
        (
            "[1 2]",
            "at byte 3, found '2', expected a comma or the end of the array (])",
        ),
        ("[1,]", "at byte 3, found ']', expected a value"),
        (
            "[1, {\"a\": [}",
            "at byte 4, the object or array that begins here does not end",
        ),
        (
            "[\"abc\\\"]",
            "at byte 1, the string that begins here does not end",
        ),
        (
            "[] x",
            "at byte 3, found 'x', expected nothing after the array",
        ),
    ] {
        let error = scan(&JsonArrayScan { field: None }, data.as_bytes(), 1).unwrap_err();
        assert!(error.to_string().ends_with(problem), "{data}: {error}");
    }
}

#[test]
fn a_panic_of_a_worker_and_an_error_of_the_sink_end_the_search() {
    let result = std::panic::catch_unwind(|| {
        scan::in_order(8, 2, 4, |job| assert!(job != 3, "job 3"), |()| Ok(()))
    });
    assert!(result.is_err() || matches!(result, Ok(Err(Error::WorkerPanicked))));
    let stop = || Error::NoSuchRecord { index: 0, len: 0 };
    let mut taken = Vec::new();
    let result = scan::in_order(
        100,
        3,
        4,
        |job| job,
        |job| {
            taken.push(job);
            if job == 5 { Err(stop()) } else { Ok(()) }
        },
    );
    assert!(matches!(result, Err(Error::NoSuchRecord { .. })));
    assert_eq!(taken, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_stream_of_an_archive_has_its_samples_and_its_errors() {
    let mut data = Vec::new();
    for (name, bytes) in [
        ("README", 700),
        ("a.txt", 10),
        ("a.jpg", 3000),
        ("b.txt", 0),
        ("c.seg.png", 513),
        ("c.txt", 5),
    ] {
        let mut header = vec![0_u8; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..135].copy_from_slice(format!("{bytes:011o}").as_bytes());
        header[156] = b'0';
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        data.extend(header);
        data.extend(std::iter::repeat_n(b'x', bytes));
        data.resize(data.len().next_multiple_of(512), 0);
    }
    let without_end = data.clone();
    data.resize(data.len() + 1024 + 9000, 0);
    for data in [&without_end, &data] {
        let whole = scan(&TarScan, data, 1).unwrap();
        assert_eq!(whole.len(), 4);
        for part in [1, 511, 512, 700, 4096, 100_000] {
            assert_eq!(
                stream(&TarScan, data, part).unwrap(),
                whole,
                "parts of {part}"
            );
        }
    }
    // Truncated, and with a wrong checksum in the header of the last sample.
    let cut = &without_end[..without_end.len() - 512];
    let mut wrong = without_end.clone();
    let at = scan(&TarScan, &without_end, 1).unwrap()[2] as usize;
    wrong[at] ^= 1;
    for data in [cut, &wrong] {
        let whole = scan(&TarScan, data, 1).unwrap_err().to_string();
        for part in [1, 700, 4096] {
            let error = stream(&TarScan, data, part).unwrap_err().to_string();
            assert_eq!(error, whole, "parts of {part}");
        }
    }
}

#[test]
fn an_error_in_a_stream_has_the_offset_in_the_file() {
    let rows = "a,b\n".repeat(1000);
    let data = format!("{rows}\"{}", "x".repeat(500));
    let csv = CsvScan {
        max_row_bytes: 100,
        ..CSV
    };
    let Error::InvalidRecord { offset, .. } = stream(&csv, data.as_bytes(), 300).unwrap_err()
    else {
        panic!("another error");
    };
    assert_eq!(offset, 4000);
}
