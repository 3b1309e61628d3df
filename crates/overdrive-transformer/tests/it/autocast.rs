//! The decoders under autocast, against transformers' fp32 logits.

use crate::common::{CASES, expected, load, max_difference, max_magnitude, trained_parameters};
use overdrive_precision::autocast;
use overdrive_transformer::{Execution, ForwardInput, LabelShift};
use tch::{Device, Kind, Tensor};

#[test]
fn autocast_computes_matmuls_in_bf16_and_the_loss_and_gradients_in_fp32() {
    for case in CASES {
        let (mut model, want) = (load(case), expected(case));
        model.set_requires_grad(true).unwrap();
        // The scores of the last chosen expert and of the next one differ by 0.003 in these fixtures, less than a
        // rounding of bf16, so a token may go to another expert.
        let is_routed = case == "qwen3_next"
            || ["moe", "mixtral", "gpt_oss", "deepseek"]
                .iter()
                .any(|name| case.contains(name));
        // States gather the roundings of all tokens before; those of transformers differ by 0.08, its gradients by 0.22.
        let is_hybrid = case.contains("qwen3_next") || case.contains("qwen3_5");
        let (of_logits, of_loss) = match (is_routed, is_hybrid) {
            (true, _) => (0.5, 0.05),
            (false, true) => (0.2, 0.01),
            (false, false) => (0.1, 0.01),
        };
        // The norms of this fixture's queries have gradients of 0.001, sums of larger numbers that cancel; those of
        // transformers differ by 0.17 as well.
        let of_gradients = match case {
            "olmo2" => 0.3,
            // Those of transformers differ by 0.74 and 0.42: its norms of hidden states, values and inputs round in bf16,
            // and sparse gates are differences.
            "gemma3n" | "gemma4" => 0.75,
            _ if is_hybrid => 0.3,
            _ => 0.1,
        };
        for fused in [true, false] {
            let mut execution = Execution::default();
            execution.fused_kernels = fused;
            model.set_execution(execution);
            let (logits, loss) = {
                let _autocast = autocast(Device::Cpu, Kind::BFloat16).unwrap();
                let (ids, labels) = (&want["input_ids"], &want["labels"]);
                let logits = model.forward(ForwardInput::new(ids)).unwrap();
                let loss = model.loss(ids, labels, LabelShift::HuggingFace).unwrap();
                (logits, loss)
            };
            assert_eq!(
                (logits.kind(), loss.sum.kind()),
                (Kind::BFloat16, Kind::Float),
                "{case}"
            );
            // bf16 has 8 bits: some ten roundings of 2^-9 in a row of values up to 3.
            let difference = max_difference(&logits, &want["logits"]);
            println!("{case:16} {difference:.1e}");
            assert!(difference < of_logits, "{case}: {difference}");
            let mean = loss.mean().unwrap();
            assert!(max_difference(&mean, &want["loss"]) < of_loss, "{case}");
            mean.backward();
            let (mut of_difference, mut of_all) = (0.0, 0.0);
            for (name, mut parameter) in trained_parameters(&model) {
                let (gradient, want) = (parameter.grad(), &want[&format!("grad.{name}")]);
                assert_eq!(gradient.kind(), Kind::Float, "{case} {name}");
                let square = |tensor: &Tensor| tensor.square().sum(Kind::Double).double_value(&[]);
                of_difference += square(&(&gradient - want));
                of_all += square(want);
                // An expert without tokens has a gradient of zeros.
                let scale = max_magnitude(want).max(1e-6);
                let relative = max_difference(&gradient, want) / scale;
                assert!(
                    relative < of_gradients || is_routed,
                    "{case} {name}: {relative}"
                );
                parameter.zero_grad();
            }
            // Rounding sends some tokens to other experts, whose gradients differ wholly; few of all do.
            let relative = (of_difference / of_all).sqrt();
            println!("{case:16} gradients {relative:.2}");
            assert!(
                relative < if is_routed { 0.3 } else { of_gradients },
                "{case}: {relative}"
            );
        }
    }
}
