//! Mixtures of experts: the balancing loss, adapters, configurations, and the counts of parameters.

use std::sync::Arc;

use overdrive_lora::{
    AddOptions, InitLoraWeights, LoadAdapterOptions, LoraConfig, TargetModules, add_adapter,
    delete_adapter, load_adapter, save_adapter, set_adapter, trainable_parameters,
};
use overdrive_nn::{AdapterRows, RowChoice};
use overdrive_transformer::{
    CausalLm, ExpertsConfig, ForwardInput, InitOptions, LabelShift, LlamaConfig, LlamaFamily,
    LoadOptions, ModelConfig,
};
use tch::Tensor;

use crate::common::{copy_of, edit_config, expected, fixture, generator, load, max_difference};

const CASES: [&str; 5] = [
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_step",
    "qwen2_moe",
    "gpt_oss",
];

/// As in `parity.rs`.
const TOLERANCE: f64 = 1e-5;

#[test]
fn the_balancing_loss_equals_that_of_transformers_with_and_without_padding() {
    for case in CASES {
        let want = expected(case);
        let dir = copy_of(case);
        edit_config(dir.path(), |config| {
            config.insert("output_router_logits".to_owned(), true.into());
        });
        let model = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let shift = LabelShift::HuggingFace;
        let plain = model
            .loss(&want["input_ids"], &want["labels"], shift)
            .unwrap();
        let aux_loss = plain.aux_loss.as_ref().unwrap();
        assert!(
            max_difference(aux_loss, &want["aux_loss"]) < TOLERANCE,
            "{case}"
        );
        let input = ForwardInput::new(&want["input_ids"])
            .with_attention_mask(&want["attention_mask"])
            .with_position_ids(&want["position_ids"]);
        let padded = model.loss_of(input, &want["padded_labels"], shift).unwrap();
        let aux_loss = padded.aux_loss.as_ref().unwrap();
        let difference = max_difference(aux_loss, &want["padded_aux_loss"]);
        assert!(difference < TOLERANCE, "{case}: {difference}");
        // The term is a part of the loss only where the configuration has it; the last case was made without.
        if case != "qwen3_moe_step" {
            let difference = max_difference(&padded.mean().unwrap(), &want["padded_loss"]);
            assert!(difference < TOLERANCE, "{case}: {difference}");
        }
        edit_config(dir.path(), |config| {
            config.insert("output_router_logits".to_owned(), false.into());
        });
        let without = CausalLm::from_pretrained(dir.path(), &LoadOptions::default()).unwrap();
        let without = without
            .loss(&want["input_ids"], &want["labels"], shift)
            .unwrap();
        assert!(without.aux_loss.is_none(), "{case}");
        assert!(
            without.mean().unwrap().double_value(&[]) < plain.mean().unwrap().double_value(&[])
        );
    }
}

fn logits(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids)).unwrap())
}

#[test]
fn experts_take_adapters_under_their_names_on_disk() {
    let _generator = generator();
    for (case, names, layers) in [
        // 2 layers of 4 experts, and the output projections of attention.
        ("mixtral", vec!["w1", "w2", "o_proj"], 2 * 4 * 2 + 2),
        // 2 layers of 12 experts, and a dense one.
        (
            "qwen3_moe",
            vec!["gate_proj", "up_proj", "down_proj"],
            3 * (2 * 12 + 1),
        ),
        // 2 layers of 4 experts.
        ("gpt_oss", vec!["gate_up_proj", "down_proj"], 2 * 4 * 2),
        // 3 layers of 6 experts and a block beside them.
        (
            "gemma4_moe",
            vec!["gate_up_proj", "down_proj"],
            3 * (6 * 2 + 1),
        ),
    ] {
        let want = expected(case);
        let ids = &want["input_ids"];
        let mut model = load(case);
        model
            .quantize(&overdrive_transformer::QuantizeOptions::new(
                "nf4".parse().unwrap(),
            ))
            .unwrap();
        let before = logits(&model, ids);
        let config = LoraConfig {
            r: 2,
            target_modules: Some(TargetModules::names(names)),
            task_type: Some("CAUSAL_LM".to_owned()),
            ..LoraConfig::default()
        };
        let added = add_adapter(&mut model, "a", &config, &AddOptions::default()).unwrap();
        assert_eq!(added.len(), layers, "{case}: {added:?}");
        let trained = trainable_parameters(&mut model).unwrap();
        assert_eq!(trained.len(), 2 * layers, "{case}");
        model.set_training(true).unwrap();
        let loss = model
            .loss(ids, &want["labels"], LabelShift::HuggingFace)
            .unwrap();
        loss.mean().unwrap().backward();
        for (name, parameter) in &trained {
            // Those of experts without tokens, too.
            assert!(parameter.grad().defined(), "{case}: {name}");
            tch::no_grad(|| {
                let _same = parameter.shallow_clone().f_add_scalar_(0.05).unwrap();
            });
        }
        model.set_training(false).unwrap();
        let changed = logits(&model, ids);
        assert!(max_difference(&changed, &before) > 1e-3, "{case}");
        let dir = tempfile::tempdir().unwrap();
        save_adapter(&mut model, dir.path(), "a").unwrap();
        delete_adapter(&mut model, "a").unwrap();
        assert_eq!(logits(&model, ids), before, "{case}");
        load_adapter(&mut model, dir.path(), "b", &LoadAdapterOptions::default()).unwrap();
        assert_eq!(logits(&model, ids), changed, "{case}");
    }
}

#[test]
fn each_row_has_its_adapter_of_the_experts_and_the_router() {
    for case in ["qwen3_moe", "gpt_oss"] {
        let mut model = load(case);
        let ids = expected(case)["input_ids"].narrow(0, 0, 1);
        let parts = match case {
            "gpt_oss" => vec!["gate_up_proj", "down_proj", "q_proj", "router"],
            _ => vec!["gate_proj", "up_proj", "down_proj", "q_proj", "gate"],
        };
        for (index, name) in ["a", "b"].into_iter().enumerate() {
            let config = LoraConfig {
                r: 2 + index as i64,
                target_modules: Some(TargetModules::names(parts.clone())),
                init_lora_weights: InitLoraWeights::Random,
                ..LoraConfig::default()
            };
            let options = AddOptions {
                seed: index as u64,
                ..AddOptions::default()
            };
            add_adapter(&mut model, name, &config, &options).unwrap();
        }
        let mut alone = Vec::new();
        for active in [&["a"][..], &[], &["b"]] {
            set_adapter(&mut model, active).unwrap();
            alone.push(logits(&model, &ids));
        }
        assert!(max_difference(&alone[0], &alone[2]) > 1e-3, "{case}");
        set_adapter(&mut model, &[]).unwrap();
        let rows = |name: Option<&str>| (ids.numel(), name.map(Arc::from));
        let each = [rows(Some("a")), rows(None), rows(Some("b"))];
        // The adapters by numbers on the device, as a captured step has them.
        let numbers = [0i64, 2, 1].map(|adapter| Tensor::full_like(&ids.view([-1]), adapter));
        let names: Vec<Arc<str>> = vec!["a".into(), "b".into()];
        let choice = RowChoice::new(names, &Tensor::cat(&numbers, 0)).unwrap();
        for rows in [AdapterRows::new(each.clone()), choice.into()] {
            let _scope = rows.scope();
            let together = logits(&model, &ids.repeat([3, 1]));
            for (row, alone) in alone.iter().enumerate() {
                let apart = max_difference(&together.narrow(0, row as i64, 1), alone);
                assert!(apart < TOLERANCE, "{case}, row {row}: {apart}");
            }
        }
    }
}

#[test]
fn all_linear_selects_what_peft_gives_an_adapter() {
    let has = |case: &str, targets: Option<&[&str]>| {
        let config = LoraConfig {
            target_modules: Some(TargetModules::AllLinear),
            target_parameters: targets.map(|names| names.iter().map(ToString::to_string).collect()),
            ..LoraConfig::default()
        };
        let added = add_adapter(&mut load(case), "a", &config, &AddOptions::default()).unwrap();
        // A bar is after each name.
        move |part: &str| {
            added
                .iter()
                .filter(|name| format!("{name}|").contains(part))
                .count()
        }
    };
    // Both were linear layers before version 5 of transformers, and PEFT converts their adapters, but takes the names of the
    // dense layer for those of experts.
    let layers = has("qwen3_moe", None);
    assert_eq!((layers(".mlp.gate|"), layers(".experts.")), (2, 2 * 12 * 3));
    assert_eq!((layers("q_proj"), layers(".mlp.down_proj")), (3, 0));
    let layers = has("deepseek_v3", None);
    assert!(layers(".mlp.gate|") > 0 && layers(".experts.") > 0);
    assert_eq!(layers(".shared_experts."), 0);
    // Nothing converts those of Qwen2-MoE.
    let layers = has("qwen2_moe", None);
    assert_eq!((layers(".mlp.gate|"), layers(".experts.")), (0, 0));
    assert!(layers(".shared_expert.down_proj") > 0 && layers("shared_expert_gate") > 0);
    let layers = has("gpt_oss", None);
    assert_eq!(
        (layers("q_proj"), layers(".router"), layers(".experts.")),
        (2, 0, 0)
    );
    let layers = has("gpt_oss", Some(&["1.mlp.experts.down_proj"]));
    assert_eq!(
        (layers("q_proj"), layers(".router"), layers(".experts.")),
        (2, 0, 4)
    );
    // A router with a linear layer inside.
    let layers = has("gemma4_moe", None);
    assert_eq!((layers(".router.proj"), layers(".experts.")), (3, 0));
}

#[test]
fn wrong_keys_of_experts_are_named() {
    let refused = |case: &str, key: &str, value: serde_json::Value| {
        let dir = copy_of(case);
        edit_config(dir.path(), |config| {
            config.insert(key.to_owned(), value);
        });
        let error = CausalLm::from_pretrained(dir.path(), &LoadOptions::default());
        error.unwrap_err().to_string()
    };
    for (case, key, value, expected) in [
        (
            "mixtral",
            "num_experts_per_tok",
            5.into(),
            "`num_experts_per_tok` is 5; it must be at most num_local_experts (4)",
        ),
        (
            "mixtral",
            "num_local_experts",
            0.into(),
            "`num_local_experts` is 0; it must be a positive integer",
        ),
        (
            "mixtral",
            "num_local_experts",
            1_000_000_000.into(),
            "`num_local_experts` is 1000000000; it must be at most 65536 for 2 layers",
        ),
        (
            "mixtral",
            "router_jitter_noise",
            1.0.into(),
            "`router_jitter_noise` is 1.0; it must be at least 0 and below 1",
        ),
        (
            "qwen3_moe",
            "mlp_only_layers",
            serde_json::json!([3]),
            "`mlp_only_layers` is 3; it must be a list of indices in 0..3, those of the layers",
        ),
        (
            "qwen3_moe",
            "mlp_only_layers",
            "none".into(),
            "`mlp_only_layers` is \"none\"; it must be a list of indices of layers",
        ),
        (
            "qwen3_moe",
            "router_aux_loss_coef",
            (-1.0).into(),
            "`router_aux_loss_coef` is -1.0; it must be 0 or positive",
        ),
        (
            "gpt_oss",
            "swiglu_limit",
            0.0.into(),
            "`swiglu_limit` is 0.0; it must be positive",
        ),
        (
            "gpt_oss",
            "num_experts_per_tok",
            5.into(),
            "`num_experts_per_tok` is 5; it must be at most num_local_experts (4)",
        ),
        (
            "qwen3_moe",
            "mlp_bias",
            true.into(),
            "`mlp_bias` is true; it must be false for a mixture of experts",
        ),
    ] {
        assert_eq!(refused(case, key, value), expected);
    }
    // Another number than the file has: the tensors are named.
    let message = refused("mixtral", "num_local_experts", 5.into());
    assert!(
        message.contains("6 missing: model.layers.0.block_sparse_moe.experts.4.w1.weight, ")
            && message.contains("experts.4.w3.weight and 3 more; 2 of another shape: "),
        "{message}"
    );
    let config = LlamaConfig {
        family: LlamaFamily::Mixtral,
        ..LlamaConfig::default()
    };
    let error = CausalLm::new(&config.into(), &InitOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`experts` is \"missing\"; it must be set for the family mixtral; start from `LlamaConfig::of`"
    );
}

#[test]
fn active_parameters_are_those_of_the_chosen_experts() {
    let model = load("mixtral");
    let expert = 3 * 32 * 48;
    assert_eq!(
        model.num_parameters() - model.num_active_parameters(),
        2 * (4 - 2) * expert
    );
    let name = "base_model.model.model.layers.0.block_sparse_moe.experts.3.w1.lora_A.weight";
    assert_eq!(model.active_share(name), 0.5);
    assert_eq!(
        model.active_share("model.layers.0.self_attn.q_proj.weight"),
        1.0
    );
    let model = load("gemma4_moe");
    assert_eq!(
        model.num_parameters() - model.num_active_parameters(),
        3 * (6 - 2) * 3 * 32 * 16
    );
    let dense = load("mistral");
    assert_eq!(dense.num_active_parameters(), dense.num_parameters());
    // Mixtral-8x7B: 46.7 billion parameters, of which 12.9 compute a token, as its model card says.
    let config = LlamaConfig::of(LlamaFamily::Mixtral);
    let numbers = ModelConfig::from(config.clone()).parameters();
    let all: i64 = numbers
        .iter()
        .map(overdrive_transformer::ParameterSpec::numel)
        .sum();
    assert_eq!(all, 46_702_792_704);
    let experts: Option<ExpertsConfig> = config.experts;
    assert_eq!(experts.map(|experts| experts.num_experts), Some(8));
}

#[test]
fn both_keys_of_the_number_of_experts_are_read() {
    let model = load("qwen3_moe");
    // transformers 5 writes `num_local_experts`; the hub has `num_experts`.
    let text = std::fs::read_to_string(fixture("qwen3_moe").join("config.json")).unwrap();
    assert!(text.contains("num_local_experts"), "{text}");
    let renamed = text.replace("num_local_experts", "num_experts");
    assert_eq!(&ModelConfig::from_json(&renamed).unwrap(), model.config());
    assert_eq!(model.config().to_json()["num_experts"], 12);
}

#[test]
fn options_of_deepseek_are_refused_in_other_mixtures() {
    let set = |key: &str, experts: &mut ExpertsConfig| match key {
        "n_shared_experts" => experts.n_shared_experts = 1,
        "first_k_dense_replace" => experts.first_k_dense_replace = 1,
        "n_group" => experts.n_group = Some(2),
        "topk_group" => experts.topk_group = Some(2),
        "group_limited" => experts.group_limited = true,
        _ => experts.routed_scaling_factor = 2.5,
    };
    let keys = [
        "n_shared_experts",
        "first_k_dense_replace",
        "n_group",
        "topk_group",
        "group_limited",
        "routed_scaling_factor",
    ];
    for family in [LlamaFamily::Qwen3Moe, LlamaFamily::Mixtral] {
        let mut config = LlamaConfig::of(family);
        assert!(ModelConfig::from(config.clone()).validate().is_ok());
        for key in keys {
            let experts = config
                .experts
                .insert(LlamaConfig::of(family).experts.unwrap());
            set(key, experts);
            let refused = ModelConfig::from(config.clone()).validate();
            let message = refused.unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{key}` is")), "{message}");
        }
    }
}
