//! Decoding on slices against the operators on tensors.

use std::cell::RefCell;
use std::rc::Rc;

use overdrive_kv_cache::{CacheImplementation, CacheShape, DynamicCache};
use overdrive_quantization::{GroupOptions, Scheme};
use overdrive_sys::CallbackResult;
use overdrive_sys::dispatch_mode::{DispatchMode, OperatorCall, push_mode};
use overdrive_transformer::{
    CausalLm, Execution, ExpertsConfig, ForwardInput, InitOptions, LlamaConfig, LlamaFamily,
    Logits, QuantizeOptions,
};
use tch::Tensor;

use crate::common::{max_difference, max_magnitude};

/// Returns a tiny model whose widths are no multiples of a vector of codes.
fn tiny(family: LlamaFamily) -> CausalLm {
    let config = LlamaConfig {
        vocab_size: 96,
        hidden_size: 96,
        intermediate_size: 160,
        num_hidden_layers: 3,
        no_rope_layer_interval: 2,
        residual_multiplier: 0.6,
        logits_scaling: 1.5,
        num_attention_heads: 6,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        max_position_embeddings: 64,
        initializer_range: 0.2,
        sliding_window: (family != LlamaFamily::Llama).then_some(5),
        partial_rotary_factor: match family {
            LlamaFamily::Phi | LlamaFamily::Phi3 | LlamaFamily::Glm4 => 0.75,
            _ => 1.0,
        },
        tie_word_embeddings: true,
        experts: LlamaConfig::of(family)
            .experts
            .map(|experts| ExpertsConfig {
                num_experts: 5,
                num_experts_per_tok: 2,
                moe_intermediate_size: 64,
                shared_expert_intermediate_size: experts
                    .shared_expert_intermediate_size
                    .map(|_| 96),
                ..experts
            }),
        ..LlamaConfig::of(family)
    };
    CausalLm::new(&config.into(), &InitOptions::default()).unwrap()
}

/// Returns the logits of a prompt, of steps of one token in two rows, and of three tokens at once; and the ids that
/// are the most likely.
fn run(
    model: &mut CausalLm,
    cache: CacheImplementation,
    fused: bool,
) -> (Vec<Tensor>, Vec<Tensor>) {
    let _no_grad = tch::no_grad_guard();
    let mut execution = Execution::default();
    execution.fused_decoding = fused;
    model.set_execution(execution);
    let mut cache = cache
        .build(&CacheShape {
            windows: model.layer_windows(),
            batch: 2,
            max_len: Some(40),
            kv_heads: 2,
            head_dim: 16,
            ..CacheShape::default()
        })
        .unwrap();
    let (mut logits, mut chosen) = (Vec::new(), Vec::new());
    let ids = Tensor::arange(40, (tch::Kind::Int64, tch::Device::Cpu)) * 7;
    let mut ids = ids.remainder(96).view([2, 20]);
    for step in 0..8 {
        let all = if step == 7 { Logits::All } else { Logits::Last };
        let input = ForwardInput::new(&ids)
            .with_cache(&mut *cache)
            .with_logits(all);
        let of_step = model.forward(input).unwrap();
        let next = of_step.argmax(-1, false);
        ids = match step {
            6 => next.repeat([1, 3]),
            _ => next.shallow_clone(),
        };
        logits.push(of_step);
        chosen.push(next);
    }
    (logits, chosen)
}

fn check(model: &mut CausalLm, what: &str) {
    for cache in CacheImplementation::ALL {
        let (expected, expected_ids) = run(model, cache, false);
        let (found, ids) = run(model, cache, true);
        for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // The same kernels in the same order; libtorch may sum in another order where it takes part. It does so
            // for the sum over experts, after which the 8 bits of an activation may be rounded the other way.
            let is_rounded = what.starts_with("Mixtral in");
            let relative = if is_rounded { 5e-3 } else { 1e-5 };
            let tolerance = relative * max_magnitude(expected).max(1.0);
            let difference = max_difference(found, expected);
            assert!(
                difference <= tolerance,
                "{what}, {cache:?}, step {step}: {difference}"
            );
        }
        assert_eq!(ids, expected_ids, "{what}, {cache:?}");
    }
}

#[test]
fn decoding_on_slices_equals_decoding_on_tensors_in_every_family_and_cache() {
    for family in [
        LlamaFamily::Llama,
        LlamaFamily::Mistral,
        LlamaFamily::Qwen2,
        LlamaFamily::Qwen3,
        // On tensors in both runs: a LayerNorm has no kernel on slices.
        LlamaFamily::Phi,
        LlamaFamily::Phi3,
        LlamaFamily::Gemma,
        LlamaFamily::Gemma2,
        LlamaFamily::Gemma3,
        LlamaFamily::Mixtral,
        LlamaFamily::Qwen3Moe,
        LlamaFamily::SmolLm3,
        LlamaFamily::Olmo2,
        LlamaFamily::Olmo3,
        LlamaFamily::Granite,
        // On tensors as well: neighbouring channels are rotated.
        LlamaFamily::GraniteMoeHybrid,
        LlamaFamily::Glm4,
        LlamaFamily::Qwen2Moe,
        LlamaFamily::GptOss,
    ] {
        check(&mut tiny(family), &format!("{family:?}"));
    }
}

#[test]
fn decoding_on_slices_equals_decoding_on_tensors_with_every_layout_of_weights() {
    let groups = |bits, symmetric| {
        Scheme::Grouped(GroupOptions {
            bits,
            group_size: 32,
            symmetric,
        })
    };
    let schemes = [
        groups(4, false),
        groups(4, true),
        groups(8, true),
        "nf4".parse().unwrap(),
        "int8".parse().unwrap(),
        "fp8".parse().unwrap(),
    ];
    for scheme in schemes {
        for family in [
            LlamaFamily::Llama,
            LlamaFamily::Gemma3,
            LlamaFamily::Mixtral,
        ] {
            let mut model = tiny(family);
            let options = QuantizeOptions::new(scheme).with_head(groups(8, true));
            model.quantize(&options).unwrap();
            check(&mut model, &format!("{family:?} in {scheme}"));
        }
    }
}

/// A mode that keeps the names of operators.
#[derive(Default)]
struct Names(RefCell<Vec<String>>);

impl DispatchMode for Names {
    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        self.0.borrow_mut().push(call.name().to_string());
        Ok(())
    }
}

#[test]
fn a_step_on_slices_makes_less_than_half_of_the_tensors() {
    let mut model = tiny(LlamaFamily::Llama);
    let options = QuantizeOptions::new("int4-g32".parse().unwrap());
    model.quantize(&options).unwrap();
    let mut calls = |fused: bool| {
        let _no_grad = tch::no_grad_guard();
        let mut execution = Execution::default();
        execution.fused_decoding = fused;
        model.set_execution(execution);
        let mut cache = DynamicCache::with_capacity(3, 16);
        let ids = Tensor::from_slice(&[5_i64]).view([1, 1]);
        let mut step = || {
            model
                .forward(ForwardInput::new(&ids).with_cache(&mut cache))
                .unwrap()
        };
        // The first step makes the tables of rotary positions.
        let _ = step();
        let names = Rc::new(Names::default());
        let guard = push_mode(names.clone());
        let _ = step();
        drop(guard);
        names.0.take()
    };
    let (separate, fused) = (calls(false), calls(true));
    let made = |names: &[String]| names.iter().filter(|name| *name == "aten::empty").count();
    assert!(
        2 * made(&fused) < made(&separate),
        "{fused:?} and {separate:?}"
    );
}
