//! The configurations of published models: each is read as transformers reads it, or refused for a reason that it names.
//! `fixtures/gen_published.py` states what is compared.

use std::collections::BTreeMap;

use overdrive_quantization::QuantizationConfig;
use overdrive_transformer::{EncoderConfig, LlamaConfig, ModelConfig, RopeScaling};
use serde_json::{Value, json};

use crate::common::fixture;

/// The models whose configuration is refused, and a part of the message.
const REFUSED: [(&str, &str); 5] = [
    ("ibm-granite/granite-4.0-h-micro", "without Mamba layers"),
    ("moonshotai/Kimi-K2-Instruct", "`model_type` is \"kimi_k2\""),
    (
        "jinaai/jina-embeddings-v2-small-en",
        "`position_embedding_type` is \"alibi\"",
    ),
    (
        "jinaai/jina-embeddings-v3",
        "`position_embedding_type` is \"rotary\"",
    ),
    (
        "nomic-ai/nomic-embed-text-v1.5",
        "`model_type` is \"nomic_bert\"",
    ),
];

fn objects(file: &str) -> BTreeMap<String, Value> {
    let path = fixture("published").join(file);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn is_encoder(config: &Value) -> bool {
    ["bert", "roberta"]
        .iter()
        .any(|end| config["model_type"].as_str().unwrap().ends_with(end))
}

fn llama(config: &Value) -> Result<LlamaConfig, String> {
    match ModelConfig::from_json(&config.to_string()) {
        Ok(ModelConfig::Llama(config)) => Ok(config),
        Ok(other) => panic!("{other:?}"),
        Err(error) => Err(error.to_string()),
    }
}

fn rope_type(scaling: &RopeScaling) -> &'static str {
    match scaling {
        RopeScaling::Default => "default",
        RopeScaling::Yarn(_) => "yarn",
        RopeScaling::LongRope(_) => "longrope",
        RopeScaling::Llama3 { .. } => "llama3",
        RopeScaling::Proportional { .. } => "proportional",
        other => panic!("{other:?}"),
    }
}

#[test]
fn decoders_have_the_parameters_and_positions_of_transformers() {
    let (configs, expected) = (objects("configs.json"), objects("expected.json"));
    let decoders = expected
        .iter()
        .filter(|(name, _)| !is_encoder(&configs[*name]));
    for (name, want) in decoders {
        let config = llama(&configs[name]).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (theta, local) = (config.rope_theta, config.rope_local_base_freq);
        let local = (!want["local_theta"].is_null()).then_some(local);
        let all = ModelConfig::from(config.clone());
        let parameters: i64 = all.parameters().iter().map(|spec| spec.numel()).sum();
        let got = json!({
            "parameters": parameters,
            "tied": config.tie_word_embeddings,
            "eos": config.eos_token_id,
            "context": config.max_position_embeddings,
            "theta": theta,
            "local_theta": local,
            "rope": rope_type(&config.rope_scaling),
        });
        for (key, got) in got.as_object().unwrap() {
            let same = match (got.as_f64(), want[key].as_f64()) {
                (Some(got), Some(want)) => got == want,
                _ => *got == want[key],
            };
            assert!(same, "{name}: {key} is {got} instead of {}", want[key]);
        }
        // As it is saved again.
        let again = llama(&Value::Object(all.to_json())).unwrap();
        assert_eq!(ModelConfig::from(again).to_json(), all.to_json(), "{name}");
    }
}

#[test]
fn encoders_have_the_positions_of_transformers() {
    let (configs, expected) = (objects("configs.json"), objects("expected.json"));
    for (name, want) in expected
        .iter()
        .filter(|(name, _)| is_encoder(&configs[*name]))
    {
        let config = EncoderConfig::from_json(&configs[name].to_string());
        let config = config.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(config.max_position_embeddings, want["context"], "{name}");
        assert_eq!(config.tie_word_embeddings, want["tied"], "{name}");
        if let Some(theta) = want["theta"].as_f64() {
            let found = (config.global_rope_theta, config.local_rope_theta);
            assert_eq!(
                found,
                (theta, want["local_theta"].as_f64().unwrap()),
                "{name}"
            );
        }
    }
}

#[test]
fn models_that_cannot_be_computed_are_refused_by_the_key_that_says_so() {
    let (configs, expected) = (objects("configs.json"), objects("expected.json"));
    for (name, part) in REFUSED {
        let config = &configs[name];
        let error = match is_encoder(config) {
            true => EncoderConfig::from_json(&config.to_string())
                .unwrap_err()
                .to_string(),
            false => llama(config).unwrap_err(),
        };
        assert!(error.contains(part), "{name}: {error}");
    }
    for (name, config) in &configs {
        let layout = config
            .get("quantization_config")
            .map(QuantizationConfig::from_json);
        if let Some(Err(error)) = layout {
            assert!(
                REFUSED.iter().any(|(own, _)| own == name),
                "{name}: {error}"
            );
        }
        let is_refused = REFUSED.iter().any(|(refused, _)| refused == name);
        let is_known = expected.contains_key(name) || name.starts_with("nvidia/");
        assert!(
            is_known != is_refused,
            "{name} is neither expected nor refused"
        );
    }
}
