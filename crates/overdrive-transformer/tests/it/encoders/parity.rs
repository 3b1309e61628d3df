use overdrive_attention::PackedLengths;
use overdrive_transformer::{
    AttentionImplementation, Encoder, EncoderHead, EncoderInput, Execution, LossOutput, Pooling,
    PoolingMode, Schedule,
};
use std::collections::HashMap;
use tch::{Device, Kind, Tensor};

use super::{BASES, CLASSIFIERS, MASKED, base, batch, classifier, masked, real};
use crate::common::{expected, fixture, max_difference, max_magnitude};

/// Every implementation.
fn executions() -> Vec<Execution> {
    let mut all = Vec::new();
    for choice in 0..6 {
        let mut execution = Execution::default();
        execution.fused_kernels = choice & 1 == 0;
        execution.attention = AttentionImplementation::ALL[choice / 2];
        all.push(execution);
    }
    all
}

fn check_hidden<H: EncoderHead>(case: &str, mut model: Encoder<H>) {
    let want = expected(case);
    for execution in executions() {
        model.set_execution(execution.clone());
        let got = model.hidden_states(batch(&want)).unwrap();
        // Hidden states of padding are zeros, so nothing is masked on this side.
        let difference = max_difference(&got, &real(&want, &want["hidden"]));
        assert!(difference < 1e-5, "{case} {execution:?}: {difference}");
        let mut whole = EncoderInput::new(&want["full_ids"]);
        whole.token_type_ids = want.get("token_type_ids");
        let got = model.hidden_states(whole).unwrap();
        let full = max_difference(&got, &want["full_hidden"]);
        assert!(full < 1e-5, "{case} {execution:?}: {full}");
        println!(
            "{case:22} {} hidden {difference:.1e} {full:.1e}",
            execution.attention
        );
    }
}

#[test]
fn hidden_states_equal_transformers_with_padding_on_both_sides_and_without() {
    MASKED
        .into_iter()
        .for_each(|case| check_hidden(case, masked(case)));
    CLASSIFIERS
        .into_iter()
        .for_each(|case| check_hidden(case, classifier(case)));
    BASES
        .into_iter()
        .for_each(|case| check_hidden(case, base(case)));
}

/// Checks the loss and every gradient, which is cleared.
fn check_loss<H: EncoderHead>(
    case: &str,
    model: &Encoder<H>,
    want: &HashMap<String, Tensor>,
    loss: LossOutput,
) {
    let mean = loss.mean().unwrap();
    let difference = max_difference(&mean, &want["loss"]);
    assert!(difference < 1e-5, "{case}: loss {difference}");
    mean.backward();
    check_gradients(case, model, want);
    println!("{case:22} loss {difference:.1e}");
}

fn check_gradients<H: EncoderHead>(case: &str, model: &Encoder<H>, want: &HashMap<String, Tensor>) {
    let mut worst = 0f64;
    for (name, mut parameter) in model.named_parameters() {
        let Some(gradient) = want.get(&format!("grad.{name}")) else {
            assert!(!parameter.grad().defined(), "{case}: {name} has a gradient");
            continue;
        };
        let scale = max_magnitude(gradient).max(1e-3);
        let relative = max_difference(&parameter.grad(), gradient) / scale;
        assert!(relative < 1e-4, "{case}: gradient of {name} {relative}");
        worst = worst.max(relative);
        parameter.zero_grad();
    }
    println!("{case:22} gradients {worst:.1e}");
}

/// The executions of a training step.
fn training_executions() -> [Execution; 3] {
    let mut plain = Execution::default();
    plain.fused_kernels = false;
    let mut checkpointed = Execution::default();
    checkpointed.checkpointing = Schedule::EveryBlock;
    [Execution::default(), plain, checkpointed]
}

#[test]
fn logits_loss_and_gradients_of_masked_tokens_equal_transformers() {
    for case in MASKED {
        let (mut model, want) = (masked(case), expected(case));
        let got = model.forward(batch(&want)).unwrap();
        let difference = max_difference(&got, &real(&want, &want["logits"]));
        assert!(difference < 1e-5, "{case}: logits {difference}");
        model.set_requires_grad(true).unwrap();
        for execution in training_executions() {
            model.set_execution(execution);
            let loss = model.loss(batch(&want), &want["labels"]).unwrap();
            let labelled = want["labels"].ne(-100).sum(Kind::Int64).int64_value(&[]);
            assert_eq!(loss.tokens().unwrap(), labelled, "{case}");
            check_loss(case, &model, &want, loss);
        }
    }
}

#[test]
fn logits_loss_and_gradients_of_classifiers_equal_transformers() {
    for case in CLASSIFIERS {
        let (mut model, want) = (classifier(case), expected(case));
        let got = model.forward(batch(&want)).unwrap();
        let difference = max_difference(&got, &want["logits"]);
        assert!(difference < 1e-5, "{case}: logits {difference}");
        model.set_requires_grad(true).unwrap();
        for execution in training_executions() {
            model.set_execution(execution);
            let loss = model.loss(batch(&want), &want["labels"]).unwrap();
            check_loss(case, &model, &want, loss);
        }
    }
}

#[test]
fn embeddings_and_their_gradients_equal_transformers() {
    for case in BASES {
        let (model, want) = (base(case), expected(case));
        let mean = Pooling::default();
        let got = model
            .embed(batch(&want), &mean.with_normalize(true))
            .unwrap();
        let difference = max_difference(&got, &want["mean"]);
        assert!(difference < 1e-5, "{case}: {difference}");
        let first = model
            .embed(batch(&want), &mean.with_mode(PoolingMode::Cls))
            .unwrap();
        // Row 2 begins with three columns of padding.
        for (row, column) in [(0, 0), (1, 0), (2, 3)] {
            let hidden = want["hidden"].get(row).get(column);
            assert!(
                max_difference(&first.get(row), &hidden) < 1e-5,
                "{case}: row {row}"
            );
        }
        match (
            model.pooler_output(batch(&want)).unwrap(),
            want.get("pooler_output"),
        ) {
            // transformers pools the first column, padding or not.
            (Some(got), Some(want)) => {
                assert!(max_difference(&got.narrow(0, 0, 2), &want.narrow(0, 0, 2)) < 1e-5);
            }
            (got, want) => assert!(got.is_none() && want.is_none(), "{case}"),
        }
        model.set_requires_grad(true).unwrap();
        let loss = model
            .embed(batch(&want), &mean)
            .unwrap()
            .square()
            .sum(Kind::Float);
        assert!(max_difference(&loss, &want["loss"]) < 1e-4, "{case}");
        loss.backward();
        check_gradients(case, &model, &want);
    }
}

#[test]
fn packed_sequences_give_the_results_of_rows() {
    for case in BASES {
        let (model, want) = (base(case), expected(case));
        let ids = &want["full_ids"];
        let parts = [
            ids.get(0),
            ids.get(1).narrow(0, 0, 5),
            ids.get(2).narrow(0, 0, 9),
        ];
        let packed = Tensor::cat(&parts, 0).unsqueeze(0);
        let lengths = PackedLengths::from_lengths(&[12, 5, 9], Device::Cpu).unwrap();
        let input = EncoderInput::new(&packed).with_sequences(&lengths);
        let hidden = model.hidden_states(input).unwrap();
        let pooled = model.embed(input, &Pooling::default()).unwrap();
        let mut start = 0;
        for (row, part) in parts.iter().enumerate() {
            let alone = part.unsqueeze(0);
            let alone = EncoderInput::new(&alone);
            let length = part.size()[0];
            let one = model.hidden_states(alone).unwrap();
            assert!(
                max_difference(&hidden.narrow(1, start, length), &one) < 1e-5,
                "{case}"
            );
            let one = model.embed(alone, &Pooling::default()).unwrap().get(0);
            assert!(
                max_difference(&pooled.get(row as i64), &one) < 1e-5,
                "{case}"
            );
            start += length;
        }
    }
}

#[test]
fn names_and_their_order_equal_those_of_transformers() {
    let ours = |case: &str, names: Vec<(String, Tensor)>| {
        let text = std::fs::read_to_string(fixture(case).join("names.json")).unwrap();
        let mut want: Vec<String> = serde_json::from_str(&text).unwrap();
        // An untied model of transformers has a second bias that no computation reads.
        want.retain(|name| case != "bert_mlm_untied" || name != "cls.predictions.bias");
        let mut got: Vec<String> = names.into_iter().map(|(name, _)| name).collect();
        if case.starts_with("xlm_") {
            // transformers has its head first; here the order is that of RoBERTa.
            want.sort();
            got.sort();
        }
        assert_eq!(got, want, "{case}");
    };
    MASKED
        .into_iter()
        .for_each(|case| ours(case, masked(case).named_parameters()));
    CLASSIFIERS
        .into_iter()
        .for_each(|case| ours(case, classifier(case).named_parameters()));
    BASES
        .into_iter()
        .for_each(|case| ours(case, base(case).named_parameters()));
}
