//! Collectives between real processes on loopback.

use std::time::Duration;

use crate::common::{group, launch, scenario, write, write_numbers};
use overdrive_distributed::{GroupConfig, ProcessGroup, ReduceOp, init_process_group};
use tch::{Device, Kind, Tensor};

#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    if scenario == "differ" {
        let config = GroupConfig::default().with_timeout(Duration::from_secs(60));
        return differ(&init_process_group(config.with_check_tensors(true)).unwrap());
    }
    if scenario == "unlimited" {
        let config = GroupConfig::default().with_timeout(Duration::MAX);
        return unlimited(&init_process_group(config).unwrap());
    }
    let group = group(60.0);
    match scenario.as_str() {
        "reduce" => reduce(&group),
        "move" => move_tensors(&group),
        "agree" => agree(&group),
        "refuse" => refuse(&group),
        other => panic!("no scenario {other}"),
    }
}

fn unlimited(group: &ProcessGroup) {
    let tensor = own(group);
    group.all_reduce(&tensor, ReduceOp::Sum).unwrap();
    group.with_timeout(Duration::MAX).barrier().unwrap();
    write_numbers(group, &values(&tensor));
}

#[test]
fn the_longest_timeout_does_not_end_a_collective_at_once() {
    let outcome = launch(module_path!(), "unlimited", 2);
    assert_eq!(outcome.numbers(0), [3.0, 6.0, 9.0]);
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

fn own(group: &ProcessGroup) -> Tensor {
    Tensor::from_slice(&[1.0f32, 2.0, 3.0]) * (group.rank() as f64 + 1.0)
}

fn reduce(group: &ProcessGroup) {
    let mut numbers = Vec::new();
    use ReduceOp::{Avg, Max, Min, Product, Sum};
    for op in [Sum, Avg, Min, Max, Product] {
        let tensor = own(group);
        group.all_reduce(&tensor, op).unwrap();
        numbers.extend(values(&tensor));
    }
    // Integers: the mean of 2, 3 and 4 and of -1, -2, -3, truncated towards zero.
    let whole = Tensor::from_slice(&[group.rank() as i64 + 2, -(group.rank() as i64) - 1]);
    group.all_reduce(&whole, Avg).unwrap();
    numbers.extend(values(&whole));
    // Memory that is not contiguous is written too.
    let wide = Tensor::zeros([2, 3], (Kind::Float, tch::Device::Cpu));
    let mut column = wide.select(1, 1);
    let _ = column.fill_(group.rank() as f64 + 1.0);
    group.all_reduce(&column, Sum).unwrap();
    numbers.extend(values(&wide));
    let first = own(group);
    let second = own(group);
    let pending = [
        group.all_reduce_async(&first, Sum).unwrap(),
        group.all_reduce_async(&second, Max).unwrap(),
    ];
    for pending in pending {
        pending.wait().unwrap();
    }
    numbers.extend(values(&first));
    numbers.extend(values(&second));
    write_numbers(group, &numbers);
}

#[test]
fn all_reduce_gives_sum_mean_min_max_and_product_on_every_rank() {
    let outcome = launch(module_path!(), "reduce", 3);
    outcome.launched.as_ref().unwrap();
    #[rustfmt::skip]
    let expected = [
        6.0, 12.0, 18.0,
        2.0, 4.0, 6.0,
        1.0, 2.0, 3.0,
        3.0, 6.0, 9.0,
        6.0, 48.0, 162.0,
        3.0, -2.0,
        0.0, 6.0, 0.0, 0.0, 6.0, 0.0,
        6.0, 12.0, 18.0,
        3.0, 6.0, 9.0,
    ];
    for rank in 0..3 {
        assert_eq!(outcome.numbers(rank), expected, "rank {rank}");
    }
}

fn move_tensors(group: &ProcessGroup) {
    let rank = group.rank();
    let mut numbers = Vec::new();
    let tensor = own(group);
    group.broadcast(&tensor, 1).unwrap();
    numbers.extend(values(&tensor)); // 2 4 6
    for part in group.all_gather(&own(group)).unwrap() {
        numbers.extend(values(&part)); // 1 2 3 2 4 6
    }
    let scattered = group
        .reduce_scatter(
            &(Tensor::arange(4, (Kind::Float, tch::Device::Cpu)) * (rank as f64 + 1.0)),
            ReduceOp::Sum,
        )
        .unwrap();
    numbers.extend(values(&scattered)); // rank 0: 0 3, rank 1: 6 9
    let gathered = group.gather(&own(group), 0).unwrap();
    assert_eq!(gathered.is_some(), rank == 0);
    for part in gathered.unwrap_or_default() {
        numbers.extend(values(&part));
    }
    let parts = [Tensor::from_slice(&[7.0f32]), Tensor::from_slice(&[8.0f32])];
    let output = Tensor::from_slice(&[0.0f32]);
    group
        .scatter(if rank == 1 { &parts } else { &[] }, &output, 1)
        .unwrap();
    numbers.extend(values(&output));
    let exchanged = group
        .all_to_all(&(Tensor::from_slice(&[10.0f32, 20.0]) + rank as f64))
        .unwrap();
    numbers.extend(values(&exchanged));
    let message = Tensor::from_slice(&[42.0f32 * (1.0 - rank as f32)]);
    if rank == 0 {
        group.send(&message, 1, 5).unwrap();
    } else {
        group.recv(&message, 0, 5).unwrap();
    }
    numbers.extend(values(&message));
    let bytes = group
        .all_gather_bytes(&vec![rank as u8 + 1; rank * 3])
        .unwrap();
    assert_eq!(bytes, [vec![], vec![2, 2, 2]]);
    assert_eq!(
        group
            .broadcast_bytes(if rank == 0 { b"from 0" } else { b"" }, 0)
            .unwrap(),
        b"from 0"
    );
    group.barrier().unwrap();
    write_numbers(group, &numbers);
}

#[test]
fn tensors_move_between_ranks_as_torch_distributed_moves_them() {
    let outcome = launch(module_path!(), "move", 2);
    outcome.launched.as_ref().unwrap();
    let common = [2.0, 4.0, 6.0, 1.0, 2.0, 3.0, 2.0, 4.0, 6.0];
    let first = [
        0.0, 3.0, 1.0, 2.0, 3.0, 2.0, 4.0, 6.0, 7.0, 10.0, 11.0, 42.0,
    ];
    let second = [6.0, 9.0, 8.0, 20.0, 21.0, 42.0];
    assert_eq!(outcome.numbers(0), [&common[..], &first[..]].concat());
    assert_eq!(outcome.numbers(1), [&common[..], &second[..]].concat());
}

fn agree(group: &ProcessGroup) {
    let rank = group.rank() as f64;
    let numbers = [
        group.sum(rank + 1.0).unwrap(),
        group.mean(rank + 1.0).unwrap(),
        group
            .weighted_mean(10.0 * (rank + 1.0), rank * 2.0 + 1.0)
            .unwrap(),
        group.min(rank).unwrap(),
        group.max(rank).unwrap(),
        f64::from(u8::from(group.any(rank == 1.0).unwrap())),
        f64::from(u8::from(group.all(rank == 1.0).unwrap())),
        f64::from(u8::from(group.all(true).unwrap())),
    ];
    write_numbers(group, &numbers);
}

#[test]
fn ranks_agree_on_losses_and_decisions() {
    let outcome = launch(module_path!(), "agree", 2);
    outcome.launched.as_ref().unwrap();
    for rank in 0..2 {
        let expected = [3.0, 1.5, 7.5, 0.0, 1.0, 1.0, 0.0, 1.0];
        assert_eq!(outcome.numbers(rank), expected);
    }
}

fn refuse(group: &ProcessGroup) {
    let three = Tensor::from_slice(&[1.0f32, 2.0, 3.0]);
    let errors = [
        group.broadcast(&three, 2).unwrap_err(),
        group.send(&three, group.rank(), 0).unwrap_err(),
        group.reduce_scatter(&three, ReduceOp::Sum).unwrap_err(),
        group.scatter(&[], &three, group.rank()).unwrap_err(),
    ];
    // None of these reached the other ranks: the group is still usable.
    group.barrier().unwrap();
    let lines: Vec<String> = errors.iter().map(ToString::to_string).collect();
    write(group, &lines.join("\n"));
}

#[test]
fn invalid_arguments_are_refused_before_anything_is_sent() {
    let outcome = launch(module_path!(), "refuse", 2);
    outcome.launched.as_ref().unwrap();
    let lines: Vec<&str> = outcome.rank(1).lines().collect();
    assert_eq!(
        lines[0],
        "`root` is 2; it must be a rank of the group, less than 2"
    );
    assert_eq!(lines[1], "`to` is 1; it must be a rank other than this one");
    assert_eq!(
        lines[2],
        "`tensor` has shape [3]; it must be a shape whose first dimension is a multiple of the 2 ranks"
    );
    assert!(lines[3].starts_with("`tensors` is a list of 0 at rank 1; it must be a list of 2"));
}

#[test]
fn a_tensor_with_gaps_or_overlaps_is_refused_by_every_collective_before_it_starts() {
    use overdrive_sys::Error;
    use overdrive_sys::c10d::{Collective, Group, NetworkDevice, ReduceOp::Sum, Store, StoreRole};
    let wait = Duration::from_secs(20);
    let (store, _) = Store::tcp("127.0.0.1", 0, StoreRole::Server, wait).unwrap();
    let address = NetworkDevice::Address("127.0.0.1");
    let group = Group::gloo(&store, 0, 1, wait, address).unwrap();
    let dense = Tensor::zeros([1000], (Kind::Float, Device::Cpu));
    let of_one = Tensor::zeros([1], (Kind::Float, Device::Cpu)).expand([1000], false);
    let column = Tensor::zeros([1000, 2], (Kind::Float, Device::Cpu)).select(1, 0);
    for (wrong, strides) in [(&of_one, "strides [0]"), (&column, "strides [2]")] {
        let list = std::slice::from_ref(wrong);
        let calls = [
            Collective::AllReduce(wrong, Sum),
            Collective::Broadcast(wrong, 0),
            Collective::Reduce(wrong, Sum, 0),
            Collective::AllGather(wrong, std::slice::from_ref(&dense)),
            Collective::AllGather(&dense, list),
            Collective::ReduceScatter(wrong, &dense, Sum),
            Collective::ReduceScatter(&dense, wrong, Sum),
            Collective::Gather(&dense, list, 0),
            Collective::Scatter(list, &dense, 0),
            Collective::AllToAll(&dense, wrong),
            Collective::Send(wrong, 0, 0),
            Collective::Recv(wrong, 0, 0),
        ];
        for call in calls {
            let error = group.start(&call, None).unwrap_err();
            assert!(
                matches!(error, Error::BadArgument { .. }),
                "{call:?}: {error}"
            );
            assert!(error.to_string().contains(strides), "{call:?}: {error}");
        }
    }
    let undefined = Tensor::new();
    let error = group.start(&Collective::AllReduce(&undefined, Sum), None);
    assert!(error.unwrap_err().to_string().contains("undefined"));
    // Nothing was sent: the group works.
    let work = group
        .start(&Collective::AllReduce(&dense, Sum), None)
        .unwrap();
    work.wait(Some(wait)).unwrap();
}

#[test]
fn a_world_of_one_computes_the_same_without_a_group() {
    let group = ProcessGroup::single();
    let tensor = Tensor::from_slice(&[1.0f32, 2.0]);
    group.all_reduce(&tensor, ReduceOp::Avg).unwrap();
    assert_eq!(values(&group.all_gather(&tensor).unwrap()[0]), [1.0, 2.0]);
    assert_eq!(
        values(&group.reduce_scatter(&tensor, ReduceOp::Sum).unwrap()),
        [1.0, 2.0]
    );
    assert_eq!(values(&group.all_to_all(&tensor).unwrap()), [1.0, 2.0]);
    assert_eq!(group.gather(&tensor, 0).unwrap().unwrap().len(), 1);
    assert_eq!(group.sum(2.5).unwrap(), 2.5);
    group.barrier().unwrap();
    assert!(group.failure().is_none());
}

/// Rank 1 passes another shape, then rank 2 calls another collective.
fn differ(group: &ProcessGroup) {
    let tensor = |elements: i64| Tensor::ones([elements], (Kind::Float, Device::Cpu));
    let elements = if group.rank() == 1 { 10 } else { 1000 };
    let shape = group.all_reduce(&tensor(elements), ReduceOp::Sum);
    let way = if group.rank() == 2 {
        group.broadcast(&tensor(5), 1)
    } else {
        group.all_reduce(&tensor(5), ReduceOp::Max)
    };
    let errors = [shape.unwrap_err().to_string(), way.unwrap_err().to_string()];
    write(group, &errors.join("\n"));
    // The group itself is still usable.
    let same = tensor(5);
    group.all_reduce(&same, ReduceOp::Sum).unwrap();
    assert_eq!(same.double_value(&[0]), 3.0);
    assert_eq!(group.all_gather_object(&group.rank()).unwrap(), [0, 1, 2]);
    group.barrier().unwrap();
}

#[test]
fn tensors_that_differ_between_ranks_are_named_before_they_are_sent() {
    let outcome = launch(module_path!(), "differ", 3);
    outcome.launched.as_ref().unwrap();
    for rank in 0..3 {
        let errors: Vec<&str> = outcome.rank(rank).lines().collect();
        let rest = "all ranks must call the same collectives, with tensors of one dtype and shape, in the same order";
        assert_eq!(
            errors[0],
            format!(
                "rank 1 calls all_reduce of Sum, Float [10], but rank 0 calls \
                 all_reduce of Sum, Float [1000]; {rest}"
            )
        );
        assert_eq!(
            errors[1],
            format!(
                "rank 2 calls broadcast from 1, Float [5], but rank 0 calls \
                 all_reduce of Max, Float [5]; {rest}"
            )
        );
    }
}
