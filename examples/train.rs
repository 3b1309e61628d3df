//! Trains a small Llama on text, by default the Rust source code that Cargo keeps on this machine. In about five
//! minutes on two CPU cores the validation loss falls from 8.3 to about 4.5 nats per token, and the generated
//! samples look like Rust.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example train              # or: cargo xtask train
//! cargo run --release -p overdrive-examples --example train -- --preset small --data book.txt --bf16
//! cargo run --release -p overdrive-examples --example train -- --data rows.csv --text-column body --packing
//! cargo xtask train --nproc 2                                            # or: torchrun --no-python …
//! cargo xtask train --check                                              # what would fail or be slow
//! ```
//!
//! The run folder gets snapshots (`--save-steps N`), from which `--resume-from-checkpoint true` resumes bit for
//! bit after a Ctrl-C, a SIGTERM (both save and end, with exit code 75) or a kill; metrics.jsonl, TensorBoard events,
//! report.html and a Hugging Face model. The example `own_model` trains another model with the same components.

use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use overdrive::accumulation::{GradientAccumulator, Window};
use overdrive::datasets::{Batch, DeviceLoader};
use overdrive::distributed::ProcessGroup;
use overdrive::optim::{EarlyStopping, Ema, LrScheduler, Optimizer};
use overdrive::precision::{GradScaler, Precision};
use overdrive::profiling::Phase;
use overdrive::snapshot::{RunState, Snapshot};
use overdrive::sys::{is_out_of_memory, memory};
use overdrive::tracking::{StepMetrics, Trackers};
use overdrive::trainer::{
    DataShard, Evaluation, Fingerprints, Interrupt, ResumeFromCheckpoint, RunFolder, Severity,
    TextData, TrainArgs, TrainingArguments, load_best,
};
use overdrive::transformer::CausalLm;
use overdrive_examples::training::{
    Done, RunLog, StepTotals, Summary, batch_loss, describe_model, evaluate, name_lost_ranks,
    new_model, shared, snapshot_files, write_results,
};
use overdrive_examples::{RunEnd, exit_or_resume, print_line};
use tch::{Device, Tensor};

/// Trains a small Llama on text
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    train: TrainArgs,
    /// Check data, disk, memory, precision, processes and threads, print what to change, and train nothing; the exit
    /// code is 1 if the run would fail
    #[arg(long)]
    check: bool,
}

fn main() -> ExitCode {
    exit_or_resume(|| run(&Flags::parse()))
}

/// Trains, and writes the results unless the run was interrupted.
pub(crate) fn run(flags: &Flags) -> Result<RunEnd> {
    // Collected, because only rank 0 prints them, and the rank is known after the arguments are.
    let mut notes = Vec::new();
    let resolved = flags
        .train
        .resolve_with_notes(|note| notes.push(note.into()));
    let mut arguments = resolved?;
    // The processes that torchrun or `cargo xtask train --nproc N` has started; usually one.
    let group = arguments.init_process_group()?;
    let say = |line: &str| {
        if group.is_main() {
            print_line(line);
        }
    };
    notes.iter().for_each(|note: &String| say(note));
    let device = arguments.device(&group);
    if let Some(choice) = arguments.choose_precision(&group, device)? {
        say(&format!("precision   {choice}"));
    }
    if flags.check {
        return check(&arguments, &group, device);
    }
    let precision = arguments.apply()?;
    let data = TextData::prepare(&arguments, say)?;
    let shape = arguments.memory_plan(data.vocab_size(), precision).shape;
    if let Some(line) = arguments.fit_batch(shape, precision, device, &group)? {
        say(&line);
    }
    for finding in arguments.start_warnings(&data, device, group.world_size())? {
        say(&format!("warning     {}; {}", finding.what, finding.remedy));
    }
    loop {
        let ended = train(&mut arguments, &data, precision, &group, say);
        match ended {
            Err(error) if retry(&mut arguments, &group, &error, say)? => {}
            ended => return ended.map_err(|error| name_lost_ranks(&group, error)),
        }
    }
}

/// Prints the findings about a run; an error if it would fail.
fn check(arguments: &TrainingArguments, group: &ProcessGroup, device: Device) -> Result<RunEnd> {
    let found = arguments.check_run(device, group.world_size())?;
    if group.is_main() {
        print_line(&found);
    }
    match found.count(Severity::Failure) {
        0 => Ok(RunEnd::Finished),
        failures => bail!("{failures} of the findings would end the run"),
    }
}

/// Makes another try continue the run in its folder, which is open. The example `finetune` uses it too.
pub(crate) fn continue_in(arguments: &mut TrainingArguments, folder: &RunFolder) {
    arguments.output_dir = Some(folder.root().to_owned());
    if !arguments.auto_find_batch_size {
        return;
    }
    arguments.overwrite_output_dir = false;
    // No change for this try: the folder of a new run has no snapshot yet.
    if !matches!(
        arguments.resume_from_checkpoint,
        Some(ResumeFromCheckpoint::Folder(_))
    ) {
        arguments.resume_from_checkpoint = Some(ResumeFromCheckpoint::Latest(true));
    }
}

/// With `auto_find_batch_size`, prepares another try after memory ran out: micro-batches of at most half the size, which
/// continue the run in its folder. Returns `false` if there is none. The example `finetune` uses it too.
pub(crate) fn retry(
    arguments: &mut TrainingArguments,
    group: &ProcessGroup,
    error: &anyhow::Error,
    mut say: impl FnMut(&str),
) -> Result<bool> {
    // Memory may have run out on one process only, while the others wait for it.
    let searches = arguments.auto_find_batch_size && group.world_size() == 1;
    if !searches || !is_out_of_memory(&**error) || !arguments.halve_batch(1)? {
        return Ok(false);
    }
    // A snapshot that was named, perhaps of another run, is the last one until this run has saved its own.
    if let (Some(root), Some(ResumeFromCheckpoint::Folder(_))) =
        (&arguments.output_dir, &arguments.resume_from_checkpoint)
        && !Snapshot::list(root)?.is_empty()
    {
        arguments.resume_from_checkpoint = Some(ResumeFromCheckpoint::Latest(true));
    }
    let batch = arguments.batch_plan(1)?;
    say(&format!(
        "            memory ran out; again with {batch}, from the last snapshot if there is one"
    ));
    memory::empty_cache(arguments.device(group))?;
    Ok(true)
}

/// Trains a new model, or resumes, and writes the results unless the run was interrupted.
fn train(
    arguments: &mut TrainingArguments,
    data: &TextData,
    precision: Precision,
    group: &ProcessGroup,
    say: impl Fn(&str),
) -> Result<RunEnd> {
    let device = arguments.device(group);
    // The processes compare theirs before one of them writes anything.
    let fingerprints = data.fingerprints(arguments, group)?;
    let mut model = new_model(arguments, data, device)?;
    describe_model(&model, arguments, precision, group, &say)?;
    // Created after all checks of data and model, so that a failed start leaves no empty run.
    let folder = RunFolder::open_or_create(group, arguments)?;
    say(&format!("run folder  {}", folder.root().display()));
    continue_in(arguments, &folder);
    let arguments = &*arguments;

    let training = Training {
        arguments,
        group,
        precision,
        folder: Some(&folder),
        files: snapshot_files(&model, data, arguments)?,
        fingerprints,
        parameters: model.named_parameters(),
        trackers: Trackers::new(),
    };
    let shard = DataShard::of(group, device);
    let loader = data.train_loader(arguments, shard)?;
    let (summary, ema) = training.fit(&mut model, loader, &mut |model| {
        let batches = data.validation_loader(arguments, shard)?;
        let loss = evaluate(model, batches, precision, group)?;
        Ok(Evaluation::new(loss, data.validation.bits_per_byte(loss)))
    })?;
    if group.is_main() && summary.interrupted {
        print_line(format_args!("{}", summary.to_string().trim_end()));
        if summary.end() == RunEnd::Saved {
            let root = folder.root().display();
            print_line(format_args!(
                "resume it with `--out {root} --resume-from-checkpoint true`"
            ));
        }
    } else if group.is_main() {
        let results = write_results(&folder, arguments, data, &model, summary.best, ema)?;
        print_line(format_args!("{summary}{results}"));
        if results.warning.is_none() {
            print_line(format_args!("report {}", folder.report().display()));
        }
        print_line(format_args!("model  {}", folder.model().display()));
    }
    Ok(summary.end())
}

/// The components of a run besides its model and its data. The example `finetune` also trains with it.
pub(crate) struct Training<'a> {
    pub(crate) arguments: &'a TrainingArguments,
    pub(crate) group: &'a ProcessGroup,
    pub(crate) precision: Precision,
    /// The folder of snapshots and metrics; with `None` nothing is written.
    pub(crate) folder: Option<&'a RunFolder>,
    /// The files that make a snapshot the folder of a model: its configuration, its tokenizer.
    pub(crate) files: Vec<(String, Vec<u8>)>,
    /// The inputs of the run, which a run that resumes compares with its own.
    pub(crate) fingerprints: Fingerprints,
    /// The trainable parameters; these handles share storage with the model.
    pub(crate) parameters: Vec<(String, Tensor)>,
    /// Additional destinations of metrics.
    pub(crate) trackers: Trackers,
}

/// The state that changes from step to step, besides the parameters and the loader.
struct State {
    optimizer: Box<dyn Optimizer>,
    scheduler: LrScheduler,
    scaler: Option<GradScaler>,
    ema: Option<Ema>,
    best: EarlyStopping,
    done: Done,
}

impl Training<'_> {
    /// Trains until the last step, an interrupt, or early stopping. All processes of the group run it, each on
    /// its shard of the batches; losses, norms and the decision to stop are the same on all of them.
    pub(crate) fn fit(
        mut self,
        model: &mut CausalLm,
        mut loader: DeviceLoader<Batch>,
        evaluate: &mut dyn FnMut(&CausalLm) -> Result<Evaluation>,
    ) -> Result<(Summary, Option<Ema>)> {
        let (arguments, group, precision) = (self.arguments, self.group, self.precision);
        let device = model.device();
        let ddp = arguments.data_parallel(group, shared(&self.parameters))?;
        let mut accumulator = GradientAccumulator::with_sync(arguments.accumulation(), &ddp)?;
        let mut snapshots = match self.folder {
            Some(folder) => Some(folder.snapshots(group, arguments)?),
            None => None,
        };
        let resumed = match &snapshots {
            Some(snapshots) => arguments.snapshot_to_resume(snapshots, &self.fingerprints)?,
            None => None,
        };
        let plan = arguments.plan_from(&mut loader, resumed.as_ref())?;
        let mut optimizer = arguments.new_optimizer(group, shared(&self.parameters))?;
        let options = optimizer.state_dict()?;
        let mut state = State {
            scheduler: arguments.new_scheduler(&plan, &mut optimizer)?,
            optimizer,
            scaler: precision.new_scaler()?,
            ema: arguments.new_ema(shared(&self.parameters))?,
            best: arguments.early_stopping()?,
            done: Done::default(),
        };
        let mut log = RunLog::begin(arguments, &plan, precision, group, model, &self.parameters)?;
        let interrupt = Interrupt::install()?;

        if let (Some(snapshots), Some(snapshot)) = (&snapshots, &resumed) {
            snapshots.load_state(snapshot, self.registered(&mut state, &mut loader))?;
            // A snapshot has the options of the run that saved it; those of this start count.
            let (optimizer, scheduler) = (&mut state.optimizer, &mut state.scheduler);
            arguments.set_resumed_options(&plan, &options, optimizer, scheduler)?;
            if let (Some(ema), Some(decay)) = (&mut state.ema, arguments.ema_decay) {
                ema.set_decay(decay)?;
            }
            log.say(&format!("resumed     from {}", snapshot.path().display()));
            log.resume(&state.done);
        }
        if let Some(folder) = self.folder {
            log.track(folder.trackers(group, arguments, state.done.steps)?);
        }
        log.track(std::mem::take(&mut self.trackers));
        let mut measure = |model: &mut CausalLm, ema: &mut Option<Ema>| -> Result<Evaluation> {
            // The guard puts the training weights back when the evaluation ends.
            let _averaged = ema.as_mut().map(Ema::apply).transpose()?;
            model.set_training(false)?;
            let found = evaluate(model)?;
            model.set_training(true)?;
            Ok(found)
        };
        if arguments.eval_on_start && state.done.steps == 0 {
            let found = measure(model, &mut state.ema)?;
            let mut metrics = StepMetrics {
                // There is no training loss before the first step; NaN is written as null.
                loss: f64::NAN,
                ..StepMetrics::default()
            };
            found.apply_to(&mut metrics);
            // A signal has cut the evaluation short; the run ends after its first step.
            if !group.any(interrupt.requested())? {
                log.log(&metrics);
            }
        }

        model.set_training(true)?;
        // A run that early stopping has ended does not start again.
        let is_over = state.best.should_stop();
        let last_step = if is_over { 0 } else { plan.total_steps };
        for step in state.done.steps + 1..=last_step {
            log.begin_step();
            // Fewer in the last step of an epoch.
            let window = log.phase(Phase::Data, || loader.next_batches(plan.micro_batches))?;
            // The label counts of the whole step, so that each token has the same weight in its mean loss.
            accumulator.open(Window::new(
                window.iter().map(|batch| batch.label_count as u64),
            ))?;
            for batch in &window {
                let loss = log.phase(Phase::Forward, || {
                    precision.autocast(device, || batch_loss(model, batch))
                })??;
                log.phase(Phase::Backward, || {
                    let labels = batch.label_count as u64;
                    accumulator.backward(&loss.sum, labels, state.scaler.as_mut())
                })?;
            }
            // Read before the scheduler moves on: it is the rate of this step.
            let learning_rate = state.scheduler.last_lr().first().copied();
            let stepped = log.phase(Phase::Optimizer, || {
                accumulator.step(&mut state.optimizer, state.scaler.as_mut())
            })?;
            // A step that the loss scaler skipped changes no weights, so neither schedule nor average advance.
            if stepped.stepped {
                state.scheduler.step(&mut state.optimizer)?;
                state.ema.as_mut().map(Ema::update).transpose()?;
            }

            // One collective for all totals, including the wish to stop, so that all processes stop at the same step.
            let totals = StepTotals::over(group, &window, &stepped, interrupt.requested())?;
            let mut metrics = log.end_step(step, &totals, &loader)?;
            metrics.learning_rate = learning_rate.unwrap_or_default();
            // Values on the device are read when a line is due, so that the host does not wait for every step.
            let mut read_due = plan.log_due(step);
            if read_due {
                let scale = state.scaler.as_ref().map(GradScaler::get_scale);
                metrics.loss_scale = scale.transpose()?;
            }

            let (mut metric, mut improved) = (None, false);
            // On a stop the run saves and ends: whoever stops it may give it seconds.
            let mut stop = totals.stop;
            if plan.eval_due(step) && !stop {
                let found = measure(model, &mut state.ema)?;
                // A signal has cut the evaluation short.
                stop = group.any(interrupt.requested())?;
                if !stop {
                    found.apply_to(&mut metrics);
                    log.summary.evaluation = Some(found);
                    let value = arguments.best_model_metric(&found)?;
                    metric = Some(value);
                    improved = state.best.observe(step, value).improved;
                }
            }
            log.summary.interrupted = stop;
            let ends = stop || state.best.should_stop();
            let save_due = plan.save_due(step, improved, ends);
            read_due |= ends || save_due || plan.eval_due(step);
            log.record(metrics, totals, stepped);
            if read_due {
                log.flush(group)?;
            }
            state.done = log.done();
            if let Some(snapshots) = &mut snapshots {
                if save_due {
                    let registered = self.registered(&mut state, &mut loader);
                    snapshots.save_state(step, metric, registered)?;
                }
                log.warn_of(snapshots)?;
            }
            if ends {
                log.say(match stop {
                    true => "interrupted: the run ends after this step",
                    false => "no improvement within `early_stopping_patience`: the run ends",
                });
                break;
            }
        }

        if let Some(mut snapshots) = snapshots {
            // Snapshots are written in the background.
            snapshots.settle()?;
            log.warn_of(&mut snapshots)?;
            // No process leaves before all have written. A signal that came during the last save leaves the rest of the
            // work to the run that resumes.
            let stop = group.any(interrupt.requested())?;
            if group.all(log.summary.is_saved())? {
                log.summary.interrupted |= stop;
            }
            if arguments.load_best_model_at_end && !log.summary.interrupted {
                let (parameters, ema) = (&self.parameters, state.ema.as_mut());
                log.summary.best = load_best(arguments, &snapshots, group, parameters, ema)?;
            }
        }
        if log.summary.end() == RunEnd::NotSaved {
            log.say("the last step is in no snapshot (`save_strategy: no`, or saving failed)");
        }
        model.set_training(false)?;
        Ok((log.finish(&state.optimizer)?, state.ema))
    }

    /// Registers the entries of a snapshot.
    fn registered<'s>(
        &self,
        state: &'s mut State,
        loader: &'s mut DeviceLoader<Batch>,
    ) -> RunState<'s> {
        let registered = RunState::new()
            .tensors("model", shared(&self.parameters))
            .register("lr_scheduler", &mut state.scheduler)
            .register_optional("scaler", state.scaler.as_mut())
            .register("early_stopping", &mut state.best)
            .value("progress", &mut state.done)
            .with_load("loader", loader.state_dict(), |state| {
                loader.load_state_dict(state)
            })
            .random_states();
        // A run does not drop its average by accident.
        let registered = match &mut state.ema {
            Some(ema) => registered.register("ema", ema),
            None => registered,
        };
        // Registered under one name in either case, so that a snapshot shows which one was used.
        let registered = match self.arguments.shards_optimizer() {
            // Each process has the states of its own parameters.
            true => registered.register_per_rank("optimizer", &mut state.optimizer),
            false => registered.register("optimizer", &mut state.optimizer),
        };
        let files = self.files.iter().cloned();
        let files = files.chain([self.fingerprints.to_file()]);
        files.fold(registered, |state, (name, bytes)| state.file(name, bytes))
    }
}
