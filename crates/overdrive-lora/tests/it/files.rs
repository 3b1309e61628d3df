//! Folders of adapters.

use std::path::Path;

use crate::common::{F32, Host, numbers};
use overdrive_lora::{
    AddOptions, BiasMode, Error, LoadAdapterOptions, LoraConfig, TargetModules, adapter_names,
    add_adapter, load_adapter, save_adapter, trainable_parameters,
};
use overdrive_nn::{Linear, LinearWeight};
use overdrive_safetensors::MappedFile;
use tch::Tensor;

fn host() -> Host {
    let mut host = Host::new(&["model.q_proj", "model.v_proj", "lm_head"], 12, 16);
    host.parameters.push((
        "model.embed_tokens.weight".to_owned(),
        numbers(&[20, 16], 5.0, F32),
    ));
    host.parameters
        .push(("model.norm.bias".to_owned(), numbers(&[16], 6.0, F32)));
    host
}

fn saved(config: &LoraConfig, dir: &Path) -> Host {
    let mut host = host();
    add_adapter(&mut host, "mine", config, &AddOptions::default()).unwrap();
    host.randomise("mine");
    tch::no_grad(|| {
        for (_, parameter) in trainable_parameters(&mut host).unwrap() {
            let _ = parameter
                .shallow_clone()
                .g_add_(&(numbers(&parameter.size(), 8.0, F32) * 0.1));
        }
    });
    save_adapter(&mut host, dir, "mine").unwrap();
    host
}

fn forward(host: &Host) -> Vec<Tensor> {
    let x = numbers(&[7, 16], 2.0, F32);
    let mut all: Vec<Tensor> = tch::no_grad(|| {
        host.layers
            .iter()
            .map(|(_, layer)| layer.forward(&x).unwrap())
            .collect()
    });
    all.extend(host.parameters.iter().map(|(_, tensor)| tensor.detach()));
    all
}

#[test]
fn adapters_of_mica_and_lora_ga_load_as_plain_ones_where_they_are() {
    let config = LoraConfig {
        r: 4,
        target_modules: Some(TargetModules::names(["q_proj", "v_proj"])),
        ..LoraConfig::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let expected = forward(&saved(&config, folder.path()));
    let file = folder.path().join("adapter_config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let plain = "\"init_lora_weights\": true";
    assert!(text.contains(plain), "{text}");
    let load = |method: &str, options: &LoadAdapterOptions| {
        let named = text.replace(plain, &format!("\"init_lora_weights\": \"{method}\""));
        std::fs::write(&file, named).unwrap();
        let mut host = host();
        let loaded = load_adapter(&mut host, folder.path(), "mine", options);
        loaded.map(|_| forward(&host))
    };
    let frozen = LoadAdapterOptions::default();
    let trainable = LoadAdapterOptions {
        trainable: true,
        ..LoadAdapterOptions::default()
    };
    let residual = LoadAdapterOptions {
        residual_base: true,
        ..LoadAdapterOptions::default()
    };
    assert_eq!(load("mica", &frozen).unwrap(), expected);
    assert_eq!(load("lora_ga", &residual).unwrap(), expected);
    let message = load("mica", &trainable).unwrap_err().to_string();
    assert!(
        message.starts_with("`init_lora_weights` is \"mica\"") && message.contains("frozen"),
        "{message}"
    );
    let message = load("lora_ga", &frozen).unwrap_err().to_string();
    assert!(
        message.starts_with("`init_lora_weights` is \"lora_ga\"")
            && message.contains("residual_base"),
        "{message}"
    );
}

#[test]
fn a_saved_adapter_loads_into_another_model_bit_for_bit() {
    let plain = LoraConfig {
        r: 4,
        target_modules: Some(TargetModules::names(["q_proj", "v_proj"])),
        ..LoraConfig::default()
    };
    let configs = [
        plain.clone(),
        LoraConfig {
            use_dora: true,
            ..plain.clone()
        },
        LoraConfig {
            lora_bias: true,
            use_rslora: true,
            ..plain.clone()
        },
        LoraConfig {
            bias: BiasMode::All,
            ..plain.clone()
        },
        LoraConfig {
            bias: BiasMode::LoraOnly,
            ..plain.clone()
        },
        LoraConfig {
            rank_pattern: vec![("v_proj".to_owned(), 2)],
            ..plain.clone()
        },
        LoraConfig {
            modules_to_save: Some(vec!["embed_tokens".to_owned(), "lm_head".to_owned()]),
            ..plain.clone()
        },
        LoraConfig {
            target_modules: Some(TargetModules::names(Vec::<String>::new())),
            modules_to_save: Some(vec!["embed_tokens".to_owned()]),
            ..plain
        },
    ];
    for config in configs {
        let dir = tempfile::tempdir().unwrap();
        let host = saved(&config, dir.path());
        let mut other = self::host();
        let loaded = load_adapter(
            &mut other,
            dir.path(),
            "theirs",
            &LoadAdapterOptions::default(),
        )
        .unwrap();
        assert!(loaded.config.inference_mode);
        assert_eq!(forward(&other), forward(&host), "{config:?}");
        // A loaded adapter is frozen, except for the biases of its mode.
        let learning = trainable_parameters(&mut other).unwrap();
        assert!(
            learning.iter().all(|(name, _)| name.ends_with(".bias")),
            "{learning:?}"
        );
        let mut other = self::host();
        let options = LoadAdapterOptions {
            trainable: true,
            ..LoadAdapterOptions::default()
        };
        load_adapter(&mut other, dir.path(), "theirs", &options).unwrap();
        let own = trainable_parameters(&mut other).unwrap().len();
        assert!(own > 0);
        // Saved again, it is the same file.
        let again = tempfile::tempdir().unwrap();
        save_adapter(&mut other, again.path(), "theirs").unwrap();
        let bytes = |dir: &Path| std::fs::read(dir.join("adapter_model.safetensors")).unwrap();
        assert_eq!(bytes(again.path()), bytes(dir.path()));
    }
}

#[test]
fn files_have_the_keys_and_shapes_of_peft() {
    let dir = tempfile::tempdir().unwrap();
    let config = LoraConfig {
        r: 4,
        use_dora: true,
        bias: BiasMode::LoraOnly,
        target_modules: Some(TargetModules::names(["q_proj"])),
        modules_to_save: Some(vec!["embed_tokens".to_owned()]),
        ..LoraConfig::default()
    };
    saved(&config, dir.path());
    let file = MappedFile::open(dir.path().join("adapter_model.safetensors")).unwrap();
    assert_eq!(file.metadata()["format"], "pt");
    let mut found: Vec<(String, Vec<i64>)> = file
        .tensors()
        .iter()
        .map(|tensor| (tensor.name().to_owned(), tensor.shape().to_vec()))
        .collect();
    found.sort();
    let key = |name: &str| format!("base_model.model.{name}");
    assert_eq!(
        found,
        [
            (key("model.embed_tokens.weight"), vec![20, 16]),
            (key("model.q_proj.base_layer.bias"), vec![12]),
            (key("model.q_proj.lora_A.weight"), vec![4, 16]),
            (key("model.q_proj.lora_B.weight"), vec![12, 4]),
            (key("model.q_proj.lora_magnitude_vector"), vec![12]),
        ]
    );
}

/// Writes the file again after `change`.
fn rewrite(dir: &Path, change: impl FnOnce(&mut Vec<(String, Tensor)>)) {
    let path = dir.join("adapter_model.safetensors");
    let mut tensors: Vec<(String, Tensor)> = {
        let file = MappedFile::open(&path).unwrap();
        let read = |tensor: &overdrive_safetensors::StoredTensor<'_>| {
            (
                tensor.name().to_owned(),
                tensor.copy_to_tensor(None, tch::Device::Cpu).unwrap(),
            )
        };
        file.tensors().iter().map(read).collect()
    };
    change(&mut tensors);
    overdrive_safetensors::write(&path, &tensors, &Default::default()).unwrap();
}

#[test]
fn everything_that_does_not_fit_is_named_and_the_model_stays_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let config = LoraConfig {
        r: 4,
        target_modules: Some(TargetModules::names(["q_proj", "v_proj"])),
        ..LoraConfig::default()
    };
    saved(&config, dir.path());
    rewrite(dir.path(), |tensors| {
        tensors.retain(|(name, _)| name != "base_model.model.model.q_proj.lora_A.weight");
        for (name, tensor) in tensors.iter_mut() {
            if name == "base_model.model.model.v_proj.lora_B.weight" {
                *tensor = Tensor::zeros([12, 3], F32);
            }
        }
        tensors.push((
            "base_model.model.model.k_proj.lora_A.weight".to_owned(),
            Tensor::zeros([4, 16], F32),
        ));
    });
    let mut other = host();
    let before = forward(&other);
    let error =
        load_adapter(&mut other, dir.path(), "a", &LoadAdapterOptions::default()).unwrap_err();
    let Error::Checkpoint { problems, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(
        problems.to_string(),
        "1 tensor is missing: `base_model.model.model.q_proj.lora_A.weight`; \
         1 tensor is of another shape: `base_model.model.model.v_proj.lora_B.weight` ([12, 3], the model has [12, 4]); \
         1 tensor is not of this model and adapter: `base_model.model.model.k_proj.lora_A.weight`"
    );
    assert!(adapter_names(&mut other).unwrap().is_empty());
    assert_eq!(forward(&other), before);
}

#[test]
fn an_adapter_of_another_model_is_refused_with_three_of_its_tensors_and_the_name_of_its_model() {
    let config = LoraConfig {
        target_modules: Some(TargetModules::AllLinear),
        base_model_name_or_path: Some("org/other".to_owned()),
        ..LoraConfig::default()
    };
    let names = ["layers.0.q", "layers.0.k", "layers.0.v", "layers.0.o"];
    let mut narrow = Host::new(&names, 8, 8);
    add_adapter(&mut narrow, "a", &config, &AddOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    save_adapter(&mut narrow, dir.path(), "a").unwrap();
    let mut wide = Host::new(&names, 16, 16);
    let options = LoadAdapterOptions::default();
    let error = load_adapter(&mut wide, dir.path(), "a", &options).unwrap_err();
    let path = dir.path().join("adapter_model.safetensors");
    assert_eq!(
        error.to_string(),
        format!(
            "{} does not fit the model: 8 tensors are of another shape: \
             `base_model.model.layers.0.q.lora_A.weight` ([8, 8], the model has [8, 16]), \
             `base_model.model.layers.0.q.lora_B.weight` ([8, 8], the model has [16, 8]), \
             `base_model.model.layers.0.k.lora_A.weight` ([8, 8], the model has [8, 16]) and 5 more; \
             the adapter was trained over org/other, so give that model",
            path.display()
        )
    );
}

#[test]
fn a_folder_without_an_adapter_says_which_file_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let load = || {
        let options = LoadAdapterOptions::default();
        let error = load_adapter(&mut host(), dir.path(), "a", &options).unwrap_err();
        error.to_string()
    };
    let lacks = |file| {
        format!(
            "{} holds no adapter: {file} is missing",
            dir.path().display()
        )
    };
    assert_eq!(load(), lacks("adapter_config.json"));
    std::fs::write(
        dir.path().join("adapter_config.json"),
        r#"{"peft_type": "LORA"}"#,
    )
    .unwrap();
    assert_eq!(load(), lacks("adapter_model.safetensors"));
}

#[test]
fn weights_of_embedding_and_head_beside_an_adapter_take_the_place_of_the_models() {
    let config = LoraConfig {
        r: 4,
        target_modules: Some(TargetModules::names(["q_proj"])),
        ..LoraConfig::default()
    };
    let dir = tempfile::tempdir().unwrap();
    saved(&config, dir.path());
    let (table, head) = (numbers(&[20, 16], 11.0, F32), numbers(&[12, 16], 12.0, F32));
    rewrite(dir.path(), |tensors| {
        // As PEFT's `save_embedding_layers` names them.
        let key = |name: &str| format!("base_model.model.{name}");
        tensors.push((key("model.embed_tokens.weight"), table.copy()));
        tensors.push((key("lm_head.weight"), head.copy()));
    });
    let with_head = || Host {
        head: Some("lm_head".to_owned()),
        ..self::host()
    };
    let mut host = with_head();
    load_adapter(&mut host, dir.path(), "a", &LoadAdapterOptions::default()).unwrap();
    assert_eq!(host.parameters[0].1, table);
    let LinearWeight::Dense { weight, .. } = host.layer("lm_head").weight() else {
        panic!("quantized")
    };
    assert_eq!(*weight, head);

    // A model that ties the two has one weight for both.
    let mut tied = with_head();
    let shared = numbers(&[12, 16], 5.0, F32);
    tied.parameters[0].1 = shared.shallow_clone();
    *tied.layer("lm_head") = Linear::dense(shared, None).unwrap();
    rewrite(dir.path(), |tensors| {
        for (name, tensor) in tensors.iter_mut() {
            if name.ends_with("embed_tokens.weight") {
                *tensor = numbers(&[12, 16], 11.0, F32);
            }
        }
    });
    let options = LoadAdapterOptions::default();
    let error = load_adapter(&mut tied, dir.path(), "a", &options)
        .unwrap_err()
        .to_string();
    assert!(error.contains("but the model ties the two"), "{error}");
    // Another vocabulary.
    let error = load_adapter(&mut with_head(), dir.path(), "a", &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("`base_model.model.model.embed_tokens.weight` is [12, 16] where the model has [20, 16]: load")
            && error.contains("the vocabulary that it was trained with"),
        "{error}"
    );
}

#[test]
fn a_tensor_that_is_there_twice_is_named() {
    let config = LoraConfig {
        r: 4,
        target_modules: Some(TargetModules::names(["q_proj"])),
        ..LoraConfig::default()
    };
    let dir = tempfile::tempdir().unwrap();
    saved(&config, dir.path());
    rewrite(dir.path(), |tensors| {
        let name = "model.q_proj.lora_A.weight".to_owned();
        tensors.push((name, Tensor::zeros([4, 16], F32)));
    });
    let options = LoadAdapterOptions::default();
    let error = load_adapter(&mut host(), dir.path(), "a", &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("occurs twice, with and without `base_model.model.`"),
        "{error}"
    );
}

#[test]
fn a_configuration_with_a_byte_order_mark_is_read_and_an_error_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    saved(&LoraConfig::default(), dir.path());
    let path = dir.path().join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, format!("\u{feff}{text}")).unwrap();
    assert_eq!(overdrive_lora::read_config(dir.path()).unwrap().r, 8);
    std::fs::write(&path, "{").unwrap();
    let error = overdrive_lora::read_config(dir.path())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with(&format!("{} is not valid JSON", path.display())),
        "{error}"
    );
}

/// Changes `adapter_config.json`.
fn reconfigure(dir: &Path, key: &str, value: serde_json::Value) {
    let path = dir.join("adapter_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config[key] = value;
    std::fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn classifiers_of_other_architectures_in_modules_to_save_are_ignored() {
    let options = LoadAdapterOptions::default();
    let head = vec!["lm_head".to_owned()];
    for own in [None, Some(head)] {
        let dir = tempfile::tempdir().unwrap();
        let config = LoraConfig {
            r: 4,
            target_modules: Some(TargetModules::names(["q_proj", "v_proj"])),
            modules_to_save: own.clone(),
            ..LoraConfig::default()
        };
        let host = saved(&config, dir.path());
        // PEFT adds both to every configuration of a classifier.
        let mut names = own.unwrap_or_default();
        names.extend(["classifier".to_owned(), "score".to_owned()]);
        reconfigure(dir.path(), "modules_to_save", names.clone().into());
        let mut other = self::host();
        let loaded = load_adapter(&mut other, dir.path(), "a", &options).unwrap();
        assert_eq!(loaded.config.modules_to_save, Some(names.clone()));
        assert_eq!(forward(&other), forward(&host));
        // The configuration is saved as it was.
        let again = tempfile::tempdir().unwrap();
        save_adapter(&mut other, again.path(), "a").unwrap();
        let config = overdrive_lora::read_config(again.path()).unwrap();
        assert_eq!(config.modules_to_save, Some(names));
        // A tensor of such a module is not lost in silence.
        rewrite(dir.path(), |tensors| {
            let name = "base_model.model.score.weight".to_owned();
            tensors.push((name, Tensor::zeros([2, 16], F32)));
        });
        let error = load_adapter(&mut self::host(), dir.path(), "a", &options).unwrap_err();
        let expected = "1 tensor is not of this model and adapter: `base_model.model.score.weight`";
        assert!(error.to_string().ends_with(expected), "{error}");
    }
}

#[test]
fn biases_are_all_parameters_with_the_word_in_their_name() {
    let with_table = || {
        let mut host = host();
        let table = ("relative_attention_bias.weight", numbers(&[8, 2], 7.0, F32));
        host.parameters.push((table.0.to_owned(), table.1));
        host
    };
    let config = |bias| LoraConfig {
        r: 4,
        bias,
        target_modules: Some(TargetModules::names(["q_proj"])),
        ..LoraConfig::default()
    };
    let options = LoadAdapterOptions::default();
    for bias in [BiasMode::All, BiasMode::LoraOnly] {
        let mut source = with_table();
        add_adapter(&mut source, "a", &config(bias), &AddOptions::default()).unwrap();
        let trained = trainable_parameters(&mut source).unwrap();
        let table = trained
            .iter()
            .find(|(name, _)| name == "base_model.model.relative_attention_bias.weight");
        assert_eq!(table.is_some(), bias == BiasMode::All);
        if let Some((_, table)) = table {
            let _ = tch::no_grad(|| table.shallow_clone().fill_(3.0));
        }
        let dir = tempfile::tempdir().unwrap();
        save_adapter(&mut source, dir.path(), "a").unwrap();
        let mut other = with_table();
        load_adapter(&mut other, dir.path(), "a", &options).unwrap();
        assert_eq!(forward(&other), forward(&source));
        // PEFT saves this buffer of BART, too.
        rewrite(dir.path(), |tensors| {
            let name = "base_model.model.final_logits_bias".to_owned();
            tensors.push((name, Tensor::zeros([1, 20], F32)));
        });
        let loaded = load_adapter(&mut with_table(), dir.path(), "a", &options);
        assert_eq!(loaded.is_ok(), bias == BiasMode::All);
    }
    // PEFT saves the biases of a full copy, and of the module that it replaces, under the names of its wrapper as well.
    let copied = LoraConfig {
        modules_to_save: Some(vec!["relative_attention_bias".to_owned()]),
        ..config(BiasMode::All)
    };
    let mut source = with_table();
    add_adapter(&mut source, "a", &copied, &AddOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    save_adapter(&mut source, dir.path(), "a").unwrap();
    rewrite(dir.path(), |tensors| {
        for part in ["modules_to_save", "original_module"] {
            let name = format!("base_model.model.relative_attention_bias.{part}.weight");
            tensors.push((name, numbers(&[8, 2], 1.0, F32)));
        }
        // PEFT leaves the adapter in the keys of modules inside a copy.
        let name = "base_model.model.relative_attention_bias.modules_to_save.default.weight";
        tensors.push((name.to_owned(), numbers(&[8, 2], 1.0, F32)));
    });
    let mut other = with_table();
    load_adapter(&mut other, dir.path(), "a", &options).unwrap();
    let again = tempfile::tempdir().unwrap();
    save_adapter(&mut other, again.path(), "a").unwrap();
    let table = |dir: &Path| {
        let tensors = Tensor::read_safetensors(dir.join("adapter_model.safetensors")).unwrap();
        let name = "base_model.model.relative_attention_bias.weight";
        tensors.into_iter().find(|(own, _)| own == name).unwrap().1
    };
    assert_eq!(table(again.path()), table(dir.path()));
    // A wrapper of a module that is not copied belongs to another adapter.
    rewrite(dir.path(), |tensors| {
        let name = "base_model.model.other_bias.original_module.weight".to_owned();
        tensors.push((name, Tensor::zeros([1], F32)));
    });
    assert!(load_adapter(&mut with_table(), dir.path(), "a", &options).is_err());
}

/// `host` as the text of a model that also reads images.
#[test]
fn an_adapter_over_a_multimodal_model_is_loaded_into_its_text_model() {
    let options = LoadAdapterOptions::default();
    let config = LoraConfig {
        target_modules: Some(TargetModules::names(["q_proj", "lm_head"])),
        rank_pattern: vec![("model.q_proj".to_owned(), 3)],
        modules_to_save: Some(vec!["embed_tokens".to_owned()]),
        ..LoraConfig::default()
    };
    // transformers 5, and the versions before.
    for (text, head) in [
        ("model.language_model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let source = saved(&config, dir.path());
        rewrite(dir.path(), |tensors| {
            for (name, _) in &mut *tensors {
                let own = name.strip_prefix("base_model.model.").unwrap();
                let own = match own.strip_prefix("model.") {
                    Some(rest) => format!("{text}{rest}"),
                    None => own.replace("lm_head.", head),
                };
                *name = format!("base_model.model.{own}");
            }
            let tower = "base_model.model.model.vision_tower.q_proj.lora_A.weight";
            tensors.push((tower.to_owned(), numbers(&[8, 4], 1.0, F32)));
        });
        let is_loaded = || {
            let mut other = host();
            load_adapter(&mut other, dir.path(), "a", &options).unwrap();
            assert_eq!(forward(&other), forward(&source), "{text}");
            other
        };
        // A name without the rest of the path selects layers of the tower in PEFT.
        reconfigure(
            dir.path(),
            "rank_pattern",
            serde_json::json!({format!("{text}q_proj"): 3}),
        );
        is_loaded();
        let names = serde_json::json!([format!("{text}q_proj"), head.trim_end_matches('.')]);
        reconfigure(dir.path(), "target_modules", names);
        is_loaded();
        let pattern = r".*language_model.*q_proj|.*lm_head";
        reconfigure(dir.path(), "target_modules", pattern.into());
        let mut other = is_loaded();
        // It is saved as one of the text model.
        let again = tempfile::tempdir().unwrap();
        save_adapter(&mut other, again.path(), "a").unwrap();
        let mut third = host();
        let loaded = load_adapter(&mut third, again.path(), "a", &options).unwrap();
        assert_eq!(loaded.layers, ["model.q_proj", "lm_head"]);
        assert_eq!(forward(&third), forward(&source), "{text}");
    }
}

#[test]
fn an_adapter_of_the_text_of_a_multimodal_model_is_saved_for_the_whole_model() {
    let config = LoraConfig {
        target_modules: Some(TargetModules::AllLinear),
        rank_pattern: vec![("model.v_proj".to_owned(), 3), ("q_proj".to_owned(), 2)],
        modules_to_save: Some(vec!["model.embed_tokens".to_owned()]),
        ..LoraConfig::default()
    };
    let mut text = host();
    text.is_text = true;
    text.head = Some("lm_head".to_owned());
    add_adapter(&mut text, "mine", &config, &AddOptions::default()).unwrap();
    text.randomise("mine");
    let folder = tempfile::tempdir().unwrap();
    save_adapter(&mut text, folder.path(), "mine").unwrap();
    let file = MappedFile::open(folder.path().join("adapter_model.safetensors")).unwrap();
    let mut names: Vec<String> = file
        .tensors()
        .iter()
        .map(|tensor| tensor.name().to_owned())
        .collect();
    names.sort_unstable();
    let key = |name: &str| format!("base_model.model.model.language_model.{name}");
    let expected = [
        "embed_tokens.weight",
        "q_proj.lora_A.weight",
        "q_proj.lora_B.weight",
        "v_proj.lora_A.weight",
        "v_proj.lora_B.weight",
    ];
    assert_eq!(names, expected.map(key));
    let saved = overdrive_lora::read_config(folder.path()).unwrap();
    let layers = ["q_proj", "v_proj"].map(|name| format!("model.language_model.{name}"));
    assert_eq!(saved.target_modules, Some(TargetModules::names(layers)));
    assert_eq!(
        saved.modules_to_save,
        Some(vec!["model.language_model.embed_tokens".to_owned()])
    );
    let ranks = [
        ("model.language_model.v_proj".to_owned(), 3),
        ("q_proj".to_owned(), 2),
    ];
    assert_eq!(saved.rank_pattern, ranks);

    let mut again = host();
    again.head = Some("lm_head".to_owned());
    load_adapter(
        &mut again,
        folder.path(),
        "mine",
        &LoadAdapterOptions::default(),
    )
    .unwrap();
    assert_eq!(forward(&again), forward(&text));
}

#[test]
fn experts_without_tensors_in_the_file_get_no_adapter_by_the_names_of_other_layers() {
    let options = LoadAdapterOptions::default();
    let names = [
        "model.layers.0.mlp.experts.0.up_proj",
        "model.layers.0.mlp.experts.1.up_proj",
        "model.layers.0.mlp.shared_expert.up_proj",
    ];
    let moe = || Host::new(&names, 12, 16);
    let adapter = |targets: &str| {
        let config = LoraConfig {
            target_modules: Some(TargetModules::names([targets])),
            ..LoraConfig::default()
        };
        let mut host = moe();
        add_adapter(&mut host, "mine", &config, &AddOptions::default()).unwrap();
        let dir = tempfile::tempdir().unwrap();
        save_adapter(&mut host, dir.path(), "mine").unwrap();
        dir
    };
    let dir = adapter("shared_expert.up_proj");
    // PEFT shortens the names of `all-linear` to their last components.
    reconfigure(dir.path(), "target_modules", vec!["up_proj"].into());
    let mut host = moe();
    let loaded = load_adapter(&mut host, dir.path(), "a", &options).unwrap();
    assert_eq!(loaded.layers, names[2..]);
    let again = tempfile::tempdir().unwrap();
    save_adapter(&mut host, again.path(), "a").unwrap();
    let loaded = load_adapter(&mut moe(), again.path(), "a", &options).unwrap();
    assert_eq!(loaded.layers, names[2..]);
    // An adapter of experts must have all of them.
    let dir = adapter("up_proj");
    let all = load_adapter(&mut moe(), dir.path(), "a", &options).unwrap();
    assert_eq!(all.layers, names);
    rewrite(dir.path(), |tensors| {
        tensors.retain(|(name, _)| !name.contains(".experts.1."));
    });
    let error = load_adapter(&mut moe(), dir.path(), "a", &options).unwrap_err();
    assert!(error.to_string().contains("experts.1.up_proj"), "{error}");
}

#[test]
fn damaged_and_missing_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let load = |dir: &Path| {
        let options = LoadAdapterOptions::default();
        load_adapter(&mut host(), dir, "a", &options)
            .unwrap_err()
            .to_string()
    };
    assert!(load(dir.path()).contains("adapter_config.json"));
    saved(
        &LoraConfig {
            target_modules: Some(TargetModules::names(["q_proj"])),
            ..LoraConfig::default()
        },
        dir.path(),
    );
    let path = dir.path().join("adapter_model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for length in [0, 7, bytes.len() / 2, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..length]).unwrap();
        assert!(
            load(dir.path()).contains("not a complete safetensors file"),
            "{length}"
        );
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::write(dir.path().join("adapter_model.bin"), b"pickle").unwrap();
    assert!(load(dir.path()).contains("save the adapter again with PEFT"));
    assert!(
        save_adapter(&mut host(), dir.path(), "none")
            .unwrap_err()
            .to_string()
            .contains("there is no adapter `none`")
    );
}
