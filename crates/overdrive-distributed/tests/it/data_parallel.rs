//! Several processes train like one process with the joint batch.

use crate::common::{group, launch, pattern, scenario, write, write_numbers};
use overdrive_distributed::{
    DdpConfig, DistributedDataParallel, Error, GradientCompression, ProcessGroup,
    ZeroRedundancyOptimizer,
};
use overdrive_optim::{
    AdamW, AdamWConfig, CombinedOptimizer, GradScaling, Muon, MuonConfig, Optimizer, ParamGroup,
    Sgd, SgdConfig,
};
use overdrive_precision::{GradScaler, GradScalerConfig, StepOutcome};
use tch::{Device, Kind, Tensor, nn};

const BATCH: i64 = 24;
const STEPS: usize = 6;

/// Three layers, an optional one that not every step uses, and a buffer.
struct Model {
    store: nn::VarStore,
    weights: Vec<Tensor>,
    biases: Vec<Tensor>,
    branch: Tensor,
    mean: Tensor,
}

impl Model {
    /// `other`: as another rank might have it, before rank 0's is copied.
    fn new(other: f64) -> Self {
        let store = nn::VarStore::new(Device::Cpu);
        let root = store.root();
        let sizes = [16, 64, 64, 4];
        let (mut weights, mut biases) = (Vec::new(), Vec::new());
        for layer in 0..3 {
            let shape = [sizes[layer + 1], sizes[layer]];
            let value = pattern(&shape, layer as f64 + 1.0) * 0.2 + other;
            weights.push(root.var_copy(&format!("weight{layer}"), &value));
            let value = pattern(&shape[..1], layer as f64 + 9.0) * 0.1 + other;
            biases.push(root.var_copy(&format!("bias{layer}"), &value));
        }
        let branch = root.var_copy("branch", &(pattern(&[16, 4], 5.0) * 0.2 + other));
        let mean = root.zeros_no_train("mean", &[16]);
        Self {
            store,
            weights,
            biases,
            branch,
            mean,
        }
    }

    fn forward(&self, input: &Tensor, with_branch: bool) -> Tensor {
        let mut hidden = input - &self.mean;
        let plain = hidden.shallow_clone();
        for layer in 0..3 {
            hidden = hidden.linear(&self.weights[layer], Some(&self.biases[layer]));
            if layer < 2 {
                hidden = hidden.tanh();
            }
        }
        if with_branch {
            hidden + plain.matmul(&self.branch)
        } else {
            hidden
        }
    }

    fn parameters(&self) -> Vec<(String, Tensor)> {
        let mut all: Vec<_> = self.store.variables().into_iter().collect();
        all.retain(|(_, tensor)| tensor.requires_grad());
        all.sort_by(|(a, _), (b, _)| a.cmp(b));
        all
    }

    fn values(&self) -> Vec<f64> {
        let all = self.parameters();
        let flat = all.iter().flat_map(|(_, tensor)| {
            Vec::<f64>::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
        });
        flat.collect()
    }
}

/// The steps that use the branch of the model.
#[derive(Clone, Copy, PartialEq)]
enum Branch {
    Always,
    OddSteps,
    Never,
}

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    micro_batches: i64,
    branch: Branch,
    static_graph: bool,
    compression: GradientCompression,
    views: bool,
    tiny_buckets: bool,
}

const PLAIN: Case = Case {
    name: "plain",
    micro_batches: 1,
    branch: Branch::Always,
    static_graph: false,
    compression: GradientCompression::None,
    views: true,
    tiny_buckets: false,
};
const CASES: [Case; 9] = [
    PLAIN,
    Case {
        name: "copies",
        views: false,
        ..PLAIN
    },
    Case {
        name: "buckets",
        tiny_buckets: true,
        ..PLAIN
    },
    Case {
        name: "accumulation",
        micro_batches: 3,
        ..PLAIN
    },
    Case {
        name: "unused",
        branch: Branch::OddSteps,
        ..PLAIN
    },
    Case {
        name: "static_graph",
        branch: Branch::Never,
        static_graph: true,
        ..PLAIN
    },
    Case {
        name: "static_accumulation",
        micro_batches: 3,
        static_graph: true,
        tiny_buckets: true,
        ..PLAIN
    },
    Case {
        name: "bf16",
        compression: GradientCompression::Bf16,
        ..PLAIN
    },
    Case {
        name: "fp16",
        compression: GradientCompression::Fp16,
        ..PLAIN
    },
];

/// Returns the losses of each step and the parameters at the end, of one process or of a rank of a group.
fn train(case: Case, group: &ProcessGroup, other: f64) -> Vec<f64> {
    let model = Model::new(other);
    let config = DdpConfig {
        find_unused_parameters: case.branch == Branch::OddSteps,
        static_graph: case.static_graph,
        compression: case.compression,
        gradient_as_bucket_view: case.views,
        bucket_cap_mb: if case.tiny_buckets { 0.0005 } else { 25.0 },
        ..DdpConfig::default()
    };
    let ddp = DistributedDataParallel::from_var_store(group, &model.store, config).unwrap();
    let groups = vec![ParamGroup::new("all", model.parameters())];
    let sgd = SgdConfig {
        learning_rate: 0.1,
        momentum: 0.9,
        ..SgdConfig::default()
    };
    let mut optimizer = Sgd::new(groups, sgd).unwrap();
    let ranks = group.world_size() as i64;
    let part = BATCH / ranks / case.micro_batches;
    let mut numbers = Vec::new();
    for step in 0..STEPS {
        let input = pattern(&[BATCH, 16], 100.0 + step as f64);
        let target = pattern(&[BATCH, 4], 200.0 + step as f64);
        // The buffer changes on rank 0; the others must follow.
        if group.is_main() {
            tch::no_grad(|| {
                model
                    .mean
                    .shallow_clone()
                    .copy_(&(pattern(&[16], step as f64) * 0.1))
            });
        }
        let mut sum = 0.0;
        for micro in 0..case.micro_batches {
            let _quiet = (micro + 1 < case.micro_batches).then(|| ddp.no_sync());
            let start = (group.rank() as i64 * case.micro_batches + micro) * part;
            let (x, y) = (input.narrow(0, start, part), target.narrow(0, start, part));
            let loss = ddp
                .forward(|| {
                    let used = match case.branch {
                        Branch::Always => true,
                        Branch::OddSteps => step % 2 == 1,
                        Branch::Never => false,
                    };
                    let output = model.forward(&x, used);
                    Ok::<_, Error>((output - &y).square().mean(Kind::Float) / case.micro_batches)
                })
                .unwrap();
            ddp.backward(&loss).unwrap();
            sum += loss.double_value(&[]);
        }
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        numbers.push(group.mean(sum).unwrap());
    }
    if case.tiny_buckets && group.world_size() > 1 {
        // 524 bytes: each of the larger weights ends a bucket.
        assert!(
            ddp.bucket_bytes().unwrap().len() >= 3,
            "{:?}",
            ddp.bucket_bytes()
        );
    }
    numbers.extend(model.values());
    numbers
}

#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    let group = group(60.0);
    if let Some(case) = CASES.iter().find(|case| case.name == scenario) {
        let other = if group.is_main() { 0.0 } else { 0.3 };
        return write_numbers(&group, &train(*case, &group, other));
    }
    match scenario.as_str() {
        "zero" => zero(&group),
        "scaler" => scaler(&group),
        "scaled_muon" => scaled_muon(&group),
        "unscaled" => unscaled(&group),
        "few" => few(&group),
        "mismatch" => mismatch(&group),
        "forgotten" => forgotten(&group),
        other => panic!("no scenario {other}"),
    }
}

fn same_as_one_process(name: &str, ranks: usize, tolerance: f64) {
    let case = *CASES.iter().find(|case| case.name == name).unwrap();
    let whole = Case {
        compression: GradientCompression::None,
        ..case
    };
    let alone = train(whole, &ProcessGroup::single(), 0.0);
    let moved = alone[STEPS..].iter().zip(Model::new(0.0).values());
    assert!(
        moved.map(|(a, b)| (a - b).abs()).sum::<f64>() > 10.0,
        "it trains"
    );
    let outcome = launch(module_path!(), name, ranks);
    outcome.launched.as_ref().unwrap();
    for rank in 0..ranks {
        let together = outcome.numbers(rank);
        assert_eq!(together.len(), alone.len());
        let mut furthest = 0.0_f64;
        for (number, (a, b)) in alone.iter().zip(&together).enumerate() {
            let apart = (a - b).abs();
            furthest = furthest.max(apart);
            assert!(
                apart <= tolerance,
                "{name} on {ranks}, number {number}: {a} and {b}"
            );
        }
        let is_compressed = case.compression != GradientCompression::None;
        assert_eq!(furthest > FP32, is_compressed, "{furthest}");
    }
}

macro_rules! cases {
    ($($name:ident: $case:literal, $ranks:expr, $tolerance:expr;)*) => {$(
        #[test]
        fn $name() {
            same_as_one_process($case, $ranks, $tolerance);
        }
    )*};
}

/// fp32 sums of another order; what travels in fewer bits is further off.
const FP32: f64 = 1e-5;

// bf16 rounds each gradient by up to 2^-9 of it, fp16 by 2^-12, over six steps.
cases! {
    two_processes_train_as_one_with_the_joint_batch: "plain", 2, FP32;
    four_processes_train_as_one_with_the_joint_batch: "plain", 4, FP32;
    gradients_that_are_no_views_train_the_same: "copies", 2, FP32;
    many_small_buckets_train_the_same: "buckets", 2, FP32;
    two_processes_accumulate_as_one: "accumulation", 2, FP32;
    four_processes_accumulate_as_one: "accumulation", 4, FP32;
    two_processes_train_with_parameters_that_are_not_always_used: "unused", 2, FP32;
    four_processes_train_with_parameters_that_are_not_always_used: "unused", 4, FP32;
    two_processes_train_with_a_parameter_that_a_static_graph_never_uses: "static_graph", 2, FP32;
    two_processes_accumulate_in_a_static_graph: "static_accumulation", 2, FP32;
    gradients_travel_in_bf16: "bf16", 2, 1e-2;
    gradients_travel_in_fp16: "fp16", 2, 1e-3;
}

/// Trains with AdamW on the gradients of DDP; returns losses and parameters.
fn adamw(group: &ProcessGroup, sharded: bool) -> (Vec<f64>, usize) {
    let model = Model::new(0.0);
    let ddp =
        DistributedDataParallel::from_var_store(group, &model.store, DdpConfig::default()).unwrap();
    let config = AdamWConfig {
        learning_rate: 0.01,
        ..AdamWConfig::default()
    };
    let groups = overdrive_optim::decay_groups(model.parameters(), 0.1);
    let (mut optimizer, own): (Box<dyn Optimizer>, usize) = if sharded {
        let zero =
            ZeroRedundancyOptimizer::new(group, groups, |own| AdamW::new(own, config)).unwrap();
        let own = zero.own_elements();
        assert_eq!(zero.parameters().len(), 7);
        (Box::new(zero), own)
    } else {
        (Box::new(AdamW::new(groups, config).unwrap()), 0)
    };
    assert_eq!(optimizer.learning_rates(), [0.01, 0.01]);
    for step in 0..STEPS {
        let size = BATCH / group.world_size() as i64;
        let start = group.rank() as i64 * size;
        let input = pattern(&[BATCH, 16], 100.0 + step as f64).narrow(0, start, size);
        optimizer
            .set_learning_rate(0.01 / (step + 1) as f64)
            .unwrap();
        let loss = ddp
            .forward(|| Ok::<_, Error>(model.forward(&input, true).square().mean(Kind::Float)))
            .unwrap();
        ddp.backward(&loss).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    (model.values(), own)
}

fn zero(group: &ProcessGroup) {
    let (whole, _) = adamw(group, false);
    let (sharded, own) = adamw(group, true);
    let same = whole
        .iter()
        .zip(&sharded)
        .all(|(a, b)| a.to_bits() == b.to_bits());
    write_numbers(
        group,
        &[f64::from(u8::from(same)), own as f64, whole.len() as f64],
    );
}

#[test]
fn a_sharded_adamw_is_bit_equal_to_the_whole_one_and_each_rank_keeps_its_part() {
    for ranks in [2, 4] {
        let outcome = launch(module_path!(), "zero", ranks);
        outcome.launched.as_ref().unwrap();
        let mut kept = 0.0;
        for rank in 0..ranks {
            let numbers = outcome.numbers(rank);
            assert_eq!(numbers[0], 1.0, "bit-equal on rank {rank} of {ranks}");
            kept += numbers[1];
            // 5508 elements, the largest parameter has 4096 of them.
            assert!(numbers[1] <= 4096.0, "{numbers:?}");
        }
        assert_eq!(kept, outcome.numbers(0)[2]);
    }
}

/// Rank 1's loss overflows in the second step: all ranks must skip it.
fn scaler(group: &ProcessGroup) {
    let mut numbers = Vec::new();
    for sharded in [false, true] {
        let model = Model::new(0.0);
        let ddp =
            DistributedDataParallel::from_var_store(group, &model.store, DdpConfig::default())
                .unwrap();
        let groups = vec![ParamGroup::new("all", model.parameters())];
        let config = AdamWConfig {
            learning_rate: 0.01,
            ..AdamWConfig::default()
        };
        let mut optimizer: Box<dyn Optimizer> = if sharded {
            let build = |own| AdamW::new(own, config);
            Box::new(ZeroRedundancyOptimizer::new(group, groups, build).unwrap())
        } else {
            Box::new(AdamW::new(groups, config).unwrap())
        };
        let mut scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        for step in 0..3 {
            let before = model.values();
            let input = pattern(&[8, 16], group.rank() as f64);
            let factor = if step == 1 && group.rank() == 1 {
                f64::INFINITY
            } else {
                1.0
            };
            let loss = ddp
                .forward(|| {
                    let loss = model.forward(&input, true).square().mean(Kind::Float) * factor;
                    Ok::<_, Error>(scaler.scale(&loss).unwrap())
                })
                .unwrap();
            ddp.backward(&loss).unwrap();
            let outcome = scaler.step(&mut *optimizer).unwrap();
            assert_ne!(
                outcome,
                StepOutcome::SkippedNonFinite,
                "AdamW decides on the device"
            );
            scaler.update().unwrap();
            optimizer.zero_grad().unwrap();
            numbers.push(f64::from(u8::from(before == model.values())));
        }
        numbers.extend(model.values().iter().take(3));
    }
    write_numbers(group, &numbers);
}

#[test]
fn a_step_that_a_scaler_skips_on_one_rank_is_skipped_on_all() {
    let outcome = launch(module_path!(), "scaler", 2);
    outcome.launched.as_ref().unwrap();
    let (first, second) = (outcome.numbers(0), outcome.numbers(1));
    assert_eq!(first, second);
    assert_eq!(
        (&first[..3], &first[6..9]),
        (&[0.0, 1.0, 0.0][..], &[0.0, 1.0, 0.0][..])
    );
}

/// Muon for the groups named `muon` and AdamW for the others, as the trainer combines them.
fn muon_and_adamw(groups: Vec<ParamGroup>) -> overdrive_optim::Result<CombinedOptimizer> {
    let (matrices, others): (Vec<_>, Vec<_>) =
        groups.into_iter().partition(|group| group.name == "muon");
    let mut optimizers: Vec<(String, Box<dyn Optimizer>)> = Vec::new();
    if !matrices.is_empty() {
        let muon = Muon::new(matrices, MuonConfig::default())?;
        optimizers.push(("muon".to_owned(), Box::new(muon)));
    }
    if !others.is_empty() {
        let adamw = AdamW::new(others, AdamWConfig::default())?;
        optimizers.push(("adamw".to_owned(), Box::new(adamw)));
    }
    CombinedOptimizer::new(optimizers)
}

/// Trains a table of `table` rows by AdamW, unless it is 0, and `matrices` matrices by Muon, with a loss scaler. The
/// second step overflows. Returns 1 for each step that was done and the parameters at the end.
fn train_scaled(group: &ProcessGroup, sharded: bool, table: i64, matrices: usize) -> Vec<f64> {
    let parameter =
        |rows: i64, seed: usize| (pattern(&[rows, 4], seed as f64) * 0.1).set_requires_grad(true);
    let named = (1..=matrices).map(|number| (format!("matrix{number}"), parameter(4, number)));
    let mut groups = vec![ParamGroup::new("muon", named.collect())];
    if table > 0 {
        let named = vec![("table".to_owned(), parameter(table, 0))];
        groups.push(ParamGroup::new("adamw", named));
    }
    let all = groups.iter().flat_map(|group| &group.parameters);
    let all: Vec<Tensor> = all.map(|(_, tensor)| tensor.shallow_clone()).collect();
    let mut optimizer: Box<dyn Optimizer> = match sharded {
        true => Box::new(ZeroRedundancyOptimizer::new(group, groups, muon_and_adamw).unwrap()),
        false => Box::new(muon_and_adamw(groups).unwrap()),
    };
    let mut scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    let mut numbers = Vec::new();
    for step in 0..3 {
        let factor = if step == 1 { f64::INFINITY } else { 1.0 };
        let losses = all.iter().map(|tensor| tensor.square().sum(Kind::Float));
        let loss = losses.reduce(|sum, loss| sum + loss).unwrap() * factor;
        scaler.scale(&loss).unwrap().backward();
        let outcome = scaler.step(&mut *optimizer).unwrap();
        scaler.update().unwrap();
        optimizer.zero_grad().unwrap();
        numbers.push(f64::from(u8::from(outcome == StepOutcome::Stepped)));
    }
    for tensor in all {
        numbers.extend(Vec::<f64>::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap());
    }
    numbers
}

/// The shards of two ranks: a table for AdamW and matrices for Muon; a matrix and nothing.
fn scaled_muon(group: &ProcessGroup) {
    let mut numbers = Vec::new();
    for (table, matrices) in [(64, 2), (0, 1)] {
        for sharded in [false, true] {
            numbers.extend(train_scaled(group, sharded, table, matrices));
        }
    }
    write_numbers(group, &numbers);
}

#[test]
fn a_scaler_steps_shards_of_different_optimizers_as_it_steps_the_whole_one() {
    let outcome = launch(module_path!(), "scaled_muon", 2);
    outcome.launched.as_ref().unwrap();
    let numbers = outcome.numbers(0);
    assert_eq!(numbers, outcome.numbers(1));
    // Three outcomes and the elements of the parameters.
    let lengths = [3 + 64 * 4 + 2 * 16, 3 + 16];
    assert_eq!(numbers.len(), 2 * (lengths[0] + lengths[1]));
    let (first, second) = numbers.split_at(2 * lengths[0]);
    for (numbers, length) in [first, second].into_iter().zip(lengths) {
        let (whole, sharded) = numbers.split_at(length);
        assert_eq!(whole[..3], [1.0, 0.0, 1.0]);
        assert_eq!(whole, sharded);
    }
}

/// A step with a scale where a rank has no shard and the optimizer of the other one cannot take such steps.
fn unscaled(group: &ProcessGroup) {
    let matrix = pattern(&[4, 4], 1.0).set_requires_grad(true);
    let named = vec![("matrix".to_owned(), matrix.shallow_clone())];
    let groups = vec![ParamGroup::new("muon", named)];
    let mut optimizer = ZeroRedundancyOptimizer::new(group, groups, muon_and_adamw).unwrap();
    matrix.square().sum(Kind::Float).backward();
    let scaling = GradScaling {
        grad_scale: Some(&Tensor::from(1.0_f32)),
        found_inf: &Tensor::from(0.0_f32),
    };
    let done = optimizer.step_scaled(&scaling).unwrap();
    // The ranks still agree on what comes next.
    optimizer.step().unwrap();
    let mut numbers = vec![f64::from(u8::from(done))];
    let matrix = matrix.detach().to_kind(Kind::Double).flatten(0, -1);
    numbers.extend(Vec::<f64>::try_from(matrix).unwrap());
    write_numbers(group, &numbers);
}

#[test]
fn no_rank_takes_a_scaled_step_that_another_one_cannot_take() {
    let outcome = launch(module_path!(), "unscaled", 2);
    outcome.launched.as_ref().unwrap();
    let numbers = outcome.numbers(0);
    assert_eq!(numbers, outcome.numbers(1));
    assert_eq!((numbers.len(), numbers[0]), (17, 0.0));
}

/// A matrix for rank 0, nothing for rank 1, and a group without parameters.
fn few(group: &ProcessGroup) {
    let new = || {
        let matrix = pattern(&[4, 4], 1.0).set_requires_grad(true);
        let groups = vec![
            ParamGroup::new("all", vec![("matrix".to_owned(), matrix)]),
            ParamGroup::new("none", Vec::new()),
        ];
        let build = |own| AdamW::new(own, AdamWConfig::default());
        ZeroRedundancyOptimizer::new(group, groups, build).unwrap()
    };
    let mut saved = new();
    let mut numbers = saved.learning_rates();
    saved.set_learning_rates(&[0.25, 0.5]).unwrap();
    let state = saved.state_dict().unwrap();
    // As for another number of ranks.
    let gathered = new().state_dict().unwrap().gather([saved.state_dict()]);
    for state in [state, gathered.unwrap()] {
        let mut loaded = new();
        loaded.load_state_dict(&state).unwrap();
        numbers.extend(loaded.learning_rates());
    }
    write_numbers(group, &numbers);
}

#[test]
fn every_rank_saves_and_loads_the_learning_rates_of_all_groups() {
    let outcome = launch(module_path!(), "few", 2);
    outcome.launched.as_ref().unwrap();
    let initial = AdamWConfig::default().learning_rate;
    for rank in 0..2 {
        let expected = [initial, initial, 0.25, 0.5, 0.25, 0.5];
        assert_eq!(outcome.numbers(rank), expected);
    }
}

fn mismatch(group: &ProcessGroup) {
    let store = nn::VarStore::new(Device::Cpu);
    let root = store.root();
    let _ = root.zeros("head", &[if group.rank() == 2 { 5 } else { 4 }, 16]);
    let _ = root.zeros("body", &[2]);
    if group.rank() == 2 {
        let _ = root.zeros("extra", &[3]);
    }
    let error = DistributedDataParallel::from_var_store(group, &store, DdpConfig::default());
    write(group, &error.unwrap_err().to_string());
    // The group itself is whole.
    group.barrier().unwrap();
}

#[test]
fn a_model_that_differs_is_found_at_construction_with_rank_name_and_shapes() {
    let outcome = launch(module_path!(), "mismatch", 3);
    outcome.launched.as_ref().unwrap();
    for rank in 0..3 {
        assert_eq!(
            outcome.rank(rank),
            "the model of rank 2 differs from that of rank 0: parameter head has shape [5, 16] and dtype \
             Float on rank 2, [4, 16] and Float on rank 0; parameter extra (shape [3]) of rank 2 is \
             missing on rank 0"
        );
    }
}

/// A parameter gets no gradient, and `find_unused_parameters` is off.
fn forgotten(group: &ProcessGroup) {
    let model = Model::new(0.0);
    let ddp =
        DistributedDataParallel::from_var_store(group, &model.store, DdpConfig::default()).unwrap();
    let input = pattern(&[8, 16], 1.0);
    let forward =
        || ddp.forward(|| Ok::<_, Error>(model.forward(&input, false).square().mean(Kind::Float)));
    let loss = forward().unwrap();
    ddp.backward(&loss).unwrap();
    write(group, &forward().unwrap_err().to_string());
}

#[test]
fn a_parameter_that_gets_no_gradient_is_named_in_the_next_forward() {
    let outcome = launch(module_path!(), "forgotten", 2);
    outcome.launched.as_ref().unwrap();
    let error = outcome.rank(1);
    assert!(
        error.contains("branch") && error.contains("find_unused_parameters"),
        "{error}"
    );
}
