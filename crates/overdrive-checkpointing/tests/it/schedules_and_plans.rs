//! Groups of blocks, and plans for a memory budget.

use overdrive_checkpointing::{
    BlockCost, CheckpointOptions, Error, Plan, Schedule, Shared, checkpoint_every_nth,
    checkpoint_scheduled, checkpoint_sequential, measure_blocks, scope,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn weights(n: usize) -> Vec<Tensor> {
    (0..n)
        .map(|_| {
            (Tensor::randn([8, 8], F32) * 0.4)
                .detach()
                .set_requires_grad(true)
        })
        .collect()
}

fn forward(
    weight: &Tensor,
    x: &Tensor,
) -> Result<Tensor, Box<dyn std::error::Error + Send + Sync>> {
    Ok(x.f_matmul(weight)?.f_gelu("none")?)
}

#[test]
fn every_schedule_gives_the_gradients_of_the_plain_run() {
    let _generator = crate::generator();
    let weights = weights(7);
    let x = Tensor::randn([4, 8], F32);
    let gradients = |y: &Tensor| {
        y.square().sum(Kind::Float).backward();
        weights
            .iter()
            .map(|weight| {
                let gradient = weight.grad().copy();
                overdrive_sys::grad::clear(weight).unwrap();
                gradient
            })
            .collect::<Vec<_>>()
    };
    let plain = weights
        .iter()
        .fold(x.shallow_clone(), |x, w| forward(w, &x).unwrap());
    let expected = gradients(&plain);
    let options = CheckpointOptions::default();
    let shared: Vec<Shared<Tensor>> = weights
        .iter()
        .map(|weight| Shared::new(weight.shallow_clone()))
        .collect();
    let schedules = [
        Schedule::Never,
        Schedule::EveryBlock,
        Schedule::EveryNth(3),
        Schedule::Segments(1),
        Schedule::Segments(7),
        Schedule::SqrtSegments,
        Schedule::Chosen(vec![true, false, false, true, true, false, true]),
    ];
    for schedule in &schedules {
        let y = checkpoint_scheduled(&shared, schedule, &x, &options, forward).unwrap();
        assert_eq!(gradients(&y), expected, "{schedule:?}");
        let found = scope(|scope| {
            gradients(
                &scope
                    .scheduled(&weights, schedule, &x, &options, forward)
                    .unwrap(),
            )
        });
        assert_eq!(found, expected, "{schedule:?}");
    }
    let y = checkpoint_sequential(&shared, 3, &x, &options, forward).unwrap();
    assert_eq!(gradients(&y), expected);
    let y = checkpoint_every_nth(&shared, 2, &x, &options, forward).unwrap();
    assert_eq!(gradients(&y), expected);
}

#[test]
fn invalid_schedules_are_an_error() {
    let _generator = crate::generator();
    let text = |schedule: Schedule| schedule.groups(4).unwrap_err().to_string();
    assert!(text(Schedule::EveryNth(0)).contains("`every_nth` is 0"));
    assert!(text(Schedule::Segments(0)).contains("`segments` is 0"));
    assert!(text(Schedule::Segments(5)).contains("at most the number of blocks"));
    assert!(text(Schedule::Chosen(vec![true])).contains("for 1 blocks, but there are 4"));
}

#[test]
fn segments_are_those_of_pytorch() {
    let _generator = crate::generator();
    // torch: size = n // segments; the last takes what is left and runs plain.
    let groups = Schedule::Segments(3).groups(10).unwrap();
    let found: Vec<_> = groups
        .into_iter()
        .map(|g| (g.blocks, g.checkpointed))
        .collect();
    assert_eq!(found, [(0..3, true), (3..6, true), (6..10, false)]);
}

proptest! {
    #[test]
    fn groups_cover_each_block_once_and_in_order(blocks in 1usize..60, n in 1usize..60) {
        for schedule in [
            Schedule::EveryBlock,
            Schedule::EveryNth(n),
            Schedule::Segments(n.min(blocks)),
            Schedule::SqrtSegments,
        ] {
            let groups = schedule.groups(blocks).unwrap();
            let covered: Vec<usize> = groups.iter().flat_map(|g| g.blocks.clone()).collect();
            prop_assert_eq!(covered, (0..blocks).collect::<Vec<_>>());
            prop_assert!(groups.iter().all(|g| !g.blocks.is_empty()));
        }
    }

    #[test]
    fn a_plan_meets_its_budget_and_recomputes_no_unnecessary_block(
        costs in proptest::collection::vec(
            (1u64..1000, 0u64..200, 0.001f64..1.0)
                .prop_map(|(saved_bytes, input_bytes, forward_s)| BlockCost { saved_bytes, input_bytes, forward_s }),
            1..12,
        ),
        budget in 1u64..6000,
    ) {
        match Plan::for_budget(&costs, budget) {
            Ok(plan) => {
                prop_assert!(plan.predicted_peak_bytes <= budget);
                prop_assert!((1.0..=4.0 / 3.0 + 1e-9).contains(&plan.predicted_slowdown));
                if plan.plain_peak_bytes <= budget {
                    prop_assert!(plan.recompute.iter().all(|again| !again));
                }
                // Leaving out any block that is recomputed breaks the budget.
                for index in (0..costs.len()).filter(|&k| plan.recompute[k]) {
                    let mut fewer = plan.recompute.clone();
                    fewer[index] = false;
                    prop_assert!(peak(&costs, &fewer) > budget);
                }
            }
            Err(Error::Budget { least_bytes, .. }) => {
                prop_assert!(least_bytes > budget);
                // No other choice would do either.
                for choice in 0..1usize << costs.len() {
                    let recompute: Vec<bool> = (0..costs.len()).map(|k| choice >> k & 1 == 1).collect();
                    prop_assert!(peak(&costs, &recompute) > budget);
                }
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

/// The most bytes at once, by going through forward and backward one block at a time.
fn peak(costs: &[BlockCost], recompute: &[bool]) -> u64 {
    let mut live = 0u64;
    let mut most = 0;
    for (cost, again) in costs.iter().zip(recompute) {
        live += if *again {
            cost.input_bytes
        } else {
            cost.saved_bytes
        };
        most = most.max(live);
    }
    for (cost, again) in costs.iter().zip(recompute).rev() {
        if *again {
            live -= cost.input_bytes;
            most = most.max(live + cost.saved_bytes.max(cost.input_bytes));
        } else {
            live -= cost.saved_bytes;
        }
    }
    most
}

#[test]
fn measured_blocks_have_the_bytes_that_their_operators_save() {
    let _generator = crate::generator();
    let weights = weights(2);
    let x = Tensor::randn([64, 8], F32);
    let costs = measure_blocks(2, &x, |index, x| forward(&weights[index], x)).unwrap();
    for cost in costs {
        // matmul saves its input, gelu its own; weights do not count.
        assert_eq!(
            (cost.saved_bytes, cost.input_bytes),
            (2 * 64 * 8 * 4, 64 * 8 * 4)
        );
        assert!(cost.forward_s > 0.0);
    }
}

#[test]
fn views_of_one_memory_count_once() {
    let _generator = crate::generator();
    let x = Tensor::randn([64, 8], F32);
    let costs = measure_blocks(1, &x, |_, x| {
        let parts = x.f_mul_scalar(2.0)?.f_chunk(2, 1)?;
        // The product saves both halves of one tensor, and the cosine the whole of it.
        Ok(parts[0].f_mul(&parts[1])?)
    })
    .unwrap();
    assert_eq!(costs[0].saved_bytes, 64 * 8 * 4);
}
