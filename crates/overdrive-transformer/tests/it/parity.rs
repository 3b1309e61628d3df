//! Against transformers: logits, loss, gradients, padding and cached steps, on the random checkpoints
//! that `fixtures/gen_checkpoints.py` makes. Tolerances and their reasons are in its docstring.

use crate::common::{
    CASES, expected, fixture, load, max_difference, max_magnitude, trained_parameters,
};
use overdrive_kv_cache::CacheImplementation;
use overdrive_transformer::{
    AttentionImplementation, Execution, ForwardInput, LabelShift, LoadOptions, Logits,
};
use tch::{Kind, Tensor};

#[test]
fn logits_equal_transformers_on_every_architecture() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let got = model
            .forward(ForwardInput::new(&want["input_ids"]))
            .unwrap();
        let difference = max_difference(&got, &want["logits"]);
        println!(
            "{case:18} logits {difference:.1e} of {:.1}",
            max_magnitude(&got)
        );
        assert!(difference < 1e-5, "{case}: {difference}");
    }
}

#[test]
fn every_execution_gives_the_same_logits() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        for choice in 0..6 {
            let mut execution = Execution::default();
            execution.fused_kernels = choice & 1 != 0;
            execution.attention = AttentionImplementation::ALL[choice / 2];
            model.set_execution(execution.clone());
            let got = model
                .forward(ForwardInput::new(&want["input_ids"]))
                .unwrap();
            let difference = max_difference(&got, &want["logits"]);
            assert!(difference < 1e-5, "{case} {execution:?}: {difference}");
        }
    }
}

#[test]
fn loss_and_gradients_equal_transformers_on_every_architecture() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        model.set_requires_grad(true).unwrap();
        for fused in [true, false] {
            let mut execution = Execution::default();
            execution.fused_kernels = fused;
            model.set_execution(execution);
            let loss = model
                .loss(&want["input_ids"], &want["labels"], LabelShift::HuggingFace)
                .unwrap();
            // 12 labels a row: the first is never used, then 3 and 1 are ignored.
            assert_eq!(loss.tokens().unwrap(), 2 * 11 - 3 - 1, "{case}");
            let mean = loss.mean().unwrap();
            let difference = max_difference(&mean, &want["loss"]);
            assert!(difference < 1e-5, "{case}: loss {difference}");
            mean.backward();
            let mut worst = 0f64;
            for (name, mut parameter) in trained_parameters(&model) {
                let gradient = &want[&format!("grad.{name}")];
                // That of an expert without tokens is zero.
                let magnitude = max_magnitude(gradient).max(f64::MIN_POSITIVE);
                let relative = max_difference(&parameter.grad(), gradient) / magnitude;
                assert!(relative < 1e-4, "{case}: gradient of {name} {relative}");
                worst = worst.max(relative);
                parameter.zero_grad();
            }
            println!("{case:18} fused {fused}: loss {difference:.1e} gradients {worst:.1e}");
        }
    }
}

#[test]
fn names_and_their_order_equal_those_of_transformers() {
    for case in CASES {
        let text = std::fs::read_to_string(fixture(case).join("names.json")).unwrap();
        let want: Vec<String> = serde_json::from_str(&text).unwrap();
        let got: Vec<String> = load(case)
            .named_parameters()
            .into_iter()
            .map(|(n, _)| n)
            .collect();
        assert_eq!(got, want, "{case}");
    }
}

#[test]
fn a_batch_padded_on_the_left_equals_transformers_where_there_are_tokens() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let got = model
            .forward(
                ForwardInput::new(&want["input_ids"])
                    .with_attention_mask(&want["attention_mask"])
                    .with_position_ids(&want["position_ids"]),
            )
            .unwrap();
        let real = want["attention_mask"].to_kind(Kind::Float).unsqueeze(-1);
        let got = got.where_self(&real.eq(1), &Tensor::zeros_like(&got));
        let difference = max_difference(&got, &(&want["padded_logits"] * &real));
        assert!(difference < 1e-5, "{case}: {difference}");
    }
}

#[test]
fn steps_over_a_cache_equal_one_forward_pass() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let ids = &want["input_ids"];
        // A prefill, a longer chunk, then token by token.
        for chunks in [
            vec![12],
            vec![1; 12],
            vec![5, 4, 1, 1, 1],
            vec![1, 11],
            vec![7, 5],
        ] {
            let mut shape = model.cache_shape();
            shape.max_len = Some(2);
            let mut cache = CacheImplementation::Dynamic.build(&shape).unwrap();
            let mut parts = Vec::new();
            for tokens in chunks {
                let part = ids.narrow(1, cache.len(), tokens);
                let input = ForwardInput::new(&part).with_cache(cache.as_mut());
                parts.push(model.forward(input).unwrap());
            }
            let difference = max_difference(&Tensor::cat(&parts, 1), &want["logits"]);
            assert!(difference < 1e-5, "{case}: {difference}");
        }
    }
}

#[test]
fn the_last_logits_are_the_last_of_all_logits() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let input = ForwardInput::new(&want["input_ids"]).with_logits(Logits::Last);
        let last = model.forward(input).unwrap();
        assert_eq!(last.size(), [2, 1, 128]);
        assert!(
            max_difference(&last, &want["logits"].narrow(1, 11, 1)) < 1e-5,
            "{case}"
        );
    }
}

#[test]
fn shifted_labels_give_the_same_loss_as_labels_that_are_shifted_here() {
    let (model, want) = (load("llama_gqa"), expected("llama_gqa"));
    let (ids, labels) = (&want["input_ids"], &want["labels"]);
    let shifted = Tensor::cat(
        &[labels.narrow(1, 1, 11), labels.narrow(1, 0, 1).fill(-100)],
        1,
    );
    let one = model.loss(ids, labels, LabelShift::HuggingFace).unwrap();
    let two = model.loss(ids, &shifted, LabelShift::Shifted).unwrap();
    assert_eq!(one.tokens().unwrap(), two.tokens().unwrap());
    assert_eq!(one.sum, two.sum);
    let none = model
        .loss(ids, &labels.full_like(-100), LabelShift::Shifted)
        .unwrap();
    assert_eq!(
        (
            none.tokens().unwrap(),
            none.mean().unwrap().double_value(&[])
        ),
        (0, 0.0)
    );
}

#[test]
fn low_precision_checkpoints_stay_near_fp32() {
    // bf16 keeps 8 bits, fp16 11: 2^-8 and 2^-11 a rounding, over some thirty roundings in a row. A rounded score chooses
    // another expert for a token now and then, as in transformers, so the bound is that of all logits together.
    for (kind, bound) in [(Kind::BFloat16, 0.1), (Kind::Half, 0.05)] {
        for case in CASES {
            let want = expected(case);
            let options = LoadOptions {
                kind: Some(kind),
                ..LoadOptions::default()
            };
            let model =
                overdrive_transformer::CausalLm::from_pretrained(fixture(case), &options).unwrap();
            assert_eq!(model.kind(), kind);
            let got = model
                .forward(ForwardInput::new(&want["input_ids"]))
                .unwrap();
            assert_eq!(got.kind(), kind);
            let norm = |tensor: &Tensor| tensor.norm().double_value(&[]);
            let difference = norm(&(got.to_kind(Kind::Float) - &want["logits"]));
            let relative = difference / norm(&want["logits"]);
            println!("{case:18} {kind:?} {relative:.1e}");
            assert!(relative < bound, "{case} {kind:?}: {relative}");
        }
    }
}
