//! A training loop on several ranks: windows of micro-batches with different numbers of tokens, a scaler,
//! results of rank 0, snapshots.

use crate::common::{group, launch, pattern, scenario, write, write_as, write_numbers};
use overdrive_accumulation::{AccumulationConfig, GradientAccumulator, Window};
use overdrive_distributed::{DdpConfig, DistributedDataParallel, Error, ProcessGroup};
use overdrive_optim::{AdamW, AdamWConfig, decay_groups};
use overdrive_precision::{GradScaler, GradScalerConfig};
use overdrive_snapshot::{Contents, Scope, SnapshotManager, SnapshotOptions};
use tch::{Device, Kind, Tensor, nn};

const STEPS: usize = 8;
/// The tokens of the eight micro-batches of each step, on any rank.
const TOKENS: [i64; 8] = [5, 1, 9, 2, 7, 3, 0, 4];

struct Model {
    store: nn::VarStore,
    first: Tensor,
    second: Tensor,
    shift: Tensor,
}

impl Model {
    fn new() -> Self {
        let store = nn::VarStore::new(Device::Cpu);
        let root = store.root();
        let first = root.var_copy("first", &(pattern(&[32, 8], 1.0) * 0.4));
        let second = root.var_copy("second", &(pattern(&[4, 32], 2.0) * 0.3));
        let shift = root.zeros_no_train("shift", &[8]);
        Self {
            store,
            first,
            second,
            shift,
        }
    }

    /// Returns the sum of the losses of `tokens` rows.
    fn loss_sum(&self, step: usize, micro_batch: usize, tokens: i64, whole: bool) -> Tensor {
        let seed = (step * TOKENS.len() + micro_batch) as f64;
        let input = pattern(&[tokens.max(1), 8], 10.0 + seed).narrow(0, 0, tokens);
        let target = pattern(&[tokens.max(1), 4], 500.0 + seed).narrow(0, 0, tokens);
        let hidden = (input - &self.shift).matmul(&self.first.tr()).tanh();
        let output = match whole {
            true => hidden.matmul(&self.second.tr()),
            false => hidden.narrow(1, 0, 4),
        };
        (output - target).square().sum(Kind::Float)
    }

    fn values(&self) -> Vec<f64> {
        let flat = |tensor: &Tensor| {
            Vec::<f64>::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
        };
        [flat(&self.first), flat(&self.second)].concat()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Way {
    /// The token counts are known ahead; forward passes run outside `ddp.forward`.
    Announced,
    /// Forward passes run inside `ddp.forward`, under `no_sync` before the last.
    Wrapped,
    /// The token counts are not known ahead.
    Unannounced,
    /// The data end early, so no backward is the last.
    CutShort,
    /// Unused parameters are searched for; the last micro-batches do not use one.
    Unused,
    /// With a scaler, and an infinity on one rank in the fourth step.
    Scaler,
}

const WAYS: [(&str, Way); 6] = [
    ("unused", Way::Unused),
    ("announced", Way::Announced),
    ("wrapped", Way::Wrapped),
    ("unannounced", Way::Unannounced),
    ("cut_short", Way::CutShort),
    ("scaler", Way::Scaler),
];

/// Returns loss, gradient norm and success of each step, and the parameters at the end.
fn train(way: Way, group: &ProcessGroup) -> Vec<f64> {
    let model = Model::new();
    let config = DdpConfig {
        find_unused_parameters: way == Way::Unused,
        ..DdpConfig::default()
    };
    let ddp = DistributedDataParallel::from_var_store(group, &model.store, config).unwrap();
    let parameters = ddp.parameters().iter();
    let parameters = parameters.map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
    let config = AdamWConfig {
        learning_rate: 0.02,
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::new(decay_groups(parameters, 0.1), config).unwrap();
    let mine = TOKENS.len() / group.world_size();
    let config = AccumulationConfig {
        // One more than come where the data end early.
        gradient_accumulation_steps: mine + usize::from(way == Way::CutShort),
        max_grad_norm: Some(0.5),
    };
    let accumulator = GradientAccumulator::with_sync(config, &ddp).unwrap();
    let scaler_config = GradScalerConfig {
        init_scale: 1024.0,
        ..GradScalerConfig::default()
    };
    let scaler = (way == Way::Scaler).then(|| GradScaler::new(scaler_config).unwrap());
    let mut accumulator = accumulator.with_scaler(scaler);
    let announced = !matches!(way, Way::Unannounced | Way::CutShort);
    let mut numbers = Vec::new();
    for step in 0..STEPS {
        let own: Vec<usize> = (0..TOKENS.len())
            .skip(group.rank() * mine)
            .take(mine)
            .collect();
        if announced {
            let counts = own.iter().map(|&micro_batch| TOKENS[micro_batch] as u64);
            accumulator.open(Window::new(counts)).unwrap();
        }
        for &micro_batch in &own {
            let tokens = TOKENS[micro_batch];
            let bad = way == Way::Scaler && step == 3 && micro_batch == 7;
            // In every third step nobody uses the second weight at all.
            let whole = way != Way::Unused || (micro_batch % 4 != 3 && step % 3 != 2);
            let forward = || {
                let loss = model.loss_sum(step, micro_batch, tokens, whole);
                if bad { loss * f64::INFINITY } else { loss }
            };
            let loss = if way == Way::Wrapped {
                let _quiet = (!accumulator.sync_gradients()).then(|| ddp.no_sync());
                ddp.forward(|| Ok::<_, Error>(forward())).unwrap()
            } else {
                forward()
            };
            match announced {
                true => accumulator.backward(&loss),
                false => accumulator.backward_counted(&loss, tokens as u64),
            }
            .unwrap();
        }
        // As a batch norm would: the buffer changes on rank 0, and the others have it in the next step.
        if group.is_main() {
            let value = pattern(&[8], step as f64) * 0.1;
            tch::no_grad(|| model.shift.shallow_clone().copy_(&value));
        }
        let done = accumulator.step(&mut optimizer).unwrap();
        assert_eq!(done.total_tokens, 31);
        let tokens = done.tokens as f64;
        let loss_sum = if tokens > 0.0 {
            done.loss().unwrap() * tokens
        } else {
            0.0
        };
        let sums = group.sums([loss_sum, tokens]).unwrap();
        if let Some(scaler) = accumulator.scaler() {
            numbers.push(scaler.get_scale().unwrap());
        }
        if done.stepped {
            numbers.push(sums[0] / sums[1]);
            numbers.push(done.grad_norm().unwrap().unwrap());
        }
        numbers.push(f64::from(u8::from(done.stepped)));
    }
    numbers.extend(model.values());
    numbers
}

#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    let group = group(60.0);
    if let Some((_, way)) = WAYS.iter().find(|(name, _)| *name == scenario) {
        return write_numbers(&group, &train(*way, &group));
    }
    match scenario.as_str() {
        "too_early" => too_early(&group),
        "abandoned" => abandoned(&group),
        "agreement" => agreement(&group),
        "save" => save(&group),
        "resume" => resume(&group),
        other => panic!("no scenario {other}"),
    }
}

fn same_as_one_process(name: &str, way: Way, ranks: usize) {
    let alone = train(way, &ProcessGroup::single());
    let outcome = launch(module_path!(), name, ranks);
    outcome.launched.as_ref().unwrap();
    let first = outcome.numbers(0);
    for rank in 0..ranks {
        let together = outcome.numbers(rank);
        assert_eq!(together, first, "bit-equal on all ranks");
        assert_eq!(together.len(), alone.len());
        for (number, (a, b)) in alone.iter().zip(&together).enumerate() {
            assert!(
                (a - b).abs() <= 1e-5,
                "{name} on {ranks}, number {number}: {a} and {b}"
            );
        }
    }
}

macro_rules! ways {
    ($($name:ident: $way:literal, $ranks:expr;)*) => {$(
        #[test]
        fn $name() {
            let (_, way) = WAYS.iter().find(|(name, _)| *name == $way).unwrap();
            same_as_one_process($way, *way, $ranks);
        }
    )*};
}

ways! {
    two_ranks_with_uneven_tokens_step_as_one_process: "announced", 2;
    four_ranks_with_uneven_tokens_step_as_one_process: "announced", 4;
    forwards_under_ddp_and_no_sync_step_as_one_process: "wrapped", 2;
    windows_that_are_not_announced_step_as_one_process: "unannounced", 2;
    windows_without_a_last_backward_step_as_one_process: "cut_short", 4;
    two_ranks_with_parameters_left_out_step_as_one_process: "unused", 2;
    four_ranks_with_parameters_left_out_step_as_one_process: "unused", 4;
    two_ranks_with_a_scaler_skip_and_step_as_one_process: "scaler", 2;
    four_ranks_with_a_scaler_skip_and_step_as_one_process: "scaler", 4;
}

#[test]
fn the_scaler_really_skips_one_step() {
    let numbers = train(Way::Scaler, &ProcessGroup::single());
    // Four numbers of each of three steps, then the scale and that it was not taken.
    assert_eq!(&numbers[12..14], &[512.0, 0.0]);
}

/// A micro-batch before the last is forwarded as if it were the last.
fn too_early(group: &ProcessGroup) {
    let model = Model::new();
    let ddp =
        DistributedDataParallel::from_var_store(group, &model.store, DdpConfig::default()).unwrap();
    let config = AccumulationConfig {
        gradient_accumulation_steps: 2,
        ..AccumulationConfig::default()
    };
    let mut accumulator = GradientAccumulator::with_sync(config, &ddp).unwrap();
    let loss = ddp
        .forward(|| Ok::<_, Error>(model.loss_sum(0, 0, 5, true)))
        .unwrap();
    let error = accumulator.backward_counted(&loss, 5).unwrap_err();
    let source = std::error::Error::source(&error).unwrap().to_string();
    write(group, &source);
}

#[test]
fn a_micro_batch_that_would_be_reduced_too_early_is_an_error() {
    let outcome = launch(module_path!(), "too_early", 2);
    outcome.launched.as_ref().unwrap();
    let error = outcome.rank(1);
    assert!(
        error.starts_with("rank 1: the forward of a micro-batch"),
        "{error}"
    );
}

/// The last backward of a window fails before it reaches a parameter.
fn abandoned(group: &ProcessGroup) {
    let model = Model::new();
    let ddp =
        DistributedDataParallel::from_var_store(group, &model.store, DdpConfig::default()).unwrap();
    let groups = decay_groups(model.store.variables(), 0.1);
    let mut optimizer = AdamW::new(groups, AdamWConfig::default()).unwrap();
    let config = AccumulationConfig {
        gradient_accumulation_steps: 2,
        ..AccumulationConfig::default()
    };
    let mut accumulator = GradientAccumulator::with_sync(config, &ddp).unwrap();
    let loss = |number| model.loss_sum(0, number, 5, true);
    accumulator.backward_counted(&loss(0), 5).unwrap();
    let product = loss(1).square();
    let mut wrong = product.exp();
    let failing = &wrong * 2.0;
    // `exp` has kept its result for its gradient.
    let _ = tch::no_grad(|| wrong.f_add_scalar_(1.0)).unwrap();
    accumulator.backward_counted(&failing, 5).unwrap_err();
    accumulator.abandon(&mut optimizer).unwrap();

    for number in [0, 1] {
        accumulator.backward_counted(&loss(number), 5).unwrap();
    }
    let step = accumulator.step(&mut optimizer).unwrap();
    write(group, &step.total_tokens.to_string());
}

#[test]
fn the_window_after_an_abandoned_one_is_reduced_as_any_other() {
    let outcome = launch(module_path!(), "abandoned", 2);
    outcome.launched.as_ref().unwrap();
    assert_eq!(outcome.rank(1), "20");
}

fn agreement(group: &ProcessGroup) {
    let rank = group.rank() as f64;
    let sums = group
        .sums([rank, 1.0, f64::from(u8::from(group.rank() == 1))])
        .unwrap();
    assert_eq!(sums, [3.0, 3.0, 1.0]);
    let text = group
        .broadcast_object(&format!("of rank {}", group.rank()), 2)
        .unwrap();
    assert_eq!(text, "of rank 2");
    let all = group
        .all_gather_object(&vec![group.rank(); group.rank()])
        .unwrap();
    assert_eq!(all, [vec![], vec![1], vec![2, 2]]);
    let done = group.on_main("count", || {
        assert_eq!(group.rank(), 0);
        Ok::<_, String>(17)
    });
    assert_eq!(done.unwrap(), 17);
    let failed = group.on_main("make the folder", || Err::<(), _>("no room"));
    let other_type = group.broadcast_object(&"words".to_owned(), 0).unwrap();
    assert_eq!(other_type, "words");
    write(group, &failed.unwrap_err().to_string());
}

#[test]
fn on_main_succeeds_or_fails_on_all_ranks() {
    let outcome = launch(module_path!(), "agreement", 3);
    outcome.launched.as_ref().unwrap();
    for rank in 0..3 {
        assert_eq!(
            outcome.rank(rank),
            "rank 0 could not make the folder: no room"
        );
    }
}

fn options() -> SnapshotOptions {
    SnapshotOptions {
        background: false,
        ..SnapshotOptions::default()
    }
}

/// Returns the folder of the snapshots.
fn folder() -> String {
    std::env::var("OD_SNAPSHOTS").unwrap()
}

fn own(rank: usize, step: u64) -> Tensor {
    Tensor::from_slice(&[rank as f32, step as f32])
}

/// Steps 1 and 2 are saved by both ranks; rank 1 is killed before it writes its shard of step 3.
fn save(group: &ProcessGroup) {
    let ranks = Box::new(group.clone());
    let mut snapshots = SnapshotManager::with_ranks(folder(), options(), ranks).unwrap();
    for step in 1..=3 {
        if step == 3 && group.rank() == 1 {
            std::process::exit(7);
        }
        let mut state = Contents::at(step);
        let shared = vec![("weight".to_owned(), own(0, step))];
        state.tensors("model", Scope::Run, shared).unwrap();
        let sharded = vec![("state".to_owned(), own(group.rank(), step))];
        state.tensors("optimizer", Scope::Rank, sharded).unwrap();
        snapshots.save(state).unwrap();
        for outcome in snapshots.wait().unwrap() {
            if step < 3 {
                outcome.result.unwrap();
            }
        }
        write_as(group.rank(), &format!("saved {step}"));
    }
}

fn resume(group: &ProcessGroup) {
    let ranks = Box::new(group.clone());
    let snapshots = SnapshotManager::with_ranks(folder(), options(), ranks).unwrap();
    let latest = snapshots.latest().unwrap().unwrap();
    let found = own(9, 9);
    let target = vec![("state".to_owned(), found.shallow_clone())];
    latest
        .copy_into("optimizer", Scope::Rank, group.rank(), target)
        .unwrap();
    let found = Vec::<f32>::try_from(&found).unwrap();
    write(group, &format!("{} {found:?}", latest.step()));
}

#[test]
fn ranks_save_into_one_folder_and_resume_at_the_step_that_all_have() {
    let dir = tempfile::tempdir().unwrap();
    let run = |scenario| {
        crate::common::launch_with(
            module_path!(),
            scenario,
            2,
            &[("OD_SNAPSHOTS", dir.path().as_os_str())],
        )
    };
    let saved = run("save");
    assert!(saved.launched.is_err(), "rank 1 ends");
    assert_eq!(saved.rank(1), "saved 2");
    assert!(dir.path().join("checkpoint-2").is_dir());
    let resumed = run("resume");
    resumed.launched.as_ref().unwrap();
    assert_eq!(resumed.rank(0), "2 [0.0, 2.0]");
    assert_eq!(resumed.rank(1), "2 [1.0, 2.0]");
}
