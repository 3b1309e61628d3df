//! Files that lie.

use std::fs;
use std::io::Write;

use overdrive_pickle::{Error, PickledFile};
use proptest::prelude::*;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::originals::fixture;

/// Opens a zip archive with this pickle and a storage `0` of eight bytes, and reads its tensors.
fn open(pickle: &[u8], method: CompressionMethod) -> Result<(), Error> {
    opened(pickle, method).map(drop)
}

fn opened(pickle: &[u8], method: CompressionMethod) -> Result<PickledFile, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.bin");
    let mut writer = ZipWriter::new(fs::File::create(&path).unwrap());
    let options = SimpleFileOptions::default().compression_method(method);
    for (name, bytes) in [("a/data.pkl", pickle), ("a/data/0", &[0_u8; 8])] {
        writer.start_file(name, options).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap();
    let file = PickledFile::open(path)?;
    for stored in file.tensors() {
        drop(stored.copy_to_tensor(None, tch::Device::Cpu)?);
    }
    Ok(file)
}

fn refusal(pickle: &[u8]) -> String {
    open(pickle, CompressionMethod::Stored)
        .unwrap_err()
        .to_string()
}

fn text(text: &str) -> Vec<u8> {
    [
        b"X",
        &(text.len() as u32).to_le_bytes()[..],
        text.as_bytes(),
    ]
    .concat()
}

fn int(value: i128) -> Vec<u8> {
    [&[0x8a, 16], &value.to_le_bytes()[..]].concat()
}

fn tuple(values: &[i128]) -> Vec<u8> {
    let items: Vec<u8> = values.iter().flat_map(|&value| int(value)).collect();
    [b"(", &items[..], b"t"].concat()
}

/// Returns the pickle of `{"w": tensor}`, of floats in the storage `key` with `elements`.
fn tensor(key: &str, elements: i128, offset: i128, shape: &[i128], strides: &[i128]) -> Vec<u8> {
    [
        b"\x80\x02}".to_vec(),
        text("w"),
        b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec(),
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text(key),
        text("cpu"),
        int(elements),
        b"tQ".to_vec(),
        int(offset),
        tuple(shape),
        tuple(strides),
        b"\x89ccollections\nOrderedDict\n)RtRs.".to_vec(),
    ]
    .concat()
}

#[test]
fn entries_that_are_no_tensors_are_named() {
    let plain = tensor("0", 2, 0, &[2], &[1]);
    let others = |pickle: &[u8]| {
        let file = opened(pickle, CompressionMethod::Stored).unwrap();
        assert_eq!(file.tensors().len(), 1);
        file.others().to_vec()
    };
    assert!(others(&plain).is_empty());
    // `s` has set the tensor; the dictionary gets a number and a nested dictionary after it.
    let end = plain.strip_suffix(b".").unwrap();
    let more = [
        end,
        &text("step"),
        &int(3),
        b"s",
        &text("state_dict"),
        b"}s",
        &int(1),
        &int(2),
        b"s.",
    ];
    assert_eq!(
        others(&more.concat()),
        ["step", "state_dict", "an entry whose name is not a string"]
    );
}

#[test]
fn tensors_stay_in_their_storages() {
    // Two floats.
    assert!(open(&tensor("0", 2, 0, &[2], &[1]), CompressionMethod::Stored).is_ok());
    assert!(
        open(
            &tensor("0", 2, 0, &[2, 1], &[1, 9]),
            CompressionMethod::Stored
        )
        .is_ok()
    );
    assert!(
        open(
            &tensor("0", 2, 9, &[0, 5], &[5, 1]),
            CompressionMethod::Stored
        )
        .is_ok()
    );
    const MAX: i128 = i64::MAX as i128;
    type Case = (
        &'static str,
        i128,
        i128,
        &'static [i128],
        &'static [i128],
        &'static str,
    );
    let cases: [Case; 15] = [
        ("0", 2, 0, &[3], &[1], "exceeds its storage"),
        ("0", 2, 1, &[2], &[1], "exceeds its storage"),
        ("0", 2, 0, &[2], &[2], "exceeds its storage"),
        ("0", 2, MAX, &[1], &[1], "exceeds its storage"),
        ("0", 2, 0, &[2], &[MAX], "exceeds its storage"),
        ("0", 3, 0, &[3], &[1], "has 8 bytes"),
        ("0", MAX, MAX - 1, &[1], &[1], "has 8 bytes"),
        ("1", 2, 0, &[2], &[1], "is not in the file"),
        ("../0", 2, 0, &[2], &[1], "is not in the file"),
        ("0", 2, -1, &[2], &[1], "a size is -1"),
        ("0", 2, 0, &[-2], &[1], "a size is -2"),
        ("0", 2, 0, &[2], &[-1], "a size is -1"),
        ("0", 2, 0, &[2, 1], &[1], "number of strides"),
        ("0", 2, 0, &[MAX, MAX], &[0, 0], "more elements than memory"),
        (
            "0",
            2,
            0,
            &[0, MAX, MAX],
            &[1, 1, 1],
            "more elements than memory",
        ),
    ];
    for (key, elements, offset, shape, strides, expected) in cases {
        let error = refusal(&tensor(key, elements, offset, shape, strides));
        assert!(error.contains(expected), "{shape:?} {strides:?}: {error}");
    }
    let error = refusal(&tensor("0", 2, 0, &[1; 65], &[1; 65]));
    assert!(error.contains("65 dimensions"), "{error}");
}

#[test]
fn a_tensor_that_repeats_its_storage_cannot_fill_memory() {
    let repeated = tensor("0", 2, 0, &[1 << 40], &[0]);
    let error = refusal(&repeated);
    assert!(error.contains("larger than the file"), "{error}");
    let few = tensor("0", 2, 0, &[3], &[0]);
    assert!(open(&few, CompressionMethod::Stored).is_ok());
}

#[test]
fn values_that_are_copied_again_and_again_cannot_fill_memory() {
    // Each of the calls would copy the tuple of ten thousand items, or the name of a megabyte.
    let items = vec![b'N'; 10_000];
    let shapes = [
        &b"\x80\x02ctorch\nSize\nq\x00(("[..],
        &items,
        b"ttq\x01",
        &b"h\x00h\x01R".repeat(10_000),
        b".",
    ];
    assert!(refusal(&shapes.concat()).contains("a shape of 10000 dimensions"));
    let storages = [
        b"\x80\x02(".to_vec(),
        text("storage"),
        b"ctorch\nFloatStorage\n".to_vec(),
        text(&"0".repeat(1 << 20)),
        text("cpu"),
        int(2),
        b"tq\x00".to_vec(),
        b"h\x00Q".repeat(1_000),
        b".".to_vec(),
    ];
    assert!(refusal(&storages.concat()).contains("a name of 1048576 bytes"));
}

#[test]
fn values_within_themselves_and_deep_ones_end() {
    // A list that holds itself, as a value beside a tensor.
    let cycle = [&b"\x80\x02]q\x00h\x00a."[..]].concat();
    assert!(refusal(&cycle).contains("no dictionary"));
    let itself = b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.";
    assert!(refusal(itself).contains("no named tensors, only a"));
    // A million tuples, one within the other, and as many calls.
    let deep = [&b"\x80\x02)"[..], &vec![0x85; 1_000_000], b"."].concat();
    assert!(refusal(&deep).contains("no dictionary"));
    let marks = [&b"\x80\x02"[..], &vec![b'('; 1_000_000], b"N."].concat();
    assert!(refusal(&marks).contains("no dictionary"));
}

#[test]
fn other_opcodes_and_names_are_refused() {
    let cases: [(&[u8], &str); 12] = [
        (b"\x80\x02ios\nsystem\n.", "opcode 0x69"),
        (b"\x80\x02cbuiltins\neval\n.", "builtins.eval"),
        (b"\x80\x02ctorch\nload\n.", "torch.load"),
        (
            b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\n.",
            "_rebuild_wrapper_subclass",
        ),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "opcode 0x81"),
        (b"\x80\x02h\x05.", "value 5"),
        (b"\x80\x02R.", "empty stack"),
        (b"\x80\x02(R.", "empty stack"),
        (b"\x80\x02.", "empty stack"),
        (b"\x80\x02X\xff\xff\xff\xff.", "ends within a value"),
        (b"\x80\x02\x8a\xffx.", "ends within a value"),
        (b"\x80\x02cos", "ends within a name"),
    ];
    for (pickle, expected) in cases {
        let error = refusal(pickle);
        assert!(error.contains(expected), "{pickle:?}: {error}");
    }
    let error = open(b"\x80\x02}.", CompressionMethod::Deflated)
        .unwrap_err()
        .to_string();
    assert!(error.contains("compressed"), "{error}");
}

#[test]
fn a_truncated_file_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.bin");
    for name in ["tensors.bin", "tensors_old.bin"] {
        let bytes = fs::read(fixture(name)).unwrap();
        for length in 0..bytes.len() {
            fs::write(&path, &bytes[..length]).unwrap();
            let error = PickledFile::open(&path).map(drop).unwrap_err();
            assert!(
                matches!(error, Error::BadFile { .. } | Error::Common(_)),
                "{length}: {error:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_bytes_are_read_or_refused(
        old in any::<bool>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let name = if old { "tensors_old.bin" } else { "tensors.bin" };
        let mut bytes = fs::read(fixture(name)).unwrap();
        for (index, value) in changes {
            let at = index.index(bytes.len());
            bytes[at] = value;
        }
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&bytes).unwrap();
        if let Ok(file) = PickledFile::open(file.path()) {
            for stored in file.tensors() {
                drop(stored.copy_to_tensor(None, tch::Device::Cpu).unwrap());
            }
        }
    }
}
