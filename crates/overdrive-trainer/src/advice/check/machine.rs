//! The checks of precision, processes and threads.

use overdrive_core::units;

use super::{Finding, MachineFacts};

/// Returns the finding about the precision.
pub(super) fn precision(facts: &MachineFacts) -> Finding {
    let (chosen, best) = (facts.precision, facts.recommended.precision);
    let reason = &facts.recommended.reason;
    if let Some(warning) = &facts.precision_warning {
        let remedy = format!("leave `bf16`, `fp16` and `tf32` out, which selects {best}");
        return Finding::warning("precision", format!("{chosen}: {warning}"), remedy);
    }
    if chosen == best {
        return Finding::fine("precision", format!("{chosen}: {reason}"));
    }
    Finding::warning(
        "precision",
        format!("{chosen}, and {best} is recommended: {reason}"),
        format!("leave `bf16`, `fp16`, `tf32` and `auto_precision` out, which selects {best}"),
    )
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
    (!others.is_empty()).then(|| {
        Finding::warning(
            "processes",
            format!(
                "other processes compute on the GPU: {}; they share its time and its memory",
                listed.join(", ")
            ),
            "end them, or select another GPU with CUDA_VISIBLE_DEVICES",
        )
    })
}

/// Returns the finding about the threads of `processes` processes.
pub(super) fn threads(facts: &MachineFacts, processes: usize) -> Finding {
    let (threads, processors) = (facts.threads, facts.processors);
    let all = threads.saturating_mul(processes.max(1));
    let what = match processes {
        0 | 1 => format!("{threads} threads an operator on {processors} processors"),
        _ => format!(
            "{processes} processes of {threads} threads an operator on {processors} processors"
        ),
    };
    if all > processors {
        let best = (processors / processes.max(1)).max(1);
        return Finding::warning(
            "threads",
            format!("{what}: they wait for one another"),
            format!("`--threads {best}`, or OMP_NUM_THREADS={best}"),
        );
    }
    // A quarter allows for hyper-threads: libtorch uses one thread per core.
    if all * 4 < processors && facts.device == tch::Device::Cpu {
        return Finding::warning(
            "threads",
            format!("{what}: most of them are idle"),
            "leave `--threads` and OMP_NUM_THREADS out, or raise them to the number of cores",
        );
    }
    Finding::fine("threads", what)
}
