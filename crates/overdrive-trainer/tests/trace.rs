//! The Chrome trace of a run is also written if the run ends before the trace is complete.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_trainer::{Preset, TrainingArguments};
use tch::{Device, Kind, Tensor};

#[test]
fn a_run_that_ends_while_it_is_traced_leaves_the_steps_it_had() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let arguments = TrainingArguments {
        trace: Some(path.clone()),
        ..Preset::Tiny.arguments()
    };
    let mut profiler = arguments.new_profiler().unwrap().unwrap();
    let x = Tensor::ones([8, 8], (Kind::Float, Device::Cpu));
    for _ in 0..6 {
        let _ = x.matmul(&x);
        profiler.step().unwrap();
    }
    let _ = x.matmul(&x);
    assert!(!path.exists());
    profiler.finish().unwrap();
    let trace = std::fs::read_to_string(&path).unwrap();
    assert!(trace.contains("ProfilerStep#5") && trace.contains("ProfilerStep#6"));
    assert!(!trace.contains("ProfilerStep#4"));

    assert!(Preset::Tiny.arguments().new_profiler().unwrap().is_none());
}
