//! Mistakes are errors that name the tensor.

use overdrive_linear_attention::{
    Backend, CausalConv1dOptions, DeltaRuleInputs, DeltaRuleOptions, StateSlot, causal_conv1d,
    causal_conv1d_update, gated_delta_rule, gated_delta_rule_update, gated_delta_rule_varlen,
};
use tch::{Kind, Tensor};

use crate::common::{Owned, Shape, zeros};

const SHAPE: Shape = Shape {
    key_heads: 2,
    heads: 4,
    key_dim: 8,
    value_dim: 6,
};

fn message<T>(result: overdrive_linear_attention::Result<T>) -> String {
    match result {
        Ok(_) => panic!("it was accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_tensor_of_the_delta_rule_that_does_not_fit_is_an_error_with_its_name() {
    let owned = Owned::random(1, &[1, 5], SHAPE, Kind::Float);
    let good = owned.inputs();
    let options = DeltaRuleOptions::default();
    let with = |inputs: DeltaRuleInputs<'_>| message(gated_delta_rule(inputs, None, &options));
    let (narrow, integers) = (zeros(&[1, 5, 2, 7]), good.query.to_kind(Kind::Int64));
    let cases = [
        (
            with(DeltaRuleInputs {
                query: &narrow,
                ..good
            }),
            "`query` has shape [1, 5, 2, 7]; it must be the shape of `key` = [1, 5, 2, 8]",
        ),
        (
            with(DeltaRuleInputs {
                query: &integers,
                ..good
            }),
            "`query` is Int64; it must be Float, Double, Half or BFloat16; convert it with `to_kind`",
        ),
        (
            with(DeltaRuleInputs {
                key: good.decay,
                ..good
            }),
            "`key` has shape [1, 5, 4]; it must be (B, T, H_k, D_k)",
        ),
        (
            with(DeltaRuleInputs {
                value: &zeros(&[1, 4, 4, 6]),
                ..good
            }),
            "`value` has shape [1, 4, 4, 6]; it must be (B, T, H, D_v), with the tokens of `key` ([1, 5, 2, 8])",
        ),
        (
            with(DeltaRuleInputs {
                value: &zeros(&[1, 5, 3, 6]),
                ..good
            }),
            "`value` has shape [1, 5, 3, 6]; it must be (B, T, H, D_v) with H a multiple of the 2 heads of `key`",
        ),
        (
            with(DeltaRuleInputs {
                decay: &zeros(&[1, 5, 2]),
                ..good
            }),
            "`decay` has shape [1, 5, 2]; it must be (B, T, H) = [1, 5, 4]",
        ),
        (
            with(DeltaRuleInputs {
                beta: &zeros(&[1, 5]),
                ..good
            }),
            "`beta` has shape [1, 5]; it must be (B, T, H) = [1, 5, 4]",
        ),
        (
            message(gated_delta_rule(
                good,
                Some(&zeros(&[1, 4, 6, 8])),
                &options,
            )),
            "`state` has shape [1, 4, 6, 8]; it must be (B, H, D_k, D_v) = [1, 4, 8, 6]",
        ),
        (
            message(gated_delta_rule(
                good,
                Some(&zeros(&[1, 4, 8, 6]).to_kind(Kind::BFloat16)),
                &options,
            )),
            "`state` is BFloat16; it must be Float, the dtype of the arithmetic",
        ),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
}

#[test]
fn an_option_of_the_delta_rule_out_of_its_range_is_an_error() {
    let owned = Owned::random(1, &[1, 5], SHAPE, Kind::Float);
    let with =
        |options: DeltaRuleOptions| message(gated_delta_rule(owned.inputs(), None, &options));
    let default = DeltaRuleOptions::default();
    assert_eq!(
        with(DeltaRuleOptions {
            chunk_size: 0,
            ..default
        }),
        "`chunk_size` is 0; it must be at least 1"
    );
    assert_eq!(
        with(DeltaRuleOptions {
            scale: Some(f64::NAN),
            ..default
        }),
        "`scale` is NaN; it must be finite, or None for 1/sqrt(D_k)"
    );
}

#[test]
fn offsets_and_slots_that_do_not_fit_are_errors_and_leave_the_states() {
    let owned = Owned::random(1, &[5], SHAPE, Kind::Float);
    let options = DeltaRuleOptions::default();
    let before = Tensor::ones([3, 4, 8, 6], (Kind::Float, tch::Device::Cpu));
    let mut states = before.copy();
    for (offsets, expected) in [
        (
            &[][..],
            "`offsets`: it is empty; pass 0, then the end of each sequence",
        ),
        (
            &[1, 5],
            "`offsets`: it begins with 1; it must begin with 0, the first row",
        ),
        (
            &[0, 3, 2, 5],
            "`offsets`: it falls from 3 to 2 at index 2; offsets are cumulative",
        ),
        (
            &[0, 4],
            "`offsets`: it ends with 4; it must end with 5, the number of rows",
        ),
    ] {
        let varlen = gated_delta_rule_varlen(owned.inputs(), offsets, &options);
        assert_eq!(message(varlen), expected);
        let slots = vec![0; offsets.len().saturating_sub(1)];
        let update =
            gated_delta_rule_update(owned.inputs(), &mut states, &slots, offsets, &options);
        assert_eq!(message(update), expected);
    }
    for (slots, expected) in [
        (
            &[0][..],
            "`slots`: it has 1 rows of the pool; it must have 2, one for each sequence of `offsets`",
        ),
        (
            &[0, 3],
            "`slots`: it has row 3; rows must be in 0..3, the rows of `states`",
        ),
        (
            &[-1, 1],
            "`slots`: it has row -1; rows must be in 0..3, the rows of `states`",
        ),
        (
            &[2, 2],
            "`slots`: it has row 2 twice; each sequence needs a row of its own",
        ),
    ] {
        let update =
            gated_delta_rule_update(owned.inputs(), &mut states, slots, &[0, 2, 5], &options);
        assert_eq!(message(update), expected);
    }
    let crossed = [
        StateSlot::from(0),
        StateSlot {
            from: Some(0),
            to: 1,
        },
    ];
    let update =
        gated_delta_rule_update(owned.inputs(), &mut states, &crossed, &[0, 2, 5], &options);
    assert_eq!(
        message(update),
        "`slots`: row 0 is read for one sequence and written for another; write another row"
    );
    assert!(states.equal(&before));
}

#[test]
fn a_tensor_of_the_convolution_that_does_not_fit_is_an_error_with_its_name() {
    let (x, weight) = (zeros(&[1, 5, 6]), zeros(&[6, 4]));
    let options = CausalConv1dOptions::default();
    let with = |x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, state: Option<&Tensor>| {
        message(causal_conv1d(x, weight, bias, state, &options))
    };
    let cases = [
        (
            with(&zeros(&[5, 6]), &weight, None, None),
            "`x` has shape [5, 6]; it must be (B, T, C)",
        ),
        (
            with(&x, &zeros(&[6, 1, 4]), None, None),
            "`weight` has shape [6, 1, 4]; it must be (C, K) with C = 6, the channels of `x`, and K at least 1; squeeze a weight (C, 1, K)",
        ),
        (
            with(&x, &weight, Some(&zeros(&[4])), None),
            "`bias` has shape [4]; it must be (C,) = [6]",
        ),
        (
            with(&x, &weight, None, Some(&zeros(&[1, 6, 4]))),
            "`state` has shape [1, 6, 4]; it must be (B, C, K - 1) = [1, 6, 3]",
        ),
        (
            with(
                &x.to_kind(Kind::Half),
                &weight,
                None,
                Some(&zeros(&[1, 6, 3])),
            ),
            "`state` is Float; it must be Half, as `x` is: it holds inputs",
        ),
        (
            with(&x.to_kind(Kind::Int), &weight, None, None),
            "`x` is Int; it must be Float, Double, Half or BFloat16; convert it with `to_kind`",
        ),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
    let mut states = zeros(&[2, 6, 3]);
    let x = x.squeeze();
    let refused = causal_conv1d_update(&x, &weight, None, &mut states, &[2], &[0, 5], &options);
    assert_eq!(
        message(refused),
        "`slots`: it has row 2; rows must be in 0..2, the rows of `states`"
    );
}

#[test]
fn sequences_without_tokens_have_results_without_elements() {
    for backend in [Backend::Auto, Backend::Math] {
        let owned = Owned::random(1, &[2, 0], SHAPE, Kind::Float);
        let options = DeltaRuleOptions {
            backend,
            ..DeltaRuleOptions::default()
        };
        let before = Tensor::ones([2, 4, 8, 6], (Kind::Float, tch::Device::Cpu));
        let (output, state) = gated_delta_rule(owned.inputs(), Some(&before), &options).unwrap();
        assert_eq!(output.size(), [2, 0, 4, 6]);
        assert!(state.equal(&before));
        let (_, state) = gated_delta_rule(owned.inputs(), None, &options).unwrap();
        assert!(state.equal(&before.zeros_like()));

        let options = CausalConv1dOptions {
            backend,
            ..CausalConv1dOptions::default()
        };
        let before = Tensor::ones([2, 6, 3], (Kind::Float, tch::Device::Cpu));
        let (x, weight) = (zeros(&[2, 0, 6]), zeros(&[6, 4]));
        let (y, state) = causal_conv1d(&x, &weight, None, Some(&before), &options).unwrap();
        assert_eq!(y.size(), [2, 0, 6]);
        assert!(state.equal(&before));
    }
}
