//! Batch plans.

use overdrive_accumulation::BatchPlan;
use proptest::prelude::*;

#[test]
fn any_two_factors_give_the_third() {
    let plan = BatchPlan::new(4, 8, 2).unwrap();
    assert_eq!(plan.effective_batch(), 64);
    assert_eq!(BatchPlan::from_micro_batch(64, 4, 2).unwrap(), plan);
    assert_eq!(BatchPlan::from_accumulation_steps(64, 8, 2).unwrap(), plan);
    assert_eq!(
        plan.to_string(),
        "64 examples per step = micro-batch 4 × 8 accumulation steps × 2 processes"
    );
}

fn error(plan: overdrive_accumulation::Result<BatchPlan>) -> String {
    plan.unwrap_err().to_string()
}

#[test]
fn the_error_of_numbers_that_do_not_divide_names_the_nearest_that_do() {
    assert_eq!(
        error(BatchPlan::from_micro_batch(60, 7, 2)),
        "a micro-batch of 7 does not divide the 30 examples per step of each process (60 on 2 processes); the nearest that do: 6 and 10"
    );
    assert_eq!(
        error(BatchPlan::from_accumulation_steps(16, 3, 1)),
        "a number of accumulation steps of 3 does not divide the 16 examples per step of each process (16 on 1 process); the nearest that do: 2 and 4"
    );
    assert_eq!(
        error(BatchPlan::from_micro_batch(8, 100, 1)),
        "a micro-batch of 100 does not divide the 8 examples per step of each process (8 on 1 process); the nearest that do: 8"
    );
    assert_eq!(
        error(BatchPlan::from_micro_batch(10, 1, 4)),
        "an effective batch of 10 does not divide among 4 processes; use 8 or 12"
    );
    assert_eq!(
        error(BatchPlan::from_micro_batch(3, 1, 4)),
        "an effective batch of 3 does not divide among 4 processes; use 4"
    );
    assert_eq!(
        error(BatchPlan::new(0, 1, 1)),
        "`micro_batch` is 0; it must be at least 1"
    );
    assert_eq!(
        error(BatchPlan::from_micro_batch(4, 1, 0)),
        "`world_size` is 0; it must be at least 1"
    );
    assert!(error(BatchPlan::new(u64::MAX, 2, 1)).contains("too large"));
}

#[test]
fn a_plan_round_trips_through_json_and_zero_is_an_error() {
    let plan = BatchPlan::new(4, 8, 2).unwrap();
    let text = serde_json::to_string(&plan).unwrap();
    assert_eq!(
        text,
        r#"{"per_device_train_batch_size":4,"gradient_accumulation_steps":8,"world_size":2}"#
    );
    assert_eq!(serde_json::from_str::<BatchPlan>(&text).unwrap(), plan);
    let error = serde_json::from_str::<BatchPlan>(&text.replace('8', "0")).unwrap_err();
    assert!(
        error.to_string().contains("`accumulation_steps` is 0"),
        "{error}"
    );
}

#[test]
fn more_processes_take_over_accumulation_steps() {
    let plan = BatchPlan::new(4, 8, 1).unwrap().with_world_size(4).unwrap();
    assert_eq!(
        (
            plan.micro_batch(),
            plan.accumulation_steps(),
            plan.world_size()
        ),
        (4, 2, 4)
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn shrinking_keeps_the_effective_batch(
        micro in 1u64..200, steps in 1u64..20, world in 1u64..9, limit in 0u64..300,
    ) {
        let plan = BatchPlan::new(micro, steps, world).unwrap();
        match plan.with_micro_batch_at_most(limit) {
            None => prop_assert_eq!(limit, 0),
            Some(smaller) => {
                prop_assert!(smaller.micro_batch() <= limit);
                prop_assert_eq!(smaller.effective_batch(), plan.effective_batch());
                prop_assert_eq!(smaller.world_size(), world);
                // The largest that fits: nothing between it and the limit divides.
                for between in smaller.micro_batch() + 1..=limit.min(micro * steps) {
                    prop_assert!(plan.with_micro_batch(between).is_err());
                }
            }
        }
        let mut plan = plan;
        let mut halvings = 0;
        while let Some(half) = plan.halved() {
            prop_assert!(half.micro_batch() <= plan.micro_batch() / 2);
            prop_assert_eq!(half.effective_batch(), plan.effective_batch());
            plan = half;
            halvings += 1;
        }
        prop_assert_eq!(plan.micro_batch(), 1);
        prop_assert!(halvings <= 8);
    }

    #[test]
    fn an_uneven_micro_batch_names_divisors(effective in 2u64..500, micro in 1u64..600) {
        match BatchPlan::from_micro_batch(effective, micro, 1) {
            Ok(plan) => prop_assert_eq!(plan.effective_batch(), effective),
            Err(error) => {
                let text = error.to_string();
                let named = text.rsplit("nearest that do: ").next().unwrap();
                for number in named.split(" and ") {
                    let number: u64 = number.parse().unwrap();
                    prop_assert!(effective.is_multiple_of(number));
                }
            }
        }
    }
}
