//! GGUF files against what the `gguf` Python package writes and reads.

use std::path::PathBuf;

use overdrive_core::Error as CoreError;
use overdrive_quantization::{
    Error, GgufArray, GgufFile, GgufTensorInfo, GgufType, GgufValue, GgufWriter, QuantizedWeight,
    Scheme,
};
use overdrive_safetensors::MappedFile;
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

fn fixture(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    assert!(path.exists(), "run tests/fixtures/gen_gguf.py");
    path
}

fn expected(name: &str) -> Tensor {
    let file = MappedFile::open(fixture("types.safetensors")).unwrap();
    let tensor = file.tensor(name).unwrap();
    tensor.copy_to_tensor(None, Device::Cpu).unwrap()
}

/// Returns `true` if two tensors are equal bit for bit, except for the sign of zero.
fn same(a: &Tensor, b: &Tensor) -> bool {
    a.size() == b.size() && a.kind() == b.kind() && a.equal(b)
}

#[test]
fn arrays_of_every_integer_type_are_read_as_single_numbers_are() {
    let array = |numbers: &[u64]| GgufValue::Array(GgufArray::U64(numbers.to_vec())).as_i64s();
    assert_eq!(array(&[1, 1 << 40]).unwrap(), [1, 1 << 40]);
    assert_eq!(array(&[1, u64::MAX]), None);
}

#[test]
fn numbers_of_every_type_equal_those_of_the_gguf_package() {
    let file = GgufFile::open(fixture("types.gguf")).unwrap();
    let mut names = 0;
    for tensor in file.tensors() {
        let expected = expected(tensor.name());
        assert_eq!(tensor.shape(), expected.size());
        let found = tensor
            .dequantize(None, expected.kind(), Device::Cpu)
            .unwrap();
        assert!(same(&found, &expected), "{}", tensor.name());
        names += 1;
    }
    assert_eq!(names, 19);
}

/// MXFP4, the type of gpt-oss's experts: `gen_gguf_mxfp4.py`.
#[test]
fn blocks_of_floats_equal_those_of_the_gguf_package() {
    let file = GgufFile::open(fixture("mxfp4.gguf")).unwrap();
    let numbers = MappedFile::open(fixture("mxfp4.safetensors")).unwrap();
    for tensor in file.tensors() {
        assert_eq!(tensor.tensor_type(), GgufType::MXFP4);
        let expected = numbers.tensor(tensor.name()).unwrap();
        let expected = expected.copy_to_tensor(None, Device::Cpu).unwrap();
        let dense = tensor.dequantize(None, Kind::Float, Device::Cpu).unwrap();
        assert!(same(&dense, &expected), "{}", tensor.name());
        let rows = tensor
            .dequantize(Some(&[2, 0]), Kind::Float, Device::Cpu)
            .unwrap();
        assert!(same(
            &rows,
            &expected.index_select(0, &Tensor::from_slice(&[2_i64, 0]))
        ));
        // Experts are matrices of a stack.
        let (matrix, expected) = match tensor.shape().len() {
            3 => (tensor.slice(1).unwrap(), expected.get(1)),
            _ => (tensor, expected),
        };
        let weight = matrix.to_quantized(None).unwrap().unwrap();
        assert_eq!(weight.scheme(), Scheme::Mxfp4);
        assert!(same(&weight.dequantize(Kind::Float).unwrap(), &expected));
        let count = 2 * expected.size()[0];
        let rows: Vec<i64> = (0..count).rev().collect();
        let parts = [weight.shallow_clone(), weight];
        let joined = QuantizedWeight::from_rows(&parts, Some(&rows)).unwrap();
        assert_eq!(joined.scheme(), Scheme::Mxfp4);
        let expected = Tensor::cat(&[&expected, &expected], 0).flip([0]);
        assert!(same(&joined.dequantize(Kind::Float).unwrap(), &expected));
    }
    assert_eq!(file.tensors().count(), 2);
}

/// Returns the matrices of groups of the fixture with their elements.
fn matrices(file: &GgufFile) -> Vec<(QuantizedWeight, Tensor)> {
    let weights = file.tensors().filter_map(|tensor| {
        let weight = tensor.to_quantized(None).unwrap()?;
        Some((weight, expected(tensor.name())))
    });
    weights.collect()
}

#[test]
fn rows_of_matrices_of_any_two_types_are_joined_without_changing_a_number() {
    let file = GgufFile::open(fixture("types.gguf")).unwrap();
    let all = matrices(&file);
    let mut joined = 0;
    for (first, numbers) in &all {
        for (second, others) in &all {
            if first.size()[1] != second.size()[1] {
                continue;
            }
            let parts = [first.shallow_clone(), second.shallow_clone()];
            let whole = Tensor::cat(&[numbers, others], 0);
            let count = whole.size()[0];
            let weight = QuantizedWeight::from_rows(&parts, None).unwrap();
            assert!(same(&weight.dequantize(Kind::Float).unwrap(), &whole));
            let rows: Vec<i64> = (0..count).rev().collect();
            let weight = QuantizedWeight::from_rows(&parts, Some(&rows)).unwrap();
            let rows = whole.flip([0]);
            assert!(same(&weight.dequantize(Kind::Float).unwrap(), &rows));
            joined += 1;
        }
    }
    assert!(joined > all.len(), "{joined}");
    assert!(QuantizedWeight::from_rows(&[], None).is_err());
    let (weight, _) = &all[0];
    let one = [weight.shallow_clone()];
    let refused = QuantizedWeight::from_rows(&one, Some(&[weight.size()[0]])).unwrap_err();
    assert!(refused.to_string().contains("rows"), "{refused}");
}

#[test]
fn inputs_of_a_matrix_are_reordered_by_groups_and_one_by_one() {
    let file = GgufFile::open(fixture("types.gguf")).unwrap();
    for (weight, numbers) in matrices(&file) {
        let width = weight.size()[1];
        let halves: Vec<i64> = (width / 2..width).chain(0..width / 2).collect();
        let reversed: Vec<i64> = (0..width).rev().collect();
        for inputs in [halves, reversed] {
            let moved = weight.with_inputs(&inputs).unwrap();
            let columns = numbers.index_select(1, &Tensor::from_slice(&inputs));
            assert!(same(&moved.dequantize(Kind::Float).unwrap(), &columns));
        }
        let refused = weight.with_inputs(&vec![0; width as usize]).unwrap_err();
        assert!(refused.to_string().contains("once"), "{refused}");
    }
}

#[test]
fn every_matrix_of_groups_is_packed_without_changing_a_number() {
    let file = GgufFile::open(fixture("types.gguf")).unwrap();
    let mut packed = 0;
    for tensor in file.tensors() {
        let Some(weight) = tensor.to_quantized(None).unwrap() else {
            let groups = tensor.tensor_type().groups();
            assert!(
                groups.is_none() || tensor.shape().len() != 2,
                "{}",
                tensor.name()
            );
            continue;
        };
        let groups = tensor.tensor_type().groups().unwrap();
        assert_eq!(weight.scheme(), Scheme::Grouped(groups));
        assert_eq!(weight.size(), *tensor.shape());
        let found = weight.dequantize(Kind::Float).unwrap();
        assert!(same(&found, &expected(tensor.name())), "{}", tensor.name());
        packed += 1;
    }
    assert_eq!(packed, 10);
    // 16 bits of scale for 32 weights, as in the file.
    for name in ["Q4_0", "Q4_1", "Q8_0"] {
        let tensor = file.tensor(name).unwrap();
        let weight = tensor.to_quantized(None).unwrap().unwrap();
        assert_eq!(weight.bytes(), tensor.data().len(), "{name}");
    }
}

#[test]
fn rows_can_be_permuted_while_they_are_read() {
    let file = GgufFile::open(fixture("types.gguf")).unwrap();
    let rows = [4i64, 0, 3, 3];
    let index = Tensor::from_slice(&rows);
    for name in ["Q4_K", "Q6_K", "Q5_1", "Q4_0", "BF16"] {
        let tensor = file.tensor(name).unwrap();
        let expected = expected(name).index_select(0, &index);
        let found = tensor
            .dequantize(Some(&rows), Kind::Float, Device::Cpu)
            .unwrap();
        assert!(same(&found, &expected), "{name}");
        if let Some(weight) = tensor.to_quantized(Some(&rows)).unwrap() {
            assert!(
                same(&weight.dequantize(Kind::Float).unwrap(), &expected),
                "{name}"
            );
        }
    }
    let stacked = file.tensor("stacked").unwrap();
    let found = stacked
        .dequantize(Some(&[1, 0]), Kind::Float, Device::Cpu)
        .unwrap();
    assert!(same(&found, &expected("stacked").flip([0])));
    let error = file.tensor("Q4_0").unwrap().to_quantized(Some(&[7]));
    assert_eq!(
        error.unwrap_err().to_string(),
        "`rows` contains 7; it must contain rows in 0..7, the rows of `Q4_0`"
    );
}

#[test]
fn metadata_of_every_type_is_read() {
    let file = GgufFile::open(fixture("types.gguf")).unwrap();
    let value = |key| file.value(key).unwrap().clone();
    assert_eq!(value("u8"), GgufValue::U8(200));
    assert_eq!(value("i8"), GgufValue::I8(-100));
    assert_eq!(value("u16"), GgufValue::U16(60000));
    assert_eq!(value("i16"), GgufValue::I16(-30000));
    assert_eq!(value("u32"), GgufValue::U32(4_000_000_000));
    assert_eq!(value("i32"), GgufValue::I32(-2_000_000_000));
    assert_eq!(value("f32"), GgufValue::F32(1.5));
    assert_eq!(value("truth"), GgufValue::Bool(true));
    assert_eq!(value("text"), GgufValue::String("größe".to_owned()));
    assert_eq!(value("u64"), GgufValue::U64(1 << 40));
    assert_eq!(value("i64"), GgufValue::I64(-(1 << 40)));
    assert_eq!(value("f64"), GgufValue::F64(0.1));
    assert_eq!(value("texts").as_strings().unwrap(), ["a", "", "ß"]);
    assert_eq!(value("numbers").as_i64s().unwrap(), [1, -2, 3]);
    assert_eq!(
        value("floats"),
        GgufValue::Array(GgufArray::F32(vec![0.5, -0.25]))
    );
    assert_eq!(
        file.value("general.architecture").unwrap().as_str(),
        Some("fixture")
    );
    assert_eq!(value("u32").as_i64(), Some(4_000_000_000));
    assert_eq!(value("i32").as_f64(), Some(-2e9));
    assert!(file.value("nothing").is_none() && file.tensor("nothing").is_none());
}

/// The bytes of a file, built field by field.
struct Bytes(Vec<u8>);

impl Bytes {
    fn header(version: u32, tensors: u64, values: u64) -> Bytes {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(version.to_le_bytes());
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(values.to_le_bytes());
        Bytes(bytes)
    }

    fn u32(mut self, number: u32) -> Bytes {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn u64(mut self, number: u64) -> Bytes {
        self.0.extend(number.to_le_bytes());
        self
    }

    fn text(self, text: &str) -> Bytes {
        let mut longer = self.u64(text.len() as u64);
        longer.0.extend(text.as_bytes());
        longer
    }

    fn tensor(self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Bytes {
        let named = self.text(name).u32(shape.len() as u32);
        let shaped = shape.iter().fold(named, |bytes, &n| bytes.u64(n));
        shaped.u32(kind).u64(offset)
    }

    fn zeros(mut self, count: usize) -> Bytes {
        self.0.resize(self.0.len().next_multiple_of(32) + count, 0);
        self
    }

    fn open(&self) -> Result<GgufFile, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, &self.0).unwrap();
        GgufFile::open(path).map_err(|error| match error {
            Error::Common(CoreError::Parse {
                format: "GGUF",
                source,
                ..
            }) => source.to_string(),
            other => panic!("{other}"),
        })
    }
}

#[test]
fn versions_2_and_3_are_read_and_others_refused() {
    for version in [2, 3] {
        let file = Bytes::header(version, 1, 0)
            .tensor("w", &[32, 2], 8, 0)
            .zeros(68);
        let file = file.open().unwrap();
        let tensor = file.tensor("w").unwrap();
        assert_eq!(
            (tensor.shape(), tensor.tensor_type()),
            (&[2, 32][..], GgufType::Q8_0)
        );
        let numbers = tensor.dequantize(None, Kind::Float, Device::Cpu).unwrap();
        assert!(same(
            &numbers,
            &Tensor::zeros([2, 32], (Kind::Float, Device::Cpu))
        ));
    }
    let refused = Bytes::header(1, 0, 0).open().unwrap_err();
    assert!(
        refused.starts_with("its version is 1; it must be 2 or 3"),
        "{refused}"
    );
    let big = Bytes::header(3u32.swap_bytes(), 0, 0).open().unwrap_err();
    assert!(big.starts_with("it is big-endian"), "{big}");
    let other = Bytes(b"PK\x03\x04....".to_vec()).open().unwrap_err();
    assert_eq!(other, "it does not begin with `GGUF`");
}

/// A file of a split model with one tensor of two elements.
fn shard(no: u16, count: u16, tensors: u32, tensor: &str, first: f32) -> Vec<u8> {
    let mut bytes = Bytes::header(3, 1, 4);
    for (key, kind, value) in [
        ("split.no", 2, no.to_le_bytes().to_vec()),
        ("split.count", 2, count.to_le_bytes().to_vec()),
        ("split.tensors.count", 5, tensors.to_le_bytes().to_vec()),
        ("own", 0, vec![no as u8]),
    ] {
        bytes = bytes.text(key).u32(kind);
        bytes.0.extend(value);
    }
    let mut bytes = bytes.tensor(tensor, &[2], 0, 0).zeros(0).0;
    bytes.extend(first.to_le_bytes());
    bytes.extend(2f32.to_le_bytes());
    bytes
}

#[test]
fn the_files_of_a_split_model_are_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = |no: usize| folder.path().join(format!("m-{no:05}-of-00003.gguf"));
    for no in 0..3u16 {
        let bytes = shard(no, 3, 3, ["a", "b", "c"][usize::from(no)], f32::from(no));
        std::fs::write(path(usize::from(no) + 1), bytes).unwrap();
    }
    for given in 1..=3 {
        let file = GgufFile::open(path(given)).unwrap();
        assert_eq!(file.path(), path(given));
        // The metadata are those of the first file.
        assert_eq!(file.value("own"), Some(&GgufValue::U8(0)));
        let tensors = file.tensors().map(|tensor| {
            let numbers = tensor.dequantize(None, Kind::Float, Device::Cpu).unwrap();
            (tensor.name().to_owned(), numbers.double_value(&[0]))
        });
        let expected = [("a", 0.0), ("b", 1.0), ("c", 2.0)];
        let expected = expected.map(|(name, first)| (name.to_owned(), first));
        assert_eq!(tensors.collect::<Vec<_>>(), expected);
        assert_eq!(file.tensor("c").unwrap().shape(), [2]);
    }
}

#[test]
fn files_of_a_split_model_that_are_missing_or_foreign_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = |no: usize| folder.path().join(format!("m-{no:05}-of-00003.gguf"));
    let write = |number: usize, bytes: Vec<u8>| std::fs::write(path(number), bytes).unwrap();
    let refusal = |path: PathBuf| GgufFile::open(path).unwrap_err();
    let message = |path: PathBuf| match refusal(path) {
        Error::Common(CoreError::Parse { path, source, .. }) => {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            format!("{name}: {source}")
        }
        other => panic!("{other}"),
    };
    write(2, shard(1, 3, 3, "b", 0.0));
    assert_eq!(
        message(path(2)),
        "m-00002-of-00003.gguf: it is file 2 of 3 of a split model, but m-00001-of-00003.gguf, \
         m-00003-of-00003.gguf are missing in its folder; put all files into one folder"
    );
    write(1, shard(0, 3, 3, "a", 0.0));
    // By its keys the third is of a model in four files.
    write(3, shard(2, 4, 3, "c", 0.0));
    assert_eq!(
        message(path(1)),
        "m-00003-of-00003.gguf: it is file 3 of 4 of a model with 3 tensors; by its name it must be file 3 of 3 \
         of a model with 3 tensors"
    );
    write(3, shard(2, 3, 3, "a", 0.0));
    assert_eq!(
        message(path(1)),
        "m-00003-of-00003.gguf: another file of the split model also has the tensor `a`"
    );
    for number in 1..=3u16 {
        let name = ["a", "b", "c"][usize::from(number) - 1];
        write(usize::from(number), shard(number - 1, 3, 4, name, 0.0));
    }
    assert_eq!(
        message(path(1)),
        "m-00001-of-00003.gguf: the 3 files of the split model have 3 tensors; `split.tensors.count` is 4"
    );
    let renamed = folder.path().join("model.gguf");
    std::fs::write(&renamed, shard(0, 3, 3, "a", 0.0)).unwrap();
    assert_eq!(
        message(renamed.clone()),
        "model.gguf: it is file 1 of 3 of a split model, but its name does not end in \
         `-00001-of-00003.gguf`; rename it, so that the other files can be found"
    );
    std::fs::write(&renamed, shard(3, 3, 3, "a", 0.0)).unwrap();
    assert_eq!(
        message(renamed),
        "model.gguf: its `split.no` is 3; it must be below 3"
    );
    // A split into one file is a file.
    let single = folder.path().join("single.gguf");
    std::fs::write(&single, shard(0, 1, 1, "a", 5.0)).unwrap();
    assert_eq!(GgufFile::open(single).unwrap().tensors().count(), 1);
}

#[test]
fn the_alignment_of_the_file_places_its_tensors() {
    let header = Bytes::header(3, 2, 1)
        .text("general.alignment")
        .u32(4)
        .u32(64);
    let header = header.tensor("a", &[1], 0, 0).tensor("b", &[1], 0, 64);
    let mut bytes = header.0.clone();
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    bytes.extend(1.5f32.to_le_bytes());
    bytes.resize(bytes.len().next_multiple_of(64), 0);
    bytes.extend(2.5f32.to_le_bytes());
    let file = Bytes(bytes).open().unwrap();
    for (name, number) in [("a", 1.5), ("b", 2.5)] {
        let tensor = file.tensor(name).unwrap();
        let found = tensor.dequantize(None, Kind::Float, Device::Cpu).unwrap();
        assert_eq!(found.double_value(&[0]), number);
    }
}

#[test]
fn inconsistent_files_are_refused_with_a_reason() {
    let one = |shape: &[u64], kind, offset| {
        let file = Bytes::header(3, 1, 0)
            .tensor("w", shape, kind, offset)
            .zeros(68);
        file.open().unwrap_err()
    };
    let cases = [
        (one(&[32, 3], 8, 0), "it is truncated"),
        (one(&[32, 2], 8, 32), "it is truncated"),
        (one(&[32, 2], 8, 7), "the tensor `w` begins at 7"),
        (one(&[32, 2], 8, u64::MAX - 31), "it is truncated"),
        (
            one(&[33, 2], 8, 0),
            "the tensor `w` has rows of 33 elements; they must be a multiple of 32",
        ),
        (
            one(&[u64::MAX, u64::MAX], 0, 0),
            "the tensor `w` has the impossible shape",
        ),
        (
            one(&[1 << 62, 2], 28, 0),
            "the tensor `w` has the impossible shape",
        ),
        (
            one(&[0, u64::MAX], 0, 0),
            "the tensor `w` has the impossible shape",
        ),
        (one(&[1; 5], 0, 0), "the tensor `w` has 5 dimensions"),
        (
            one(&[32], 20, 0),
            "the tensor `w` is of IQ4_NL, which is not supported",
        ),
        (one(&[32], 77, 0), "the tensor `w` is of type 77"),
        (
            Bytes::header(3, u64::MAX, 0).open().unwrap_err(),
            "it is truncated: it ends at byte 24, but its header needs",
        ),
        (
            Bytes::header(3, 0, u64::MAX).open().unwrap_err(),
            "it is truncated: it ends at byte 24, but its header needs",
        ),
        (
            Bytes::header(3, 0, 1)
                .text("k")
                .u32(9)
                .u32(8)
                .u64(1 << 60)
                .open()
                .unwrap_err(),
            "in the value of `k`: an array of 1152921504606846976 items",
        ),
        (
            Bytes::header(3, 0, 1)
                .text("k")
                .u32(8)
                .u64(u64::MAX)
                .open()
                .unwrap_err(),
            "in the value of `k`: it is truncated: it ends at byte",
        ),
        (
            Bytes::header(3, 0, 1)
                .text("k")
                .u32(13)
                .u64(0)
                .open()
                .unwrap_err(),
            "in the value of `k`: it has a value of unknown type 13",
        ),
        (
            (0..9)
                .fold(Bytes::header(3, 0, 1).text("k").u32(9), |b, _| {
                    b.u32(9).u64(1)
                })
                .open()
                .unwrap_err(),
            "in the value of `k`: its arrays are nested more than 4 deep",
        ),
        (
            Bytes::header(3, 0, 2)
                .text("k")
                .u32(4)
                .u32(1)
                .text("k")
                .u32(4)
                .u32(2)
                .open()
                .unwrap_err(),
            "it has two values of `k`",
        ),
        (
            Bytes::header(3, 2, 0)
                .tensor("w", &[1], 0, 0)
                .tensor("w", &[1], 0, 32)
                .zeros(68)
                .open()
                .unwrap_err(),
            "it has two tensors `w`",
        ),
        (
            Bytes::header(3, 0, 1)
                .text("general.alignment")
                .u32(4)
                .u32(48)
                .open()
                .unwrap_err(),
            "its `general.alignment` is not a power of two",
        ),
    ];
    for (found, expected) in cases {
        assert!(
            found.starts_with(expected),
            "{found:?}, expected {expected:?}"
        );
    }
}

#[test]
fn scales_that_are_not_finite_are_refused() {
    let mut file = Bytes::header(3, 1, 0).tensor("w", &[32, 2], 8, 0).zeros(68);
    let start = file.0.len() - 34;
    file.0[start..start + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let file = file.open().unwrap();
    let tensor = file.tensor("w").unwrap();
    for error in [
        tensor
            .dequantize(None, Kind::Float, Device::Cpu)
            .unwrap_err(),
        tensor.to_quantized(None).unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(
            text.ends_with("the tensor `w`: it has scales that are not finite"),
            "{text}"
        );
    }
}

#[test]
fn a_tensor_without_elements_is_empty() {
    let file = Bytes::header(3, 1, 0)
        .tensor("w", &[0, 1 << 40], 8, 0)
        .zeros(0)
        .open()
        .unwrap();
    let tensor = file.tensor("w").unwrap();
    let numbers = tensor.dequantize(None, Kind::Float, Device::Cpu).unwrap();
    assert_eq!(numbers.size(), [1 << 40, 0]);
    assert!(tensor.to_quantized(None).unwrap().is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// The reader reads any damaged file or returns an error.
    #[test]
    fn damaged_files_are_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        end in any::<Option<prop::sample::Index>>(),
    ) {
        let mut bytes = std::fs::read(fixture("types.gguf")).unwrap();
        for (place, byte) in changes {
            // The header is what the reader believes; the rest are numbers.
            let place = place.index(2000);
            bytes[place] = byte;
        }
        if let Some(end) = end {
            bytes.truncate(end.index(bytes.len()));
        }
        if let Ok(file) = Bytes(bytes).open() {
            for tensor in file.tensors() {
                // Either outcome is right; a panic or an endless allocation is not.
                let numbers = tensor.dequantize(None, Kind::Float, Device::Cpu);
                prop_assert!(numbers.is_err() || numbers.unwrap().size() == tensor.shape());
            }
        }
    }
}

fn info(name: &str, shape: &[i64], tensor_type: GgufType) -> GgufTensorInfo {
    GgufTensorInfo {
        name: name.to_owned(),
        shape: shape.to_vec(),
        tensor_type,
    }
}

#[test]
fn blocks_are_written_with_the_bytes_of_llama_cpp() {
    let blocks = MappedFile::open(fixture("blocks.safetensors")).unwrap();
    let read = |name: &str| {
        let tensor = blocks.tensor(name).unwrap();
        tensor.copy_to_tensor(None, Device::Cpu).unwrap()
    };
    let x = read("x");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("blocks.gguf");
    use GgufType as T;
    for kind in [
        T::Q4_0,
        T::Q4_1,
        T::Q5_0,
        T::Q5_1,
        T::Q8_0,
        T::Q4_K,
        T::Q5_K,
        T::Q6_K,
        T::MXFP4,
    ] {
        let infos = vec![info("x", &x.size(), kind)];
        let mut writer = GgufWriter::create(&path, &Default::default(), infos).unwrap();
        // In two parts, as a stack is written matrix by matrix.
        writer.write(&x.narrow(0, 0, 3)).unwrap();
        writer.write(&x.narrow(0, 3, x.size()[0] - 3)).unwrap();
        writer.finish().unwrap();
        let file = GgufFile::open(&path).unwrap();
        let expected = Vec::<u8>::try_from(read(&kind.to_string()).reshape([-1])).unwrap();
        let found = file.tensor("x").unwrap().data();
        let block = kind.block_bytes();
        for (at, (found, expected)) in found.chunks(block).zip(expected.chunks(block)).enumerate() {
            assert_eq!(found, expected, "{kind}, block {at}");
        }
        assert_eq!(found.len(), expected.len());
    }
}

#[test]
fn metadata_and_dense_tensors_come_back_as_they_were() {
    let source = GgufFile::open(fixture("types.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("again.gguf");
    let kinds = [GgufType::F32, GgufType::F16, GgufType::BF16];
    let names = kinds.map(|kind| info(&kind.to_string(), &[3, 5], kind));
    let mut metadata = source.metadata().clone();
    let nested = GgufArray::Array(vec![GgufArray::U64(vec![1]), GgufArray::Bool(vec![true])]);
    metadata.insert("nested".to_owned(), GgufValue::Array(nested));
    let mut writer = GgufWriter::create(&path, &metadata, names.to_vec()).unwrap();
    let x = Tensor::arange(15, (Kind::Float, Device::Cpu)).view([3, 5]) / 8;
    for _ in kinds {
        writer.write(&x).unwrap();
    }
    writer.finish().unwrap();
    let again = GgufFile::open(&path).unwrap();
    assert!(
        metadata
            .iter()
            .all(|(key, value)| again.value(key) == Some(value))
    );
    for tensor in again.tensors() {
        let found = tensor.dequantize(None, Kind::Float, Device::Cpu).unwrap();
        assert!(same(&found, &x), "{}", tensor.name());
    }
}

#[test]
fn a_file_that_cannot_be_completed_does_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    let begin = |shape: &[i64], kind| {
        GgufWriter::create(&path, &Default::default(), vec![info("x", shape, kind)])
    };
    let text = |error: Error| error.to_string();
    let error = text(begin(&[2, 48], GgufType::Q8_0).unwrap_err());
    assert!(error.contains("a multiple of 32 elements"), "{error}");
    let error = text(begin(&[2, 256], GgufType::Q3_K).unwrap_err());
    assert!(
        error.contains("Q3_K") && error.contains("Q5_K") && error.contains("MXFP4 for `x`"),
        "{error}"
    );
    let mut writer = begin(&[2, 32], GgufType::F16).unwrap();
    for wrong in [f64::NAN, f64::INFINITY, 1e6] {
        let mut writer = begin(&[2, 32], GgufType::F16).unwrap();
        let x = Tensor::full([2, 32], wrong, (Kind::Float, Device::Cpu));
        let error = text(writer.write(&x).unwrap_err());
        assert!(error.contains("at most 6.5504e4 in `x`"), "{error}");
    }
    writer
        .write(&Tensor::ones([1, 32], (Kind::Float, Device::Cpu)))
        .unwrap();
    assert!(text(writer.finish().unwrap_err()).contains("`x` is incomplete"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
