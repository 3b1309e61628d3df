//! Batches in every form, in every family: padding on either side, sequences packed in one row, positions that do not
//! start at 0, a batch over a cache, and recomputed blocks.
//!
//! Tolerance: 1e-5 for logits, which are sums of up to 128 terms in fp32 in another order; 1e-4 of the largest element of a
//! gradient.

use overdrive_attention::PackedLengths;
use overdrive_kv_cache::CacheImplementation;
use overdrive_transformer::{CausalLm, Execution, ForwardInput, LabelShift, Schedule};
use tch::{Device, Kind, Tensor};

use crate::common::{CASES, expected, load, max_difference, max_magnitude, trained_parameters};

fn alone(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids)).unwrap())
}

/// Returns `logits (1, T, V)` of the tokens from `from` to `to`.
fn between(logits: &Tensor, from: i64, to: i64) -> Tensor {
    logits.narrow(1, from, to - from)
}

#[test]
fn sequences_packed_in_one_row_equal_each_alone() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let row = want["input_ids"].reshape([1, 24]);
        let lengths = PackedLengths::from_lengths(&[7, 1, 16], Device::Cpu).unwrap();
        let input = ForwardInput::new(&row).with_sequences(&lengths);
        let packed = tch::no_grad(|| model.forward(input).unwrap());
        for [from, to] in [[0, 7], [7, 8], [8, 24]] {
            let own = alone(&model, &row.narrow(1, from, to - from));
            let difference = max_difference(&between(&packed, from, to), &own);
            assert!(difference < 1e-5, "{case} {from}: {difference}");
        }
    }
}

#[test]
fn a_batch_padded_on_the_right_equals_each_row_alone() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let ids = &want["input_ids"];
        let mask = Tensor::ones([2, 12], (Kind::Int64, Device::Cpu));
        let _same = mask.get(0).narrow(0, 5, 7).fill_(0);
        let input = ForwardInput::new(ids).with_attention_mask(&mask);
        let got = tch::no_grad(|| model.forward(input).unwrap());
        for (row, length) in [(0, 5), (1, 12)] {
            let own = alone(&model, &ids.narrow(0, row, 1).narrow(1, 0, length));
            let difference = max_difference(&got.narrow(0, row, 1).narrow(1, 0, length), &own);
            assert!(difference < 1e-5, "{case} row {row}: {difference}");
        }
    }
}

#[test]
fn a_batch_padded_on_the_left_continues_over_a_cache_as_each_row_alone() {
    for case in CASES {
        let (model, want) = (load(case), expected(case));
        let (ids, mask) = (&want["input_ids"], &want["attention_mask"]);
        let positions = &want["position_ids"];
        let padding = 12 - mask.get(0).sum(Kind::Int64).int64_value(&[]);
        assert!((1..8).contains(&padding));
        let mut cache = CacheImplementation::Dynamic
            .build(&model.cache_shape())
            .unwrap();
        let mut parts = Vec::new();
        for tokens in [8, 1, 3] {
            let from = cache.len();
            let part = ids.narrow(1, from, tokens);
            let (seen, at) = (
                mask.narrow(1, 0, from + tokens),
                positions.narrow(1, from, tokens),
            );
            let input = ForwardInput::new(&part)
                .with_attention_mask(&seen)
                .with_position_ids(&at)
                .with_cache(cache.as_mut());
            parts.push(tch::no_grad(|| model.forward(input).unwrap()));
        }
        let got = Tensor::cat(&parts, 1);
        for (row, from) in [(0, padding), (1, 0)] {
            let own = alone(&model, &ids.narrow(0, row, 1).narrow(1, from, 12 - from));
            let got = between(&got.narrow(0, row, 1), from, 12);
            let difference = max_difference(&got, &own);
            assert!(difference < 1e-5, "{case} row {row}: {difference}");
        }
    }
}

#[test]
fn recomputed_blocks_change_no_gradient() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        model.set_requires_grad(true).unwrap();
        let mut gradients = |checkpointing: Schedule| -> Vec<(String, Tensor)> {
            let mut execution = Execution::default();
            execution.checkpointing = checkpointing;
            model.set_execution(execution);
            let loss = model.loss(&want["input_ids"], &want["labels"], LabelShift::HuggingFace);
            loss.unwrap().mean().unwrap().backward();
            let take = |(name, mut parameter): (String, Tensor)| {
                let gradient = parameter.grad().copy();
                parameter.zero_grad();
                (name, gradient)
            };
            trained_parameters(&model).into_iter().map(take).collect()
        };
        let plain = gradients(Schedule::Never);
        for ((name, one), (_, other)) in plain.iter().zip(gradients(Schedule::EveryBlock)) {
            let relative = max_difference(one, &other) / max_magnitude(one).max(1e-6);
            assert!(relative < 1e-4, "{case} {name}: {relative}");
        }
    }
}
