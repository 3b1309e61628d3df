//! Rows are those that TRL packs (`fixtures/gen_packing.py`).

use crate::common::fixture;
use overdrive_datasets::{PackPlan, PackingStrategy};

#[derive(serde::Deserialize)]
struct Case {
    lengths: Vec<u32>,
    capacity: usize,
    bfd: Vec<Vec<[u32; 3]>>,
    bfd_split: Vec<Vec<[u32; 3]>>,
    /// Tokens, counted through all sequences.
    wrapped: Vec<Vec<u32>>,
}

fn cases() -> Vec<Case> {
    serde_json::from_slice(&std::fs::read(fixture("packing.json")).unwrap()).unwrap()
}

/// Returns each row as sequence, first token and length of its segments.
fn rows(plan: &PackPlan) -> Vec<Vec<[u32; 3]>> {
    let parts = |row| {
        plan.row(row)
            .iter()
            .map(|part| [part.sequence, part.start, part.len])
            .collect()
    };
    (0..plan.len()).map(parts).collect()
}

#[test]
fn best_fit_rows_are_those_of_trl_in_its_order() {
    for case in cases() {
        for (strategy, expected) in [
            (PackingStrategy::Bfd, &case.bfd),
            (PackingStrategy::BfdSplit, &case.bfd_split),
        ] {
            let plan = PackPlan::new(&case.lengths, case.capacity, strategy).unwrap();
            assert_eq!(
                &rows(&plan),
                expected,
                "{strategy}, {} sequences",
                case.lengths.len()
            );
        }
    }
}

#[test]
fn wrapped_rows_hold_the_tokens_of_trls() {
    for case in cases() {
        let plan = PackPlan::new(&case.lengths, case.capacity, PackingStrategy::Wrapped).unwrap();
        let starts: Vec<u32> = case
            .lengths
            .iter()
            .scan(0, |sum, &len| {
                *sum += len;
                Some(*sum - len)
            })
            .collect();
        let tokens = |row: Vec<[u32; 3]>| -> Vec<u32> {
            row.into_iter()
                .flat_map(|[sequence, start, len]| {
                    let first = starts[sequence as usize] + start;
                    first..first + len
                })
                .collect()
        };
        let found: Vec<_> = rows(&plan).into_iter().map(tokens).collect();
        assert_eq!(found, case.wrapped);
    }
}
