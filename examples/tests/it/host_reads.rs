//! The host waits for the device only where a line of the log is due.

use overdrive::accumulation::{GradientAccumulator, Window};
use overdrive::datasets::{RowLayout, TokenizedExample, collate};
use overdrive::distributed::ProcessGroup;
use overdrive::precision::Precision;
use overdrive::profiling::HostReads;
use overdrive::trainer::{ModelArguments, OptimizerName, TrainingArguments};
use overdrive::transformer::{CausalLm, InitOptions, ModelConfig};
use overdrive_examples::training::{StepTotals, batch_loss, shared};
use tch::Device;

use crate::alone;

/// Returns the operators by which the third step of the loop of `train` reads tensors.
fn reads(arguments: &TrainingArguments, precision: Precision, layout: RowLayout) -> Vec<String> {
    let group = ProcessGroup::single();
    let json = arguments.model.to_hugging_face(64, 32);
    let config = ModelConfig::try_from(json).unwrap();
    let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
    model.set_requires_grad(true).unwrap();
    model.set_execution(arguments.execution());
    model.set_training(true).unwrap();
    let plan = arguments.plan(100).unwrap();
    let parameters = model.named_parameters();
    let ddp = arguments
        .data_parallel(&group, shared(&parameters))
        .unwrap();
    let mut accumulator = GradientAccumulator::with_sync(arguments.accumulation(), &ddp).unwrap();
    let mut optimizer = arguments
        .new_optimizer(&group, shared(&parameters))
        .unwrap();
    let mut scheduler = arguments.new_scheduler(&plan, &mut optimizer).unwrap();
    let mut ema = arguments.new_ema(shared(&parameters)).unwrap();
    let mut scaler = precision.new_scaler().unwrap();
    let rows = [7, 12, 12, 5].map(|length| {
        // Half of the labels are ignored, so that the loss leaves rows out.
        let tokens = (0..length).map(|token| token % 64).collect::<Vec<i64>>();
        let mut row = TokenizedExample::from(tokens);
        row.labels[..4].fill(-100);
        row
    });
    let mut found = Vec::new();
    for step in 0..3 {
        let window = [0..2, 2..4].map(|range| collate(&rows[range], layout).unwrap());
        // From the third step on, states and caches exist.
        let counted = (step == 2).then(|| HostReads::of(Device::Cpu));
        let counts = window.iter().map(|batch| batch.label_count as u64);
        accumulator.open(Window::new(counts)).unwrap();
        for batch in &window {
            let loss = precision
                .autocast(Device::Cpu, || batch_loss(&model, batch))
                .unwrap()
                .unwrap();
            let labels = batch.label_count as u64;
            accumulator
                .backward(&loss.sum, labels, scaler.as_mut())
                .unwrap();
        }
        let stepped = accumulator.step(&mut optimizer, scaler.as_mut()).unwrap();
        scheduler.step(&mut optimizer).unwrap();
        if let Some(ema) = &mut ema {
            ema.update().unwrap();
        }
        StepTotals::over(&group, &window, &stepped, false).unwrap();
        found = counted.map(|reads| reads.names()).unwrap_or_default();
        assert!(stepped.loss().unwrap().is_finite());
    }
    found
}

fn arguments() -> TrainingArguments {
    TrainingArguments {
        use_cpu: true,
        max_steps: 100,
        gradient_accumulation_steps: 2,
        context_length: 32,
        weight_decay: 0.1,
        ema_decay: Some(0.9),
        model: ModelArguments {
            // Matrices of 4096 elements have 8-bit states.
            hidden_size: 64,
            intermediate_size: 128,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            ..ModelArguments::default()
        },
        ..TrainingArguments::default()
    }
}

#[test]
fn a_step_that_does_not_log_reads_nothing() {
    let _alone = alone();
    for fused_kernels in [true, false] {
        for gradient_checkpointing in [false, true] {
            for layout in [RowLayout::default(), RowLayout::EndToEnd] {
                let arguments = TrainingArguments {
                    fused_kernels,
                    gradient_checkpointing,
                    ..arguments()
                };
                let found = reads(&arguments, Precision::Bf16, layout);
                assert!(
                    found.is_empty(),
                    "{fused_kernels} {gradient_checkpointing} {layout:?}: {found:?}"
                );
            }
        }
    }
    for optim in [
        OptimizerName::Adamw8bit,
        OptimizerName::PagedAdamw32bit,
        OptimizerName::Lion32bit,
        OptimizerName::Adafactor,
        OptimizerName::Sgd,
        OptimizerName::Muon,
    ] {
        let arguments = TrainingArguments {
            optim,
            ..arguments()
        };
        let found = reads(&arguments, Precision::Fp32, RowLayout::default());
        assert!(found.is_empty(), "{optim:?}: {found:?}");
    }
}

#[test]
fn a_step_with_a_loss_scaler_reads_one_flag() {
    let _alone = alone();
    for optim in [
        OptimizerName::AdamwTorchFused,
        OptimizerName::Adamw8bit,
        OptimizerName::Lion32bit,
    ] {
        let arguments = TrainingArguments {
            optim,
            ..arguments()
        };
        let found = reads(&arguments, Precision::Fp16, RowLayout::default());
        // A skipped step must not move the schedule, which is on the host.
        assert_eq!(found, ["aten::_local_scalar_dense"], "{optim:?}");
    }
}
