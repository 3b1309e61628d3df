//! Files that PyTorch wrote.

use std::path::{Path, PathBuf};

use overdrive_pickle::{Error, PickledFile};
use overdrive_safetensors::MappedFile;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

#[test]
fn tensors_equal_those_that_pytorch_saved() {
    let expected = MappedFile::open(fixture("expected.safetensors")).unwrap();
    for (name, count) in [("tensors.bin", 17), ("tensors_old.bin", 16)] {
        let file = PickledFile::open(fixture(name)).unwrap();
        let tensors = file.tensors();
        assert_eq!(tensors.len(), count, "{name}");
        for stored in &tensors {
            let expected = expected.tensor(stored.name()).unwrap();
            let (kind, shape) = (stored.kind(), stored.shape());
            assert_eq!(
                (kind, shape),
                (expected.kind(), expected.shape()),
                "{}",
                stored.name()
            );
            assert_eq!(stored.data(), expected.data(), "{name} {}", stored.name());
        }
    }
}

#[test]
fn a_shared_storage_is_mapped_once() {
    for name in ["tensors.bin", "tensors_old.bin"] {
        let file = PickledFile::open(fixture(name)).unwrap();
        let tensors = file.tensors();
        let bytes = |name: &str| {
            let tensor = tensors.iter().find(|tensor| tensor.name() == name);
            tensor.unwrap().data().as_ptr_range()
        };
        let (dense, rows) = (bytes("dense"), bytes("rows"));
        // The second and third of four rows of six floats.
        assert_eq!(rows.start, dense.start.wrapping_add(24));
        assert_eq!(rows.end, dense.end.wrapping_sub(24));
        assert!(!dense.contains(&bytes("transposed").start));
    }
}

#[test]
fn code_is_refused_by_its_name_and_not_run() {
    let cases = [
        ("reduce.bin", "posix.system"),
        ("reduce_old.bin", "posix.system"),
        ("model.bin", "torch.nn.modules.linear.Linear"),
    ];
    for (name, global) in cases {
        let error = PickledFile::open(fixture(name)).unwrap_err();
        assert!(
            matches!(&error, Error::Refused { global: found, .. } if found == global),
            "{error:?}"
        );
        assert!(
            error.to_string().contains(global) && error.to_string().contains(name),
            "{error}"
        );
    }
    assert!(!Path::new("overdrive-was-here").exists());
}

#[test]
fn values_that_are_no_weights_are_skipped_one_by_one() {
    for name in ["skipped.bin", "skipped_old.bin"] {
        let file = PickledFile::open(fixture(name)).unwrap();
        let tensors = file.tensors();
        let read: Vec<(&str, Vec<f32>)> = tensors
            .iter()
            .map(|stored| {
                let (chunks, _) = stored.data().as_chunks();
                let numbers = chunks.iter().map(|&bytes| f32::from_le_bytes(bytes));
                (stored.name(), numbers.collect())
            })
            .collect();
        let expected = [
            ("attribute", vec![5.0]),
            ("complex", vec![0.0, 1.0]),
            ("complex64", vec![1.0, 2.0]),
            ("named", vec![3.0, 4.0]),
            ("plain", vec![1.0, 2.0]),
        ];
        assert_eq!(read, expected, "{name}");
        let others = [
            "complex128",
            "conjugate",
            "quantized",
            "channels",
            "sparse",
            "csr",
            "set",
            "bytes",
        ];
        assert_eq!(file.others(), others, "{name}");
    }
}

#[test]
fn what_is_no_state_dict_is_named() {
    let error = PickledFile::open(fixture("checkpoint.bin"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("epoch, state_dict") && error.contains("model.state_dict()"),
        "{error}"
    );
    assert!(error.contains("`PickledFile::open_entry`"), "{error}");
    let file = PickledFile::open_entry(fixture("checkpoint.bin"), "state_dict").unwrap();
    let tensors = file.tensors();
    let names: Vec<&str> = tensors.iter().map(|stored| stored.name()).collect();
    assert_eq!(names, ["weight"]);
    let none = PickledFile::open_entry(fixture("checkpoint.bin"), "model").unwrap_err();
    let none = none.to_string();
    assert!(
        none.contains("no dictionary under the key `model`"),
        "{none}"
    );
    let error = PickledFile::open(fixture("expected.safetensors"))
        .unwrap_err()
        .to_string();
    assert!(error.contains("neither a zip archive"), "{error}");
    assert!(PickledFile::open(fixture("nothing.bin")).is_err());
}
