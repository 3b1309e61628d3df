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
mod images;
mod kernels;
mod linear_attention;
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

pub(crate) use distributed::run_rank;
pub(crate) use start::{Work, run_start};

/// The device of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Target {
    /// The CPU, with small sizes: a test of the program itself.
    Cpu,
    /// The first CUDA device.
    Cuda,
}

impl Target {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    /// Returns the target of a device.
    pub(crate) fn of(device: Device) -> Self {
        match device {
            Device::Cpu => Self::Cpu,
            _ => Self::Cuda,
        }
    }

    /// Returns the device.
    pub(crate) fn device(self) -> Device {
        match self {
            Self::Cpu => Device::Cpu,
            Self::Cuda => Device::Cuda(0),
        }
    }
}

/// The purpose of a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It checks correctness.
    Correctness,
    /// It measures figures.
    Figures,
}

impl Kind {
    /// Returns the kind of this name on the command line.
    pub(crate) fn of_name(name: &str) -> Option<Self> {
        match name {
            "correctness" => Some(Self::Correctness),
            "figures" => Some(Self::Figures),
            _ => None,
        }
    }
}

/// Checks that belong together.
#[derive(Debug)]
pub(crate) struct Section {
    /// The name on the command line and in the report.
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// The time in seconds that it always gets: somewhat more than it took on an H200.
    pub(crate) planned_seconds: u64,
    /// The time limit on a GPU in seconds, which it may reach where other sections leave time.
    pub(crate) cuda_seconds: u64,
    /// A description.
    pub(crate) about: &'static str,
    run: fn(&mut Context) -> Result<()>,
}

/// The share of its time that a process reserves to report its last check.
pub(crate) const GRACE: Duration = Duration::from_secs(3);

/// The limit of a section on a CPU: its sizes take seconds, but the processor may be slow.
const CPU_LIMIT: Duration = Duration::from_secs(240);

impl Section {
    /// Returns the time limit.
    pub(crate) fn limit(&self, target: Target) -> Duration {
        match target {
            Target::Cpu => CPU_LIMIT,
            Target::Cuda => Duration::from_secs(self.cuda_seconds),
        }
    }

    /// Returns the time that it gets in a run of nine minutes, whatever the sections before it take.
    pub(crate) fn planned(&self) -> Duration {
        Duration::from_secs(self.planned_seconds)
    }
}

/// Declares sections: name, kind, planned seconds, seconds on a GPU at most, description, function.
macro_rules! sections {
    ($($name:literal $kind:ident $planned:literal $most:literal $about:literal $run:expr;)*) => {
        &[$(Section {
            name: $name,
            kind: Kind::$kind,
            planned_seconds: $planned,
            cuda_seconds: $most,
            about: $about,
            run: $run,
        }),*]
    };
}

/// All sections in the order in which they run: what cannot work shows at once, and figures come last.
#[rustfmt::skip]
pub(crate) const SECTIONS: &[Section] = sections! {
    "doctor" Correctness 10 40 "the machine, its libraries and devices" doctor::run;
    "own_kernels" Correctness 9 60 "the kernels of Overdrive: loaded, beside f64, and launched" own_kernels::run;
    "tiny" Correctness 27 60 "a small model: train, adapt, quantize, generate, save, resume" tiny::run;
    "graphs" Correctness 6 30 "CUDA graphs: capture, replay, work after a failed capture" graphs::run;
    "attention" Correctness 26 50 "attention beside f64 on the CPU, forward and backward" attention::run;
    "fused" Correctness 7 30 "fused operators beside f64 on the CPU, forward and backward" |c| composed(c, fused::run);
    "quantized" Correctness 6 30 "quantized linear layers beside their dequantized weights in f64" |c| composed(c, quantized::run);
    "reads" Correctness 7 25 "reads of the device by the host in a step" reads::run;
    "caches" Correctness 11 25 "logits over each kind of cache beside the CPU" caches::run;
    "optimizers" Correctness 5 20 "steps of each optimizer beside the CPU" |c| composed(c, optimizers::run);
    "memory" Correctness 5 20 "out of memory, and work after it" memory::run;
    "profiler" Correctness 5 15 "traces of a step" profiler::run;
    "distributed" Correctness 10 30 "two processes: NCCL on GPUs, Gloo on a CPU" distributed::run;
    "decode_kernel" Correctness 6 40 "the decode kernel of Overdrive captured, its GB/s, and beside f64" decode_kernel::run;
    "train_step" Figures 145 220 "a training step of a 1B Llama beside PyTorch" train_step::run;
    "decode" Figures 115 190 "decoding of a 1B Llama with 1 and 64 streams beside transformers" decode::run;
    "finetune" Figures 60 110 "QLoRA of an 8B Llama beside PEFT" finetune::run;
    "start" Figures 25 60 "from a file to the first token and the first step" start::run;
    "ablation" Figures 17 60 "the effect of each technique on a training step" ablation::run;
    "kernels" Figures 6 30 "launches and GB/s of single operations" kernels::run;
    "backends" Figures 17 40 "the back ends of attention by length" backends::run;
};

/// Sections that fail in every way, for the tests of the [runner](crate::runner); they run only when they are named.
#[rustfmt::skip]
pub(crate) const MACHINERY: &[Section] = sections! {
    "machinery" Correctness 60 60 "checks that fail in every way" machinery::failures;
    "machinery-hang" Correctness 60 60 "a check that never ends" machinery::hang;
};

// The plans of a run of nine minutes, and of its correctness checks in four (docs/src/gpu-check.md).
const _: () = assert!(planned_seconds(false) <= 9 * 60 && planned_seconds(true) <= 4 * 60);

const fn planned_seconds(of_correctness: bool) -> u64 {
    let (mut sum, mut index) = (0, 0);
    while index < SECTIONS.len() {
        let section = &SECTIONS[index];
        if !of_correctness || matches!(section.kind, Kind::Correctness) {
            sum += section.planned_seconds;
        }
        index += 1;
    }
    sum
}

/// Returns the time for the first of `sections`, when `left` remains for all of them. On a GPU this is the section's
/// limit, or less if the following sections would not get their planned time, because the sum of the limits exceeds the
/// time of a run. On a CPU it is the limit.
pub(crate) fn share(sections: &[&Section], target: Target, left: Duration) -> Duration {
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
pub(crate) fn run_here(
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
