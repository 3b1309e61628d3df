//! The start of a run.

use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::rc::Rc;

use overdrive_accumulation::GradientAccumulator;
use overdrive_core::check_option;
use overdrive_datasets::{DeviceLoader, OnDevice};
use overdrive_distributed::ProcessGroup;
use overdrive_optim::{Optimizer, Stateful};
use overdrive_precision::Precision;
use overdrive_profiling::ModelFlops;
use overdrive_tracking::Trackers;
use tch::{Device, Tensor};

use super::capture::Capture;
use super::fingerprints::Fingerprints;
use super::folder::RunFolder;
use super::log::RunLog;
use super::micro_batch::StepTotals;
use super::training_run::{State, TrainingRun, shared};
use crate::arguments::TrainingArguments;
use crate::{Interrupt, Result};

/// The parts of a [`TrainingRun`] that do not follow from its arguments.
#[derive(Default)]
pub struct RunOptions {
    /// The precision. Default: that of the arguments.
    pub precision: Option<Precision>,
    /// The optimizer, which must be over the run's parameters. Default: the one that `optim` names.
    pub optimizer: Option<Box<dyn Optimizer>>,
    /// The folder for snapshots and metrics. Default: none, and nothing is written.
    pub folder: Option<RunFolder>,
    /// The files that make a snapshot the folder of a model, each with its name: its configuration, its tokenizer.
    pub files: Vec<(String, Vec<u8>)>,
    /// The fingerprints of the inputs of the run, which a run that resumes compares with its own. Default: those of
    /// the arguments that determine the order of the data.
    pub fingerprints: Option<Fingerprints>,
    /// The FLOPs of a token in the model, from which the MFU is computed. Default: unknown.
    pub flops: Option<ModelFlops>,
    /// The trackers that also get the metrics of each step.
    pub trackers: Trackers,
    /// The flag that ends the run. Default: that of the process, which Ctrl-C and SIGTERM set
    /// ([`Interrupt::install`]).
    pub interrupt: Option<Interrupt>,
    /// The values of the program that must survive a restart, each under a name, as with Accelerate's
    /// `register_for_checkpointing`. Parameters, optimizer, schedule, scaler, averages, early stopping, the position
    /// in the data and the random states are registered already.
    pub registered: Vec<(String, Rc<RefCell<dyn Stateful>>)>,
    /// If `true`, no lines are printed.
    pub silent: bool,
}

/// The requirement on `parameters`, to complete "it must be".
const SOME_PARAMETERS: &str = "the trainable parameters of the model, at least one";

/// Checks that a program's optimizer updates parameters of the run only: of others, the run has neither the gradients
/// of all processes nor the values in a snapshot.
fn check_is_over(optimizer: &dyn Optimizer, parameters: &[(String, Tensor)]) -> Result<()> {
    let own: HashSet<usize> = parameters
        .iter()
        .map(|(_, parameter)| parameter.data_ptr() as usize)
        .collect();
    let updated = optimizer.parameters();
    let strange = updated
        .iter()
        .filter(|parameter| !own.contains(&(parameter.data_ptr() as usize)))
        .count();
    check_option(
        strange == 0,
        "RunOptions::optimizer",
        format_args!("an optimizer with {strange} other parameters"),
        "one over parameters that are passed to `TrainingRun::start`",
    )?;
    Ok(())
}

impl TrainingRun {
    /// Starts a run with `arguments` over the trainable `parameters`, whose tensors share storage with those of the model,
    /// or resumes it: the parameters get the values of the snapshot that `resume_from_checkpoint` names, `loader` goes to
    /// its position, and the options of these arguments replace those of the snapshot. Each process of `group` calls it.
    ///
    /// # Errors
    /// An error of an argument; of a snapshot that is damaged or was saved with other inputs; if there are no parameters or
    /// no batches, or the optimizer has other parameters; if the models of the processes differ, or one of them is lost.
    pub fn start<B: OnDevice>(
        arguments: &TrainingArguments,
        group: &ProcessGroup,
        parameters: Vec<(String, Tensor)>,
        loader: &mut DeviceLoader<B>,
        options: RunOptions,
    ) -> Result<Self> {
        let (arguments, group) = (arguments.clone(), group.clone());
        check_option(
            !parameters.is_empty(),
            "parameters",
            "empty",
            SOME_PARAMETERS,
        )?;
        let precision = options.precision.unwrap_or(arguments.precision());
        let own = || arguments.fingerprints(&group);
        let fingerprints = options.fingerprints.map_or_else(own, Ok)?;
        let first = parameters.first();
        let device = first.map_or(Device::Cpu, |(_, parameter)| parameter.device());
        precision.check(device)?;
        let ddp = arguments.data_parallel(&group, shared(&parameters))?;
        let mut accumulator = GradientAccumulator::with_sync(arguments.accumulation(), ddp)?
            .with_scaler(precision.new_scaler()?);
        let mut snapshots = match &options.folder {
            Some(folder) => Some(folder.snapshots(&group, &arguments)?),
            None => None,
        };
        let resumed = match &snapshots {
            Some(snapshots) => arguments.snapshot_to_resume(snapshots, &fingerprints)?,
            None => None,
        };
        let plan = arguments.plan_from(loader, resumed.as_ref())?;
        let named = || arguments.new_optimizer(&group, shared(&parameters));
        if let Some(optimizer) = &options.optimizer {
            check_is_over(&**optimizer, &parameters)?;
        }
        let mut optimizer = options.optimizer.map_or_else(named, Ok)?;
        let new = Optimizer::state_dict(&optimizer)?;
        let mut state = State {
            scheduler: arguments.new_scheduler(&plan, &mut optimizer)?,
            optimizer,
            ema: arguments.new_ema(shared(&parameters))?,
            best: arguments.early_stopping()?,
            loader: loader.state_dict(),
            registered: options.registered,
        };
        let prints = group.is_main() && !options.silent;
        let devices = group.world_size();
        let flops = options.flops;
        let mut log = RunLog::begin(&arguments, &plan, precision, device, devices, flops, prints)?;
        let interrupt = options.interrupt.map_or_else(Interrupt::install, Ok)?;
        if let Some(snapshots) = &mut snapshots {
            snapshots.set_interrupt(interrupt.flag());
        }
        let mut files = options.files;
        files.push(fingerprints.to_file());

        if let (Some(snapshots), Some(snapshot)) = (&snapshots, &resumed) {
            let sharded = arguments.shards_optimizer();
            let scaler = accumulator.scaler_mut();
            let registered = state.registered(&mut log.done, scaler, &parameters, &files, sharded);
            snapshots.load_state(snapshot, registered)?;
            // The loader's state replaces that of the snapshot, whose position may be counted in
            // batches of another size.
            state.loader = loader.state_dict();
            // A snapshot has the options of the run that saved it; the options of this start replace them.
            let (optimizer, scheduler) = (&mut state.optimizer, &mut state.scheduler);
            arguments.set_resumed_options(&plan, &new, optimizer, scheduler)?;
            if let (Some(ema), Some(decay)) = (&mut state.ema, arguments.ema_decay) {
                ema.set_decay(decay)?;
            }
            log.say(&format!("resumed     from {}", snapshot.path().display()));
            log.resume();
        }
        if let Some(folder) = &options.folder {
            log.track(folder.trackers(&group, &arguments, log.done.steps)?);
        }
        log.track(options.trackers);
        let capture = Capture::of(&arguments, group.world_size(), precision, device);
        // A run that ended by early stopping does not continue.
        let has_ended = state.best.should_stop();
        Ok(Self {
            arguments,
            group,
            precision,
            device,
            plan,
            parameters,
            accumulator,
            capture,
            state,
            snapshots,
            files,
            log,
            interrupt,
            totals: StepTotals::default(),
            source_epochs: Vec::new(),
            stepped: None,
            has_ended,
            prints,
        })
    }
}

impl fmt::Debug for RunOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunOptions")
            .field("precision", &self.precision)
            .finish_non_exhaustive()
    }
}
