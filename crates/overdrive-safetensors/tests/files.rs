//! Files out and in, and what is refused.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::rc::Rc;

use overdrive_sys::CallbackResult;
use overdrive_sys::dispatch_mode::{DispatchMode, OperatorCall, Results, push_mode};

use overdrive_safetensors::{Error, MappedFile, dtype_name, file_in, weight_files, write};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const NONE: BTreeMap<String, String> = BTreeMap::new();
const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

fn named(name: &str, tensor: Tensor) -> (String, Tensor) {
    (name.to_owned(), tensor)
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn an_index_names_existing_files_of_its_own_folder_only() {
    const SINGLE: &str = "model.safetensors";
    const INDEX: &str = "model.safetensors.index.json";
    let folder = tempfile::tempdir().unwrap();
    let found = || weight_files(folder.path(), SINGLE, INDEX);
    assert!(found().unwrap().is_none());
    let index = |text: &str| fs::write(folder.path().join(INDEX), text).unwrap();
    let with = |file: &str| {
        index(&format!(
            r#"{{"weight_map": {{"w": "a.safetensors", "v": {file:?}, "u": {file:?}}}}}"#
        ));
        found()
    };
    let own = ["a.safetensors", "b.safetensors"].map(|name| folder.path().join(name));
    fs::write(&own[0], "").unwrap();
    let error = with("b.safetensors").unwrap_err().to_string();
    assert!(
        error.contains("b.safetensors is missing") && error.contains("2 tensors"),
        "{error}"
    );
    fs::write(&own[1], "").unwrap();
    let files = with("b.safetensors").unwrap().unwrap();
    assert_eq!(files.paths, own);
    assert!(files.names_other_file("w", &own[1]) && !files.names_other_file("w", &own[0]));
    assert!(!files.names_other_file("unlisted", &own[0]));
    for outside in ["../b.safetensors", "/etc/passwd", "sub/b.safetensors", ".."] {
        let error = with(outside).unwrap_err().to_string();
        let names = error.contains("weight_map") && error.contains(&format!("{outside:?}"));
        assert!(names, "{error}");
    }
    for damaged in [
        "",
        "[]",
        "{}",
        r#"{"weight_map": 1}"#,
        r#"{"weight_map": {"w": 1}}"#,
    ] {
        index(damaged);
        let error = found().unwrap_err().to_string();
        assert!(error.contains(INDEX), "{damaged}: {error}");
    }
    fs::write(folder.path().join(SINGLE), "").unwrap();
    // As in transformers, the single file comes first.
    assert_eq!(
        found().unwrap().unwrap().paths,
        [folder.path().join(SINGLE)]
    );
}

#[test]
fn every_kind_comes_back_bit_for_bit_whatever_its_strides() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("all.safetensors");
    let kinds = [
        Kind::Double,
        Kind::Float,
        Kind::Half,
        Kind::BFloat16,
        Kind::Float8e4m3fn,
        Kind::Float8e5m2,
        Kind::ComplexFloat,
        Kind::Int64,
        Kind::Int,
        Kind::Int16,
        Kind::Int8,
        Kind::Uint8,
        Kind::Bool,
    ];
    let mut tensors = Vec::new();
    for kind in kinds {
        let values = Tensor::arange(15, CPU).view([3, 5]) - 4.0;
        let values = match kind {
            Kind::Uint8 => values.abs(),
            _ => values,
        };
        let values = values.to_kind(kind);
        tensors.push(named(&format!("{kind:?}.t"), values.tr()));
        tensors.push(named(&format!("{kind:?}.scalar"), values.get(1).get(2)));
        tensors.push(named(&format!("{kind:?}.empty"), values.narrow(0, 1, 0)));
        tensors.push(named(&format!("{kind:?}"), values));
    }
    let metadata = BTreeMap::from([("b".to_owned(), "2".to_owned()), ("a".into(), "ü\n".into())]);
    write(&path, &tensors, &metadata).unwrap();
    let first = fs::read(&path).unwrap();
    tensors.reverse();
    write(&path, &tensors, &metadata).unwrap();
    assert_eq!(
        first,
        fs::read(&path).unwrap(),
        "the order given does not matter"
    );

    let file = MappedFile::open(&path).unwrap();
    assert_eq!(*file.metadata(), metadata);
    assert_eq!(file.tensors().len(), tensors.len());
    for (name, tensor) in &tensors {
        let stored = file.tensor(name).unwrap();
        assert_eq!(stored.kind(), Some(tensor.kind()));
        assert_eq!(dtype_name(tensor.kind()), Some(stored.format()));
        let size = tensor.kind().elt_size_in_bytes();
        assert_eq!(stored.data().as_ptr().align_offset(size), 0, "{name}");
        let read = stored.copy_to_tensor(None, Device::Cpu).unwrap();
        assert_eq!(read.size(), tensor.size());
        let bytes = |tensor: &Tensor| {
            let mut bytes = vec![0; tensor.numel() * size];
            tensor.contiguous().copy_data_u8(&mut bytes, tensor.numel());
            bytes
        };
        assert_eq!(bytes(&read), bytes(tensor), "{name}");
    }
    assert_eq!(names_in(folder.path()), ["all.safetensors"]);
}

#[test]
fn the_safetensors_crate_and_tch_read_what_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let tensor = Tensor::randn([40, 3], CPU).set_requires_grad(true);
    // Larger than the part that is written at once.
    let large = Tensor::randn([5_000_001], CPU);
    let tensors = [
        named("w", tensor.shallow_clone()),
        named("large", large.shallow_clone()),
    ];
    write(&path, &tensors, &NONE).unwrap();
    let read: BTreeMap<_, _> = Tensor::read_safetensors(&path)
        .unwrap()
        .into_iter()
        .collect();
    assert_eq!(read["w"], tensor.detach());
    assert_eq!(read["large"], large);
}

#[test]
fn a_tensor_is_converted_and_copied_into_an_existing_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let values = Tensor::randn([6, 4], CPU);
    write(&path, &[named("w", values.shallow_clone())], &NONE).unwrap();
    let file = MappedFile::open(&path).unwrap();
    let stored = file.tensor("w").unwrap();
    for kind in [Kind::Double, Kind::Half, Kind::BFloat16] {
        let read = stored.copy_to_tensor(Some(kind), Device::Cpu).unwrap();
        assert_eq!(read, values.to_kind(kind));
    }
    // Rows 2 to 8 of a parameter.
    let joint = Tensor::zeros([10, 4], CPU).set_requires_grad(true);
    stored.copy_into(&joint.narrow(0, 2, 6)).unwrap();
    assert_eq!(joint.detach().narrow(0, 2, 6), values);
    assert_eq!(joint.detach().narrow(0, 0, 2), Tensor::zeros([2, 4], CPU));
    assert!(joint.is_leaf(), "no graph has begun");
    let message = stored.copy_into(&joint).unwrap_err().to_string();
    assert_eq!(
        message,
        "`w` has shape [10, 4]; it must be [6, 4], the shape of the stored tensor"
    );
    let message = file.tensor("v").unwrap_err().to_string();
    assert!(
        message.ends_with("x.safetensors has no tensor `v`"),
        "{message}"
    );
}

/// Keeps every tensor that an operator is called with.
#[derive(Default)]
struct Keeper(RefCell<Vec<Tensor>>);

impl DispatchMode for Keeper {
    fn before(&self, call: &OperatorCall) -> CallbackResult<Option<std::sync::Arc<Results>>> {
        self.0.borrow_mut().extend(call.tensors()?);
        Ok(None)
    }
}

#[test]
fn no_tensor_of_the_mapped_memory_escapes_through_a_dispatch_mode() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mapped.safetensors");
    let values = Tensor::arange(12, CPU);
    write(&path, &[named("values", values.shallow_clone())], &NONE).unwrap();
    let file = MappedFile::open(&path).unwrap();
    let stored = file.tensor("values").unwrap();
    // Aligned, so that it is read without a copy.
    assert_eq!(stored.data().as_ptr().align_offset(4), 0);
    let mapped = stored.data().as_ptr_range();

    let keeper = Rc::new(Keeper::default());
    let mode = push_mode(keeper.clone());
    let copied = stored.copy_to_tensor(None, Device::Cpu).unwrap();
    let half = stored
        .copy_to_tensor(Some(Kind::Half), Device::Cpu)
        .unwrap();
    drop(mode);
    assert_eq!(copied, values);
    assert_eq!(half, values.to_kind(Kind::Half));
    for kept in keeper.0.borrow().iter() {
        assert!(!mapped.contains(&kept.data_ptr().cast_const().cast()));
    }
}

#[test]
fn files_of_other_writers_may_be_unaligned_and_have_invalid_bools() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let header = r#"{"b":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]},"x":{"dtype":"F32","shape":[1],"data_offsets":[3,7]},"u":{"dtype":"U16","shape":[1],"data_offsets":[7,9]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0, 1, 7]);
    bytes.extend(1.5f32.to_le_bytes());
    bytes.extend([1, 2]);
    fs::write(&path, bytes).unwrap();
    let file = MappedFile::open(&path).unwrap();
    let read = |name: &str| {
        let stored = file.tensor(name).unwrap();
        stored.copy_to_tensor(None, Device::Cpu)
    };
    assert_eq!(
        Vec::<bool>::try_from(read("b").unwrap()).unwrap(),
        [false, true, true]
    );
    assert_eq!(read("x").unwrap().double_value(&[0]), 1.5);
    assert_eq!(file.tensor("u").unwrap().kind(), None);
    assert_eq!(
        read("u").unwrap_err().to_string(),
        "the tensor `u` is stored as U16, a dtype that tch does not support; write it in another dtype"
    );
}

#[test]
fn truncated_files_and_false_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    let refusal = || {
        let error = MappedFile::open(&path).unwrap_err();
        assert!(matches!(error, Error::BadFile { .. }), "{error}");
        error.to_string()
    };
    let tensors = [
        named("a", Tensor::ones([4, 2], CPU)),
        named("b", Tensor::ones([3], CPU)),
    ];
    write(&path, &tensors, &NONE).unwrap();
    let whole = fs::read(&path).unwrap();
    for keep in 0..whole.len() {
        fs::write(&path, &whole[..keep]).unwrap();
        assert!(refusal().contains("not a complete safetensors file"));
    }
    fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    refusal();
    let text = String::from_utf8(whole[8..whole.len() - 44].to_vec()).unwrap();
    let with_header = |header: &str| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend([0; 44]);
        fs::write(&path, bytes).unwrap();
        refusal()
    };
    for (from, to) in [
        ("[4,2]", "[4,3]"),                       // more elements than bytes
        ("[4,2]", "[-4,2]"),                      // a negative size
        ("[4,2]", "[4294967296,4294967296,2]"),   // a product that overflows
        ("[0,32]", "[0,31]"),                     // a hole
        ("[32,44]", "[20,32]"),                   // bytes used twice
        ("[32,44]", "[32,18446744073709551615]"), // past the end
        ("\"F32\"", "\"F33\""),                   // no such format
        ("{", "["),                               // no JSON
    ] {
        assert!(text.contains(from), "{text}");
        with_header(&text.replacen(from, to, 1));
    }
    // A header that claims to be longer than the file.
    for length in [u64::MAX, 1 << 40, 1000] {
        let mut bytes = whole.clone();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        fs::write(&path, bytes).unwrap();
        refusal();
    }
    fs::write(
        &path,
        "version https://git-lfs.github.com/spec/v1\nsize 5\n",
    )
    .unwrap();
    assert!(refusal().contains("it is a Git LFS pointer and not the file itself"));
    fs::remove_file(&path).unwrap();
    let message = MappedFile::open(&path).unwrap_err().to_string();
    assert!(message.starts_with("cannot read "), "{message}");
}

#[test]
fn a_dimension_beyond_64_bits_with_a_sign_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("wide.safetensors");
    // The product is 0, so that the data is as long as it should be.
    let header = br#"{"x":{"dtype":"F32","shape":[0,9223372036854775808],"data_offsets":[0,0]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header);
    fs::write(&path, bytes).unwrap();
    let error = MappedFile::open(&path).unwrap_err().to_string();
    assert!(
        error.contains("impossible shape [0, 9223372036854775808]"),
        "{error}"
    );
}

#[test]
fn a_name_from_a_file_stays_in_the_folder() {
    let in_folder = |name| file_in("dir".as_ref(), name, "weight_map");
    for name in ["a.safetensors", "..a", "a b"] {
        assert_eq!(in_folder(name).unwrap(), Path::new("dir").join(name));
    }
    for name in [
        "",
        ".",
        "..",
        "../a",
        "a/b",
        "/etc/passwd",
        "a/",
        "./a",
        "a/.",
    ] {
        let error = in_folder(name).unwrap_err().to_string();
        let expected = "it must be the name of a file in the same folder";
        assert_eq!(error, format!("`weight_map` is {name:?}; {expected}"));
    }
}

#[test]
fn unsupported_tensors_are_refused_and_the_old_file_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    write(&path, &[named("w", Tensor::ones([2], CPU))], &NONE).unwrap();
    let before = fs::read(&path).unwrap();
    let one = || Tensor::ones([2], CPU);
    for (tensors, expected) in [
        (
            vec![named("z", one().to_kind(Kind::ComplexDouble))],
            "the tensor `z` is ComplexDouble, which safetensors files do not support; convert it to another dtype first",
        ),
        (
            vec![named("w", one()), named("w", one())],
            "a tensor cannot be named `w`: another tensor of the file has this name",
        ),
        (
            vec![named("__metadata__", one())],
            "a tensor cannot be named `__metadata__`: the format reserves this name",
        ),
        (
            vec![named("ids", one().to_sparse_sparse_dim(1))],
            "the tensor `ids` cannot be written: it is sparse; convert it with `to_dense` first",
        ),
        (
            vec![named("grad", one().grad())],
            "the tensor `grad` cannot be written: it is undefined, as the gradient of a parameter without one; leave it out",
        ),
    ] {
        assert_eq!(
            write(&path, &tensors, &NONE).unwrap_err().to_string(),
            expected
        );
    }
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(names_in(folder.path()), ["x.safetensors"]);
}

#[test]
fn a_device_that_this_process_does_not_have_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    write(&path, &[named("w", Tensor::ones([2], CPU))], &NONE).unwrap();
    let file = MappedFile::open(&path).unwrap();
    let stored = file.tensor("w").unwrap();
    let error = stored
        .copy_to_tensor(None, Device::Cuda(100))
        .unwrap_err()
        .to_string();
    let expected = "`device` is Cuda(100); it must be a device of this process";
    assert!(
        error.starts_with(expected) && !error.contains('\n'),
        "{error}"
    );
}

#[test]
fn a_write_that_fails_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [named("w", Tensor::ones([1000], CPU))];
    // The last step fails: the name belongs to a folder.
    let taken = folder.path().join("taken");
    fs::create_dir(&taken).unwrap();
    let message = write(&taken, &tensors, &NONE).unwrap_err().to_string();
    assert!(message.starts_with("cannot write "), "{message}");
    assert_eq!(names_in(folder.path()), ["taken"]);
    // The first step fails.
    let nowhere = folder.path().join("no/such/folder/x.safetensors");
    assert!(write(&nowhere, &tensors, &NONE).is_err());
    assert!(write(Path::new(".."), &tensors, &NONE).is_err());
    // A tensor in the middle fails.
    let broken = [
        named("a", Tensor::ones([1000], CPU)),
        named("b", Tensor::new()),
    ];
    let path = folder.path().join("x.safetensors");
    assert!(write(&path, &broken, &NONE).is_err());
    assert_eq!(names_in(folder.path()), ["taken"]);
}

#[test]
fn a_file_of_another_process_with_the_same_id_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    // The processes of two containers can have one id, and both begin to count at 0.
    let theirs = |number: u32| {
        let name = format!(".x.safetensors.{}-{number}.tmp", std::process::id());
        folder.path().join(name)
    };
    for number in 0..100 {
        fs::write(theirs(number), "half").unwrap();
    }
    write(&path, &[named("w", Tensor::ones([3], CPU))], &NONE).unwrap();
    for number in 0..100 {
        assert_eq!(fs::read(theirs(number)).unwrap(), b"half");
    }
}

/// A child process of [`a_full_disk_is_an_error_and_leaves_the_old_file`], whose file size is limited.
#[test]
#[ignore = "run by another test, under a limit"]
fn child_writes_more_than_it_may() {
    let Ok(path) = std::env::var("OVERDRIVE_TEST_FILE") else {
        return;
    };
    let tensors = [named("w", Tensor::zeros([1_000_000], CPU))];
    let error = write(path, &tensors, &NONE).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Common(overdrive_core::Error::Io {
                action: "write",
                ..
            })
        ),
        "{error}"
    );
    println!("refused: {error}");
}

#[test]
#[cfg(unix)]
fn a_full_disk_is_an_error_and_leaves_the_old_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    write(&path, &[named("w", Tensor::ones([2], CPU))], &NONE).unwrap();
    let before = fs::read(&path).unwrap();
    // A limit on the size of files stands in for a full disk: write(2) fails in the middle.
    let output = std::process::Command::new("sh")
        .args(["-c", r#"trap "" XFSZ; ulimit -f 100; exec "$0" "$@""#])
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "child_writes_more_than_it_may",
            "--ignored",
            "--nocapture",
        ])
        .env("OVERDRIVE_TEST_FILE", &path)
        .output()
        .unwrap();
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && out.contains("refused: cannot write "),
        "{out}"
    );
    assert_eq!(fs::read(&path).unwrap(), before);
    assert_eq!(names_in(folder.path()), ["x.safetensors"]);
}

#[test]
fn writers_of_one_file_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.safetensors");
    std::thread::scope(|scope| {
        for value in 0..4i64 {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..20 {
                    let tensor = Tensor::full([10_000], value, (Kind::Int64, Device::Cpu));
                    write(path, &[named("w", tensor)], &NONE).unwrap();
                    let read = MappedFile::open(path).unwrap();
                    let read = read.tensor("w").unwrap();
                    let read = read.copy_to_tensor(None, Device::Cpu).unwrap();
                    assert_eq!(read.min().int64_value(&[]), read.max().int64_value(&[]));
                }
            });
        }
    });
    assert_eq!(names_in(folder.path()), ["x.safetensors"]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damage_to_a_header_never_crashes_the_reader(at in 0usize..200, byte in any::<u8>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.safetensors");
        let tensors = [named("a", Tensor::ones([4, 2], CPU)), named("b", Tensor::ones([3], CPU))];
        write(&path, &tensors, &NONE).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let at = at % (bytes.len() - 44);
        bytes[at] = byte;
        fs::write(&path, bytes).unwrap();
        if let Ok(file) = MappedFile::open(&path) {
            for stored in file.tensors() {
                let elements: i64 = stored.shape().iter().product();
                if let Some(kind) = stored.kind() {
                    prop_assert_eq!(stored.data().len(), elements as usize * kind.elt_size_in_bytes());
                    let _read = stored.copy_to_tensor(None, Device::Cpu).unwrap();
                }
            }
        }
    }
}
