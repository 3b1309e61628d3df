//! The events of a profile as a Chrome trace.
//!
//! The format: "Trace Event Format", <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.

use serde_json::{Value, json};

use super::TraceEvent;
use super::key_averages::{CPU, MEMORY, USER_SCOPE};

/// Returns the events as a JSON object with `traceEvents`, in microseconds since `start_ns`.
pub(super) fn json(events: &[TraceEvent], start_ns: u64) -> String {
    let process = std::process::id();
    let microseconds = |ns: u64| ns.saturating_sub(start_ns) as f64 * 1e-3;
    let mut allocated = 0_i64;
    let traced: Vec<Value> = events
        .iter()
        .filter(|event| !event.is_hidden)
        .map(|event| {
            if event.name == MEMORY {
                allocated += event.bytes;
                return json!({
                    "ph": "C", "name": "allocated bytes", "pid": process,
                    "ts": microseconds(event.start_ns), "args": { "bytes": allocated },
                });
            }
            let category = match (event.device_type, event.scope) {
                (CPU, USER_SCOPE) => "user_annotation",
                (CPU, _) => "cpu_op",
                _ => "kernel",
            };
            let mut traced = json!({
                "ph": "X", "cat": category, "name": event.name, "pid": process, "tid": event.thread,
                "ts": microseconds(event.start_ns),
                "dur": event.end_ns.saturating_sub(event.start_ns) as f64 * 1e-3,
                "args": { "External id": event.correlation },
            });
            // The same id on the kernel and on the operator that launched it draws an arrow between them.
            if event.device_type != CPU {
                traced["tid"] = format!("device {}", event.device_index).into();
                traced["args"]["External id"] = event.linked_correlation.into();
            }
            if !event.shapes.is_empty() {
                traced["args"]["Input Dims"] = event.shapes.as_str().into();
            }
            traced
        })
        .collect();
    json!({
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": start_ns,
        "traceEvents": traced,
    })
    .to_string()
}
