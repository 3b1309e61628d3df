//! Snapshots of a run: what is in them, and how a run goes on after one.

use overdrive_autograd::random;
use overdrive_datasets::LoaderState;
use overdrive_distributed::ProcessGroup;
use overdrive_optim::{EarlyStopping, LrScheduler, LrSchedulerState, Optimizer};
use overdrive_precision::{GradScaler, GradScalerState};
use overdrive_snapshot::{RunState, SaveOutcome, Scope, Snapshot, SnapshotManager};
use overdrive_transformer::CausalLm;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Tensor};

use crate::parallel::made_on_main;
use crate::{Error, Result, ResumeFromCheckpoint, RunFolder, TextData, TrainingArguments};

/// The parts of a snapshot.
const MODEL: &str = "model";
const OPTIMIZER: &str = "optimizer";
const RANDOM: &str = "random";
const STATE: &str = "trainer_state";

/// Snapshots of a run, `checkpoint-<step>` in its folder: weights, optimizer, schedule, loss scale, random
/// states, place in the data. A run that goes on after one has the losses of one that never stopped, bit
/// for bit.
#[derive(Debug)]
pub struct Saving {
    manager: SnapshotManager,
    rank: usize,
    /// What learns. The handles share memory with the model.
    weights: Vec<(String, Tensor)>,
    /// What makes a snapshot the folder of a model: its configuration, its tokenizer.
    files: Vec<(String, Vec<u8>)>,
    resumed: Option<Snapshot>,
}

/// What is not a tensor.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainerState {
    pub(crate) global_step: u64,
    pub(crate) max_steps: u64,
    pub(crate) gradient_accumulation_steps: u64,
    pub(crate) tokens_seen: u64,
    pub(crate) elapsed_seconds: f64,
    pub(crate) best_global_step: Option<u64>,
    pub(crate) early_stopping: Option<EarlyStopping>,
    pub(crate) lr_scheduler: Option<LrSchedulerState>,
    pub(crate) scaler: Option<GradScalerState>,
    pub(crate) loader: Option<LoaderState>,
}

impl Saving {
    /// Opens the snapshots in the run's folder, and finds the one that `resume_from_checkpoint` means:
    /// `None` where there is none yet. `weights` are what learns; the handles must stay those of the model.
    ///
    /// All processes of the group call it.
    ///
    /// # Errors
    /// When another run writes there, the snapshot that is named is not whole, or
    /// [`Error::WorldSize`].
    pub fn open(
        arguments: &TrainingArguments,
        group: &ProcessGroup,
        run: &RunFolder,
        weights: Vec<(String, Tensor)>,
    ) -> Result<Self> {
        let (ranks, options) = (Box::new(group.clone()), arguments.snapshot_options());
        let manager = SnapshotManager::with_ranks(run.root(), options, ranks)?;
        let resumed = match &arguments.resume_from_checkpoint {
            None | Some(ResumeFromCheckpoint::Latest(false)) => None,
            Some(ResumeFromCheckpoint::Latest(true)) => manager.latest()?,
            Some(ResumeFromCheckpoint::Folder(folder)) => Some(Snapshot::open(folder)?),
        };
        if let Some(snapshot) = &resumed
            && snapshot.world_size() != group.world_size()
        {
            return Err(Error::WorldSize {
                path: snapshot.path().to_owned(),
                saved: snapshot.world_size(),
                now: group.world_size(),
            });
        }
        Ok(Self {
            rank: group.rank(),
            manager,
            weights,
            files: Vec::new(),
            resumed,
        })
    }

    /// Of a run that trains `model` from scratch: as [`open`](Saving::open), and every snapshot has the
    /// configuration and the tokenizer too, so that it is a folder which transformers and
    /// [`CausalLm::from_pretrained`] load.
    ///
    /// # Errors
    /// As [`open`](Saving::open).
    pub fn of_model(
        arguments: &TrainingArguments,
        group: &ProcessGroup,
        run: &RunFolder,
        model: &CausalLm,
        data: &TextData,
    ) -> Result<Self> {
        let mut saving = Self::open(arguments, group, run, model.named_parameters())?;
        let config = format!("{:#}\n", Value::Object(model.config().to_json()));
        saving
            .files
            .push(("config.json".to_owned(), config.into_bytes()));
        let folder = tempfile::tempdir().map_err(Error::io("create", std::env::temp_dir()))?;
        data.save_tokenizer(folder.path(), arguments)?;
        let entries = std::fs::read_dir(folder.path()).map_err(Error::io("list", folder.path()))?;
        for entry in entries {
            let path = entry.map_err(Error::io("list", folder.path()))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let bytes = std::fs::read(&path).map_err(Error::io("read", &path))?;
            saving.files.push((name.into_owned(), bytes));
        }
        Ok(saving)
    }

    /// The step after which the run goes on; 0 for a new run.
    pub fn resumed_step(&self) -> u64 {
        self.resumed.as_ref().map_or(0, Snapshot::step)
    }

    /// A line that says after what the run goes on; empty for a new run.
    pub fn goes_on(&self) -> String {
        match &self.resumed {
            Some(snapshot) => format!("goes on     after {}\n", snapshot.path().display()),
            None => String::new(),
        }
    }

    /// The snapshot after which the run goes on.
    pub fn resumed(&self) -> Option<&Snapshot> {
        self.resumed.as_ref()
    }

    /// Takes over the state of the snapshot to go on after, if there is one.
    pub(crate) fn restore(
        &self,
        optimizer: &mut dyn Optimizer,
        scheduler: &mut LrScheduler,
        scaler: Option<&mut GradScaler>,
    ) -> Result<Option<TrainerState>> {
        let Some(snapshot) = &self.resumed else {
            return Ok(None);
        };
        let state: TrainerState = snapshot.document(STATE, Scope::Run, 0)?;
        self.copy_weights(snapshot)?;
        optimizer.load_state_dict(&snapshot.state(OPTIMIZER, Scope::Run, 0)?)?;
        if let Some(scheduler_state) = &state.lr_scheduler {
            scheduler.load_state_dict(scheduler_state, &mut *optimizer)?;
        }
        if let (Some(scaler), Some(scaler_state)) = (scaler, &state.scaler) {
            scaler.load_state_dict(scaler_state)?;
        }
        let random_states = snapshot.tensors(RANDOM, Scope::Rank, self.rank)?;
        for device in random::devices() {
            // One that was not there when the snapshot was saved has no state to take over.
            if let Ok(stored) = random_states.tensor(&name_of(device)) {
                let stored = stored.copy_to_tensor(None, Device::Cpu);
                random::set_state(device, &stored.map_err(overdrive_snapshot::Error::from)?)?;
            }
        }
        Ok(Some(state))
    }

    fn copy_weights(&self, snapshot: &Snapshot) -> Result<()> {
        let weights = self.weights.iter();
        let targets = weights.map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        Ok(snapshot.copy_into(MODEL, Scope::Run, 0, targets)?)
    }

    /// Saves the state as it is now, while the run goes on.
    pub(crate) fn save(
        &mut self,
        optimizer: &dyn Optimizer,
        state: &TrainerState,
        metric: Option<f64>,
    ) -> Result<()> {
        let mut saved = RunState::at(state.global_step);
        if let Some(metric) = metric {
            saved.metric(metric);
        }
        let weights = self.weights.iter();
        let weights = weights.map(|(name, tensor)| (name.clone(), tensor.shallow_clone()));
        saved.tensors(MODEL, Scope::Run, weights)?;
        saved.state(OPTIMIZER, Scope::Run, optimizer.state_dict()?)?;
        let devices = random::devices();
        let random_states = devices
            .iter()
            .map(|device| Ok((name_of(*device), random::state(*device)?)))
            .collect::<Result<Vec<_>>>()?;
        saved.tensors(RANDOM, Scope::Rank, random_states)?;
        saved.document(STATE, Scope::Run, state)?;
        for (name, bytes) in &self.files {
            saved.file(name, bytes.clone())?;
        }
        Ok(self.manager.save(saved)?)
    }

    /// What is to be told of snapshots that have ended.
    pub(crate) fn troubles(&mut self) -> Result<Vec<String>> {
        let outcomes = self.manager.outcomes()?;
        Ok(self.told(outcomes))
    }

    /// Waits for what is under way.
    pub(crate) fn finish(&mut self) -> Result<Vec<String>> {
        let outcomes = self.manager.wait()?;
        Ok(self.told(outcomes))
    }

    fn told(&self, outcomes: Vec<SaveOutcome>) -> Vec<String> {
        let mut lines = Vec::new();
        for outcome in outcomes {
            match outcome.result {
                Err(error) => {
                    let newest = self.manager.list().unwrap_or_default();
                    let newest = match newest.first() {
                        Some(snapshot) => format!("the last one is {}", snapshot.path().display()),
                        None => "there is none yet".to_owned(),
                    };
                    lines.push(format!(
                        "warning: no snapshot of step {}: {error}; training goes on, {newest}",
                        outcome.step
                    ));
                }
                Ok(report) => {
                    lines.extend(report.rotation_error.map(|error| {
                        format!("warning: an old snapshot could not be deleted: {error}")
                    }));
                }
            }
        }
        lines
    }

    /// Takes the weights of the best snapshot; returns its step, if there is one.
    pub(crate) fn load_best(&self, group: &ProcessGroup) -> Result<Option<u64>> {
        let step = made_on_main(group, "load the best snapshot", || {
            let Some(best) = self.manager.best()? else {
                return Ok(None);
            };
            self.copy_weights(&best)?;
            Ok(Some(best.step()))
        })?;
        for (_, weight) in &self.weights {
            group.broadcast(weight, 0)?;
        }
        Ok(step)
    }
}

fn name_of(device: Device) -> String {
    match device {
        Device::Cuda(index) => format!("cuda:{index}"),
        _ => "cpu".to_owned(),
    }
}
