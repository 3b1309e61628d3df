//! Adapters over the parameters of all experts of a layer (`target_parameters`), against PEFT's.

use std::path::Path;

use overdrive_lora::{
    AddOptions, BiasMode, LoadAdapterOptions, LoraConfig, TargetModules, add_adapter, load_adapter,
    save_adapter,
};
use overdrive_nn::Linear;
use overdrive_safetensors::MappedFile;
use tch::Tensor;

use crate::common::{F32, Host, distance, fixture, read};

/// The names of the layers of an expert: gate and up are one layer, or two.
const PACKED: [&str; 2] = ["gate_up_proj", "down_proj"];
const APART: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const MIXTRAL: [&str; 3] = ["w1", "w3", "w2"];

/// The layers of the model with these layers of an expert, and the weights after PEFT merged the adapter.
fn model(parts: &[&str]) -> (Host, Vec<Tensor>) {
    let file = MappedFile::open(fixture("peft_experts/expected.safetensors")).unwrap();
    let (mut host, mut merged) = (Host::default(), Vec::new());
    let block = match parts[0] {
        "w1" => "block_sparse_moe",
        _ => "mlp",
    };
    let mut push = |name: &str, stored: &str, half: Option<usize>| {
        let weight = |which: &str| {
            let whole = read(&file, &format!("{stored} {which}"));
            half.map_or_else(|| whole.copy(), |half| whole.chunk(2, 0)[half].copy())
        };
        let linear = Linear::dense(weight("base"), None).unwrap();
        host.layers.push((name.to_owned(), linear));
        merged.push(weight("merged"));
    };
    for layer in 0..2 {
        let name = format!("layers.{layer}.q_proj");
        push(&name, &name, None);
        let name = format!("layers.{layer}.{block}.gate");
        push(&name, &format!("layers.{layer}.mlp.gate"), None);
        for expert in 0..3 {
            let own = |part: &str| format!("layers.{layer}.{block}.experts.{expert}.{part}");
            let stored = |part: &str| format!("layers.{layer}.mlp.experts.{expert}.{part}");
            let (down, joint) = parts.split_last().unwrap();
            for (half, part) in joint.iter().enumerate() {
                let half = (joint.len() == 2).then_some(half);
                push(&own(part), &stored(PACKED[0]), half);
            }
            push(&own(down), &stored(PACKED[1]), None);
        }
    }
    (host, merged)
}

fn assert_saved_alike(host: &mut Host, adapter: &str) {
    let folder = tempfile::tempdir().unwrap();
    save_adapter(host, folder.path(), adapter).unwrap();
    let file = "adapter_model.safetensors";
    let ours = MappedFile::open(folder.path().join(file)).unwrap();
    let theirs = MappedFile::open(fixture("peft_experts").join(file)).unwrap();
    assert_eq!(ours.tensors().len(), theirs.tensors().len());
    for tensor in theirs.tensors() {
        assert_eq!(read(&ours, tensor.name()), read(&theirs, tensor.name()));
    }
    let read_config = |folder: &Path| overdrive_lora::read_config(folder).unwrap();
    let (ours, theirs) = (
        read_config(folder.path()),
        read_config(&fixture("peft_experts")),
    );
    assert_eq!(ours.target_parameters, theirs.target_parameters);
    assert_eq!(ours.rank_pattern, theirs.rank_pattern);
}

#[test]
fn an_adapter_over_all_experts_is_that_of_each_expert() {
    for parts in [&PACKED[..], &APART, &MIXTRAL] {
        let (mut host, merged) = model(parts);
        let options = LoadAdapterOptions::default();
        load_adapter(&mut host, fixture("peft_experts"), "mine", &options).unwrap();
        for ((name, layer), merged) in host.layers.iter().zip(&merged) {
            let inputs = merged.size()[1];
            let rows = layer.forward(&Tensor::eye(inputs, F32)).unwrap();
            let apart = distance(&rows.tr(), merged);
            assert!(apart < 1e-6, "{name}: {apart}");
        }
        assert_saved_alike(&mut host, "mine");
    }
}

#[test]
fn a_new_adapter_over_all_experts_is_trained_and_saved_as_one() {
    let config = overdrive_lora::read_config(fixture("peft_experts")).unwrap();
    let (mut host, _) = model(&PACKED);
    add_adapter(&mut host, "mine", &config, &AddOptions::default()).unwrap();
    host.randomise("mine");
    let folder = tempfile::tempdir().unwrap();
    save_adapter(&mut host, folder.path(), "mine").unwrap();
    let (mut again, _) = model(&PACKED);
    let trainable = LoadAdapterOptions {
        trainable: true,
        ..Default::default()
    };
    load_adapter(&mut again, folder.path(), "mine", &trainable).unwrap();
    for ((name, layer), (_, loaded)) in host.layers.iter().zip(&again.layers) {
        let x = Tensor::eye(layer.weight().size()[1], F32);
        let (ours, theirs) = (layer.forward(&x).unwrap(), loaded.forward(&x).unwrap());
        assert_eq!(ours.detach(), theirs.detach(), "{name}");
    }
}

#[test]
fn a_saved_adapter_of_experts_has_no_dropout_which_peft_refuses() {
    for (names, expected) in [(vec!["down_proj"], 0.0), (vec!["q_proj"], 0.1)] {
        let (mut host, _) = model(&APART);
        let config = LoraConfig {
            target_modules: Some(TargetModules::names(names)),
            lora_dropout: 0.1,
            ..LoraConfig::default()
        };
        add_adapter(&mut host, "mine", &config, &AddOptions::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        save_adapter(&mut host, folder.path(), "mine").unwrap();
        let saved = overdrive_lora::read_config(folder.path()).unwrap();
        assert_eq!(saved.lora_dropout, expected);
    }
}

#[test]
fn two_layers_of_one_parameter_are_not_trained_as_one() {
    let (mut host, _) = model(&APART);
    let trainable = LoadAdapterOptions {
        trainable: true,
        ..Default::default()
    };
    let loaded = load_adapter(&mut host, fixture("peft_experts"), "mine", &trainable);
    let config = overdrive_lora::read_config(fixture("peft_experts")).unwrap();
    let added = add_adapter(&mut host, "mine", &config, &AddOptions::default());
    for error in [loaded.unwrap_err(), added.unwrap_err()] {
        let error = error.to_string();
        assert!(
            error.contains("layers.0.mlp.experts.gate_up_proj") && error.contains("target_modules"),
            "{error}"
        );
    }
    // One parameter that is one layer is.
    let down = LoraConfig {
        target_parameters: Some(vec!["experts.down_proj".to_owned()]),
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    };
    let layers = add_adapter(&mut host, "mine", &down, &AddOptions::default()).unwrap();
    let is_expected = |name: &String| name.ends_with("q_proj") || name.ends_with("down_proj");
    assert!(
        layers.len() == 8 && layers.iter().all(is_expected),
        "{layers:?}"
    );
}

#[test]
fn what_peft_refuses_with_parameters_is_refused() {
    let refused = |change: &dyn Fn(&mut LoraConfig)| {
        let mut config = LoraConfig {
            target_parameters: Some(vec!["mlp.experts.down_proj".to_owned()]),
            ..LoraConfig::default()
        };
        change(&mut config);
        config.validate().unwrap_err().to_string()
    };
    let errors = [
        refused(&|config| config.lora_dropout = 0.1),
        refused(&|config| config.use_dora = true),
        refused(&|config| config.lora_bias = true),
        refused(&|config| config.bias = BiasMode::All),
        refused(&|config| config.init_lora_weights = overdrive_lora::InitLoraWeights::Olora),
    ];
    for error in errors {
        assert!(error.contains("`target_parameters`"), "{error}");
    }
    let (mut host, _) = model(&PACKED);
    let unknown = LoraConfig {
        target_parameters: Some(vec!["mlp.experts.up".to_owned()]),
        target_modules: Some(TargetModules::names(["q_proj"])),
        ..LoraConfig::default()
    };
    let error = add_adapter(&mut host, "mine", &unknown, &AddOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("mlp.experts.up\"") && error.contains("layers.*.mlp.experts.*.down_proj"),
        "{error}"
    );
}
