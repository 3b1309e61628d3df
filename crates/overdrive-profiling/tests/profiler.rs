//! libtorch's profiler: what it sees, the schedule, the Chrome trace.
//!
//! A process takes one profile at a time, so every test here holds one lock.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::RefCell;
use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_profiling::{
    GroupBy, Phase, Profiler, ProfilerConfig, Schedule, SortBy, StepTimer, profile, record_function,
};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

fn alone() -> MutexGuard<'static, ()> {
    static ONE_PROFILE: Mutex<()> = Mutex::new(());
    ONE_PROFILE.lock().unwrap_or_else(PoisonError::into_inner)
}

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

fn everything() -> ProfilerConfig {
    ProfilerConfig {
        record_shapes: true,
        profile_memory: true,
        with_flops: true,
        ..ProfilerConfig::default()
    }
}

/// A product of (32, 64) and (64, 16) with its backward, in two phases.
fn step(timer: &StepTimer) {
    let x = Tensor::ones([32, 64], F32);
    let w = Tensor::ones([64, 16], F32).set_requires_grad(true);
    let loss = timer.phase(Phase::Forward, || x.matmul(&w).relu().sum(Kind::Float));
    timer.phase(Phase::Backward, || loss.backward());
}

#[test]
fn a_trace_without_the_work_of_a_gpu_that_was_asked_for_says_so() {
    let _alone = alone();
    let of = |cuda| {
        let config = ProfilerConfig {
            cuda: Some(cuda),
            profile_memory: true,
            ..ProfilerConfig::default()
        };
        let (_, trace) = profile(config, || step(&StepTimer::new())).unwrap();
        trace.gpu_warning().map(str::to_owned)
    };
    assert_eq!(of(false), None);
    let warning = of(true).unwrap();
    assert!(
        warning.starts_with("the trace has no GPU work: ")
            && warning.contains("`KINETO_LOG_LEVEL=0`"),
        "{warning}"
    );
}

#[test]
fn a_release_is_reported_with_the_memory_that_remains() {
    let _alone = alone();
    let (_, mut trace) = profile(everything(), || {
        let kept = Tensor::ones([1 << 10], F32);
        let freed = Tensor::ones([1 << 12], F32);
        drop(freed);
        drop(kept);
    })
    .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.json");
    trace.save_chrome_trace(&path).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let events: Value = serde_json::from_str(&text).unwrap();
    let memory = events["traceEvents"].as_array().unwrap().iter();
    let memory: Vec<[i64; 2]> = memory
        .filter(|event| event["name"] == "[memory]")
        .map(|event| ["Bytes", "Total Allocated"].map(|key| event["args"][key].as_i64().unwrap()))
        .collect();
    let total_after = |change: i64| {
        let event = memory.iter().find(|[bytes, _]| *bytes == change);
        event.map(|[_, total]| *total)
    };
    let (made, freed) = (
        total_after(4 << 12).unwrap(),
        total_after(-4 << 12).unwrap(),
    );
    assert_eq!(freed, made - (4 << 12), "{memory:?}");
}

#[test]
fn operators_are_counted_with_shapes_memory_and_flops() {
    let _alone = alone();
    let (_, trace) = profile(everything(), || step(&StepTimer::new())).unwrap();
    let averages = trace.key_averages(GroupBy::Name);
    // One product forward, one backward: x needs no gradient.
    let mm = averages.get("aten::mm").unwrap();
    assert_eq!((mm.calls, mm.flops), (2, 2 * 2 * 32 * 64 * 16));
    assert!(mm.self_cpu_ns > 0 && mm.total_cpu_ns >= mm.self_cpu_ns);
    // (32, 16) forward and (64, 16) backward.
    assert_eq!(mm.total_cpu_bytes, 4 * (32 * 16 + 64 * 16));
    let matmul = averages.get("aten::matmul").unwrap();
    assert_eq!(matmul.calls, 1);
    assert!(
        matmul.total_cpu_ns > matmul.self_cpu_ns,
        "mm is inside of it"
    );

    let mut by_shape = trace.key_averages(GroupBy::NameAndShapes);
    by_shape.sort_by(SortBy::Calls);
    let shapes: Vec<_> = by_shape
        .rows()
        .iter()
        .filter(|row| row.name == "aten::mm")
        .map(|row| row.shapes.as_str())
        .collect();
    assert_eq!(shapes.len(), 2, "{shapes:?}");
    assert!(shapes.contains(&"[32, 64], [64, 16]"), "{shapes:?}");
    assert!(averages.table(5).contains("GFLOP"));
}

#[test]
fn phases_and_ranges_are_in_the_trace_around_their_operators() {
    let _alone = alone();
    let (_, trace) = profile(ProfilerConfig::default(), || {
        let timer = StepTimer::new();
        step(&timer);
        let _range = record_function("by hand");
        drop(Tensor::eye(2, F32));
    })
    .unwrap();
    let find = |name: &str| {
        trace
            .events()
            .iter()
            .find(|event| event.name == name)
            .unwrap()
    };
    let (forward, backward) = (find("forward"), find("backward"));
    let inside = |inner: &str, outer: &overdrive_profiling::TraceEvent| {
        find(inner).start_ns >= outer.start_ns && find(inner).end_ns <= outer.end_ns
    };
    assert!(inside("aten::matmul", forward));
    assert!(inside("MmBackward0", backward));
    assert!(forward.end_ns <= backward.start_ns);
    assert!(inside("aten::eye", find("by hand")));
}

fn traced(path: &std::path::Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    json["traceEvents"].as_array().unwrap().clone()
}

#[test]
fn the_chrome_trace_is_whole_json_under_its_own_name_and_can_be_written_again() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let (_, mut trace) = profile(everything(), || step(&StepTimer::new())).unwrap();
    let (first, second) = (
        folder.path().join("new/a.json"),
        folder.path().join("b.json"),
    );
    trace.save_chrome_trace(&first).unwrap();
    trace.save_chrome_trace(&second).unwrap();
    for path in [&first, &second] {
        let events = traced(path);
        let category = |name: &str| {
            let event = events
                .iter()
                .find(|e| e["name"] == name && e["ph"] == "X")
                .unwrap();
            assert!(event["dur"].as_f64().unwrap() > 0.0);
            event["cat"].as_str().unwrap().to_owned()
        };
        assert_eq!(category("forward"), "user_annotation", "{}", path.display());
        assert_eq!(category("aten::mm"), "cpu_op", "{}", path.display());
    }
    // The times of the two writers agree: ours begins at the profile's start.
    let length = |path| {
        let events = traced(path);
        let mm = events.iter().find(|e| e["name"] == "aten::mm").unwrap();
        mm["dur"].as_f64().unwrap()
    };
    assert!((length(&first) - length(&second)).abs() < 0.01);
    let left: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "no partial file is left: {left:?}");
}

#[test]
fn a_trace_that_cannot_be_written_is_an_error_with_its_path() {
    let _alone = alone();
    let file = tempfile::NamedTempFile::new().unwrap();
    let (_, mut trace) = profile(ProfilerConfig::default(), || ()).unwrap();
    let error = trace
        .save_chrome_trace(file.path().join("trace.json"))
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains(&file.path().display().to_string()),
        "{error}"
    );
    let error = trace.save_chrome_trace("/").unwrap_err();
    assert!(
        error.to_string().contains("the path names no file"),
        "{error}"
    );
}

#[test]
fn a_second_profile_at_once_is_refused_and_the_first_continues() {
    let _alone = alone();
    let (second, trace) = profile(ProfilerConfig::default(), || {
        let second = profile(ProfilerConfig::default(), || panic!("not run"));
        drop(Tensor::ones([2], F32));
        second.map(|_: ((), _)| ())
    })
    .unwrap();
    let text = second.unwrap_err().to_string();
    assert!(text.contains("another profile is being taken"), "{text}");
    assert!(
        trace
            .events()
            .iter()
            .any(|event| event.name == "aten::ones")
    );
}

#[test]
fn a_panic_ends_the_profile() {
    let _alone = alone();
    let outcome = std::panic::catch_unwind(|| {
        let _ = profile(ProfilerConfig::default(), || panic!("on purpose"));
    });
    assert!(outcome.is_err());
    assert!(profile(ProfilerConfig::default(), || ()).is_ok());
}

#[test]
fn a_schedule_hands_over_the_active_steps_of_each_cycle_and_no_others() {
    let _alone = alone();
    let cycles = RefCell::new(Vec::new());
    let schedule = Schedule {
        skip_first: 1,
        wait: 1,
        warmup: 1,
        active: 2,
        repeat: 2,
    };
    let mut profiler = Profiler::start(ProfilerConfig::default(), schedule, |trace| {
        let mut steps: Vec<_> = trace
            .events()
            .iter()
            .filter_map(|event| event.name.strip_prefix("ProfilerStep#"))
            .map(str::to_owned)
            .collect();
        steps.sort();
        let products = trace
            .events()
            .iter()
            .filter(|e| e.name == "aten::mm")
            .count();
        cycles.borrow_mut().push((steps, products));
        Ok(())
    })
    .unwrap();
    let timer = StepTimer::new();
    for _ in 0..12 {
        step(&timer);
        profiler.step().unwrap();
    }
    assert_eq!(profiler.steps(), 12);
    profiler.finish().unwrap();
    let two = |a: &str, b: &str| (vec![a.to_owned(), b.to_owned()], 4);
    assert_eq!(*cycles.borrow(), [two("3", "4"), two("7", "8")]);
}

#[test]
fn a_loop_that_ends_inside_a_cycle_hands_over_what_it_has() {
    let _alone = alone();
    let handed = RefCell::new(0);
    let config = ProfilerConfig::default();
    let mut profiler = Profiler::start(config, Schedule::default(), |trace| {
        *handed.borrow_mut() += trace
            .events()
            .iter()
            .filter(|e| e.name == "aten::mm")
            .count();
        Ok(())
    })
    .unwrap();
    for _ in 0..3 {
        step(&StepTimer::new());
        profiler.step().unwrap();
    }
    assert_eq!(*handed.borrow(), 0);
    profiler.finish().unwrap();
    assert_eq!(*handed.borrow(), 6);
}

#[test]
fn an_error_of_the_closure_is_the_error_of_the_step() {
    let _alone = alone();
    let schedule = Schedule {
        active: 1,
        ..Schedule::default()
    };
    let mut profiler = Profiler::start(ProfilerConfig::default(), schedule, |mut trace| {
        trace.save_chrome_trace("/")
    })
    .unwrap();
    assert!(profiler.step().is_err());
    drop(profiler);
    assert!(profile(ProfilerConfig::default(), || ()).is_ok());
}

#[test]
fn marks_for_nsight_systems_need_cuda() {
    let _alone = alone();
    // The error of a CPU libtorch leaves the profiler free for others.
    if !tch::Cuda::is_available() {
        let error = overdrive_profiling::emit_nvtx(false).unwrap_err();
        assert!(error.to_string().contains("NVTX"), "{error}");
    } else {
        let _nvtx = overdrive_profiling::emit_nvtx(true).unwrap();
        let _one = Tensor::ones([2, 2], (Kind::Float, Device::Cpu)) + 1;
    }
    let (_, trace) = profile(ProfilerConfig::default(), || ()).unwrap();
    drop(trace);
}
