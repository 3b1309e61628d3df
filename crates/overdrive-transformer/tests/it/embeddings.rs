//! Embedding models and rerankers against sentence-transformers and the code of Qwen3-Reranker's model card, on the
//! random folders that `fixtures/gen_embeddings.py` makes.
//!
//! Tolerance: 1e-5 for embeddings and scores, which are sums of up to 64 terms in fp32 in another order.

use overdrive_safetensors::MappedFile;
use overdrive_transformer::{
    CausalLm, EmbeddingModel, EncoderInput, EncoderModel, Error, LoadOptions, Pooling, PoolingMode,
    PoolingTask, Reranker, TokenSequence,
};
use serde_json::Value;
use tch::{Device, Kind};

use crate::common::{copy_of, expected, fixture, max_difference};

const TOLERANCE: f64 = 1e-5;
const EMBEDDINGS: [&str; 4] = [
    "embedding_bert",
    "embedding_modernbert",
    "embedding_qwen3",
    "embedding_gemma",
];

/// Returns the tokens of the texts of a fixture.
fn sequences(case: &str) -> Vec<TokenSequence> {
    let text = std::fs::read_to_string(fixture(case).join("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let list = |value: &Value| serde_json::from_value::<Vec<i64>>(value.clone()).unwrap();
    let tokens = expected["tokens"].as_array().unwrap().iter();
    tokens
        .map(|row| TokenSequence::new(list(&row["ids"])).with_types(list(&row["types"])))
        .collect()
}

fn embedding_model(case: &str) -> EmbeddingModel {
    EmbeddingModel::from_pretrained(fixture(case), &LoadOptions::default()).unwrap()
}

/// The reranker of Qwen3 with the answers of its fixture.
fn qwen3_reranker() -> Reranker {
    let answers = &expected("reranker_qwen3")["answers"];
    let answers = Vec::<i64>::try_from(&answers.to_kind(Kind::Int64)).unwrap();
    let folder = fixture("reranker_qwen3");
    let model = CausalLm::from_pretrained(folder, &LoadOptions::default()).unwrap();
    Reranker::with_answers(model, [answers[0], answers[1]]).unwrap()
}

#[test]
fn embeddings_equal_sentence_transformers_alone_and_in_a_batch() {
    for case in EMBEDDINGS {
        let (model, sequences) = (embedding_model(case), sequences(case));
        let want = &expected(case)["embeddings"];
        let got = model.embed(&sequences).unwrap();
        assert_eq!(got.size(), [sequences.len() as i64, model.dimension()]);
        let together = max_difference(&got, want);
        assert!(together < TOLERANCE, "{case}: {together}");
        for (row, sequence) in (0..).zip(&sequences) {
            let got = model.embed(std::slice::from_ref(sequence)).unwrap();
            let alone = max_difference(&got.get(0), &want.get(row));
            assert!(alone < TOLERANCE, "{case}: row {row} {alone}");
        }
        println!("{case:22} {together:.1e}");
    }
}

#[test]
fn scores_equal_cross_encoders_and_the_model_card() {
    let load = |case: &str| Reranker::from_pretrained(fixture(case), &LoadOptions::default());
    for (case, model) in [
        ("reranker_bert", load("reranker_bert").unwrap()),
        // Its scores are logits.
        ("reranker_roberta", load("reranker_roberta").unwrap()),
        ("reranker_qwen3", qwen3_reranker()),
        (
            "reranker_logit_score",
            load("reranker_logit_score").unwrap(),
        ),
    ] {
        let (sequences, want) = (sequences(case), &expected(case)["scores"]);
        let together = max_difference(&model.scores(&sequences).unwrap(), want);
        assert!(together < TOLERANCE, "{case}: {together}");
        for (row, sequence) in (0..).zip(&sequences) {
            let got = model.scores(std::slice::from_ref(sequence)).unwrap();
            let alone = max_difference(&got.get(0), &want.get(row));
            assert!(alone < TOLERANCE, "{case}: row {row} {alone}");
        }
        let is_causal = matches!(case, "reranker_qwen3" | "reranker_logit_score");
        assert_eq!(model.takes_prompts(), is_causal);
        println!("{case:22} {together:.1e}");
    }
}

#[test]
fn a_bert_in_a_gguf_file_is_the_model_of_its_folder() {
    let path = fixture("gguf").join("bert.gguf");
    assert_eq!(PoolingTask::of(&path).unwrap(), Some(PoolingTask::Embed));
    let model = EmbeddingModel::from_pretrained(&path, &LoadOptions::default()).unwrap();
    let mean = Pooling::default().with_normalize(true);
    assert_eq!((model.pooling(), model.max_length()), (mean, 64));
    let case = "embedding_bert";
    let got = model.embed(&sequences(case)).unwrap();
    let difference = max_difference(&got, &expected(case)["embeddings"]);
    assert!(difference < TOLERANCE, "{difference}");

    // Files have no pooler.
    let encoder = EncoderModel::from_gguf(&path, &LoadOptions::default()).unwrap();
    let initialized = &encoder.load_report().initialized;
    assert_eq!(initialized.len(), 2, "{initialized:?}");
    let llama = fixture("gguf").join("llama.gguf");
    assert_eq!(PoolingTask::of(&llama).unwrap(), None);
    let error = EncoderModel::from_gguf(llama, &LoadOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("general.architecture"),
        "{error}"
    );
    let error = CausalLm::from_gguf(path, &LoadOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("general.architecture"),
        "{error}"
    );
}

#[test]
fn a_modern_bert_in_a_gguf_file_is_the_model_of_its_folder() {
    let path = fixture("gguf").join("modern_bert.gguf");
    assert_eq!(PoolingTask::of(&path).unwrap(), Some(PoolingTask::Embed));
    let case = "modernbert_base";
    let (want, folder) = (expected(case), fixture(case));
    let file = EncoderModel::from_gguf(&path, &LoadOptions::default()).unwrap();
    let report = file.load_report();
    assert!(report.initialized.is_empty() && report.unused.is_empty());
    let folder = EncoderModel::from_pretrained(folder, &LoadOptions::default()).unwrap();
    let mask = &want["attention_mask"];
    let hidden = |model: &EncoderModel| {
        let input = EncoderInput::new(&want["input_ids"]).with_attention_mask(mask);
        tch::no_grad(|| model.hidden_states(input)).unwrap() * mask.unsqueeze(-1)
    };
    let difference = max_difference(&hidden(&file), &(&want["hidden"] * mask.unsqueeze(-1)));
    assert!(difference < TOLERANCE, "{difference}");
    assert_eq!(hidden(&file), hidden(&folder));
    let model = EmbeddingModel::from_pretrained(&path, &LoadOptions::default()).unwrap();
    let mean = Pooling::default().with_normalize(true);
    assert_eq!((model.pooling(), model.max_length()), (mean, 20));
}

#[test]
fn embedding_gemma_in_a_gguf_file_is_the_model_of_its_folder() {
    let path = fixture("gguf").join("gemma_embedding.gguf");
    assert_eq!(PoolingTask::of(&path).unwrap(), Some(PoolingTask::Embed));
    let model = EmbeddingModel::from_pretrained(&path, &LoadOptions::default()).unwrap();
    let case = "embedding_gemma";
    let got = model.embed(&sequences(case)).unwrap();
    let difference = max_difference(&got, &expected(case)["embeddings"]);
    assert!(difference < TOLERANCE, "{difference}");
    let error = CausalLm::from_gguf(path, &LoadOptions::default()).unwrap_err();
    assert!(error.to_string().contains("EmbeddingModel"), "{error}");
}

/// Tolerance: 3 % of the largest value, because the kernels round activations to 8 bits; 1e-5 with gradients, where they do
/// not.
#[test]
fn a_quantized_encoder_in_a_gguf_file_stays_quantized() {
    let folder = fixture("gguf");
    for (name, matrices, heads) in [
        (
            "bert_q8_0",
            ["query.weight", "word_embeddings.weight"],
            &[][..],
        ),
        (
            "modern_bert_q8_0",
            ["Wqkv.weight", "tok_embeddings.weight"],
            &["cls.norm.weight", "cls.weight"],
        ),
    ] {
        let file = MappedFile::open(folder.join(format!("{name}.safetensors"))).unwrap();
        let read = |name: &str| file.tensor(name).unwrap().copy_to_tensor(None, Device::Cpu);
        let (ids, first) = (read("input_ids").unwrap(), read("first").unwrap());
        let path = folder.join(format!("{name}.gguf"));
        let model = EncoderModel::from_gguf(path, &LoadOptions::default()).unwrap();
        assert_eq!(model.load_report().unused, heads, "{name}");
        let dense = model.named_parameters();
        let is_quantized = |module: &str| !dense.iter().any(|(name, _)| name.contains(module));
        assert!(matrices.into_iter().all(is_quantized), "{name}");
        let pooling = Pooling::default().with_mode(PoolingMode::Cls);
        let difference = || {
            let got = model.embed(EncoderInput::new(&ids), &pooling).unwrap();
            max_difference(&got, &first) / first.abs().max().double_value(&[])
        };
        let (exact, rounded) = (difference(), tch::no_grad(difference));
        assert!(exact < 1e-5, "{name}: {exact}");
        assert!(exact < rounded && rounded < 0.03, "{name}: {rounded}");
    }
}

#[test]
fn options_of_a_modern_bert_that_cannot_be_computed_are_refused_by_key() {
    let bytes = std::fs::read(fixture("gguf").join("modern_bert.gguf")).unwrap();
    let text = b"\x04\0\0\0\0\0\0\0none";
    let at = bytes
        .windows(text.len())
        .position(|part| part == text)
        .unwrap();
    let mut bytes = bytes;
    bytes[at + 8..at + text.len()].copy_from_slice(b"yarn");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    let error = EncoderModel::from_gguf(path, &LoadOptions::default()).unwrap_err();
    let expected = "`modern-bert.rope.scaling.type` is ";
    assert!(error.to_string().contains(expected), "{error}");
}

/// The tokens after a position change its state only if attention is bidirectional.
#[test]
fn a_causal_model_is_not_read_as_a_bidirectional_one() {
    let folder = copy_of("embedding_gemma");
    for dir in ["1_Pooling", "2_Dense", "3_Dense", "4_Normalize"] {
        std::fs::create_dir(folder.path().join(dir)).unwrap();
        for entry in std::fs::read_dir(fixture("embedding_gemma").join(dir)).unwrap() {
            let entry = entry.unwrap();
            let to = folder.path().join(dir).join(entry.file_name());
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
    let path = folder.path().join("config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    let causal = config.replace(
        "\"use_bidirectional_attention\": true",
        "\"use_bidirectional_attention\": false",
    );
    assert_ne!(config, causal);
    std::fs::write(&path, causal).unwrap();
    let model = EmbeddingModel::from_pretrained(folder.path(), &LoadOptions::default()).unwrap();
    let got = model.embed(&sequences("embedding_gemma")).unwrap();
    let difference = max_difference(&got, &expected("embedding_gemma")["embeddings"]);
    assert!(difference > 0.01, "{difference}");

    let error = CausalLm::from_pretrained(fixture("embedding_gemma"), &LoadOptions::default());
    let message = error.unwrap_err().to_string();
    assert!(message.contains("`EmbeddingModel` loads"), "{message}");
}

#[test]
fn folders_and_inputs_that_do_not_fit_are_refused() {
    let pooling = Pooling::from_dir(fixture("embedding_qwen3")).unwrap();
    let last = Pooling::default().with_mode(PoolingMode::LastToken);
    assert_eq!(pooling, Some(last.with_normalize(true)));
    let message = Pooling::from_dir(fixture("embedding_gemma")).unwrap_err();
    assert!(message.to_string().contains("EmbeddingModel"), "{message}");

    let load = |case: &str| Reranker::from_pretrained(fixture(case), &LoadOptions::default());
    for (case, text) in [
        ("bert_classifier", "`num_labels` is 3"),
        ("reranker_qwen3", "Reranker::with_answers"),
        ("bert_base", "num_labels"),
    ] {
        let message = load(case).unwrap_err().to_string();
        assert!(message.contains(text), "{case}: {message}");
    }
    let other = copy_of("bert_base");
    std::fs::write(
        other.path().join("config.json"),
        r#"{"model_type": "nomic_bert"}"#,
    )
    .unwrap();
    let error = EmbeddingModel::from_pretrained(other.path(), &LoadOptions::default());
    let message = error.unwrap_err().to_string();
    assert!(
        message.contains("bert, roberta, xlm-roberta, modernbert, llama"),
        "{message}"
    );
    let model = embedding_model("embedding_bert");
    assert!(model.embed(&[]).is_err());
    assert!(model.embed(&[TokenSequence::new(vec![])]).is_err());
    let long = TokenSequence::new(vec![2; 65]);
    let error = model.embed(&[long]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::ContextExceeded {
                limit: 64,
                key: "max_position_embeddings",
                ..
            }
        ),
        "{error}"
    );
    let uneven = TokenSequence::new(vec![2, 3]).with_types(vec![0]);
    assert!(model.embed(&[uneven]).is_err());
}

#[test]
fn a_reranker_refuses_a_prompt_beyond_its_length_even_where_the_model_reads_longer_rows() {
    for (case, wanted) in [
        ("llama_dynamic_rope", "max_position_embeddings"),
        ("phi3_longrope", "original_max_position_embeddings"),
        ("gpt2", "n_positions"),
    ] {
        let model = CausalLm::from_pretrained(fixture(case), &LoadOptions::default());
        let reranker = Reranker::with_answers(model.unwrap(), [1, 2]).unwrap();
        let prompt = |tokens| [TokenSequence::new(vec![3; tokens])];
        let longest = reranker.max_length();
        assert_eq!(
            reranker.scores(&prompt(longest as usize)).unwrap().size(),
            [1]
        );
        let error = reranker.scores(&prompt(longest as usize + 1)).unwrap_err();
        let Error::ContextExceeded { limit, key, .. } = error else {
            panic!("{error}");
        };
        assert_eq!((limit, key), (longest, wanted), "{case}");
    }
}

#[test]
fn a_folder_may_keep_the_first_elements_of_its_embeddings() {
    let case = "embedding_qwen3";
    let folder = copy_of(case);
    for entry in std::fs::read_dir(fixture(case)).unwrap() {
        let from = entry.unwrap().path();
        if from.is_dir() {
            let to = folder.path().join(from.file_name().unwrap());
            std::fs::create_dir(&to).unwrap();
            for file in std::fs::read_dir(from).unwrap() {
                let file = file.unwrap();
                std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
            }
        }
    }
    let load = |kept: &str| {
        let settings = format!("{{\"truncate_dim\": {kept}}}");
        let path = folder.path().join("config_sentence_transformers.json");
        std::fs::write(path, settings).unwrap();
        EmbeddingModel::from_pretrained(folder.path(), &LoadOptions::default())
    };
    let all = load("null").unwrap();
    let width = all.dimension();
    let sequences = sequences(case);
    let want = all.embed(&sequences).unwrap();
    for (kept, dimension) in [("8", 8), ("100000", width)] {
        let model = load(kept).unwrap();
        assert_eq!(model.dimension(), dimension);
        let got = model.embed(&sequences).unwrap();
        // Not normalized again, as in sentence-transformers.
        assert_eq!(got, want.narrow(1, 0, dimension));
    }
    for wrong in ["0", "\"8\""] {
        let error = load(wrong).unwrap_err().to_string();
        assert!(error.contains("`truncate_dim` is "), "{error}");
    }
}

#[test]
fn dense_layers_and_orders_that_are_not_implemented_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let steps = |kinds: &[&str]| {
        let modules: Vec<Value> = kinds
            .iter()
            .map(|kind| serde_json::json!({"type": format!("st.{kind}"), "path": kind}))
            .collect();
        let text = Value::Array(modules).to_string();
        std::fs::write(folder.path().join("modules.json"), text).unwrap();
        Pooling::from_dir(folder.path()).unwrap_err().to_string()
    };
    std::fs::create_dir(folder.path().join("Pooling")).unwrap();
    let mode = r#"{"pooling_mode": "mean"}"#;
    std::fs::write(folder.path().join("Pooling/config.json"), mode).unwrap();
    for (kinds, text) in [
        (&["Pooling"][..], "\"Pooling\" at the beginning"),
        (&["Transformer", "Dense"], "\"Dense\" after \"Transformer\""),
        (&["Transformer", "Pooling", "LSTM"], "\"LSTM\" after"),
        (
            &["Transformer", "Pooling", "Normalize", "Dense"],
            "\"Dense\" after \"Normalize\"",
        ),
    ] {
        let message = steps(kinds);
        assert!(message.contains(text), "{message}");
    }
    let mode = r#"{"pooling_mode": "mean", "include_prompt": false}"#;
    std::fs::write(folder.path().join("Pooling/config.json"), mode).unwrap();
    assert!(steps(&["Transformer", "Pooling"]).contains("include_prompt"));
}
