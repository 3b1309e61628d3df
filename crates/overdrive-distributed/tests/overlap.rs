#![allow(clippy::unwrap_used, reason = "a test may panic")]
//! Buckets are reduced while backward runs, by the order of events in the profiler's trace. A test target of
//! its own, because other groups on the machine would delay the reductions.

#[path = "it/common.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{group, launch, scenario, write};
use overdrive_distributed::{DdpConfig, DistributedDataParallel, Error, ProcessGroup};
use overdrive_profiling::{ProfilerConfig, profile, record_function};
use overdrive_sys::hook;
use serde_json::Value;
use tch::nn::Module;
use tch::{Device, Kind, Tensor, nn};

#[test]
fn worker() {
    let Some(scenario) = scenario() else { return };
    traced(&group(60.0), scenario == "quiet");
}

/// Gloo's thread marks a bucket as reduced before it ends the event; on a busy machine that takes a while.
const EVENT_ENDS: Duration = Duration::from_millis(300);

/// Blocks backward before the first layer until a bucket has been reduced. If buckets were reduced after
/// backward, it would block forever.
fn wait_for_a_bucket(group: &ProcessGroup, hidden: &Tensor) {
    let ended = |group: &ProcessGroup| {
        let progress = group.progress().unwrap();
        progress.started - progress.active
    };
    let (before, group) = (ended(group), group.clone());
    let wait = move |_: &Tensor| {
        let start = Instant::now();
        while ended(&group) == before {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "no bucket is reduced"
            );
        }
        std::thread::sleep(EVENT_ENDS);
        Ok(None)
    };
    hook::register(hidden, wait).unwrap();
}

/// Writes the name, start and end in nanoseconds of each event of the third step.
fn traced(group: &ProcessGroup, quiet: bool) {
    let store = nn::VarStore::new(Device::Cpu);
    let layer = |number| nn::linear(store.root() / number, 256, 256, Default::default());
    let layers: Vec<nn::Linear> = (0..6).map(layer).collect();
    let config = DdpConfig {
        // A weight fills a bucket.
        bucket_cap_mb: 0.25,
        ..DdpConfig::default()
    };
    let ddp = DistributedDataParallel::from_var_store(group, &store, config).unwrap();
    let input = Tensor::ones([32, 256], (Kind::Float, Device::Cpu));
    let step = |waits: bool| {
        let loss = ddp
            .forward(|| {
                let mut hidden = layers[0].forward(&input).tanh();
                if waits {
                    wait_for_a_bucket(group, &hidden);
                }
                for layer in &layers[1..] {
                    hidden = layer.forward(&hidden).tanh();
                }
                Ok::<_, Error>(hidden.square().mean(Kind::Float))
            })
            .unwrap();
        let _range = record_function("backward");
        ddp.backward(&loss).unwrap();
        let progress = group.progress().unwrap();
        assert_eq!(progress.active, 0, "backward ends when all are reduced");
    };
    // The buckets are made after the first backward, in the order of its gradients.
    for _ in 0..2 {
        step(false);
    }
    let (_, mut trace) = profile(ProfilerConfig::default(), || {
        let _quiet = quiet.then(|| ddp.no_sync());
        step(!quiet);
        std::thread::sleep(EVENT_ENDS);
    })
    .unwrap();
    let events: Vec<(String, u64, u64)> = trace
        .events()
        .iter()
        .map(|event| (event.name.clone(), event.start_ns, event.end_ns))
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    trace.save_chrome_trace(&path).unwrap();
    let chrome = std::fs::read_to_string(path).unwrap();
    let chrome: Value = serde_json::from_str(&chrome).unwrap();
    let drawn = chrome["traceEvents"].as_array().unwrap().iter();
    let drawn = drawn.filter(|event| event["name"] == "gloo:all_reduce");
    let buckets = ddp.bucket_bytes().unwrap().len();
    let found = (events, drawn.count(), buckets);
    write(group, &serde_json::to_string(&found).unwrap());
    group.barrier().unwrap();
}

type Found = (Vec<(String, u64, u64)>, usize, usize);

fn found(scenario: &str) -> Vec<Found> {
    let outcome = launch(module_path!(), scenario, 2);
    outcome.launched.as_ref().unwrap();
    let ranks = 0..2;
    ranks
        .map(|rank| serde_json::from_str(outcome.rank(rank)).unwrap())
        .collect()
}

#[test]
fn reduction_of_the_first_bucket_starts_before_the_last_gradients_are_computed() {
    for (events, drawn, buckets) in found("traced") {
        let named = |name: &'static str| events.iter().filter(move |event| event.0 == name);
        let (_, begin, end) = named("backward").next().unwrap();
        let inside = |event: &&(String, u64, u64)| event.1 >= *begin && event.2 <= *end;
        let reduced: Vec<_> = named("gloo:all_reduce").collect();
        // Whether a layer's bias comes before its weight or after it, in the next bucket.
        assert!(buckets == 6 || buckets == 7, "{buckets}");
        assert_eq!(
            (reduced.len(), drawn),
            (buckets, buckets),
            "one for each, in the file too"
        );
        let begins_inside = |event: &&(String, u64, u64)| event.1 >= *begin && event.1 <= *end;
        assert!(reduced.iter().all(begins_inside));
        // The matmuls of backward: two per layer, and one for the first layer.
        let matmuls: Vec<_> = named("aten::mm").filter(inside).collect();
        assert_eq!(matmuls.len(), 11);
        let last_matmul = matmuls.iter().map(|event| event.1).max().unwrap();
        // Each bucket starts as soon as its weight's gradient is computed: only that of the first layer starts
        // after the last matmul.
        let begun = named("c10d::allreduce_").filter(inside);
        assert_eq!(begun.filter(|event| event.1 < last_matmul).count(), 5);
        // At least one is complete before backward is, not only queued.
        assert!(reduced.iter().any(|event| event.2 < last_matmul));
    }
}

#[test]
fn under_no_sync_nothing_is_reduced() {
    for (events, drawn, _) in found("quiet") {
        assert!(events.iter().any(|event| event.0 == "backward"));
        let reduced = events.iter().filter(|event| event.0 == "gloo:all_reduce");
        assert_eq!((reduced.count(), drawn), (0, 0));
    }
}
