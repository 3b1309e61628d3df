//! `adapter_config.json`.

use crate::common::fixture;
use overdrive_lora::{
    BiasMode, InitLoraWeights, LayerIndices, LoftqConfig, LoraConfig, Names, TargetModules,
    read_config,
};

#[test]
fn the_defaults_are_those_of_peft() {
    let config = LoraConfig::from_json("{}").unwrap();
    assert_eq!(config, LoraConfig::default());
    assert_eq!(
        (config.r, config.lora_alpha, config.lora_dropout),
        (8, 8.0, 0.0)
    );
    assert_eq!(config.init_lora_weights, InitLoraWeights::Default);
}

#[test]
fn files_of_peft_are_read_with_all_their_keys() {
    for family in ["llama", "gpt2"] {
        for entry in std::fs::read_dir(fixture("peft").join(family)).unwrap() {
            let dir = entry.unwrap().path();
            if dir.join("adapter_config.json").exists() {
                let config = read_config(&dir).unwrap();
                assert!(config.inference_mode);
                let written = LoraConfig::from_json(&config.to_json()).unwrap();
                assert_eq!(written, config, "{}", dir.display());
            }
        }
    }
    let config = read_config(fixture("peft/llama/patterns")).unwrap();
    // PEFT writes the keys in order.
    assert_eq!(config.rank_pattern[1], ("q_proj".to_owned(), 2));
    assert_eq!(config.alpha_pattern, [("v_proj".to_owned(), 3.0)]);
    assert!(matches!(
        config.target_modules,
        Some(TargetModules::Pattern(_))
    ));
}

#[test]
fn every_key_survives_writing_and_reading() {
    let config = LoraConfig {
        r: 16,
        lora_alpha: 12.5,
        lora_dropout: 0.1,
        target_modules: Some(TargetModules::names(["q_proj"])),
        exclude_modules: Some(Names::One(".*0.*".to_owned())),
        bias: BiasMode::LoraOnly,
        use_rslora: true,
        modules_to_save: Some(vec!["lm_head".to_owned()]),
        init_lora_weights: InitLoraWeights::PissaFast(4),
        layers_to_transform: Some(LayerIndices::Many(vec![0, 2])),
        layers_pattern: Some(Names::Many(vec!["layers".to_owned()])),
        rank_pattern: vec![("b".to_owned(), 4), ("a".to_owned(), 2)],
        alpha_pattern: vec![("k_proj".to_owned(), 1.5)],
        fan_in_fan_out: true,
        base_model_name_or_path: Some("base".to_owned()),
        revision: Some("main".to_owned()),
        task_type: Some("CAUSAL_LM".to_owned()),
        ..LoraConfig::default()
    };
    assert_eq!(LoraConfig::from_json(&config.to_json()).unwrap(), config);
    assert!(config.to_json().contains("\"lora_alpha\": 12.5"));
    assert!(
        LoraConfig::default()
            .to_json()
            .contains("\"lora_alpha\": 8,")
    );
}

#[test]
fn unsupported_keys_are_refused_by_name() {
    let refused = |text: &str| LoraConfig::from_json(text).unwrap_err().to_string();
    for (text, says) in [
        (
            r#"{"layer_replication": [[0, 4], [2, 5]]}"#,
            "`layer_replication` is [[0,4],[2,5]]",
        ),
        (
            r#"{"trainable_token_indices": "all"}"#,
            "`trainable_token_indices` is",
        ),
        (r#"{"megatron_config": {"a": 1}}"#, "`megatron_config` is"),
        (r#"{"use_qalora": true}"#, "`use_qalora` is true"),
        (r#"{"some_later_key": 3}"#, "`some_later_key` is 3"),
        (
            r#"{"init_lora_weights": "later"}"#,
            "`init_lora_weights` is \"later\"",
        ),
        (
            r#"{"init_lora_weights": "loftq"}"#,
            "`loftq_config` is missing; it must be an object with `loftq_bits`",
        ),
        (
            r#"{"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 2}}"#,
            "`loftq_bits` is 2; it must be 4 or 8",
        ),
        (
            r#"{"init_lora_weights": "loftq", "loftq_config": {"loftq_iter": 0}}"#,
            "`loftq_iter` is 0; it must be positive",
        ),
        (r#"{"peft_type": "IA3"}"#, "`peft_type` is \"IA3\""),
        (r#"{"r": 0}"#, "`r` is 0; it must be positive"),
        (r#"{"r": "8"}"#, "`r` is \"8\""),
        (r#"{"lora_dropout": 1.5}"#, "`lora_dropout` is 1.5"),
        (r#"{"bias": "some"}"#, "`bias` is \"some\""),
        (r#"{"target_modules": "(q"}"#, "`target_modules` is `"),
        (
            r#"{"target_modules": ".*", "layers_to_transform": 1}"#,
            "`layers_to_transform` is set",
        ),
        (r#"{"layers_pattern": "h"}"#, "`layers_pattern` is set"),
        (
            r#"{"use_dora": true, "lora_bias": true}"#,
            "`lora_bias` is true; it must be false with `use_dora`",
        ),
        (
            r#"{"init_lora_weights": "orthogonal", "r": 3}"#,
            "`r` is 3; it must be even",
        ),
        ("[1]", "`adapter_config.json` is not an object"),
        ("{", "adapter_config.json is not valid JSON"),
    ] {
        assert!(refused(text).contains(says), "{text}: {}", refused(text));
    }
    // At their defaults these keys are accepted.
    let idle = r#"{"layer_replication": null, "megatron_core": "megatron.core", "qalora_group_size": 16,
                   "loftq_config": {}, "use_qalora": false, "trainable_token_indices": null}"#;
    assert_eq!(LoraConfig::from_json(idle).unwrap(), LoraConfig::default());
}

#[test]
fn the_options_of_initializations_are_read_with_their_method() {
    let loftq =
        r#"{"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 8, "loftq_iter": 3}}"#;
    let config = LoraConfig::from_json(loftq).unwrap();
    let expected = LoftqConfig {
        loftq_bits: 8,
        loftq_iter: 3,
    };
    assert_eq!(config.init_lora_weights, InitLoraWeights::Loftq(expected));
    assert_eq!(LoraConfig::from_json(&config.to_json()).unwrap(), config);
    for (text, init) in [
        (
            r#"{"init_lora_weights": "eva", "eva_config": {"rho": 2.0}, "corda_config": null}"#,
            InitLoraWeights::Eva,
        ),
        (
            r#"{"init_lora_weights": "corda", "corda_config": {"corda_method": "kpm"}}"#,
            InitLoraWeights::Corda,
        ),
        (
            r#"{"init_lora_weights": "lora_ga", "lora_ga_config": {"direction": "ArB2r"}}"#,
            InitLoraWeights::LoraGa,
        ),
        (r#"{"init_lora_weights": "mica"}"#, InitLoraWeights::Mica),
        // PEFT ignores the options of another method.
        (
            r#"{"init_lora_weights": true, "loftq_config": {"loftq_bits": 2}}"#,
            InitLoraWeights::Default,
        ),
    ] {
        let config = LoraConfig::from_json(text).unwrap();
        assert_eq!(config.init_lora_weights, init, "{text}");
        assert_eq!(LoraConfig::from_json(&config.to_json()).unwrap(), config);
    }
}
