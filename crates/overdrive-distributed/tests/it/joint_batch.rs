//! A language model on two and four processes has the losses of one process with the joint batch: with activation
//! checkpointing, LoRA, packed sequences, and all of them with accumulation and mixed precision; also under torchrun.

use std::process::Command;

use crate::common::{group, launch, scenario, write_numbers};
use crate::on_python::python;
use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
use overdrive_attention::PackedLengths;
use overdrive_distributed::{DdpConfig, DistributedDataParallel, ProcessGroup};
use overdrive_lora::{AddOptions, LoraConfig, TargetModules, add_adapter, trainable_parameters};
use overdrive_optim::{AdamW, AdamWConfig, ParamGroup};
use overdrive_precision::autocast;
use overdrive_transformer::{
    CausalLm, Execution, ForwardInput, IGNORE_INDEX, InitOptions, LabelShift, LlamaConfig,
    LossOutput, Schedule,
};
use tch::{Device, Kind, Tensor};

const STEPS: usize = 6;
/// The tokens of the sequences of each step.
const LENGTHS: [i64; 8] = [7, 3, 12, 5, 9, 2, 11, 6];

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Checkpointing,
    Lora,
    Packing,
    /// All of them, with accumulation and mixed precision.
    Everything,
}

const MODES: [(&str, Mode); 4] = [
    ("checkpointing", Mode::Checkpointing),
    ("lora", Mode::Lora),
    ("packing", Mode::Packing),
    ("everything", Mode::Everything),
];

impl Mode {
    fn has(self, other: Mode) -> bool {
        self == other || self == Mode::Everything
    }
}

/// Returns the model as rank `rank` initializes it; that of rank 0 is copied to all.
fn model(mode: Mode, rank: usize) -> CausalLm {
    let config = LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 16,
        ..LlamaConfig::default()
    };
    let options = InitOptions {
        seed: rank as u64,
        ..InitOptions::default()
    };
    let mut model = CausalLm::new(&config.into(), &options).unwrap();
    model.set_requires_grad(true).unwrap();
    let mut execution = Execution::default();
    if mode.has(Mode::Checkpointing) {
        execution.checkpointing = Schedule::EveryBlock;
    }
    model.set_execution(execution);
    if mode.has(Mode::Lora) {
        let config = LoraConfig {
            r: 4,
            target_modules: Some(TargetModules::AllLinear),
            ..LoraConfig::default()
        };
        add_adapter(&mut model, "default", &config, &AddOptions::default()).unwrap();
    }
    model.set_training(true).unwrap();
    model
}

fn text(step: usize, index: usize) -> (Vec<i64>, Vec<i64>) {
    let ids: Vec<i64> = (0..LENGTHS[index])
        .map(|at| (at * at * 5 + at * 13 + index as i64 * 29 + step as i64 * 17) % 64)
        .collect();
    let mut labels = ids.clone();
    // Nothing predicts it.
    labels[0] = IGNORE_INDEX;
    (ids, labels)
}

fn labels_in(texts: &[usize]) -> u64 {
    texts.iter().map(|index| LENGTHS[*index] as u64 - 1).sum()
}

/// Returns the summed loss of some sequences: padded to rows, or packed into one.
fn loss(model: &CausalLm, mode: Mode, step: usize, texts: &[usize]) -> LossOutput {
    let pairs: Vec<_> = texts.iter().map(|index| text(step, *index)).collect();
    if mode.has(Mode::Packing) {
        let ids: Vec<i64> = pairs.iter().flat_map(|(ids, _)| ids.clone()).collect();
        let labels: Vec<i64> = pairs
            .iter()
            .flat_map(|(_, labels)| labels.clone())
            .collect();
        let lengths: Vec<i64> = texts.iter().map(|index| LENGTHS[*index]).collect();
        let sequences = PackedLengths::from_lengths(&lengths, Device::Cpu).unwrap();
        let ids = Tensor::from_slice(&ids).unsqueeze(0);
        let labels = Tensor::from_slice(&labels).unsqueeze(0);
        let input = ForwardInput::new(&ids).with_sequences(&sequences);
        return model
            .loss_of(input, &labels, LabelShift::HuggingFace)
            .unwrap();
    }
    let row = |numbers: &[i64], fill: i64| {
        let mut row = numbers.to_vec();
        row.resize(12, fill);
        Tensor::from_slice(&row)
    };
    let ids: Vec<Tensor> = pairs.iter().map(|(ids, _)| row(ids, 0)).collect();
    let labels: Vec<Tensor> = pairs
        .iter()
        .map(|(_, labels)| row(labels, IGNORE_INDEX))
        .collect();
    let (ids, labels) = (Tensor::stack(&ids, 0), Tensor::stack(&labels, 0));
    model.loss(&ids, &labels, LabelShift::HuggingFace).unwrap()
}

/// Returns for each step the loss and the norm of the gradients.
/// `parts` is the number of micro-batches into which one process splits the joint batch.
fn train(mode: Mode, group: &ProcessGroup, parts: usize) -> Vec<f64> {
    let mut model = model(mode, group.rank());
    let trained = trainable_parameters(&mut model).unwrap();
    let frozen = model.named_parameters().into_iter();
    let frozen = frozen.filter(|(_, tensor)| !tensor.requires_grad());
    let all = trained
        .iter()
        .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
        .chain(frozen);
    let config = DdpConfig {
        // Several buckets.
        bucket_cap_mb: 0.01,
        ..DdpConfig::default()
    };
    let ddp = DistributedDataParallel::new(group, all, [], config).unwrap();
    if mode.has(Mode::Lora) {
        assert!(
            ddp.parameters()
                .iter()
                .all(|(name, _)| name.contains("lora_"))
        );
    }
    let config = AdamWConfig {
        learning_rate: 0.003,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::new(vec![ParamGroup::new("all", trained)], config).unwrap();
    let config = AccumulationConfig {
        gradient_accumulation_steps: parts,
        max_grad_norm: Some(1.0),
    };
    let mut accumulator = GradientAccumulator::with_sync(config, &ddp).unwrap();
    let share = LENGTHS.len() / group.world_size();
    let own: Vec<usize> = (0..LENGTHS.len())
        .skip(group.rank() * share)
        .take(share)
        .collect();
    let micro_batches: Vec<&[usize]> = own.chunks(share / parts).collect();
    let mut numbers = Vec::new();
    for step in 0..STEPS {
        let counts = micro_batches.iter().map(|texts| labels_in(texts));
        accumulator.open(Window::new(counts)).unwrap();
        for texts in &micro_batches {
            let output = {
                let low = mode == Mode::Everything;
                let _autocast = low.then(|| autocast(Device::Cpu, Kind::BFloat16).unwrap());
                loss(&model, mode, step, texts)
            };
            accumulator.backward(&output.sum).unwrap();
        }
        let done = accumulator.step(&mut optimizer).unwrap();
        let tokens = done.tokens as f64;
        let [loss, labels] = group.sums([done.loss().unwrap() * tokens, tokens]).unwrap();
        numbers.extend([loss / labels, done.grad_norm().unwrap().unwrap()]);
    }
    numbers
}

/// Returns the micro-batches of a process among `ranks`, and those of a single process with the joint batch.
fn parts(mode: Mode, ranks: usize) -> (usize, usize) {
    match mode {
        // bf16 rounds what it sums up: one process takes the same texts together that each rank does.
        Mode::Everything => (2, 2 * ranks),
        _ => (1, 1),
    }
}

#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    let group = group(60.0);
    let (_, mode) = MODES.iter().find(|(name, _)| *name == scenario).unwrap();
    let (own, _) = parts(*mode, group.world_size());
    write_numbers(&group, &train(*mode, &group, own));
}

fn check(mode: Mode, ranks: usize, of: impl Fn(usize) -> Vec<f64>) {
    let (_, alone) = parts(mode, ranks);
    let alone = train(mode, &ProcessGroup::single(), alone);
    assert!(alone[0] > 3.0, "of 64 tokens each is as likely: {alone:?}");
    let first = of(0);
    for rank in 0..ranks {
        let together = of(rank);
        assert_eq!(together, first, "bit-equal on all ranks");
        assert_eq!(together.len(), alone.len());
        for (number, (a, b)) in alone.iter().zip(&together).enumerate() {
            assert!((a - b).abs() <= 1e-5, "number {number}: {a} and {b}");
        }
    }
    assert!(alone[alone.len() - 2] != alone[0], "it trains");
}

macro_rules! modes {
    ($($name:ident: $mode:literal, $ranks:expr;)*) => {$(
        #[test]
        fn $name() {
            let (_, mode) = MODES.iter().find(|(name, _)| *name == $mode).unwrap();
            let outcome = launch(module_path!(), $mode, $ranks);
            outcome.launched.as_ref().unwrap();
            check(*mode, $ranks, |rank| outcome.numbers(rank));
        }
    )*};
}

modes! {
    processes_that_recompute_activations_have_the_losses_of_the_joint_batch: "checkpointing", 2;
    processes_that_train_adapters_have_the_losses_of_the_joint_batch: "lora", 2;
    processes_with_packed_texts_have_the_losses_of_the_joint_batch: "packing", 2;
    processes_with_all_of_it_have_the_losses_of_the_joint_batch: "everything", 4;
}

#[test]
#[ignore = "needs Python with torch"]
fn under_torchrun_two_processes_have_the_losses_of_the_joint_batch_on_python() {
    let folder = tempfile::tempdir().unwrap();
    let worker = std::env::current_exe().unwrap();
    let run = Command::new(python(&["torch"]))
        .args([
            "-m",
            "torch.distributed.run",
            "--no-python",
            "--standalone",
            "--nproc-per-node",
            "2",
        ])
        .arg(worker)
        .args(crate::common::worker_arguments(module_path!()))
        .env("OMP_NUM_THREADS", "1")
        .env("OD_SCENARIO", "everything")
        .env("OD_FOLDER", folder.path())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{errors}");
    check(Mode::Everything, 2, |rank| {
        let text = std::fs::read_to_string(folder.path().join(rank.to_string())).unwrap();
        serde_json::from_str(&text).unwrap()
    });
}
