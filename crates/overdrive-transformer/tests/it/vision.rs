//! Qwen3-VL, dense and with experts (`fixtures/gen_vision.py`): the vision tower, the positions of images, whole models with
//! images, and what is refused.

use std::collections::BTreeSet;

use overdrive_kv_cache::CacheImplementation;
use overdrive_safetensors::MappedFile;
use overdrive_transformer::{
    CausalLm, CheckpointOptions, Error, Execution, ForwardInput, ImageFeatures, ImageTokens,
    InitOptions, LabelShift, LlamaConfig, LlamaFamily, LoadOptions, Logits, ModelConfig,
    QuantizeOptions, Schedule,
};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use crate::common::{copy_of, dynamic_cache, edit_config, expected, fixture, load, max_difference};

const CASE: &str = "qwen3_vl";
/// Dense, and with experts.
const CASES: [&str; 2] = [CASE, "qwen3_vl_moe"];
const GRIDS: [[i64; 2]; 3] = [[4, 6], [2, 8], [4, 4]];

/// Returns the image tokens of the rows of `ids (B, T)`, for the columns `from..to`.
fn images_of(ids: &Tensor, features: &ImageFeatures, [from, to]: [i64; 2]) -> Option<ImageTokens> {
    let (mut indices, mut rows, mut seen) = (Vec::new(), Vec::new(), 0);
    let size = ids.size();
    for row in 0..size[0] {
        for column in 0..size[1] {
            if ids.int64_value(&[row, column]) == 120 {
                if (from..to).contains(&column) {
                    indices.push(row * (to - from) + column - from);
                    rows.push(seen);
                }
                seen += 1;
            }
        }
    }
    (!rows.is_empty()).then(|| ImageTokens {
        indices: Tensor::from_slice(&indices),
        features: features.select(&Tensor::from_slice(&rows)).unwrap(),
    })
}

fn positions_of(model: &CausalLm, ids: &Tensor, grids: &[[i64; 2]]) -> (Tensor, i64) {
    let tokens = Vec::<i64>::try_from(ids.flatten(0, -1)).unwrap();
    let found = model
        .config()
        .vision()
        .unwrap()
        .positions(&tokens, grids)
        .unwrap();
    (found.to_tensor(model.device()).unwrap(), found.delta)
}

#[test]
fn the_tower_gives_the_image_tokens_of_transformers() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        for fused in [true, false] {
            let mut execution = Execution::default();
            execution.fused_kernels = fused;
            model.set_execution(execution);
            let found = model.encode_images(&want["pixels"], &GRIDS).unwrap();
            let difference = max_difference(&found.embeddings, &want["embeddings"]);
            assert!(difference < 1e-5, "{difference}");
            assert_eq!(found.deepstack.len(), 2);
            for (index, values) in found.deepstack.iter().enumerate() {
                let difference = max_difference(values, &want[&format!("deepstack.{index}")]);
                assert!(difference < 1e-5, "{index}: {difference}");
            }
        }
    }
}

#[test]
fn positions_of_images_are_those_of_transformers() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let padding = 24
            - want["attention_mask"]
                .select(0, 1)
                .sum(Kind::Int64)
                .int64_value(&[]);
        for (row, from, grids) in [(0, 0, &GRIDS[..2]), (1, padding, &GRIDS[2..])] {
            let ids = want["input_ids"].select(0, row).narrow(0, from, 24 - from);
            let (positions, delta) = positions_of(&model, &ids, grids);
            let wanted = want["position_ids"]
                .select(1, row)
                .narrow(1, from, 24 - from);
            assert_eq!(positions.squeeze_dim(1), wanted);
            assert_eq!(delta, want["deltas"].int64_value(&[row, 0]));
        }
    }
}

#[test]
fn logits_of_two_prompts_with_images_equal_those_of_transformers() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        let ids = &want["input_ids"];
        for fused in [true, false] {
            let mut execution = Execution::default();
            execution.fused_kernels = fused;
            model.set_execution(execution);
            let _no_grad = tch::no_grad_guard();
            let features = model.encode_images(&want["pixels"], &GRIDS).unwrap();
            let images = images_of(ids, &features, [0, 24]).unwrap();
            let input = ForwardInput::new(ids)
                .with_attention_mask(&want["attention_mask"])
                .with_position_ids(&want["position_ids"])
                .with_images(&images);
            let mask = want["attention_mask"].unsqueeze(-1);
            let found = model.forward(input).unwrap() * &mask;
            let difference = max_difference(&found, &(&want["logits"] * &mask));
            assert!(difference < 1e-5, "{difference}");
        }
    }
}

#[test]
fn chunks_of_a_prompt_with_images_over_each_cache_give_the_tokens_of_transformers() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let _no_grad = tch::no_grad_guard();
        let features = model.encode_images(&want["pixels"], &GRIDS).unwrap();
        let ids = want["input_ids"].narrow(0, 0, 1);
        let (positions, delta) = positions_of(&model, &ids, &GRIDS[..2]);
        let wanted = want["greedy"].narrow(0, 0, 1);
        for kind in [CacheImplementation::Dynamic, CacheImplementation::Static] {
            for chunk in [24, 7, 1] {
                let mut shape = model.cache_shape();
                shape.max_len = Some(40);
                let mut cache = kind.build(&shape).unwrap();
                let mut next = 0;
                for from in (0..24).step_by(chunk) {
                    let to = (from + chunk as i64).min(24);
                    let part = ids.narrow(1, from, to - from);
                    let places = positions.narrow(2, from, to - from);
                    let images = images_of(&ids, &features, [from, to]);
                    let mut input = ForwardInput::new(&part)
                        .with_position_ids(&places)
                        .with_logits(Logits::Last)
                        .with_cache(cache.as_mut());
                    input.images = images.as_ref();
                    next = model
                        .forward(input)
                        .unwrap()
                        .argmax(-1, false)
                        .int64_value(&[0, 0]);
                }
                for column in 24..36 {
                    assert_eq!(
                        next,
                        wanted.int64_value(&[0, column]),
                        "{kind} {chunk} {column}"
                    );
                    let token = Tensor::from_slice(&[next]).view([1, 1]);
                    let place = Tensor::from_slice(&[column + delta]).view([1, 1]);
                    let input = ForwardInput::new(&token)
                        .with_position_ids(&place)
                        .with_cache(cache.as_mut());
                    next = model
                        .forward(input)
                        .unwrap()
                        .argmax(-1, false)
                        .int64_value(&[0, 0]);
                }
            }
        }
    }
}

#[test]
fn gradients_of_the_tower_and_of_the_text_equal_those_of_transformers() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        model.set_requires_grad(true).unwrap();
        let ids = want["input_ids"].narrow(0, 0, 1);
        let (positions, _) = positions_of(&model, &ids, &GRIDS[..2]);
        for schedule in [Schedule::Never, Schedule::EveryBlock] {
            let mut execution = Execution::default();
            execution.checkpointing = schedule;
            execution.checkpoint_options = CheckpointOptions::default();
            model.set_execution(execution);
            let pixels = want["pixels"].narrow(0, 0, 40);
            let features = model.encode_images(&pixels, &GRIDS[..2]).unwrap();
            let images = images_of(&ids, &features, [0, 24]).unwrap();
            let input = ForwardInput::new(&ids)
                .with_position_ids(&positions)
                .with_images(&images);
            let loss = model
                .loss_of(input, &want["labels"], LabelShift::HuggingFace)
                .unwrap();
            let loss = loss.mean().unwrap();
            assert!(max_difference(&loss, &want["loss"]) < 1e-5);
            loss.backward();
            for (name, mut parameter) in model.named_parameters() {
                let wanted = &want[&format!("grad.{name}")];
                let scale = wanted.abs().max().double_value(&[]).max(1e-6);
                let relative = max_difference(&parameter.grad(), wanted) / scale;
                assert!(relative < 1e-4, "{name}: {relative}");
                parameter.zero_grad();
            }
        }
    }
}

#[test]
fn a_prompt_without_images_gives_the_logits_of_transformers_over_each_cache() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let _no_grad = tch::no_grad_guard();
        let ids = &want["text_ids"];
        let whole = model.forward(ForwardInput::new(ids)).unwrap();
        let mut cache = dynamic_cache(&model);
        let parts = [(0, 7), (7, 1), (8, 4)].map(|(from, tokens)| {
            let part = ids.narrow(1, from, tokens);
            let input = ForwardInput::new(&part).with_cache(cache.as_mut());
            model.forward(input).unwrap()
        });
        for found in [whole, Tensor::cat(&parts, 1)] {
            let difference = max_difference(&found, &want["text_logits"]);
            assert!(difference < 1e-5, "{difference}");
        }
    }
}

#[test]
fn a_saved_folder_has_the_names_and_keys_of_transformers() {
    for case in CASES {
        let model = load(case);
        let folder = tempfile::tempdir().unwrap();
        model
            .save_pretrained(folder.path(), &Default::default())
            .unwrap();
        let read = |path: &std::path::Path| -> Value {
            serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
        };
        let (new, old) = (
            read(&folder.path().join("config.json")),
            read(&fixture(case).join("config.json")),
        );
        assert_eq!(new["vision_config"], old["vision_config"]);
        for key in [
            "model_type",
            "architectures",
            "image_token_id",
            "tie_word_embeddings",
        ] {
            assert_eq!(new[key], old[key], "{key}");
        }
        let scaling = &new["text_config"]["rope_scaling"];
        assert_eq!(*scaling, old["text_config"]["rope_parameters"]);
        let again = CausalLm::from_pretrained(folder.path(), &Default::default()).unwrap();
        let names: BTreeSet<String> =
            serde_json::from_value(read(&fixture(case).join("names.json"))).unwrap();
        let own = model.named_parameters();
        assert_eq!(
            own.iter()
                .map(|(name, _)| name.clone())
                .collect::<BTreeSet<_>>(),
            names
        );
        for ((name, tensor), (other, loaded)) in own.iter().zip(again.named_parameters()) {
            assert_eq!((name, tensor), (&other, &loaded));
        }
        assert_eq!(again.config(), model.config());
    }
}

#[test]
fn quantization_leaves_the_tower_as_it_is() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        model
            .quantize(&QuantizeOptions::new("int8".parse().unwrap()))
            .unwrap();
        assert!(model.is_quantized());
        let found = model.encode_images(&want["pixels"], &GRIDS).unwrap();
        assert!(max_difference(&found.embeddings, &want["embeddings"]) < 1e-5);
        // The folder has the quantized layers beside the dense tower.
        let folder = tempfile::tempdir().unwrap();
        model
            .save_pretrained(folder.path(), &Default::default())
            .unwrap();
        let again = CausalLm::from_pretrained(folder.path(), &Default::default()).unwrap();
        assert!(again.is_quantized());
        let logits =
            |model: &CausalLm| model.forward(ForwardInput::new(&want["text_ids"])).unwrap();
        assert_eq!(logits(&again), logits(&model));
    }
}

#[test]
fn a_new_model_has_the_parameters_of_its_configuration() {
    let mut config = LlamaConfig {
        vocab_size: 128,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        ..LlamaConfig::of(LlamaFamily::Qwen3Vl)
    };
    let vision = config.vision.as_mut().unwrap();
    (
        vision.hidden_size,
        vision.num_heads,
        vision.intermediate_size,
    ) = (24, 2, 32);
    (vision.depth, vision.out_hidden_size) = (2, 32);
    (vision.patch_size, vision.num_position_embeddings) = (4, 16);
    vision.deepstack_visual_indexes = vec![1];
    vision.mrope_section = [4, 2, 2];
    let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    let pixels = Tensor::zeros([8, 96], (Kind::Float, model.device()));
    let tokens = model.encode_images(&pixels, &[[2, 4]]).unwrap();
    assert_eq!(tokens.embeddings.size(), [2, 32]);
}

#[test]
fn keys_that_all_models_of_transformers_have_change_nothing_in_the_tower() {
    let folder = copy_of(CASE);
    edit_config(folder.path(), |config| {
        let tower = config["vision_config"].as_object_mut().unwrap();
        // As transformers 4 writes a configuration inside another one.
        tower.insert("return_dict".to_owned(), true.into());
        tower.insert("chunk_size_feed_forward".to_owned(), 0.into());
        tower.insert("id2label".to_owned(), json!({"0": "LABEL_0"}));
    });
    let [own, other] = [fixture(CASE), folder.path().to_owned()]
        .map(|folder| ModelConfig::from_dir(folder).unwrap());
    assert_eq!(own, other);
}

#[test]
fn options_of_the_tower_that_cannot_be_computed_are_refused_by_key() {
    for (edit, key) in [
        (
            json!({"vision_config": {"hidden_size": 20}}),
            "vision_config.hidden_size",
        ),
        (
            json!({"vision_config": {"out_hidden_size": 16}}),
            "vision_config.out_hidden_size",
        ),
        (
            json!({"vision_config": {"num_position_embeddings": 24}}),
            "num_position_embeddings",
        ),
        (
            json!({"vision_config": {"patch_size": 2_147_483_647, "in_channels": 2_147_483_647}}),
            "the sizes of vision_config",
        ),
        (
            json!({"vision_config": {"rope_parameters": {"rope_theta": -1.0}}}),
            "rope_theta",
        ),
        (
            json!({"vision_config": {"deepstack_visual_indexes": [2, 1]}}),
            "deepstack_visual_indexes",
        ),
        (
            json!({"vision_config": {"rope_parameters": {"rope_type": "linear"}}}),
            "rope_type",
        ),
        (
            json!({"text_config": {"rope_parameters": {"mrope_section": [4, 2, 1]}}}),
            "mrope_section",
        ),
        (
            json!({"text_config": {"rope_parameters": {"mrope_interleaved": false}}}),
            "mrope_interleaved",
        ),
        (
            json!({"text_config": {"model_type": "qwen3"}}),
            "text_config.model_type",
        ),
    ] {
        let folder = copy_of(CASE);
        edit_config(folder.path(), |config| {
            for (object, changes) in edit.as_object().unwrap() {
                for (key, value) in changes.as_object().unwrap() {
                    match (key.as_str(), value) {
                        ("rope_parameters", Value::Object(all)) => {
                            let own = config[object][key].as_object_mut().unwrap();
                            own.extend(all.clone());
                        }
                        _ => config[object][key] = value.clone(),
                    }
                }
            }
        });
        let error = ModelConfig::from_dir(folder.path())
            .unwrap_err()
            .to_string();
        assert!(error.contains(key), "{key}: {error}");
    }
}

#[test]
fn images_that_do_not_fit_are_refused() {
    let (model, want) = (load(CASE), expected(CASE));
    let refused = |grids: &[[i64; 2]]| model.encode_images(&want["pixels"], grids).unwrap_err();
    assert!(refused(&[[4, 6]]).to_string().contains("pixels"));
    assert!(
        refused(&[[3, 6]])
            .to_string()
            .contains("spatial_merge_size")
    );
    let vision = model.config().vision().unwrap();
    for grids in [&GRIDS[..1], &GRIDS[..], &[[4, 6], [2, 12]]] {
        let tokens = Vec::<i64>::try_from(want["input_ids"].select(0, 0)).unwrap();
        let error = vision.positions(&tokens, grids).unwrap_err().to_string();
        assert!(error.contains("image tokens in a prompt"), "{error}");
    }
    let text = load("qwen3");
    let features = model.encode_images(&want["pixels"], &GRIDS).unwrap();
    let images = images_of(&want["input_ids"], &features, [0, 24]).unwrap();
    let input = ForwardInput::new(&want["input_ids"]).with_images(&images);
    assert!(matches!(text.forward(input), Err(Error::NoVision)));
    assert!(matches!(
        text.encode_images(&want["pixels"], &GRIDS),
        Err(Error::NoVision)
    ));
}

#[test]
fn experts_in_the_order_in_which_transformers_saves_them_are_read() {
    let folder = copy_of("qwen3_vl_moe");
    let path = folder.path().join("model.safetensors");
    let file = MappedFile::open(&path).unwrap();
    let tensors = file.tensors().into_iter().map(|stored| {
        let tensor = stored.copy_to_tensor(None, Device::Cpu).unwrap();
        match stored.name().contains(".mlp.experts.") {
            true => (
                stored.name().to_owned(),
                tensor.transpose(1, 2).contiguous(),
            ),
            false => (stored.name().to_owned(), tensor),
        }
    });
    let tensors: Vec<(String, Tensor)> = tensors.collect();
    drop(file);
    overdrive_safetensors::write(&path, &tensors, &Default::default()).unwrap();
    let read = CausalLm::from_pretrained(folder.path(), &Default::default()).unwrap();
    let wanted = load("qwen3_vl_moe");
    let parameters = wanted.named_parameters();
    assert_eq!(read.named_parameters().len(), parameters.len());
    for ((name, wanted), (_, found)) in parameters.iter().zip(read.named_parameters()) {
        assert!(found.equal(wanted), "{name}");
    }
    let quantized = LoadOptions {
        quantization: Some(QuantizeOptions::new("int8".parse().unwrap())),
        ..LoadOptions::default()
    };
    let [read, wanted] = [folder.path(), &fixture("qwen3_vl_moe")].map(|folder| {
        let model = CausalLm::from_pretrained(folder, &quantized).unwrap();
        let ids = Tensor::from_slice(&[1_i64, 2, 3]).view([1, 3]);
        tch::no_grad(|| model.forward(ForwardInput::new(&ids)).unwrap())
    });
    assert!(read.equal(&wanted));
}
