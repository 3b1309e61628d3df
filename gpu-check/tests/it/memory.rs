//! What remains allocated after a failure, and what a library keeps.

use std::cell::Cell;

use overdrive_gpu_check::finding::Outcome;
use overdrive_gpu_check::sections::around;

/// The work space of cuBLAS on Hopper.
const WORK_SPACE: u64 = 32 << 20;

#[test]
fn the_work_space_that_the_first_work_keeps_is_no_leak_of_a_failure() {
    let allocated = Cell::new(1000);
    let work = || {
        allocated.set(allocated.get().max(1000 + WORK_SPACE));
        Ok(())
    };
    let memory = around(|| Ok(allocated.get()), work, || Ok(())).unwrap();
    assert_eq!(memory.kept_by_work, WORK_SPACE);
    let found = memory.judge();
    assert_eq!(found.outcome, Outcome::Passed, "{found:?}");
    assert_eq!(found.figures[0].value, Some(WORK_SPACE as f64));
}

#[test]
fn memory_that_a_failure_keeps_is_found() {
    let allocated = Cell::new(0);
    let fail = || {
        allocated.set(512);
        Ok(())
    };
    let found = around(|| Ok(allocated.get()), || Ok(()), fail)
        .unwrap()
        .judge();
    assert_eq!(found.outcome, Outcome::Failed);
    assert_eq!(found.detail, "0 bytes before and 512 after");
}

#[test]
fn a_failure_that_does_not_happen_is_an_error() {
    let error = around(|| Ok(0), || Ok(()), || anyhow::bail!("the tensor fits")).unwrap_err();
    assert_eq!(error.to_string(), "the tensor fits");
}
