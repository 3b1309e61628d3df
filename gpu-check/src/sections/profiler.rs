use anyhow::Result;
use overdrive::precision::Precision;
use overdrive::profiling::{GroupBy, ProfilerConfig, record_function};
use tch::Device;

use crate::context::Context;
use crate::finding::Finding;
use crate::models::{config, tokens};
use crate::timing::trace;
use crate::training::Trainer;

pub(super) fn run(context: &mut Context) -> Result<()> {
    let config = config(context);
    let device = context.device();
    context.check("trace of a training step", || {
        let (model, mut trainer) = Trainer::of_model(&config, device, Precision::Bf16)?;
        let ids = tokens(2, 64, device)?;
        trainer.steps(&model, &ids, 2)?;
        let settings = ProfilerConfig {
            record_shapes: true,
            with_flops: true,
            ..ProfilerConfig::default()
        };
        let (_loss, mut trace) = trace(device, settings, || {
            let _range = record_function("a step of the check");
            trainer.step(&model, &ids)
        })?;
        let on_host = trace.events().iter().filter(|event| event.device_type == 0);
        let on_host = on_host.count();
        let on_device: Vec<_> = trace
            .events()
            .iter()
            .filter(|event| event.device_type != 0)
            .collect();
        let (launches, nanoseconds) = (
            on_device.len(),
            on_device
                .iter()
                .map(|event| event.end_ns - event.start_ns)
                .sum::<u64>(),
        );
        let averages = trace.key_averages(GroupBy::Name);
        let has_range = averages.get("a step of the check").is_some();
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("trace.json");
        trace.save_chrome_trace(&path)?;
        let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&path)?)?;
        let is_list = written["traceEvents"].is_array() || written.is_array();
        let reason = match (has_range, is_list, launches) {
            (false, ..) => "the range is not in the trace",
            (_, false, _) => "the file has no list of events",
            (.., 0) if device != Device::Cpu => {
                "no kernels: CUPTI may lack the permission (NVreg_RestrictProfilingToAdminUsers)"
            }
            _ => "",
        };
        Ok(Finding::judged(reason.is_empty(), reason)
            .with("operators", on_host as f64)
            .with("device events", launches as f64)
            .with("device ms", nanoseconds as f64 / 1e6))
    })
}
