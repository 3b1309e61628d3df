//! Checkpointed regions: their gradients, their errors, offloading, schedules.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Mutex, MutexGuard, PoisonError};

mod cuda;
mod errors;
mod gradients;
mod offload;
mod random_programs;
mod schedules_and_plans;

/// Takes libtorch's generator, which belongs to the process. All tests here take it: a checkpoint saves its
/// state and sets it again, also one that draws nothing.
fn generator() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}
