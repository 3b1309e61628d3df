//! The construction of a run.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use overdrive_accumulation::GradientAccumulator;
use overdrive_datasets::{DeviceLoader, OnDevice};
use overdrive_distributed::ProcessGroup;
use overdrive_optim::{Optimizer, Stateful};
use overdrive_precision::Precision;
use overdrive_profiling::ModelFlops;
use overdrive_tracking::Trackers;
use tch::{Device, Tensor};

use super::fingerprints::Fingerprints;
use super::folder::RunFolder;
use super::log::{Done, RunLog};
use super::training_run::{State, TrainingRun, shared};
use crate::arguments::TrainingArguments;
use crate::{Interrupt, Result};

/// The parts of a [`TrainingRun`] before it starts. Each has a default from the arguments.
#[must_use = "a run does nothing before it starts"]
pub struct RunBuilder {
    arguments: TrainingArguments,
    group: ProcessGroup,
    precision: Precision,
    optimizer: Option<Box<dyn Optimizer>>,
    folder: Option<RunFolder>,
    files: Vec<(String, Vec<u8>)>,
    fingerprints: Option<Fingerprints>,
    model: Option<ModelFlops>,
    trackers: Trackers,
    interrupt: Option<Interrupt>,
    registered: Vec<(String, Rc<RefCell<dyn Stateful>>)>,
    silent: bool,
}

impl RunBuilder {
    fn new(arguments: &TrainingArguments, group: &ProcessGroup) -> Self {
        Self {
            arguments: arguments.clone(),
            group: group.clone(),
            precision: arguments.precision(),
            optimizer: None,
            folder: None,
            files: Vec::new(),
            fingerprints: None,
            model: None,
            trackers: Trackers::new(),
            interrupt: None,
            registered: Vec::new(),
            silent: false,
        }
    }

    /// Sets the precision. Default: that of the arguments.
    pub fn precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Sets the optimizer, which must be over the run's parameters. Default: the one that `optim` names.
    pub fn optimizer(mut self, optimizer: Box<dyn Optimizer>) -> Self {
        self.optimizer = Some(optimizer);
        self
    }

    /// Sets the folder for snapshots and metrics. Default: none, and nothing is written.
    pub fn folder(mut self, folder: impl Into<Option<RunFolder>>) -> Self {
        self.folder = folder.into();
        self
    }

    /// Adds files that make a snapshot the folder of a model: its configuration, its tokenizer.
    pub fn files(mut self, files: impl IntoIterator<Item = (String, Vec<u8>)>) -> Self {
        self.files.extend(files);
        self
    }

    /// Sets the fingerprints of the inputs of the run, which a run that resumes compares with its own. Default: those of
    /// the arguments that determine the order of the data.
    pub fn fingerprints(mut self, fingerprints: Fingerprints) -> Self {
        self.fingerprints = Some(fingerprints);
        self
    }

    /// Sets the FLOPs of a token in the model, from which the MFU is computed. Default: unknown.
    pub fn flops(mut self, model: ModelFlops) -> Self {
        self.model = Some(model);
        self
    }

    /// Also sends the metrics of each step to `trackers`.
    pub fn track(mut self, trackers: Trackers) -> Self {
        self.trackers = self.trackers.with(trackers);
        self
    }

    /// Sets the flag that ends the run. Default: that of the process, which Ctrl-C and SIGTERM set
    /// ([`Interrupt::install`]).
    pub fn interrupt(mut self, interrupt: Interrupt) -> Self {
        self.interrupt = Some(interrupt);
        self
    }

    /// Registers a value of the program that must survive a restart, under a name, as Accelerate's
    /// `register_for_checkpointing` does. Parameters, optimizer, schedule, scaler, averages, early stopping, the position
    /// in the data and the random states are registered already.
    pub fn register(mut self, name: &str, value: Rc<RefCell<dyn Stateful>>) -> Self {
        self.registered.push((name.to_owned(), value));
        self
    }

    /// Prints no lines.
    pub fn silent(mut self) -> Self {
        self.silent = true;
        self
    }

    /// Starts the run over the trainable `parameters`, whose tensors share storage with those of the model, or resumes it:
    /// the parameters get the values of the snapshot that `resume_from_checkpoint` names, `loader` goes to its position,
    /// and the options of these arguments replace those of the snapshot. Each process of the group calls it.
    ///
    /// # Errors
    /// An error of an argument; of a snapshot that is damaged or was saved with other inputs; if the models of the
    /// processes differ, or one of them is lost.
    pub fn start<B: OnDevice>(
        self,
        parameters: Vec<(String, Tensor)>,
        loader: &mut DeviceLoader<B>,
    ) -> Result<TrainingRun> {
        let (arguments, group, precision) = (self.arguments, self.group, self.precision);
        let fingerprints = match self.fingerprints {
            Some(fingerprints) => fingerprints,
            None => arguments.fingerprints(&group)?,
        };
        let first = parameters.first();
        let device = first.map_or(Device::Cpu, |(_, parameter)| parameter.device());
        let ddp = arguments.data_parallel(&group, shared(&parameters))?;
        let mut accumulator = GradientAccumulator::with_sync(arguments.accumulation(), ddp)?
            .with_scaler(precision.new_scaler()?);
        let mut snapshots = match &self.folder {
            Some(folder) => Some(folder.snapshots(&group, &arguments)?),
            None => None,
        };
        let resumed = match &snapshots {
            Some(snapshots) => arguments.snapshot_to_resume(snapshots, &fingerprints)?,
            None => None,
        };
        let plan = arguments.plan_from(loader, resumed.as_ref())?;
        let mut optimizer = match self.optimizer {
            Some(optimizer) => optimizer,
            None => arguments.new_optimizer(&group, shared(&parameters))?,
        };
        let options = Optimizer::state_dict(&optimizer)?;
        let mut state = State {
            scheduler: arguments.new_scheduler(&plan, &mut optimizer)?,
            optimizer,
            ema: arguments.new_ema(shared(&parameters))?,
            best: arguments.early_stopping()?,
            done: Done::default(),
            loader: loader.state_dict(),
            registered: self.registered,
        };
        let prints = group.is_main() && !self.silent;
        let devices = group.world_size();
        let mut log = RunLog::begin(
            &arguments, &plan, precision, device, devices, self.model, prints,
        )?;
        let interrupt = match self.interrupt {
            Some(interrupt) => interrupt,
            None => Interrupt::install()?,
        };
        if let Some(snapshots) = &mut snapshots {
            snapshots.set_interrupt(interrupt.flag());
        }
        let mut files = self.files;
        files.push(fingerprints.to_file());

        if let (Some(snapshots), Some(snapshot)) = (&snapshots, &resumed) {
            let sharded = arguments.shards_optimizer();
            let scaler = accumulator.scaler_mut();
            let registered = state.registered(scaler, &parameters, &files, sharded);
            snapshots.load_state(snapshot, registered)?;
            // The loader's state replaces that of the snapshot, whose position may be counted in
            // batches of another size.
            state.loader = loader.state_dict();
            // A snapshot has the options of the run that saved it; the options of this start replace them.
            let (optimizer, scheduler) = (&mut state.optimizer, &mut state.scheduler);
            arguments.set_resumed_options(&plan, &options, optimizer, scheduler)?;
            if let (Some(ema), Some(decay)) = (&mut state.ema, arguments.ema_decay) {
                ema.set_decay(decay)?;
            }
            log.say(&format!("resumed     from {}", snapshot.path().display()));
            log.resume(&state.done);
        }
        if let Some(folder) = &self.folder {
            log.track(folder.trackers(&group, &arguments, state.done.steps)?);
        }
        log.track(self.trackers);
        // A run that ended by early stopping does not continue.
        let has_ended = state.best.should_stop();
        Ok(TrainingRun {
            arguments,
            group,
            precision,
            device,
            plan,
            parameters,
            accumulator,
            state,
            snapshots,
            files,
            log,
            interrupt,
            window: Vec::new(),
            source_epochs: Vec::new(),
            stepped: None,
            has_ended,
            prints,
        })
    }
}

impl TrainingRun {
    /// Starts to build a run with the options of `arguments`, for the processes of `group`.
    pub fn builder(arguments: &TrainingArguments, group: &ProcessGroup) -> RunBuilder {
        RunBuilder::new(arguments, group)
    }
}

impl fmt::Debug for RunBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunBuilder")
            .field("precision", &self.precision)
            .finish_non_exhaustive()
    }
}
