//! Gradients of checkpointed models: they equal those of the plain run bit for bit, with dropout, in fp32 and
//! under autocast, for every schedule. This is a test target of its own, as libtorch's generators belong to the
//! process and every checkpoint saves and sets their state.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Mutex;

use overdrive_precision::Precision;
use overdrive_transformer::{
    AttentionImplementation, CausalLm, CheckpointOptions, Execution, ExpertsConfig, Gpt2Config,
    InitOptions, LabelShift, LlamaConfig, LlamaFamily, ModelConfig, SavePolicy, Schedule,
};
use tch::{Device, Kind, Tensor};

/// Dropout draws from the generator of the process, so the tests run one at a time.
static GENERATOR: Mutex<()> = Mutex::new(());

fn llama() -> ModelConfig {
    LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 5,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 32,
        attention_dropout: 0.2,
        ..LlamaConfig::default()
    }
    .into()
}

/// A mixture of experts whose routers see noise, and whose loss balances them.
fn mixtral() -> ModelConfig {
    let defaults = LlamaConfig::of(LlamaFamily::Mixtral);
    LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 16,
        num_hidden_layers: 5,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        attention_dropout: 0.2,
        experts: defaults.experts.clone().map(|experts| ExpertsConfig {
            num_experts: 5,
            output_router_logits: true,
            router_aux_loss_coef: 0.1,
            router_jitter_noise: 0.3,
            ..experts
        }),
        ..defaults
    }
    .into()
}

fn gpt2() -> ModelConfig {
    Gpt2Config {
        vocab_size: 64,
        n_embd: 32,
        n_layer: 5,
        n_head: 4,
        n_positions: 32,
        ..Gpt2Config::default()
    }
    .into()
}

/// The loss and all gradients of one step from a fixed seed.
fn step(model: &CausalLm, precision: Precision) -> (f64, Vec<(String, Tensor)>) {
    tch::manual_seed(3);
    let ids = Tensor::randint(64, [2, 24], (Kind::Int64, Device::Cpu));
    let loss = {
        let _autocast = precision.autocast(Device::Cpu).unwrap();
        model.loss(&ids, &ids, LabelShift::HuggingFace).unwrap()
    };
    let mean = loss.mean().unwrap();
    mean.backward();
    let gradients = model
        .named_parameters()
        .into_iter()
        .map(|(name, mut parameter)| {
            let gradient = parameter.grad().copy();
            parameter.zero_grad();
            (name, gradient)
        })
        .collect();
    (mean.double_value(&[]), gradients)
}

#[test]
fn gradients_of_a_checkpointed_model_with_dropout_are_those_of_the_plain_one_bit_for_bit() {
    let _alone = GENERATOR.lock().unwrap();
    for config in [llama(), gpt2(), mixtral()] {
        let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
        model.set_requires_grad(true).unwrap();
        model.set_training(true).unwrap();
        for attention in AttentionImplementation::ALL {
            for (fused, precision) in [
                (true, Precision::Fp32),
                (false, Precision::Fp32),
                (true, Precision::Bf16),
                (false, Precision::Bf16),
                (true, Precision::Fp8),
            ] {
                let mut execution = Execution::default();
                execution.fused_kernels = fused;
                execution.attention = attention;
                model.set_execution(execution.clone());
                let (plain_loss, plain) = step(&model, precision);
                for (schedule, policy) in [
                    (Schedule::EveryBlock, SavePolicy::Nothing),
                    (Schedule::EveryNth(2), SavePolicy::Nothing),
                    (Schedule::SqrtSegments, SavePolicy::Nothing),
                    (Schedule::EveryBlock, SavePolicy::MatmulsAndAttention),
                ] {
                    let what =
                        format!("{attention} fused {fused} {precision} {schedule:?} {policy:?}");
                    execution.checkpointing = schedule;
                    execution.checkpoint_options = CheckpointOptions::keeping(policy);
                    model.set_execution(execution.clone());
                    let (loss, gradients) = step(&model, precision);
                    assert_eq!(loss, plain_loss, "{what}");
                    for ((name, gradient), (_, expected)) in gradients.iter().zip(&plain) {
                        assert_eq!(gradient, expected, "{what}: {name}");
                    }
                }
            }
        }
    }
}

#[test]
fn dropout_makes_a_difference_in_these_tests() {
    let _alone = GENERATOR.lock().unwrap();
    let mut model = CausalLm::new(&llama(), &InitOptions::default()).unwrap();
    model.set_requires_grad(true).unwrap();
    let without = step(&model, Precision::Fp32).0;
    model.set_training(true).unwrap();
    assert_ne!(step(&model, Precision::Fp32).0, without);
}

#[test]
fn the_noise_of_routers_applies_in_training_alone() {
    let _alone = GENERATOR.lock().unwrap();
    let ModelConfig::Llama(mut config) = mixtral() else {
        panic!("a Mixtral");
    };
    config.attention_dropout = 0.0;
    let mut losses = Vec::new();
    for (noise, training) in [(0.0, true), (0.3, false), (0.3, true)] {
        for experts in config.experts.iter_mut() {
            experts.router_jitter_noise = noise;
        }
        let config = config.clone().into();
        let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
        model.set_requires_grad(true).unwrap();
        model.set_training(training).unwrap();
        losses.push(step(&model, Precision::Fp32).0);
    }
    assert_eq!(losses[0], losses[1]);
    assert_ne!(losses[0], losses[2]);
}

#[test]
fn a_schedule_that_does_not_fit_the_model_is_an_error() {
    let _alone = GENERATOR.lock().unwrap();
    let mut model = CausalLm::new(&llama(), &InitOptions::default()).unwrap();
    let mut execution = Execution::default();
    execution.checkpointing = Schedule::Segments(9);
    model.set_execution(execution);
    let ids = Tensor::zeros([1, 4], (Kind::Int64, Device::Cpu));
    let error = model.loss(&ids, &ids, LabelShift::Shifted).unwrap_err();
    assert!(
        error.to_string().contains("`segments` is 9; it must be"),
        "{error}"
    );
}

#[test]
fn selective_checkpointing_saves_the_matmuls_and_the_attention_of_fused_blocks() {
    use overdrive_sys::dispatch_mode::{DispatchMode, OperatorCall, push_mode};
    use std::cell::Cell;
    use std::rc::Rc;

    /// Counts the calls by the names of this library's kernels.
    #[derive(Default)]
    struct Count(Cell<usize>);
    impl DispatchMode for Count {
        fn after(&self, call: &OperatorCall) -> overdrive_sys::CallbackResult<()> {
            if call.name().starts_with("overdrive::") {
                self.0.set(self.0.get() + 1);
            }
            Ok(())
        }
    }

    // Checkpoints restore the generator's state, also in the middle of another test that runs beside this one.
    let _alone = GENERATOR.lock().unwrap();
    let model = |policy| {
        let mut model = CausalLm::new(&llama(), &InitOptions::default()).unwrap();
        model.set_requires_grad(true).unwrap();
        let mut execution = Execution::default();
        execution.checkpointing = Schedule::EveryBlock;
        execution.checkpoint_options = CheckpointOptions::keeping(policy);
        model.set_execution(execution);
        model
    };
    let ids = Tensor::zeros([1, 8], (Kind::Int64, Device::Cpu));
    let ran = |policy| {
        let model = model(policy);
        let loss = model.loss(&ids, &ids, LabelShift::Shifted).unwrap().sum;
        let count = Rc::new(Count::default());
        let guard = push_mode(Rc::<Count>::clone(&count));
        loss.backward();
        drop(guard);
        count.0.get()
    };
    // Query-key-value, attention, output, gate-up; the last matmul of a block saves nothing itself.
    assert!(ran(SavePolicy::Nothing) >= 5 * 4);
    assert_eq!(ran(SavePolicy::MatmulsAndAttention), 0);
}
