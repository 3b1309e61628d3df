//! The groups of decayed parameters, and the adapter for tch's optimizers.

use overdrive_optim::{
    ClipOptions, DecayRule, Ema, EmaConfig, Optimizer, ParamGroup, Sgd, SgdConfig, TchOptimizer,
    decay_groups, grad_norm,
};
use tch::nn::{self, OptimizerConfig};
use tch::{Device, Kind, Tensor};

#[test]
fn biases_and_norms_are_not_decayed_and_embeddings_by_choice() {
    let (rule, exempting) = (DecayRule::default(), DecayRule::without_embeddings());
    for name in [
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "shared.weight",
        "model.shared.weight",
    ] {
        assert!(rule.decays(name, 2), "{name}");
        assert!(!exempting.decays(name, 2), "{name}");
    }
    for (name, dim) in [
        ("model.layers.0.self_attn.q_proj.weight", 2),
        ("lm_head.weight", 2),
        ("h.0.attn.c_attn.weight", 2),
        ("layers.0.mlp.shared_expert.up_proj.weight", 2),
    ] {
        assert!(rule.decays(name, dim), "{name}");
        assert!(exempting.decays(name, dim), "{name}");
    }
    for (name, dim) in [
        ("model.layers.0.self_attn.q_proj.bias", 1),
        ("model.layers.0.input_layernorm.weight", 1),
        ("model.layers.0.self_attn.q_norm.weight", 1),
        ("transformer.ln_f.weight", 1),
        ("anything", 1),
        ("experts.bias", 2),
    ] {
        assert!(!rule.decays(name, dim), "{name}");
    }
    assert!(DecayRule::by_dimension().decays("experts.bias", 2));
}

#[test]
fn muon_gets_neither_embeddings_nor_heads_of_any_architecture() {
    let matrices = [
        "decoder.block.0.layer.0.SelfAttention.q.weight",
        "layers.0.mlp.shared_expert.up_proj.weight",
    ];
    let others = [
        "classifier.weight",
        "cls.predictions.decoder.weight",
        "decoder.weight",
        "lm_head.decoder.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.shared.weight",
        "score.weight",
        "shared.weight",
    ];
    let weight = || Tensor::zeros([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let all = matrices.into_iter().chain(others);
    let named = all.map(|name| (name.to_owned(), weight()));
    let groups = DecayRule::default().groups_with_muon(named, 0.1);
    let names = |group: &ParamGroup| {
        let names = group.parameters.iter().map(|(name, _)| name.clone());
        (group.name.clone(), names.collect::<Vec<_>>())
    };
    let found: Vec<_> = groups.iter().map(names).collect();
    let expected = [("muon", &matrices[..]), ("decay", &others[..])];
    let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    let expected = expected.map(|(group, names)| (group.to_owned(), owned(names)));
    assert_eq!(found, expected);
}

#[test]
fn frozen_parameters_and_empty_groups_are_left_out() {
    let weight =
        |trainable| Tensor::zeros([2, 2], (Kind::Float, Device::Cpu)).set_requires_grad(trainable);
    let groups = decay_groups(
        [
            ("a.weight".into(), weight(true)),
            ("b.weight".into(), weight(false)),
        ],
        0.1,
    );
    assert_eq!(groups.len(), 1);
    assert_eq!(groups[0].name, "decay");
    assert_eq!(groups[0].parameters.len(), 1);
}

#[test]
fn tch_optimizers_follow_the_trait() {
    let store = nn::VarStore::new(Device::Cpu);
    let weight = store.root().ones("weight", &[2]);
    let inner = nn::Sgd::default().build(&store, 1.0).unwrap();
    let mut optimizer = TchOptimizer::new(inner, 0.25).unwrap();
    assert_eq!(optimizer.learning_rates(), [0.25]);
    weight.sum(Kind::Float).backward();
    optimizer.step().unwrap();
    assert_eq!(Vec::<f32>::try_from(&weight).unwrap(), [0.75, 0.75]);
    optimizer.zero_grad().unwrap();
    assert!(!weight.grad().defined());
    optimizer.set_learning_rate(0.5).unwrap();
    weight.sum(Kind::Float).backward();
    optimizer.step().unwrap();
    assert_eq!(Vec::<f32>::try_from(&weight).unwrap(), [0.25, 0.25]);
    assert!(optimizer.set_learning_rates(&[0.1, 0.2]).is_err());
    let error = optimizer.state_dict().unwrap_err().to_string();
    assert!(error.contains("use overdrive_optim::AdamW"), "{error}");
}

#[test]
fn every_optimizer_has_its_own_id() {
    let store = nn::VarStore::new(Device::Cpu);
    let _weight = store.root().ones("weight", &[2]);
    let make = || TchOptimizer::new(nn::Sgd::default().build(&store, 1.0).unwrap(), 0.1).unwrap();
    let (first, second) = (make(), make());
    assert_ne!(first.id(), second.id());
    assert_eq!(first.id(), first.id());
}

#[test]
fn the_order_in_which_parameters_are_listed_changes_no_bit_of_their_norm() {
    // As `VarStore::variables` lists them: in another order in each process.
    let named = |order: &[i64]| {
        let tensor = |&number: &i64| {
            let values = Tensor::arange(37, (Kind::Float, Device::Cpu)) * 0.37 + number * number;
            let weight = Tensor::zeros([37], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            (&weight * values.sin()).sum(Kind::Float).backward();
            (format!("layer{number}.weight"), weight)
        };
        order.iter().map(tensor).collect::<Vec<_>>()
    };
    let norm = |order: &[i64]| {
        let optimizer = Sgd::new(decay_groups(named(order), 0.1), SgdConfig::default()).unwrap();
        let norm = grad_norm(&optimizer.parameters(), ClipOptions::default()).unwrap();
        norm.double_value(&[]).to_bits()
    };
    let sorted: Vec<i64> = (0..9).collect();
    for order in [[8, 7, 6, 5, 4, 3, 2, 1, 0], [3, 1, 4, 8, 5, 2, 6, 0, 7]] {
        assert_eq!(norm(&order), norm(&sorted));
    }
    let group = ParamGroup::new("all", named(&[2, 0, 1]));
    let names: Vec<&str> = group
        .parameters
        .iter()
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(names, ["layer0.weight", "layer1.weight", "layer2.weight"]);
}

#[test]
fn parameters_without_memory_of_their_own_are_refused() {
    let row = || Tensor::zeros([1, 3], (Kind::Float, Device::Cpu));
    for (parameter, problem) in [
        (row().expand([4, 3], false), "expanded"),
        (row().to_sparse_sparse_dim(2), "not dense"),
        (Tensor::new(), "undefined"),
    ] {
        let named = || vec![("weight".to_owned(), parameter.shallow_clone())];
        let group = ParamGroup::new("all", named());
        let of_optimizer = Sgd::new(vec![group], SgdConfig::default()).map(drop);
        let of_average = Ema::new(named(), EmaConfig::default()).map(drop);
        for refused in [of_optimizer, of_average] {
            let error = refused.unwrap_err().to_string();
            assert!(
                error.starts_with(&format!("parameter `weight` is {problem}")),
                "{error}"
            );
        }
    }
    // A dimension of one element has any stride, here 0.
    let one = row().narrow(1, 0, 1).expand([1, 1], false);
    let group = ParamGroup::new("all", vec![("weight".to_owned(), one)]);
    Sgd::new(vec![group], SgdConfig::default()).unwrap();
}
