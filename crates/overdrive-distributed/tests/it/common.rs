//! A test starts copies of its own binary as the ranks of a group.
//!
//! A copy runs only the test `worker` of the test's module, which does nothing unless `OD_SCENARIO` names a
//! scenario. It writes its results to a file that the test reads.
#![allow(dead_code, reason = "not every test file uses all of it")]

use std::ffi::OsStr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use overdrive_distributed::{
    GroupConfig, Launch, ProcessGroup, Result, RunEnd, init_process_group,
};
use tch::{Device, Kind, Tensor};

/// The results that the ranks of a scenario wrote, in rank order; `None` for a rank that wrote nothing.
pub(crate) struct Outcome {
    pub(crate) written: Vec<Option<String>>,
    pub(crate) launched: Result<RunEnd>,
}

impl Outcome {
    pub(crate) fn rank(&self, rank: usize) -> &str {
        let written = self.written[rank].as_deref();
        written.unwrap_or_else(|| panic!("rank {rank} wrote nothing; {:?}", self.launched))
    }

    pub(crate) fn numbers(&self, rank: usize) -> Vec<f64> {
        serde_json::from_str(self.rank(rank)).unwrap()
    }
}

/// The arguments that make a test binary run nothing but the test `worker` of `module`, a `module_path!()`.
pub(crate) fn worker_arguments(module: &str) -> [String; 4] {
    // The name of a test has no crate before it.
    let name = match module.split_once("::") {
        Some((_, module)) => format!("{module}::worker"),
        None => "worker".to_owned(),
    };
    [&name, "--exact", "--nocapture", "--test-threads=1"].map(str::to_owned)
}

/// Runs `scenario` on `ranks` ranks, by the `worker` of `module`, a `module_path!()`.
pub(crate) fn launch(module: &str, scenario: &str, ranks: usize) -> Outcome {
    launch_within(module, scenario, ranks, Duration::from_secs(60))
}

/// Runs a scenario with environment variables for all ranks, and a grace time of one second.
pub(crate) fn launch_with(
    module: &str,
    scenario: &str,
    ranks: usize,
    env: &[(&str, &OsStr)],
) -> Outcome {
    launch_with_grace(module, scenario, ranks, Duration::from_secs(1), env)
}

/// Runs a scenario; `grace` is the time for which the other ranks may run after one has failed.
pub(crate) fn launch_within(
    module: &str,
    scenario: &str,
    ranks: usize,
    grace: Duration,
) -> Outcome {
    launch_with_grace(module, scenario, ranks, grace, &[])
}

pub(crate) fn launch_with_grace(
    module: &str,
    scenario: &str,
    ranks: usize,
    grace: Duration,
    env: &[(&str, &OsStr)],
) -> Outcome {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::SeqCst);
    let folder = std::env::temp_dir().join(format!("od-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let mut launch = Launch::new(std::env::current_exe().unwrap())
        .args(worker_arguments(module))
        .nproc(ranks)
        .grace(grace)
        .env("OMP_NUM_THREADS", "1")
        .env("OD_SCENARIO", scenario)
        .env("OD_FOLDER", &folder);
    for (name, value) in env {
        launch = launch.env(name, value);
    }
    let launched = launch.run();
    let written = (0..ranks)
        .map(|rank| std::fs::read_to_string(folder.join(rank.to_string())).ok())
        .collect();
    std::fs::remove_dir_all(&folder).unwrap();
    Outcome { written, launched }
}

/// Returns the scenario of this process if it is a rank.
pub(crate) fn scenario() -> Option<String> {
    std::env::var("OD_SCENARIO").ok()
}

pub(crate) fn write(group: &ProcessGroup, text: &str) {
    write_as(group.rank(), text);
}

pub(crate) fn write_as(rank: usize, text: &str) {
    let folder = PathBuf::from(std::env::var_os("OD_FOLDER").unwrap());
    std::fs::write(folder.join(rank.to_string()), text).unwrap();
}

pub(crate) fn write_numbers(group: &ProcessGroup, numbers: &[f64]) {
    write(group, &serde_json::to_string(numbers).unwrap());
}

pub(crate) fn group(seconds: f64) -> ProcessGroup {
    let timeout = Duration::from_secs_f64(seconds);
    init_process_group(GroupConfig::default().with_timeout(timeout)).unwrap()
}

/// Returns values that look random and are the same on all ranks.
pub(crate) fn pattern(shape: &[i64], seed: f64) -> Tensor {
    let count: i64 = shape.iter().product();
    let index = Tensor::arange(count, (Kind::Double, Device::Cpu));
    ((index * 12.9898 + seed * 78.233).sin() * 43.7585)
        .sin()
        .to_kind(Kind::Float)
        .reshape(shape)
}
