//! The checks of precision, processes and threads.

use overdrive_core::units;

use super::Severity::Warning;
use super::{Finding, MachineFacts};

/// Returns the finding about the precision.
pub(super) fn precision(facts: &MachineFacts) -> Finding {
    let (chosen, best) = (facts.precision, facts.recommended.precision);
    let reason = &facts.recommended.reason;
    let (what, keys) = match &facts.precision_warning {
        Some(warning) => (
            format!("{chosen}: {warning}"),
            "`bf16`, `fp16`, `fp8` and `tf32`",
        ),
        None if chosen == best => (format!("{chosen}: {reason}"), ""),
        None => (
            format!("{chosen}, and {best} is recommended: {reason}"),
            "`bf16`, `fp16`, `fp8`, `tf32` and `auto_precision`",
        ),
    };
    let remedy = format!("leave {keys} out, which selects {best}");
    Finding::fine("precision", what).or(!keys.is_empty(), Warning, remedy)
}

/// Returns the finding about other processes on the GPU, if there are any.
pub(super) fn other_processes(facts: &MachineFacts) -> Option<Finding> {
    let others = &facts.gpu_processes;
    let listed: Vec<String> = others
        .iter()
        .map(|process| match process.memory_bytes {
            Some(bytes) => format!("{} ({})", process.pid, units::bytes(bytes)),
            None => process.pid.to_string(),
        })
        .collect();
    let what = format!(
        "other processes compute on the GPU: {}; they share its time and its memory",
        listed.join(", ")
    );
    let remedy = "end them, or select another GPU with CUDA_VISIBLE_DEVICES";
    let finding = Finding::fine("processes", what).or(true, Warning, remedy);
    (!others.is_empty()).then_some(finding)
}

/// Returns the finding about the threads of `processes` processes.
pub(super) fn threads(facts: &MachineFacts, processes: usize) -> Finding {
    let (threads, processors) = (facts.threads, facts.processors);
    let all = threads.saturating_mul(processes.max(1));
    let threads_of = units::counted(threads, "thread");
    let all_processors = units::counted(processors, "processor");
    let what = match processes {
        0 | 1 => format!("{threads_of} an operator on {all_processors}"),
        _ => format!("{processes} processes of {threads_of} an operator on {all_processors}"),
    };
    if all > processors {
        let best = (processors / processes.max(1)).max(1);
        let what = format!("{what}: they wait for one another");
        let remedy = format!("`--threads {best}`, or OMP_NUM_THREADS={best}");
        return Finding::fine("threads", what).or(true, Warning, remedy);
    }
    // A quarter allows for hyper-threads: libtorch uses one thread per core.
    let idle = all * 4 < processors && facts.device == tch::Device::Cpu;
    let what = what + if idle { ": most of them are idle" } else { "" };
    let remedy = "leave `--threads` and OMP_NUM_THREADS out, or raise them to the number of cores";
    Finding::fine("threads", what).or(idle, Warning, remedy)
}
