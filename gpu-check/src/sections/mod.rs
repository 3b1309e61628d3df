//! The sections: correctness checks come first, figures last.
//!
//! A new section is a file here and an entry in [`SECTIONS`].

use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;
use tch::Device;

use crate::context::{Context, Lost};
use crate::line::Line;
use crate::report::KernelUse;
use crate::timing::kernels_set;

mod ablation;
mod attention;
mod backends;
mod caches;
mod decode;
mod decode_kernel;
mod distributed;
mod doctor;
mod finetune;
mod fused;
mod graphs;
mod kernels;
mod machinery;
mod memory;
mod optimizers;
mod own_kernels;
mod profiler;
mod quantized;
mod rates;
mod reads;
mod start;
mod tiny;
mod train_step;

pub use distributed::run_rank;
pub use memory::{Around, around};
pub use optimizers::{Build, Inputs, allowed, furthest, updates};
pub use start::{Phases, Work, run_start};
pub use train_step::batch_for;

/// The device of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// The CPU, with small sizes: a test of the program itself.
    Cpu,
    /// The first CUDA device.
    Cuda,
}

impl Target {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// Returns the device.
    pub fn device(self) -> Device {
        match self {
            Self::Cpu => Device::Cpu,
            Self::Cuda => Device::Cuda(0),
        }
    }
}

/// The purpose of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It checks correctness.
    Correctness,
    /// It measures figures.
    Figures,
}

impl Kind {
    /// Returns the kind of this name on the command line.
    pub fn of_name(name: &str) -> Option<Self> {
        match name {
            "correctness" => Some(Self::Correctness),
            "figures" => Some(Self::Figures),
            _ => None,
        }
    }
}

/// Checks that belong together.
#[derive(Debug)]
pub struct Section {
    /// The name on the command line and in the report.
    pub name: &'static str,
    /// A description.
    pub about: &'static str,
    /// The purpose of the section.
    pub kind: Kind,
    /// The time in seconds that it always gets: somewhat more than it took on an H200.
    planned_seconds: u64,
    /// The time limit on a GPU in seconds, which it may reach where other sections leave time.
    cuda_seconds: u64,
    run: fn(&mut Context) -> Result<()>,
}

/// The share of its time that a process reserves to report its last check.
pub const GRACE: Duration = Duration::from_secs(3);

/// The limit of a section on a CPU: its sizes take seconds, but the processor may be slow.
const CPU_LIMIT: Duration = Duration::from_secs(240);

impl Section {
    /// Returns the time limit.
    pub fn limit(&self, target: Target) -> Duration {
        match target {
            Target::Cpu => CPU_LIMIT,
            Target::Cuda => Duration::from_secs(self.cuda_seconds),
        }
    }

    /// Returns the time that it gets in a run of nine minutes, whatever the sections before it take.
    pub fn planned(&self) -> Duration {
        Duration::from_secs(self.planned_seconds)
    }
}

/// All sections in the order in which they run. The plans of all of them are at most nine minutes, those of
/// [`Kind::Correctness`] at most four (docs/src/gpu-check.md).
pub const SECTIONS: &[Section] = &[
    Section {
        name: "doctor",
        about: "the machine, its libraries and devices",
        kind: Kind::Correctness,
        planned_seconds: 10,
        cuda_seconds: 40,
        run: doctor::run,
    },
    Section {
        name: "own_kernels",
        about: "the kernels of Overdrive: loaded, beside f64, and launched",
        kind: Kind::Correctness,
        planned_seconds: 9,
        cuda_seconds: 60,
        run: own_kernels::run,
    },
    Section {
        name: "tiny",
        about: "a small model: train, adapt, quantize, generate, save, resume",
        kind: Kind::Correctness,
        planned_seconds: 27,
        cuda_seconds: 60,
        run: tiny::run,
    },
    Section {
        name: "graphs",
        about: "CUDA graphs: capture, replay, work after a failed capture",
        kind: Kind::Correctness,
        planned_seconds: 6,
        cuda_seconds: 30,
        run: graphs::run,
    },
    Section {
        name: "attention",
        about: "attention beside f64 on the CPU, forward and backward",
        kind: Kind::Correctness,
        planned_seconds: 26,
        cuda_seconds: 50,
        run: attention::run,
    },
    Section {
        name: "fused",
        about: "fused operators beside f64 on the CPU, forward and backward",
        kind: Kind::Correctness,
        planned_seconds: 7,
        cuda_seconds: 30,
        run: |context| composed(context, fused::run),
    },
    Section {
        name: "quantized",
        about: "quantized linear layers beside their dequantized weights in f64",
        kind: Kind::Correctness,
        planned_seconds: 6,
        cuda_seconds: 30,
        run: |context| composed(context, quantized::run),
    },
    Section {
        name: "reads",
        about: "reads of the device by the host in a step",
        kind: Kind::Correctness,
        planned_seconds: 7,
        cuda_seconds: 25,
        run: reads::run,
    },
    Section {
        name: "caches",
        about: "logits over each kind of cache beside the CPU",
        kind: Kind::Correctness,
        planned_seconds: 11,
        cuda_seconds: 25,
        run: caches::run,
    },
    Section {
        name: "optimizers",
        about: "steps of each optimizer beside the CPU",
        kind: Kind::Correctness,
        planned_seconds: 5,
        cuda_seconds: 20,
        run: |context| composed(context, optimizers::run),
    },
    Section {
        name: "memory",
        about: "out of memory, and work after it",
        kind: Kind::Correctness,
        planned_seconds: 5,
        cuda_seconds: 20,
        run: memory::run,
    },
    Section {
        name: "profiler",
        about: "traces of a step",
        kind: Kind::Correctness,
        planned_seconds: 5,
        cuda_seconds: 15,
        run: profiler::run,
    },
    Section {
        name: "distributed",
        about: "two processes: NCCL on GPUs, Gloo on a CPU",
        kind: Kind::Correctness,
        planned_seconds: 10,
        cuda_seconds: 30,
        run: distributed::run,
    },
    Section {
        name: "decode_kernel",
        about: "the decode kernel of Overdrive captured, its GB/s, and beside f64",
        kind: Kind::Correctness,
        planned_seconds: 6,
        cuda_seconds: 40,
        run: decode_kernel::run,
    },
    Section {
        name: "train_step",
        about: "a training step of a 1B Llama beside PyTorch",
        kind: Kind::Figures,
        planned_seconds: 145,
        cuda_seconds: 220,
        run: train_step::run,
    },
    Section {
        name: "decode",
        about: "decoding of a 1B Llama with 1 and 64 streams beside transformers",
        kind: Kind::Figures,
        planned_seconds: 115,
        cuda_seconds: 190,
        run: decode::run,
    },
    Section {
        name: "finetune",
        about: "QLoRA of an 8B Llama beside PEFT",
        kind: Kind::Figures,
        planned_seconds: 60,
        cuda_seconds: 110,
        run: finetune::run,
    },
    Section {
        name: "start",
        about: "from a file to the first token and the first step",
        kind: Kind::Figures,
        planned_seconds: 25,
        cuda_seconds: 60,
        run: start::run,
    },
    Section {
        name: "ablation",
        about: "the effect of each technique on a training step",
        kind: Kind::Figures,
        planned_seconds: 17,
        cuda_seconds: 60,
        run: ablation::run,
    },
    Section {
        name: "kernels",
        about: "launches and GB/s of single operations",
        kind: Kind::Figures,
        planned_seconds: 6,
        cuda_seconds: 30,
        run: kernels::run,
    },
    Section {
        name: "backends",
        about: "the back ends of attention by length",
        kind: Kind::Figures,
        planned_seconds: 17,
        cuda_seconds: 40,
        run: backends::run,
    },
];

/// Sections that fail in every way, for the tests of the [runner](crate::runner); they run only when they are named.
pub const MACHINERY: &[Section] = &[
    Section {
        name: "machinery",
        about: "checks that fail in every way",
        kind: Kind::Correctness,
        planned_seconds: 60,
        cuda_seconds: 60,
        run: machinery::failures,
    },
    Section {
        name: "machinery-hang",
        about: "a check that never ends",
        kind: Kind::Correctness,
        planned_seconds: 60,
        cuda_seconds: 60,
        run: machinery::hang,
    },
];

/// Returns the time for the first of `sections`, when `left` remains for all of them. On a GPU this is the section's
/// limit, or less if the following sections would not get their planned time, because the sum of the limits exceeds the
/// time of a run. On a CPU it is the limit.
pub fn share(sections: &[&Section], target: Target, left: Duration) -> Duration {
    let Some((first, later)) = sections.split_first() else {
        return Duration::ZERO;
    };
    let limit = first.limit(target).min(left);
    if target == Target::Cpu {
        return limit;
    }
    let kept: Duration = later.iter().map(|section| section.planned()).sum();
    let own = first.planned();
    if left >= own + kept {
        return limit.min(left - kept);
    }
    limit.min(left.mul_f64(own.as_secs_f64() / (own + kept).as_secs_f64()))
}

/// Runs the checks with libtorch's operators even if the kernels of overdrive-gpu are the default; the section
/// `own_kernels` runs the same checks with these kernels.
fn composed(context: &mut Context, run: fn(&mut Context) -> Result<()>) -> Result<()> {
    let _off = kernels_set(Some(false));
    run(context)
}

/// Runs a section in this process and gives its events to `emit`.
pub fn run_here(
    section: &Section,
    target: Target,
    first: usize,
    limit: Duration,
    emit: impl Fn(&Line) + Clone + 'static,
) {
    let mut context = Context::new(target.device(), first, Instant::now() + limit, emit.clone());
    let examines = section.name == SECTIONS[0].name;
    if !examines && let Err(error) = context.check_device() {
        // One line a section, not one a check.
        context.fail("device", &format!("{error:#}"));
        return emit(&Line::End);
    }
    let done = (section.run)(&mut context);
    emit(&Line::Kernels(KernelUse::of_this_process(target.device())));
    match done {
        Ok(()) => emit(&Line::End),
        Err(error) if error.is::<Lost>() => emit(&Line::Lost),
        Err(error) => {
            // Outside of a check: what the section prepares for all of them.
            context.fail("preparation", &format!("{error:#}"));
            emit(&Line::End);
        }
    }
}
