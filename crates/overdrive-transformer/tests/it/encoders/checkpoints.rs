use overdrive_transformer::{
    CheckpointProblems, Encoder, EncoderConfig, EncoderFamily, EncoderHead, EncoderInput,
    EncoderModel, Error, InitOptions, LoadOptions, MaskedLm, Pooling, PoolingMode,
    SequenceClassifier,
};
use std::fs;
use std::path::Path;
use std::process::Command;
use tch::{Kind, Tensor};

use super::{BASES, CLASSIFIERS, MASKED, base, batch, classifier, masked};
use crate::common::{copy_of, edit_config, expected, fixture, max_difference};
use crate::on_python::python;

/// The tensors of a folder's weight file, by name.
fn tensors(dir: &Path) -> Vec<(String, Tensor)> {
    let mut all = Tensor::read_safetensors(dir.join("model.safetensors")).unwrap();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Rewrites the weight file with other names; `None` drops a tensor.
fn rename(dir: &Path, name: impl Fn(&str) -> Option<String>) {
    let renamed = tensors(dir).into_iter();
    let renamed: Vec<_> = renamed
        .filter_map(|(old, tensor)| Some((name(&old)?, tensor)))
        .collect();
    Tensor::write_safetensors(&renamed, dir.join("model.safetensors")).unwrap();
}

fn save<H: EncoderHead>(model: &Encoder<H>, dir: &Path) {
    model.save_pretrained(dir, &Default::default()).unwrap();
}

#[test]
fn a_saved_model_has_the_tensors_that_it_was_read_from() {
    let check = |case: &str, save: &dyn Fn(&Path)| {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path());
        let mut want = tensors(&fixture(case));
        want.retain(|(name, _)| case != "bert_mlm_untied" || name != "cls.predictions.bias");
        let got = tensors(dir.path());
        assert_eq!(got.len(), want.len(), "{case}");
        for (got, want) in got.iter().zip(&want) {
            assert_eq!(got, want, "{case}");
        }
        let configs = [dir.path(), &fixture(case)].map(|dir| EncoderConfig::from_dir(dir).unwrap());
        let [got, mut want] = configs;
        // A key of transformers 4 that is written beside `layer_types`.
        assert_eq!(got.extra.get("transformers_version"), None);
        want.extra.remove("transformers_version");
        assert_eq!(got, want, "{case}");
        assert!(!dir.path().join("generation_config.json").exists());
    };
    for case in MASKED {
        check(case, &|dir| save(&masked(case), dir));
    }
    for case in CLASSIFIERS {
        check(case, &|dir| save(&classifier(case), dir));
    }
    for case in BASES {
        check(case, &|dir| save(&base(case), dir));
    }
}

#[test]
fn old_names_buffers_and_bare_or_prefixed_checkpoints_load() {
    let want = expected("bert_mlm");
    let same = |dir: &Path| {
        let model = MaskedLm::from_pretrained(dir, &LoadOptions::default()).unwrap();
        let got = model.hidden_states(batch(&want)).unwrap();
        let exact = masked("bert_mlm").hidden_states(batch(&want)).unwrap();
        assert_eq!(max_difference(&got, &exact), 0.0);
        model
    };
    let old = copy_of("bert_mlm");
    rename(old.path(), |name| {
        let name = name.replace("LayerNorm.weight", "LayerNorm.gamma");
        Some(name.replace("LayerNorm.bias", "LayerNorm.beta"))
    });
    let mut all = tensors(old.path());
    // As in the first BERTs of the Hub: the tied weight twice, the head of another task, a buffer.
    let table = all
        .iter()
        .find(|(name, _)| name.ends_with("word_embeddings.weight"))
        .unwrap();
    all.push(("cls.predictions.decoder.weight".to_owned(), table.1.copy()));
    let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Float, tch::Device::Cpu));
    all.push(("cls.seq_relationship.weight".to_owned(), zeros(&[2, 32])));
    all.push(("bert.pooler.dense.bias".to_owned(), zeros(&[32])));
    let buffer = Tensor::arange(20, (Kind::Int64, tch::Device::Cpu));
    all.push(("bert.embeddings.position_ids".to_owned(), buffer));
    Tensor::write_safetensors(&all, old.path().join("model.safetensors")).unwrap();
    let report = same(old.path()).load_report().clone();
    assert!(report.initialized.is_empty(), "{report:?}");
    assert_eq!(
        report.unused,
        ["bert.pooler.dense.bias", "cls.seq_relationship.weight"]
    );

    // A bare checkpoint as a model with a head, whose parameters are initialized.
    let bare = copy_of("bert_mlm");
    rename(bare.path(), |name| {
        name.strip_prefix("bert.").map(str::to_owned)
    });
    let report = same(bare.path()).load_report().clone();
    let head = ["bias", "transform.dense.weight", "transform.dense.bias"];
    let head = head.map(|name| format!("cls.predictions.{name}"));
    assert_eq!(report.initialized[..3], head);
    assert_eq!(report.initialized.len(), 5);

    // A model with a head as a bare one.
    for case in ["bert_mlm", "roberta_mlm", "modernbert_mlm"] {
        let want = expected(case);
        let model = base(case);
        let got = model.hidden_states(batch(&want)).unwrap();
        let exact = masked(case).hidden_states(batch(&want)).unwrap();
        assert_eq!(max_difference(&got, &exact), 0.0);
        let pooler = if case == "modernbert_mlm" { 0 } else { 2 };
        assert_eq!(model.load_report().initialized.len(), pooler, "{case}");
        assert!(model.load_report().unused.len() >= 2);
    }
}

#[test]
fn a_classifier_takes_new_classes_and_a_seed_over_a_pretrained_backbone() {
    for case in ["bert_mlm", "roberta_mlm", "modernbert_mlm"] {
        let config = EncoderConfig::from_dir(fixture(case)).unwrap();
        let config = config.with_labels(&["no", "maybe", "yes", "never"]);
        let made = |seed| {
            let options = LoadOptions::default();
            SequenceClassifier::from_pretrained_with(fixture(case), &config, &options, seed)
                .unwrap()
        };
        let want = expected(case);
        let logits = |seed| made(seed).forward(batch(&want)).unwrap();
        assert_eq!(logits(1).size(), [3, 4]);
        assert_eq!(logits(1), logits(1));
        assert_ne!(logits(1), logits(2));
        let dir = tempfile::tempdir().unwrap();
        save(&made(1), dir.path());
        let again = SequenceClassifier::from_pretrained(dir.path(), &Default::default()).unwrap();
        assert_eq!(again.config().id2label, ["no", "maybe", "yes", "never"]);
        assert_eq!(again.forward(batch(&want)).unwrap(), logits(1));
        assert_eq!(again.load_report(), &Default::default());
    }
    // A head of other classes is not silently replaced.
    let config = EncoderConfig::from_dir(fixture("bert_classifier"))
        .unwrap()
        .with_labels(&["a", "b"]);
    let folder = fixture("bert_classifier");
    let error = SequenceClassifier::from_pretrained_with(folder, &config, &Default::default(), 0);
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("classifier.weight (found [3, 32], expected [2, 32])"),
        "{error}"
    );
}

#[test]
fn a_backbone_with_missing_or_unknown_tensors_is_refused() {
    let dir = copy_of("modernbert_base");
    rename(dir.path(), |name| match name {
        "layers.1.attn_norm.weight" => None,
        "layers.1.mlp.Wo.weight" => Some("layers.1.mlp.Wo.weights".to_owned()),
        other => Some(other.to_owned()),
    });
    let error = EncoderModel::from_pretrained(dir.path(), &LoadOptions::default()).unwrap_err();
    let Error::Checkpoint { problems, .. } = &error else {
        panic!("{error}")
    };
    let CheckpointProblems {
        missing,
        unexpected,
        ..
    } = &**problems;
    assert_eq!(
        missing,
        &["layers.1.attn_norm.weight", "layers.1.mlp.Wo.weight"]
    );
    assert_eq!(unexpected, &["layers.1.mlp.Wo.weights"]);
}

#[test]
fn low_precision_checkpoints_stay_near_fp32() {
    // Hidden states of about 3; bf16 keeps 8 bits over some ten roundings in a row.
    for case in BASES {
        let (want, dir) = (expected(case), tempfile::tempdir().unwrap());
        let options = LoadOptions {
            kind: Some(Kind::BFloat16),
            ..LoadOptions::default()
        };
        save(
            &EncoderModel::from_pretrained(fixture(case), &options).unwrap(),
            dir.path(),
        );
        let model = EncoderModel::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let got = model.hidden_states(batch(&want)).unwrap();
        assert_eq!(got.kind(), Kind::BFloat16);
        let exact = base(case).hidden_states(batch(&want)).unwrap();
        let difference = max_difference(&got, &exact);
        assert!(difference > 0.0 && difference < 0.2, "{case}: {difference}");
    }
}

#[test]
fn the_pooling_of_sentence_transformers_is_read() {
    let dir = copy_of("bert_base");
    let path = dir.path();
    assert_eq!(Pooling::from_dir(path).unwrap(), None);
    let modules = |normalize: bool, other: &str| {
        let module = |index: usize, path: &str, name: &str| {
            format!(
                r#"{{"idx": {index}, "name": "{index}", "path": "{path}", "type": "sentence_transformers.models.{name}"}}"#
            )
        };
        let mut all = vec![
            module(0, "", "Transformer"),
            module(1, "1_Pooling", "Pooling"),
        ];
        if normalize {
            all.push(module(2, "2_Normalize", "Normalize"));
        }
        if !other.is_empty() {
            all.push(module(3, "3_Dense", other));
        }
        fs::write(path.join("modules.json"), format!("[{}]", all.join(", "))).unwrap();
    };
    fs::create_dir(path.join("1_Pooling")).unwrap();
    let pooling = |keys: &str| {
        let text = format!(r#"{{"word_embedding_dimension": 32, {keys}}}"#);
        fs::write(path.join("1_Pooling/config.json"), text).unwrap();
        Pooling::from_dir(path)
    };
    modules(true, "");
    let mean = pooling(r#""pooling_mode_cls_token": false, "pooling_mode_mean_tokens": true"#);
    let mean = mean.unwrap().unwrap();
    assert_eq!(mean, Pooling::default().with_normalize(true));
    let want = expected("bert_base");
    let got = base("bert_base").embed(batch(&want), &mean).unwrap();
    assert!(max_difference(&got, &want["mean"]) < 1e-5);
    modules(false, "");
    let cls = pooling(r#""pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false"#);
    assert_eq!(
        cls.unwrap().unwrap(),
        Pooling::default().with_mode(PoolingMode::Cls)
    );
    let max = pooling(r#""pooling_mode_max_tokens": true"#)
        .unwrap_err()
        .to_string();
    assert!(
        max.contains("`pooling_mode` is max_tokens, which is not supported"),
        "{max}"
    );
    modules(false, "Dense");
    let dense = pooling(r#""pooling_mode_mean_tokens": true"#)
        .unwrap_err()
        .to_string();
    assert!(
        dense.contains("Dense") && dense.contains("Transformer, Pooling, Normalize"),
        "{dense}"
    );
    let outside = r#"[{"path": "../1_Pooling", "type": "sentence_transformers.models.Pooling"}]"#;
    fs::write(path.join("modules.json"), outside).unwrap();
    assert!(
        Pooling::from_dir(path)
            .unwrap_err()
            .to_string()
            .contains("../1_Pooling")
    );
}

#[test]
fn a_configuration_that_is_not_supported_names_key_value_and_what_is() {
    let cases = [
        (
            r#"{"model_type": "deberta-v2"}"#,
            "`model_type` is \"deberta-v2\", which is not supported; supported: bert, roberta, xlm-roberta, modernbert",
        ),
        (
            r#"{"model_type": "bert", "is_decoder": true}"#,
            "`is_decoder` is true, which is not supported",
        ),
        (
            r#"{"model_type": "bert", "position_embedding_type": "relative_key"}"#,
            "`position_embedding_type` is \"relative_key\", which is not supported; supported: absolute",
        ),
        (
            r#"{"model_type": "bert", "hidden_act": "mish"}"#,
            "`hidden_act` is \"mish\", which is not supported",
        ),
        (
            r#"{"model_type": "bert", "hidden_size": 100}"#,
            "`hidden_size` is 100; it must be a multiple of num_attention_heads (12)",
        ),
        (
            r#"{"model_type": "roberta", "pad_token_id": null}"#,
            "`pad_token_id` is null",
        ),
        (
            r#"{"model_type": "roberta", "max_position_embeddings": 2}"#,
            "`max_position_embeddings` is 2",
        ),
        (
            r#"{"model_type": "bert", "pad_token_id": 30522}"#,
            "`pad_token_id` is 30522; it must be in 0..30522",
        ),
        (
            r#"{"model_type": "bert", "vocab_size": 9223372036854775807}"#,
            "`vocab_size`",
        ),
        (
            r#"{"model_type": "bert", "num_hidden_layers": 100000000}"#,
            "`num_hidden_layers`",
        ),
        (
            r#"{"model_type": "bert", "num_labels": 2000000000}"#,
            "`num_labels` is 2000000000; it must be at most 1048576",
        ),
        (
            r#"{"model_type": "bert", "id2label": {"0": "a", "2": "b"}}"#,
            "`id2label`",
        ),
        (
            r#"{"model_type": "bert", "id2label": {}}"#,
            "`num_labels` is 0",
        ),
        (
            r#"{"model_type": "bert", "problem_type": "ranking"}"#,
            "`problem_type` is \"ranking\", which is not supported; supported: regression",
        ),
        (
            r#"{"model_type": "modernbert", "layer_types": ["full_attention"]}"#,
            "`layer_types` is 1; it must be one type for each of 22 layers",
        ),
        (
            r#"{"model_type": "modernbert", "classifier_pooling": "max"}"#,
            "`classifier_pooling` is \"max\", which is not supported; supported: cls, mean",
        ),
        (
            r#"{"model_type": "modernbert", "initializer_cutoff_factor": 1e-300}"#,
            "`initializer_cutoff_factor`",
        ),
        (
            r#"{"model_type": "modernbert", "rope_parameters": {"full_attention": {"rope_type": "yarn"}}}"#,
            "`rope_parameters.full_attention.rope_type` is \"yarn\", which is not supported; supported: default",
        ),
        (
            r#"{"model_type": "modernbert", "hidden_size": 36}"#,
            "even heads",
        ),
        (
            r#"{"model_type": "bert", "hidden_size": 2147483640, "intermediate_size": 2147483647, "vocab_size": 2147483647, "num_hidden_layers": 65536}"#,
            "parameters",
        ),
    ];
    for (text, want) in cases {
        let error = EncoderConfig::from_json(text).unwrap_err().to_string();
        assert!(error.contains(want), "{text}: {error}");
    }
}

#[test]
fn the_keys_of_transformers_4_mean_the_same() {
    let dir = copy_of("modernbert_mlm");
    edit_config(dir.path(), |config| {
        config.remove("layer_types");
        config.remove("rope_parameters");
        config.insert("global_attn_every_n_layers".to_owned(), 3.into());
        config.insert("global_rope_theta".to_owned(), 160_000.0.into());
        config.insert("local_rope_theta".to_owned(), 10_000.0.into());
        config.insert("local_attention".to_owned(), 6.into());
    });
    let new = EncoderConfig::from_dir(fixture("modernbert_mlm")).unwrap();
    let old = EncoderConfig::from_dir(dir.path()).unwrap();
    assert_eq!(old.layer_types, new.layer_types);
    let (want, model) = (
        expected("modernbert_mlm"),
        MaskedLm::from_pretrained(dir.path(), &Default::default()),
    );
    let got = model.unwrap().hidden_states(batch(&want)).unwrap();
    assert_eq!(
        max_difference(
            &got,
            &masked("modernbert_mlm")
                .hidden_states(batch(&want))
                .unwrap()
        ),
        0.0
    );
}

#[test]
#[ignore = "needs Python with torch, transformers and safetensors"]
fn transformers_loads_what_is_written_and_computes_the_same_on_python() {
    let python = python(&["transformers", "torch", "safetensors"]);
    let root = tempfile::tempdir().unwrap();
    let ids = Tensor::from_slice(&[1i64, 5, 9, 30, 2, 7, 11, 12, 3, 2]).view([2, 5]);
    let input = EncoderInput::new(&ids);
    let write = |name: &str, output: Tensor| {
        let pairs = [("ids", &ids), ("ours", &output.detach())];
        Tensor::write_safetensors(&pairs, root.path().join(name).join("ours.st")).unwrap();
    };
    let mut folders = 0;
    for case in MASKED.into_iter().chain(["fresh_mlm"]) {
        let model = match case {
            "fresh_mlm" => {
                MaskedLm::new(&fresh(EncoderFamily::ModernBert), &InitOptions::default()).unwrap()
            }
            case => masked(case),
        };
        save(&model, &root.path().join(case));
        write(case, model.forward(input).unwrap());
        folders += 1;
    }
    for case in CLASSIFIERS
        .into_iter()
        .chain(["fresh_roberta", "fresh_bert"])
    {
        let model = match case {
            "fresh_roberta" => {
                SequenceClassifier::new(&fresh(EncoderFamily::Roberta), &InitOptions::default())
                    .unwrap()
            }
            "fresh_bert" => {
                SequenceClassifier::new(&fresh(EncoderFamily::Bert), &InitOptions::default())
                    .unwrap()
            }
            case => classifier(case),
        };
        save(&model, &root.path().join(case));
        write(case, model.forward(input).unwrap());
        folders += 1;
    }
    for case in BASES {
        let model = base(case);
        save(&model, &root.path().join(case));
        write(case, model.hidden_states(input).unwrap());
        folders += 1;
    }
    let script = r#"
import pathlib, sys, torch, transformers
from safetensors.torch import load_file
for folder in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    # A bias that no computation of an untied model reads.
    bad = {k: v for k, v in info.items() if v and set(v) != {"cls.predictions.bias"}}
    assert not bad, (folder.name, bad)
    ours = load_file(folder / "ours.st")
    with torch.no_grad():
        output = model.eval()(ours["ids"])
    theirs = output.logits if "For" in model_class.__name__ else output.last_hidden_state
    difference = (theirs - ours["ours"]).abs().max().item()
    assert difference < 1e-5, (folder.name, difference)
    print(folder.name, model_class.__name__, list(config.id2label.values()), f"{difference:.1e}")
"#;
    let output = Command::new(&python)
        .arg("-c")
        .arg(script)
        .arg(root.path())
        .output()
        .unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{out}\n{err}");
    println!("{out}");
    assert_eq!(out.lines().count(), folders, "{out}");
}

/// A small configuration that was never a checkpoint.
fn fresh(family: EncoderFamily) -> EncoderConfig {
    let mut config = EncoderConfig::new(family);
    (
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
    ) = (40, 24, 20);
    (config.num_hidden_layers, config.num_attention_heads) = (4, 2);
    (config.max_position_embeddings, config.pad_token_id) = (16, Some(0));
    config.classifier_pooling = PoolingMode::Mean;
    config.with_labels(&["ham", "spam", "eggs"])
}

#[test]
fn a_configuration_is_its_json_and_no_classifier_pools_the_last_token() {
    let mut config = fresh(EncoderFamily::ModernBert);
    let json = serde_json::to_string(&config).unwrap();
    let again: EncoderConfig = serde_json::from_str(&json).unwrap();
    assert_eq!(serde_json::to_string(&again).unwrap(), json);
    assert_eq!(again.classifier_pooling, PoolingMode::Mean);
    config.classifier_pooling = PoolingMode::LastToken;
    let message = config.validate().unwrap_err().to_string();
    assert!(message.starts_with("`classifier_pooling` is"), "{message}");
}
