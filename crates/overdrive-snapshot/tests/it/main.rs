//! Writing, finding and restoring snapshots, by one process and by several ranks.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::{Mutex, MutexGuard, PoisonError};

mod branches;
#[path = "../common/mod.rs"]
mod common;
mod gpu;
mod ranks;
mod snapshots;

/// libtorch's generator is the process's: one test uses it at a time.
fn generator() -> MutexGuard<'static, ()> {
    static GENERATOR: Mutex<()> = Mutex::new(());
    GENERATOR.lock().unwrap_or_else(PoisonError::into_inner)
}
