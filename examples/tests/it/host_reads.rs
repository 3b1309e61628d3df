//! The host waits for the device only where a line of the log is due.

use overdrive::datasets::{
    Batch, DataLoader, DataLoaderOptions, DeviceLoader, InMemory, RowLayout, TokenizedExample,
    collate,
};
use overdrive::distributed::ProcessGroup;
use overdrive::precision::Precision;
use overdrive::profiling::HostReads;
use overdrive::trainer::{
    ModelArguments, OptimizerName, RunOptions, TrainingArguments, TrainingRun, batch_loss,
};
use overdrive::transformer::{CausalLm, InitOptions, ModelConfig};
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
    let rows = [7, 12, 12, 5].map(|length| {
        // Half of the labels are ignored, so that the loss leaves rows out.
        let tokens = (0..length).map(|token| token % 64).collect::<Vec<i64>>();
        let mut row = TokenizedExample::from(tokens);
        row.labels[..4].fill(-100);
        row
    });
    let options = DataLoaderOptions {
        batch_size: 2,
        ..DataLoaderOptions::default()
    };
    let collate = move |rows: Vec<_>| collate(&rows, layout);
    let loader = DataLoader::with_collate(InMemory(rows.to_vec()), collate, options).unwrap();
    let mut loader = DeviceLoader::new(loader, Device::Cpu);
    let options = RunOptions {
        precision: Some(precision),
        silent: true,
        ..RunOptions::default()
    };
    let parameters = model.named_parameters();
    let mut run = TrainingRun::start(arguments, &group, parameters, &mut loader, options).unwrap();
    for _ in 0..2 {
        step(&mut run, &model, &mut loader);
    }
    // From the third step on, states and caches exist.
    let reads = HostReads::of(Device::Cpu);
    step(&mut run, &model, &mut loader);
    let found = reads.names();
    let (summary, _) = run.finish().unwrap();
    assert!(summary.losses.iter().all(|loss| loss.is_finite()));
    found
}

/// Runs a step, and logs it if a line is due.
fn step(run: &mut TrainingRun, model: &CausalLm, loader: &mut DeviceLoader<Batch>) {
    for batch in &run.next_batches(loader).unwrap().unwrap() {
        let loss = run.forward(|| batch_loss(model, batch)).unwrap();
        run.backward(&loss.sum).unwrap();
    }
    run.step().unwrap();
    run.save_if_due().unwrap();
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
