//! Checkpointed regions: their gradients, their errors, offloading, schedules.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Mutex, MutexGuard, PoisonError};

mod cuda;
mod errors;
mod gradients;
mod offload;
mod random_programs;
mod schedules_and_plans;
mod unsigned;

/// Locks libtorch's generator, which is a global state. All tests here lock it, because every checkpoint saves and
/// restores its state.
fn generator() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}
