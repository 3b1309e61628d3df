//! Folders with `pytorch_model.bin`, which load as those with safetensors do.

use std::fs;
use std::path::Path;

use crate::common::{copy_of, fixture, load};
use overdrive_quantization::Scheme;
use overdrive_transformer::{CausalLm, LoadOptions, QuantizeOptions, SaveOptions};

/// Returns a copy of a checkpoint whose weights are those of the folder `pickled`.
fn with_pickles(case: &str, pickled: &str) -> tempfile::TempDir {
    let dir = copy_of(case);
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    for entry in fs::read_dir(fixture(pickled)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

fn refusal(dir: &Path) -> String {
    let model = CausalLm::from_pretrained(dir, &LoadOptions::default());
    model.unwrap_err().to_string()
}

#[test]
fn pickled_weights_equal_those_of_safetensors_bit_for_bit() {
    for (case, pickled) in [("llama_gqa", "pickled"), ("qwen3", "pickled_sharded")] {
        let dir = with_pickles(case, pickled);
        let model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let (expected, found) = (load(case).named_parameters(), model.named_parameters());
        assert_eq!(expected.len(), found.len(), "{case}");
        for ((name, expected), (other, found)) in expected.iter().zip(&found) {
            assert_eq!(name, other, "{case}");
            assert_eq!(expected, found, "{case} {name}");
        }
        // Saved again, they are safetensors.
        let saved = tempfile::tempdir().unwrap();
        model
            .save_pretrained(saved.path(), &SaveOptions::default())
            .unwrap();
        assert!(saved.path().join("model.safetensors").exists());
    }
}

#[test]
fn pickled_weights_are_quantized_while_they_are_loaded() {
    let dir = with_pickles("qwen3", "pickled_sharded");
    let options = LoadOptions {
        quantization: Some(QuantizeOptions::new("int8".parse::<Scheme>().unwrap())),
        ..LoadOptions::default()
    };
    let pickled = CausalLm::from_pretrained(dir.path(), &options).unwrap();
    let expected = CausalLm::from_pretrained(fixture("qwen3"), &options).unwrap();
    assert!(pickled.is_quantized());
    let ids = tch::Tensor::from_slice(&[1_i64, 5, 9, 30]).view([1, 4]);
    let logits = |model: &CausalLm| {
        let input = overdrive_transformer::ForwardInput::new(&ids);
        tch::no_grad(|| model.forward(input)).unwrap()
    };
    assert_eq!(logits(&pickled), logits(&expected));
}

#[test]
fn safetensors_beside_pickles_are_preferred() {
    let dir = copy_of("llama_gqa");
    fs::write(dir.path().join("pytorch_model.bin"), "not read").unwrap();
    assert!(CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).is_ok());
}

#[test]
fn pickles_that_ask_for_code_or_are_missing_are_refused() {
    let dir = with_pickles("llama_gqa", "pickled");
    let reduce =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../overdrive-pickle/tests/fixtures/reduce.bin");
    fs::copy(reduce, dir.path().join("pytorch_model.bin")).unwrap();
    let error = refusal(dir.path());
    assert!(error.contains("posix.system"), "{error}");

    let dir = with_pickles("qwen3", "pickled_sharded");
    fs::remove_file(dir.path().join("pytorch_model-00002-of-00002.bin")).unwrap();
    let error = refusal(dir.path());
    assert!(
        error.contains("pytorch_model-00002-of-00002.bin"),
        "{error}"
    );
    assert!(error.contains("pytorch_model.bin.index.json"), "{error}");

    let index = dir.path().join("pytorch_model.bin.index.json");
    fs::write(index, r#"{"weight_map": {"a": "../evil.bin"}}"#).unwrap();
    let error = refusal(dir.path());
    assert!(
        error.contains("weight_map of pytorch_model.bin.index.json"),
        "{error}"
    );

    for name in [
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model.bin.index.json",
    ] {
        fs::remove_file(dir.path().join(name)).unwrap();
    }
    let error = refusal(dir.path());
    assert!(
        error.contains("model.safetensors") && error.contains("pytorch_model.bin"),
        "{error}"
    );
}
