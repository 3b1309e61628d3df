use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, anyhow, ensure};
use clap::ValueEnum;
use overdrive::core::print_line;
use overdrive::generation::{GenerationConfig, generate};
use overdrive::precision::Precision;
use overdrive::sys::process::terminate_with_parent;
use overdrive::transformer::{CausalLm, LoadOptions, SaveOptions};
use overdrive_benches::{generation, random_model};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use super::Target;
use crate::context::Context;
use crate::finding::Finding;
use crate::timing::synchronize;
use crate::training::{Trainer, of_step};

/// The tokens of the prompt, and of a sequence in training.
const TOKENS: i64 = 128;

/// The work of a process that has just been started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Work {
    /// The first token of a prompt.
    Token,
    /// The first step of training.
    Step,
}

/// The phases of a start in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Phases {
    /// From the start of the process until the device computes.
    libraries: f64,
    /// Reading the file to the device.
    file: f64,
    /// The first work.
    first: f64,
    /// The same work once more, when every library and kernel is loaded.
    again: f64,
}

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let shape = super::train_step::shape(context)?;
    let kind = context.sized(Kind::BFloat16, Kind::Float);
    let mut folder: Option<TempDir> = None;
    let written = |folder: &mut Option<TempDir>| -> Result<f64> {
        let made = tempfile::tempdir()?;
        let mut config = shape.config();
        config.eos_token_id = Vec::new();
        let model = of_step(random_model(&config.into(), device, kind))?;
        model.save_pretrained(made.path(), &SaveOptions::default())?;
        let bytes = std::fs::metadata(made.path().join("model.safetensors"))?.len();
        *folder = Some(made);
        Ok(bytes as f64)
    };
    context.check("a file of the model is written", || {
        let bytes = written(&mut folder)?;
        Ok(Finding::passed().with("GB", bytes / 1e9))
    })?;
    for (name, work) in [
        ("from the file to the first token", Work::Token),
        ("from the file to the first step", Work::Step),
    ] {
        context.check(name, || {
            // A process that continues after a crash has no file yet.
            if folder.is_none() {
                written(&mut folder)?;
            }
            let folder = folder.as_ref().context("the file")?;
            let phases = started(folder.path(), work, Target::of(device))?;
            let finding = Finding::judged(phases.is_possible(), format!("{phases:?}"))
                .with("s", phases.total())
                .with("libraries s", phases.libraries)
                .with("file s", phases.file)
                .with("kernels s", phases.kernels());
            Ok(match work {
                Work::Token => finding.with("first token s", phases.again),
                Work::Step => finding.with("first step s", phases.again),
            })
        })?;
    }
    Ok(())
}

impl Phases {
    /// Returns the time from the start of the process to the end of the first work.
    fn total(&self) -> f64 {
        self.libraries + self.file + self.first
    }

    /// Returns what the first work takes longer than the second: kernels and libraries are loaded at their first use.
    fn kernels(&self) -> f64 {
        (self.first - self.again).max(0.0)
    }

    fn is_possible(&self) -> bool {
        let all = [self.libraries, self.file, self.first, self.again];
        all.iter().all(|time| time.is_finite() && *time > 0.0)
    }
}

/// Starts a process that does the work with the model of a folder, and returns its phases.
fn started(folder: &Path, work: Work, target: Target) -> Result<Phases> {
    let mut command = Command::new(std::env::current_exe()?);
    let name = work.to_possible_value();
    let name = name.as_ref().map_or("", |name| name.get_name());
    command
        .args(["run-start", "--device", target.name(), "--work", name])
        .arg("--model")
        .arg(folder)
        .args(["--began", &now()?.as_nanos().to_string()]);
    terminate_with_parent(&mut command);
    let output = command.output()?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{}: {errors}", output.status);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().rev().find(|line| line.starts_with('{'));
    let line = line.ok_or_else(|| anyhow!("it printed no figures: {text}"))?;
    Ok(serde_json::from_str(line)?)
}

fn now() -> Result<Duration> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?)
}

/// Does the work in this process, which was started at `began`, nanoseconds since 1970, and prints its phases.
pub(crate) fn run_start(target: Target, work: Work, model: &Path, began: u64) -> Result<()> {
    let device = target.device();
    let _ones = Tensor::f_ones([1], (Kind::Float, device))?.f_double_value(&[0])?;
    let libraries = now()?.saturating_sub(Duration::from_nanos(began));
    let phases = match work {
        Work::Token => first_token(device, model)?,
        Work::Step => first_step(device, model, target)?,
    };
    let phases = Phases {
        libraries: libraries.as_secs_f64(),
        ..phases
    };
    print_line(format_args!("{}", serde_json::to_string(&phases)?));
    Ok(())
}

/// Reads the model, and runs `work` twice with it.
fn timed(
    device: Device,
    folder: &Path,
    kind: Option<Kind>,
    mut work: impl FnMut(&CausalLm) -> Result<()>,
) -> Result<Phases> {
    let clock = Instant::now();
    let options = LoadOptions {
        device,
        kind,
        ..LoadOptions::default()
    };
    let model = CausalLm::from_pretrained(folder, &options)?;
    synchronize(device);
    let file = clock.elapsed().as_secs_f64();
    let mut times = [0.0; 2];
    for time in &mut times {
        let clock = Instant::now();
        work(&model)?;
        synchronize(device);
        *time = clock.elapsed().as_secs_f64();
    }
    let [first, again] = times;
    Ok(Phases {
        libraries: 0.0,
        file,
        first,
        again,
    })
}

/// Returns the number of tokens of a prompt or a sequence, with room for a new one.
fn length(model: &CausalLm) -> Result<usize> {
    let most = model.config().max_position_embeddings() - 1;
    Ok(usize::try_from(most.min(TOKENS))?)
}

fn first_token(device: Device, folder: &Path) -> Result<Phases> {
    timed(device, folder, None, |model| {
        let prompts = generation::prompts(1, length(model)?, model.config().vocab_size());
        let one = GenerationConfig {
            max_new_tokens: Some(1),
            ..GenerationConfig::default()
        };
        generate(model, &prompts, &one)?;
        Ok(())
    })
}

fn first_step(device: Device, folder: &Path, target: Target) -> Result<Phases> {
    let precision = match target {
        Target::Cpu => Precision::Fp32,
        Target::Cuda => Precision::Bf16,
    };
    precision.apply()?;
    let mut trainer: Option<Trainer> = None;
    timed(device, folder, Some(Kind::Float), |model| {
        let trainer = match &mut trainer {
            Some(made) => made,
            none => {
                model.set_requires_grad(true)?;
                none.insert(Trainer::new(model.named_parameters(), precision)?)
            }
        };
        let size = [1, i64::try_from(length(model)?)?];
        let vocabulary = model.config().vocab_size();
        let batch = Tensor::f_randint(vocabulary, size, (Kind::Int64, device))?;
        trainer.step(model, &batch)?.f_double_value(&[])?;
        Ok(())
    })
}
