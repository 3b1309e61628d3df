//! The sections. Those that show whether something is wrong come first, figures come last.
//!
//! A new section is a file here and an entry in [`SECTIONS`].

use std::time::{Duration, Instant};

use anyhow::Result;
use clap::ValueEnum;
use tch::Device;

use crate::context::{Context, Lost};
use crate::line::Line;
use crate::report::KernelUse;

mod ablation;
mod attention;
mod backends;
mod caches;
mod decode;
mod decode_kernel;
mod distributed;
mod doctor;
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
mod tiny;
mod train_step;

pub use distributed::run_rank;
pub use train_step::{baseline_without_figures, batch_for};

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

/// Checks that belong together.
#[derive(Debug)]
pub struct Section {
    /// The name on the command line and in the report.
    pub name: &'static str,
    /// A description.
    pub about: &'static str,
    /// The time limit on a GPU in seconds.
    cuda_seconds: u64,
    run: fn(&mut Context) -> Result<()>,
}

/// A process that is past its limit gets this time to report its last check.
pub const GRACE: Duration = Duration::from_secs(3);

/// The limit of a section on a CPU: its sizes are for seconds, its processor may be slow.
const CPU_LIMIT: Duration = Duration::from_secs(240);

impl Section {
    const fn new(
        name: &'static str,
        cuda_seconds: u64,
        run: fn(&mut Context) -> Result<()>,
        about: &'static str,
    ) -> Self {
        Self {
            name,
            about,
            cuda_seconds,
            run,
        }
    }

    /// Returns the time limit.
    pub fn limit(&self, target: Target) -> Duration {
        match target {
            Target::Cpu => CPU_LIMIT,
            Target::Cuda => Duration::from_secs(self.cuda_seconds),
        }
    }
}

/// All sections in the order in which they run.
pub const SECTIONS: &[Section] = &[
    Section::new(
        "doctor",
        45,
        doctor::run,
        "the machine, its libraries and devices",
    ),
    Section::new(
        "own_kernels",
        60,
        own_kernels::run,
        "the kernels of Overdrive: loaded, beside f64, and launched",
    ),
    Section::new(
        "tiny",
        60,
        tiny::run,
        "a small model: train, adapt, quantize, generate, save, resume",
    ),
    Section::new(
        "graphs",
        30,
        graphs::run,
        "CUDA graphs: capture, replay, work after a failed capture",
    ),
    Section::new(
        "attention",
        40,
        attention::run,
        "attention beside f64 on the CPU, forward and backward",
    ),
    Section::new(
        "fused",
        30,
        fused::run,
        "fused operators beside f64 on the CPU, forward and backward",
    ),
    Section::new(
        "quantized",
        35,
        quantized::run,
        "quantized linear layers beside their dequantized weights in f64",
    ),
    Section::new(
        "reads",
        25,
        reads::run,
        "reads of the device by the host in a step",
    ),
    Section::new(
        "caches",
        20,
        caches::run,
        "logits over each kind of cache beside the CPU",
    ),
    Section::new(
        "optimizers",
        20,
        optimizers::run,
        "steps of each optimizer beside the CPU",
    ),
    Section::new(
        "memory",
        20,
        memory::run,
        "out of memory, and work after it",
    ),
    Section::new("profiler", 15, profiler::run, "traces of a step"),
    Section::new(
        "distributed",
        30,
        distributed::run,
        "two processes: NCCL on GPUs, Gloo on a CPU",
    ),
    Section::new(
        "decode_kernel",
        45,
        decode_kernel::run,
        "the decode kernel of Overdrive captured, its GB/s, and beside f64",
    ),
    Section::new(
        "kernels",
        40,
        kernels::run,
        "launches and GB/s of single operations",
    ),
    Section::new(
        "train_step",
        130,
        train_step::run,
        "a training step of a 1B Llama beside PyTorch",
    ),
    Section::new(
        "decode",
        80,
        decode::run,
        "decoding of a 1B Llama with 1 and 64 streams",
    ),
    Section::new(
        "backends",
        30,
        backends::run,
        "the back ends of attention by length",
    ),
    Section::new(
        "ablation",
        60,
        ablation::run,
        "the effect of each technique on a training step",
    ),
];

/// Sections that fail in every way, for the tests of the [runner](crate::runner); they run only when they are named.
pub const MACHINERY: &[Section] = &[
    Section::new(
        "machinery",
        60,
        machinery::failures,
        "checks that fail in every way",
    ),
    Section::new(
        "machinery-hang",
        60,
        machinery::hang,
        "a check that never ends",
    ),
];

/// Returns the time for the first of `sections`, for all of which `left` is there. On a GPU it is the section's limit,
/// or less where the sections after it would not get half of theirs: the limits together are longer than a run. On a CPU
/// it is the limit.
pub fn share(sections: &[&Section], target: Target, left: Duration) -> Duration {
    let Some((first, later)) = sections.split_first() else {
        return Duration::ZERO;
    };
    let limit = first.limit(target).min(left);
    if target == Target::Cpu {
        return limit;
    }
    let half = |section: &Section| section.limit(target) / 2 + GRACE;
    let kept: Duration = later.iter().map(|section| half(section)).sum();
    let own = half(first);
    if left >= own + kept {
        return limit.min(left - kept - GRACE);
    }
    limit.min(left.mul_f64(own.as_secs_f64() / (own + kept).as_secs_f64()))
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
