//! The stand-in for tests that count launches.

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

#[path = "mod.rs"]
mod stand_in;

/// Installs the stand-in, and lets one test at a time count its launches.
pub(crate) struct StandIn {
    log: PathBuf,
    _alone: MutexGuard<'static, ()>,
}

impl StandIn {
    pub(crate) fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        static LOG: OnceLock<PathBuf> = OnceLock::new();
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let log = LOG.get_or_init(stand_in::install).clone();
        let stand_in = Self { log, _alone: alone };
        stand_in.launches();
        stand_in
    }

    /// Returns the names of the kernels that were launched since the last call.
    pub(crate) fn launches(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let _ = fs::remove_file(&self.log);
        let launches = text.lines().filter_map(|line| line.strip_prefix("launch "));
        launches
            .map(|line| line.split(' ').nth(1).unwrap().to_owned())
            .collect()
    }
}
