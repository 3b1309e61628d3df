//! Groups of a subset of the ranks.

use std::time::Duration;

use crate::common::{group, launch, scenario, write};
use overdrive_distributed::{
    DdpConfig, DistributedDataParallel, Error, ProcessGroup, ReduceOp, ZeroRedundancyOptimizer,
};
use overdrive_optim::{AdamW, AdamWConfig, Optimizer, decay_groups};
use tch::{Device, Kind, Tensor, nn};

#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    match scenario.as_str() {
        "subgroups" => subgroups(&group(60.0)),
        "train" => train(&group(60.0)),
        "lists" => lists(&group(60.0)),
        "lost" => lost(&group(3.0)),
        other => panic!("no scenario {other}"),
    }
}

fn subgroups(group: &ProcessGroup) {
    let rank = group.rank();
    // The list may be in any order; the ranks keep that of the parent group.
    let odd = group.new_group(&[3, 1]).unwrap();
    assert_eq!(odd.is_some(), rank % 2 == 1);
    if let Some(odd) = &odd {
        assert_eq!((odd.rank(), odd.world_size()), (rank / 2, 2));
        assert_eq!(odd.global_ranks(), [1, 3]);
        assert_eq!(odd.sum(rank as f64).unwrap(), 4.0);
    }
    // Halves by a color; both run at the same time, with collectives of the parent in between.
    let half = group.split(&format!("half {}", rank / 2)).unwrap();
    let sums: Vec<f64> = (0..20)
        .map(|round| {
            let sum = half.sum(rank as f64 + f64::from(round)).unwrap();
            if round % 5 == 0 {
                group.barrier().unwrap();
            }
            sum
        })
        .collect();
    let own = half.global_ranks().iter().sum::<usize>() as f64;
    for (round, sum) in sums.iter().enumerate() {
        assert_eq!(*sum, own + 2.0 * round as f64);
    }
    // A subgroup of a subgroup, with one rank.
    let quarter = half.new_group(&[1]).unwrap();
    assert_eq!(quarter.is_some(), rank % 2 == 1);
    if let Some(quarter) = quarter {
        assert_eq!(quarter.global_ranks(), [rank]);
        assert_eq!(quarter.sum(7.0).unwrap(), 7.0);
    }
    // The parent lives as long as its subgroup.
    let again = half.split(&0).unwrap();
    assert_eq!(again.global_ranks(), half.global_ranks());
    drop(half);
    assert_eq!(again.sum(1.0).unwrap(), 2.0);
    write(group, "done");
    group.barrier().unwrap();
}

#[test]
fn subgroups_have_their_own_collectives() {
    let outcome = launch(module_path!(), "subgroups", 4);
    outcome.launched.as_ref().unwrap();
    for rank in 0..4 {
        assert_eq!(outcome.rank(rank), "done");
    }
}

/// Two pairs train two models; optimizer states are sharded within a pair.
fn train(group: &ProcessGroup) {
    let pair = group.split(&(group.rank() / 2)).unwrap();
    let store = nn::VarStore::new(Device::Cpu);
    let weight = store.root().ones("weight", &[3]);
    let ddp = DistributedDataParallel::from_var_store(&pair, &store, DdpConfig::default()).unwrap();
    let groups = decay_groups(store.variables(), 0.0);
    let mut optimizer =
        ZeroRedundancyOptimizer::new(&pair, groups, |own| AdamW::new(own, AdamWConfig::default()))
            .unwrap();
    let input = Tensor::ones([3], (Kind::Float, Device::Cpu)) * (group.rank() as f64);
    let loss = ddp
        .forward(|| Ok::<_, Error>((&weight * input).sum(Kind::Float)))
        .unwrap();
    ddp.backward(&loss).unwrap();
    let gradient = weight.grad().double_value(&[0]);
    optimizer.step().unwrap();
    write(group, &format!("{gradient}"));
    group.barrier().unwrap();
}

#[test]
fn each_subgroup_trains_its_own_model() {
    let outcome = launch(module_path!(), "train", 4);
    outcome.launched.as_ref().unwrap();
    let gradients: Vec<&str> = (0..4).map(|rank| outcome.rank(rank)).collect();
    assert_eq!(gradients, ["0.5", "0.5", "2.5", "2.5"]);
}

fn lists(group: &ProcessGroup) {
    let error = |ranks: &[usize]| group.new_group(ranks).unwrap_err().to_string();
    let own = [0, group.rank()];
    let errors = [error(&[]), error(&[1, 1]), error(&[0, 3]), error(&own)];
    write(group, &errors.join("\n"));
    group.barrier().unwrap();
}

#[test]
fn invalid_rank_lists_are_errors_on_all_ranks() {
    let outcome = launch(module_path!(), "lists", 3);
    outcome.launched.as_ref().unwrap();
    for rank in 0..3 {
        let errors: Vec<&str> = outcome.rank(rank).lines().collect();
        let expected = "it must be a list of at least one rank, each below 3 and listed once";
        assert_eq!(errors[0], format!("`ranks` is []; {expected}"));
        assert_eq!(errors[1], format!("`ranks` is [1, 1]; {expected}"));
        assert_eq!(errors[2], format!("`ranks` is [0, 3]; {expected}"));
        assert_eq!(
            errors[3],
            "`ranks` is [0, 1] on rank 1; it must be the same on all ranks; it is [0, 0] on rank 0"
        );
    }
}

/// Rank 3 is killed; in the subgroup it is rank 1.
fn lost(group: &ProcessGroup) {
    let Some(subgroup) = group.new_group(&[2, 3]).unwrap() else {
        return;
    };
    if group.rank() == 3 {
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
        std::thread::sleep(Duration::from_secs(30));
    }
    let tensor = Tensor::ones([10], (Kind::Float, Device::Cpu));
    let error = subgroup.all_reduce(&tensor, ReduceOp::Sum).unwrap_err();
    write(group, &error.to_string());
}

#[test]
fn a_lost_rank_of_a_subgroup_is_named_by_both_ranks() {
    let outcome = launch(module_path!(), "lost", 4);
    let error = outcome.rank(2);
    assert!(
        error.starts_with(
            "all_reduce #2 on rank 0 of 2 (rank 2 of all): rank 1 (rank 3 of all) is lost"
        ),
        "{error}"
    );
}
