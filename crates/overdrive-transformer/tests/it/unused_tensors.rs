//! Tensors of a checkpoint that stand beside those of the model: a head of its own, copies, buffers and other entries.

use std::path::Path;

use crate::common::{copy_of, edit_config, expected, fixture, max_difference, warnings_of};
use overdrive_transformer::{
    CausalLm, EncoderInput, ForwardInput, LoadOptions, MaskedLm, SaveOptions, Seq2SeqLm,
};
use tch::Tensor;

/// Writes the tensors of the folder again with others beside them.
fn add(dir: &Path, more: impl FnOnce(&[(String, Tensor)]) -> Vec<(String, Tensor)>) {
    let path = dir.join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&path).unwrap();
    tensors.extend(more(&tensors));
    Tensor::write_safetensors(&tensors, &path).unwrap();
}

/// Returns a table of other values than the tensor `name`, in its shape.
fn other(tensors: &[(String, Tensor)], name: &str) -> Tensor {
    let (_, table) = tensors.iter().find(|(own, _)| own == name).unwrap();
    table.flip([0]) * 1.5
}

/// Returns a folder whose configuration ties the head and whose files hold one with other values, and the same folder with
/// a configuration that does not tie it.
fn with_own_head(case: &str, table: &str, head: &str) -> [tempfile::TempDir; 2] {
    [true, false].map(|tied| {
        let dir = copy_of(case);
        add(dir.path(), |tensors| {
            vec![(head.to_owned(), other(tensors, table))]
        });
        edit_config(dir.path(), |config| {
            config.insert("tie_word_embeddings".to_owned(), tied.into());
        });
        dir
    })
}

fn loaded(dir: &Path) -> (CausalLm, Vec<String>) {
    warnings_of(|| CausalLm::from_pretrained(dir, &LoadOptions::default()).unwrap())
}

fn logits(model: &CausalLm, case: &str) -> Tensor {
    let input = &expected(case)["input_ids"];
    tch::no_grad(|| model.forward(ForwardInput::new(input))).unwrap()
}

#[test]
fn a_tied_head_with_other_values_is_untied_with_a_warning_as_in_transformers() {
    for (case, table) in [
        ("llama_tied_biases", "model.embed_tokens.weight"),
        ("gpt2", "transformer.wte.weight"),
    ] {
        let [tied, untied] = with_own_head(case, table, "lm_head.weight");
        let (model, warnings) = loaded(tied.path());
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        let expected = "`tie_word_embeddings` is true in ";
        assert!(
            warnings[0].starts_with(expected)
                && warnings[0].contains(
                    "lm_head.weight differs from the embedding, so the head was not tied"
                ),
            "{warnings:?}"
        );
        assert!(!model.config().tie_word_embeddings());
        let (wanted, none) = loaded(untied.path());
        assert_eq!(none, Vec::<String>::new());
        let got = logits(&model, case);
        assert_eq!(max_difference(&got, &logits(&wanted, case)), 0.0, "{case}");
        // The test could not fail if the two tables gave the same logits.
        assert!(max_difference(&got, &expected_logits(case)) > 0.1, "{case}");

        // What is written is a folder of two tables.
        let again = tempfile::tempdir().unwrap();
        model
            .save_pretrained(again.path(), &SaveOptions::default())
            .unwrap();
        let (again, none) = loaded(again.path());
        assert_eq!(none, Vec::<String>::new());
        assert_eq!(max_difference(&got, &logits(&again, case)), 0.0, "{case}");
    }
}

fn expected_logits(case: &str) -> Tensor {
    expected(case)["logits"].shallow_clone()
}

#[test]
fn a_head_that_is_the_embedding_in_another_dtype_stays_tied() {
    let dir = copy_of("llama_tied_biases");
    add(dir.path(), |tensors| {
        let (_, table) = tensors
            .iter()
            .find(|(name, _)| name == "model.embed_tokens.weight")
            .unwrap();
        vec![(
            "lm_head.weight".to_owned(),
            table.to_kind(tch::Kind::Double),
        )]
    });
    let (model, warnings) = loaded(dir.path());
    assert_eq!(warnings, Vec::<String>::new());
    assert!(model.config().tie_word_embeddings());
    let got = logits(&model, "llama_tied_biases");
    assert!(max_difference(&got, &expected_logits("llama_tied_biases")) < 1e-5);
}

#[test]
fn heads_of_encoders_and_encoder_decoders_are_untied_too() {
    let ids = |case: &str| expected(case);
    for case in ["bart", "t5"] {
        let table = if case == "bart" {
            "model.shared.weight"
        } else {
            "shared.weight"
        };
        let folders = with_own_head(case, table, "lm_head.weight");
        let want = ids(case);
        let logits = folders.map(|dir| {
            let model = Seq2SeqLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
            assert!(!model.config().tie_word_embeddings(), "{case}");
            let mask = Some(&want["attention_mask"]);
            model
                .forward(&want["input_ids"], mask, &want["decoder_input_ids"])
                .unwrap()
        });
        assert_eq!(max_difference(&logits[0], &logits[1]), 0.0, "{case}");
        assert!(max_difference(&logits[0], &want["logits"]) > 0.01, "{case}");
    }
    let table = "bert.embeddings.word_embeddings.weight";
    let folders = with_own_head("bert_mlm", table, "cls.predictions.decoder.weight");
    let want = ids("bert_mlm");
    let logits = folders.map(|dir| {
        let model = MaskedLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        assert!(!model.config().tie_word_embeddings);
        assert!(model.load_report().initialized.is_empty());
        let mut input = EncoderInput::new(&want["input_ids"]);
        input.attention_mask = Some(&want["attention_mask"]);
        model.forward(input).unwrap()
    });
    assert_eq!(max_difference(&logits[0], &logits[1]), 0.0);
    assert!(max_difference(&logits[0], &want["logits"]) > 0.01);
}

#[test]
fn copies_with_other_values_are_named_and_equal_ones_and_buffers_are_not() {
    let dir = copy_of("bart");
    add(dir.path(), |tensors| {
        let (_, table) = tensors
            .iter()
            .find(|(name, _)| name == "model.shared.weight")
            .unwrap();
        vec![
            ("model.encoder.embed_tokens.weight".to_owned(), table.copy()),
            ("model.decoder.embed_tokens.weight".to_owned(), table * 2.0),
            ("model.encoder.version".to_owned(), Tensor::from(3_f32)),
        ]
    });
    let load = || Seq2SeqLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
    let (_, warnings) = warnings_of(load);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let expected = "1 tensors in ";
    assert!(
        warnings[0].starts_with(expected)
            && warnings[0].ends_with(
                "are not used: model.decoder.embed_tokens.weight (it differs from model.shared.weight, which is used)"
            ),
        "{warnings:?}"
    );
}

#[test]
fn complex_buffers_are_named_and_do_not_keep_a_model_from_loading() {
    let dir = copy_of("llama_gqa");
    let path = dir.path().join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&path).unwrap();
    let angles = Tensor::arange(8, (tch::Kind::Float, tch::Device::Cpu));
    let buffer = Tensor::polar(&angles.ones_like(), &angles);
    tensors.push(("model.freqs_cis".to_owned(), buffer));
    overdrive_safetensors::write(&path, &tensors, &Default::default()).unwrap();
    let (model, warnings) = loaded(dir.path());
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0].ends_with("are not used: model.freqs_cis (it is complex, and no parameter is)"),
        "{warnings:?}"
    );
    let difference = max_difference(&logits(&model, "llama_gqa"), &expected_logits("llama_gqa"));
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn a_tensor_in_two_shards_with_other_values_is_named() {
    let dir = copy_of("llama_sharded");
    let index = std::fs::read_to_string(dir.path().join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_str(&index).unwrap();
    let shards = index["weight_map"].as_object().unwrap();
    let norm = "model.norm.weight";
    let other = shards
        .values()
        .find(|shard| **shard != shards[norm])
        .unwrap();
    let path = dir.path().join(other.as_str().unwrap());
    let mut tensors = Tensor::read_safetensors(&path).unwrap();
    let own = dir.path().join(shards[norm].as_str().unwrap());
    let own = Tensor::read_safetensors(own).unwrap();
    let (_, norm) = own.into_iter().find(|(name, _)| name == norm).unwrap();
    tensors.push(("model.norm.weight".to_owned(), norm + 1.0));
    Tensor::write_safetensors(&tensors, &path).unwrap();
    let (model, warnings) = loaded(dir.path());
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(
        warnings[0]
            .contains("model.norm.weight (it differs from that of the file that the index names"),
        "{warnings:?}"
    );
    let difference = max_difference(
        &logits(&model, "llama_sharded"),
        &expected_logits("llama_sharded"),
    );
    assert!(difference < 1e-5, "{difference}");
}

#[test]
fn configurations_with_a_byte_order_mark_are_read() {
    let dir = copy_of("llama_gqa");
    for name in ["config.json", "generation_config.json"] {
        let path = dir.path().join(name);
        let text = std::fs::read_to_string(fixture("llama_gqa").join(name)).unwrap();
        std::fs::write(path, format!("\u{feff}{}", text.replace('\n', "\r\n"))).unwrap();
    }
    let (model, _) = loaded(dir.path());
    assert_eq!(model.config(), loaded(&fixture("llama_gqa")).0.config());
    std::fs::write(
        dir.path().join("config.json"),
        b"{\n\"model_type\": \"ll\xe4ma\"}",
    )
    .unwrap();
    let error = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("config.json is not valid UTF-8 text: line 2 has the byte 0xe4"),
        "{error}"
    );
}
