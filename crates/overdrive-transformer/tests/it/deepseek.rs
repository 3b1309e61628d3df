//! DeepSeek: latent attention and its cache, adapters over it, groups of experts; the tests of all families have its
//! fixtures, too.

use overdrive_kv_cache::{DynamicCache, KvCache};
use overdrive_lora::{AddOptions, LoraConfig, TargetModules, add_adapter, trainable_parameters};
use overdrive_nn::{AdapterHost, LinearWeight};
use overdrive_transformer::{
    CausalLm, ForwardInput, LabelShift, LoadOptions, ModelConfig, QuantizeOptions,
};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::common::{copy_of, edit_config, expected, fixture, load, max_difference};

fn logits(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids)).unwrap())
}

fn over_a_cache(model: &CausalLm, ids: &Tensor) -> (Tensor, DynamicCache) {
    let mut cache = DynamicCache::new(model.num_layers());
    let mut parts = Vec::new();
    for tokens in [5, 1, 4, 2] {
        let part = ids.narrow(1, cache.len(), tokens);
        let input = ForwardInput::new(&part).with_cache(&mut cache);
        parts.push(tch::no_grad(|| model.forward(input).unwrap()));
    }
    (Tensor::cat(&parts, 1), cache)
}

#[test]
fn a_cache_holds_one_latent_vector_a_token() {
    let (model, ids) = (load("deepseek_v3"), &expected("deepseek_v3")["input_ids"]);
    let config = model.config();
    assert_eq!(
        (config.num_key_value_heads(), config.head_dim()),
        (1, 16 + 8)
    );
    let (_, mut cache) = over_a_cache(&model, ids);
    let one = Tensor::zeros([2, 1, 1, 24], (Kind::Float, tch::Device::Cpu));
    let held = cache.append(0, &one, &one).unwrap();
    assert_eq!(held.keys.size(), [2, 1, 13, 24]);
}

/// With adapters, the keys and values that a cache stands for are expanded, and not multiplied into the queries.
#[test]
fn adapters_over_all_layers_are_trained_and_count_over_a_cache() {
    let nf4 = Some(QuantizeOptions::new("nf4".parse().unwrap()));
    for (case, quantization) in [
        ("deepseek_v2", None),
        ("deepseek_v2_groups", None),
        ("deepseek_v3", None),
        ("deepseek_v3", nf4),
    ] {
        let ids = &expected(case)["input_ids"];
        let options = LoadOptions {
            quantization,
            ..LoadOptions::default()
        };
        let mut model = CausalLm::from_pretrained(fixture(case), &options).unwrap();
        let config = LoraConfig {
            target_modules: Some(TargetModules::AllLinear),
            ..LoraConfig::default()
        };
        add_adapter(&mut model, "a", &config, &AddOptions::default()).unwrap();
        let loss = model.loss(ids, ids, LabelShift::HuggingFace).unwrap();
        loss.mean().unwrap().backward();
        let trainable = trainable_parameters(&mut model).unwrap();
        assert!(
            trainable.iter().any(|(name, _)| name.contains("kv_b_proj")),
            "{case}"
        );
        let before = logits(&model, ids);
        tch::no_grad(|| {
            for (_, mut tensor) in trainable.into_iter() {
                let step = tensor.grad() * -0.1;
                let _same = tensor.f_add_(&step).unwrap();
            }
        });
        let after = logits(&model, ids);
        assert!(max_difference(&before, &after) > 1e-2, "{case}");
        let (cached, _) = over_a_cache(&model, ids);
        let difference = max_difference(&cached, &after);
        assert!(difference < 1e-5, "{case}: {difference}");
    }
}

/// It multiplies queries as well, transposed, for which there is no quantized product.
#[test]
fn the_layer_that_expands_latent_vectors_stays_dense() {
    let load = LoadOptions {
        quantization: Some(QuantizeOptions::new("int8".parse().unwrap())),
        ..LoadOptions::default()
    };
    let mut model = CausalLm::from_pretrained(fixture("deepseek_v3"), &load).unwrap();
    model
        .visit_linears(&mut |name, linear| {
            let is_dense = matches!(linear.weight(), LinearWeight::Dense { .. });
            let kept = ["kv_b_proj", "mlp.gate", "lm_head"];
            assert_eq!(
                is_dense,
                kept.iter().any(|kept| name.ends_with(kept)),
                "{name}"
            );
            Ok(())
        })
        .unwrap();
}

/// The published files of DeepSeek-V3 have such a module, after the last layer.
#[test]
fn modules_that_predict_further_tokens_are_not_read() {
    let dir = copy_of("deepseek_v3");
    let layers = load("deepseek_v3").num_layers();
    let further = [layers, layers + 1].map(|layer| format!("model.layers.{layer}.enorm.weight"));
    let path = dir.path().join("model.safetensors");
    let mut tensors = Tensor::read_safetensors(&path).unwrap();
    tensors.extend(
        further
            .each_ref()
            .map(|name| (name.clone(), Tensor::from(1f32))),
    );
    Tensor::write_safetensors(&tensors, &path).unwrap();
    let load_with = |count: usize| {
        edit_config(dir.path(), |config| {
            config.insert("num_nextn_predict_layers".to_owned(), count.into());
        });
        CausalLm::from_pretrained(dir.path(), &LoadOptions::default())
    };
    let ids = &expected("deepseek_v3")["input_ids"];
    let model = load_with(2).unwrap();
    assert_eq!(logits(&model, ids), logits(&load("deepseek_v3"), ids));
    // A layer beyond their number is unexpected.
    let error = load_with(1).unwrap_err().to_string();
    assert!(
        error.contains(&further[1]) && !error.contains(&further[0]),
        "{error}"
    );
}

#[test]
fn configurations_that_cannot_be_computed_are_refused_by_their_keys() {
    let config = |family: &str, key: &str, value: Value| {
        let mut config = json!({
            "model_type": family, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
        });
        config[key] = value;
        ModelConfig::from_json(&config.to_string()).map_err(|error| error.to_string())
    };
    for (family, key, value, part) in [
        (
            "deepseek_v2",
            "topk_method",
            json!("noaux_tc"),
            "greedy, group_limited_greedy",
        ),
        (
            "deepseek_v2",
            "norm_topk_prob",
            json!(true),
            "false for deepseek_v2",
        ),
        (
            "deepseek_v3",
            "moe_layer_freq",
            json!(2),
            "`moe_layer_freq` is 2",
        ),
        (
            "deepseek_v3",
            "output_router_logits",
            json!(true),
            "no balancing loss",
        ),
        (
            "deepseek_v3",
            "n_group",
            json!(3),
            "a divisor of n_routed_experts (8)",
        ),
        (
            "deepseek_v3",
            "num_experts_per_tok",
            json!(5),
            "the experts of topk_group groups",
        ),
        ("deepseek_v3", "n_group", json!(8), "at most 4"),
        (
            "deepseek_v3",
            "num_key_value_heads",
            json!(2),
            "has no groups",
        ),
        ("deepseek_v3", "qk_rope_head_dim", json!(7), "even"),
        (
            "deepseek_v3",
            "kv_lora_rank",
            json!(0),
            "a positive integer",
        ),
        (
            "deepseek_v3",
            "n_shared_experts",
            json!(0),
            "a positive integer",
        ),
        (
            "deepseek_v3",
            "routed_scaling_factor",
            json!(0),
            "a positive number",
        ),
        (
            "deepseek_v3",
            "first_k_dense_replace",
            json!(-1),
            "at least 0",
        ),
        (
            "deepseek_v3",
            "mlp_bias",
            json!(true),
            "false for a mixture of experts",
        ),
    ] {
        let message = config(family, key, value).unwrap_err();
        assert!(message.contains(part), "{family} {key}: {message}");
    }
    for key in ["n_group", "topk_group", "q_lora_rank"] {
        config("deepseek_v2", key, Value::Null).unwrap();
    }
}
