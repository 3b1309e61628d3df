//! `cargo xtask doctor`: the state of this machine, its problems and their remedies.

mod findings;
mod gpu;
mod machine;
mod precision;
mod tools;

use std::fmt::Display;

use overdrive_build::cpu::CpuFeatures;
use overdrive_build::measured::Processor;
use overdrive_build::{Environment, Libtorch, MatmulSpeed};
use overdrive_core::print_line;

use self::findings::{disk, gpus, libtorch, memory, processor, tools};
use crate::failure::{Failure, Result};
use crate::setup;

/// The findings, in the order in which they are printed.
#[derive(Debug, Default)]
struct Findings {
    problems: Vec<Problem>,
}

/// A problem and its remedy.
#[derive(Debug)]
struct Problem {
    what: String,
    remedy: String,
    /// If `true`, nothing can be built until the problem is solved.
    fatal: bool,
}

impl Findings {
    fn say(&self, what: &str, value: impl Display) {
        print_line(format_args!("{what:<14} {value}"));
    }

    fn warn(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(Problem {
            what: what.into(),
            remedy: remedy.into(),
            fatal: false,
        });
    }

    fn fatal(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.problems.push(Problem {
            what: what.into(),
            remedy: remedy.into(),
            fatal: true,
        });
    }
}

/// Examines the machine and prints the report; an error only if nothing can be built.
pub(crate) fn doctor() -> Result<()> {
    let environment = setup::users_environment();
    let mut findings = Findings::default();
    let features = CpuFeatures::detect();
    processor(&mut findings, features);
    let gpus = gpus(&mut findings);
    memory(&mut findings);
    let libtorch = libtorch(&mut findings, &environment);
    if let (Some(gpu), Some(torch)) = (gpus.first(), &libtorch)
        && !torch.cuda
    {
        findings.warn(
            format!(
                "there is a {}, but this libtorch is for the CPU only",
                gpu.name
            ),
            "cargo xtask setup --cuda",
        );
    }
    tools(&mut findings, &environment, libtorch.is_some());
    disk(&mut findings, &environment, libtorch.is_some());
    let usable = libtorch.as_ref().is_none_or(|torch| torch.cuda);
    findings.say(
        "precision",
        precision::recommend(
            gpus.first().filter(|_| usable),
            features,
            libtorch.and_then(|torch| measured_speed(&environment, &torch)),
        ),
    );
    verdict(&findings)
}

/// Returns the speed of matmuls that a program with this libtorch has stored, for the number of threads that
/// libtorch starts by default.
fn measured_speed(environment: &Environment, torch: &Libtorch) -> Option<MatmulSpeed> {
    let threads = std::env::var("OMP_NUM_THREADS").ok();
    let threads = threads.and_then(|count| count.parse().ok());
    let threads = threads.unwrap_or_else(|| machine::cpu().threads());
    let processor = Processor::detect(torch.version.as_deref()?, threads);
    MatmulSpeed::stored(environment, &processor)
}

/// Returns `true` if this machine has a GPU that `libtorch` can use.
pub(crate) fn has_gpu(libtorch: &Libtorch) -> bool {
    libtorch.cuda && gpu::list().is_ok_and(|gpus| !gpus.is_empty())
}

fn verdict(findings: &Findings) -> Result<()> {
    print_line("");
    if findings.problems.is_empty() {
        print_line("no problems");
        return Ok(());
    }
    for problem in &findings.problems {
        let kind = if problem.fatal { "problem" } else { "warning" };
        print_line(format_args!(
            "{kind}: {}\n  remedy: {}",
            problem.what, problem.remedy
        ));
    }
    if findings.problems.iter().any(|problem| problem.fatal) {
        return Err(Failure::silent(1));
    }
    Ok(())
}
