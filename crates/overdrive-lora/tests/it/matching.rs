//! PEFT's rules of module names (fixtures/gen_peft.py).

use crate::common::{F32, Host, fixture, numbers};
use overdrive_lora::{
    AddOptions, Error, LoraConfig, TargetModules, active_adapters, add_adapter, add_lora,
    delete_adapter, lora_adapter, parameter_counts,
};
use serde_json::Value;

fn cases() -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture("matching.json")).unwrap()).unwrap()
}

fn host(cases: &Value) -> Host {
    let names: Vec<&str> = cases["names"]
        .as_array()
        .unwrap()
        .iter()
        .map(|name| name.as_str().unwrap())
        .collect();
    Host::new(&names, 16, 16)
}

#[test]
fn linear_layers_are_matched_as_in_peft() {
    let cases = cases();
    let mut host = host(&cases);
    let targets = cases["targets"].as_array().unwrap();
    assert!(targets.len() >= 15);
    for case in targets {
        let config = LoraConfig::from_json(&case["config"].to_string()).unwrap();
        let config = LoraConfig {
            // The cases test the exclusion by `modules_to_save`, not the existence of the modules.
            modules_to_save: config.modules_to_save.clone(),
            ..config
        };
        let expected: Vec<String> = case["matched"]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| name.as_str().unwrap().to_owned())
            .collect();
        match add_adapter(&mut host, "a", &config, &AddOptions::default()) {
            Ok(mut layers) => {
                layers.sort();
                let mut expected = expected;
                expected.sort();
                assert_eq!(layers, expected, "{case}");
                delete_adapter(&mut host, "a").unwrap();
            }
            Err(Error::NoTarget { .. }) => assert!(expected.is_empty(), "{case}"),
            Err(error) => panic!("{case}: {error}"),
        }
    }
}

#[test]
fn ranks_by_pattern_are_those_of_peft() {
    let cases = cases();
    let mut host = host(&cases);
    for case in cases["ranks"].as_array().unwrap() {
        let mut config =
            LoraConfig::from_json(&format!("{{\"rank_pattern\": {}}}", case["rank_pattern"]))
                .unwrap();
        config.target_modules = Some(TargetModules::AllLinear);
        add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
        for (name, layer) in &host.layers {
            let rank = lora_adapter(layer, "a").unwrap().rank();
            assert_eq!(Some(rank), case["ranks"][name].as_i64(), "{name}: {case}");
        }
        delete_adapter(&mut host, "a").unwrap();
    }
}

#[test]
fn all_linear_skips_the_head_and_a_target_without_a_match_lists_the_layers() {
    let mut host = Host::new(
        &["model.layers.0.q_proj", "model.layers.1.q_proj", "lm_head"],
        8,
        8,
    );
    host.head = Some("lm_head".to_owned());
    let config = LoraConfig {
        target_modules: Some(TargetModules::from("All-Linear")),
        ..LoraConfig::default()
    };
    let layers = add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
    assert_eq!(layers, ["model.layers.0.q_proj", "model.layers.1.q_proj"]);

    let config = LoraConfig {
        target_modules: Some(TargetModules::names(["query"])),
        ..LoraConfig::default()
    };
    let error = add_adapter(&mut host, "b", &config, &AddOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no linear layer matches `target_modules` [\"query\"]; the model has model.layers.*.q_proj, lm_head"
    );
    let config = LoraConfig {
        target_modules: Some(TargetModules::names(Vec::<String>::new())),
        ..LoraConfig::default()
    };
    let error = add_adapter(&mut host, "b", &config, &AddOptions::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("no linear layer matches `target_modules` []"),
        "{error}"
    );
    // PEFT's table of defaults does not have this architecture.
    let error = add_adapter(
        &mut host,
        "b",
        &LoraConfig::default(),
        &AddOptions::default(),
    );
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("has no default for this model")
    );
}

#[test]
fn a_target_that_is_no_linear_layer_is_refused_by_name_and_not_left_out() {
    let with = |targets: TargetModules| {
        let mut host = Host::new(&["model.layers.0.q_proj"], 4, 4);
        let embedding = (
            "model.embed_tokens.weight".to_owned(),
            numbers(&[8, 4], 1.0, F32),
        );
        host.parameters.push(embedding);
        let config = LoraConfig {
            target_modules: Some(targets),
            ..LoraConfig::default()
        };
        add_adapter(&mut host, "a", &config, &AddOptions::default())
    };
    for targets in [
        TargetModules::names(["q_proj", "embed_tokens"]),
        TargetModules::Pattern(".*(q_proj|embed_tokens)".to_owned()),
    ] {
        let error = with(targets).unwrap_err().to_string();
        assert!(
            error.contains("model.embed_tokens") && error.contains("modules_to_save"),
            "{error}"
        );
    }
    assert_eq!(with(TargetModules::AllLinear).unwrap().len(), 1);
}

#[test]
fn one_call_adds_a_trainable_adapter_also_to_a_model_that_has_another() {
    let config = LoraConfig {
        r: 4,
        target_modules: Some(TargetModules::names(["q"])),
        ..LoraConfig::default()
    };
    let mut host = Host::new(&["q", "k"], 16, 16);
    add_adapter(&mut host, "other", &config, &AddOptions::default()).unwrap();
    let parameters = add_lora(&mut host, &config).unwrap();
    let names: Vec<&str> = parameters.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "base_model.model.q.lora_A.default.weight",
            "base_model.model.q.lora_B.default.weight"
        ]
    );
    assert_eq!(active_adapters(&mut host).unwrap(), ["default"]);
    assert_eq!(parameter_counts(&mut host).unwrap().trainable, 2 * 4 * 16);
    // The handles share storage with the model: B starts at zero.
    let x = numbers(&[1, 16], 1.0, F32);
    let before = host.layers[0].1.forward(&x).unwrap();
    let _ = tch::no_grad(|| parameters[1].1.shallow_clone().fill_(1.0));
    assert_ne!(host.layers[0].1.forward(&x).unwrap(), before);
    assert!(add_lora(&mut host, &config).is_err());
}
