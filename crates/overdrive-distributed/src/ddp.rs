//! Data parallel: each rank trains a copy of the model on its part of the batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use overdrive_sys::c10d::Reducer;
use tch::{Tensor, nn};

use crate::same_model::{MAX_LISTED, by_name, check_same_model, copy_from_main};
use crate::{DdpConfig, Error, ProcessGroup, Result};

/// Averages gradients over the ranks, bucket by bucket, while backward runs
/// (`torch.nn.parallel.DistributedDataParallel`).
///
/// It holds handles of the parameters, not the model: the forward runs inside [`forward`](Self::forward),
/// and backward as ever. After backward the gradients are the mean over the ranks, so a loss that is the
/// mean over a rank's part of the batch trains as the mean over the whole batch. In a world of one it does
/// nothing.
///
/// ```
/// use overdrive_distributed::{DdpConfig, DistributedDataParallel, GroupConfig, init_process_group};
/// use tch::{Device, Kind, Tensor, nn, nn::Module};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = init_process_group(GroupConfig::default())?;
/// let store = nn::VarStore::new(group.device());
/// let model = nn::linear(store.root(), 4, 1, Default::default());
/// let ddp = DistributedDataParallel::from_var_store(&group, &store, DdpConfig::default())?;
///
/// let batch = Tensor::ones([8, 4], (Kind::Float, group.device()));
/// let loss = ddp.forward(|| Ok::<_, overdrive_distributed::Error>(model.forward(&batch).mean(Kind::Float)))?;
/// ddp.backward(&loss)?; // gradients: the mean over all ranks
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct DistributedDataParallel {
    group: ProcessGroup,
    config: DdpConfig,
    parameters: Vec<(String, Tensor)>,
    buffers: Vec<(String, Tensor)>,
    reducer: Option<Reducer>,
    /// How many [`NoSync`] guards there are.
    quiet: AtomicUsize,
    /// Whether the last forward was one whose gradients were reduced.
    buffers_due: AtomicBool,
    /// Whether the next backward reduces gradients, or the last one did.
    armed: AtomicBool,
}

/// While this lives, gradients are summed up on each rank and not reduced.
#[derive(Debug)]
#[must_use = "gradients are reduced again as soon as this is dropped"]
pub struct NoSync<'a>(&'a DistributedDataParallel);

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        self.0.quiet.fetch_sub(1, Ordering::SeqCst);
    }
}

impl DistributedDataParallel {
    /// Takes the trainable variables of a store as parameters and the others as buffers.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_var_store(
        group: &ProcessGroup,
        store: &nn::VarStore,
        config: DdpConfig,
    ) -> Result<Self> {
        let (parameters, buffers): (Vec<_>, Vec<_>) = store
            .variables()
            .into_iter()
            .partition(|(_, tensor)| tensor.requires_grad());
        Self::new(group, parameters, buffers, config)
    }

    /// Checks that all ranks have the same parameters and buffers, copies those of rank 0 to all, and puts
    /// hooks on the parameters. Both may come in any order; those that need no gradient (frozen ones) count
    /// as buffers that are copied only here.
    ///
    /// # Errors
    /// [`Error::ModelMismatch`] with the rank, the names and the shapes; [`Error::InvalidArgument`] for a
    /// bucket size that is not above 0, or two parameters of one name; [`Error::Collective`].
    pub fn new(
        group: &ProcessGroup,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
        buffers: impl IntoIterator<Item = (String, Tensor)>,
        config: DdpConfig,
    ) -> Result<Self> {
        config.validate()?;
        let parameters = by_name(parameters)?;
        let buffers = by_name(buffers)?;
        let (trained, frozen): (Vec<_>, Vec<_>) = parameters
            .into_iter()
            .partition(|(_, tensor)| tensor.requires_grad());
        let mut reducer = None;
        if let Some(connected) = &group.shared.connected {
            check_same_model(group, &trained, &frozen, &buffers)?;
            copy_from_main(group, trained.iter().chain(&frozen).chain(&buffers))?;
            if !trained.is_empty() {
                let (names, tensors): (Vec<_>, Vec<_>) = trained
                    .iter()
                    .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
                    .unzip();
                let options = config.reducer_options();
                reducer = Some(Reducer::new(
                    Arc::clone(&connected.group),
                    &names,
                    &tensors,
                    options,
                )?);
            }
        }
        Ok(Self {
            group: group.clone(),
            config,
            parameters: trained,
            buffers,
            reducer,
            quiet: AtomicUsize::new(0),
            buffers_due: AtomicBool::new(true),
            armed: AtomicBool::new(false),
        })
    }

    /// Runs a forward pass: `forward` returns the loss, or whatever tensor backward starts from.
    ///
    /// # Errors
    /// Those of `forward`, and of [`before_forward`](Self::before_forward) and
    /// [`after_forward`](Self::after_forward).
    pub fn forward<E: From<Error>>(
        &self,
        forward: impl FnOnce() -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Tensor, E> {
        self.before_forward()?;
        let loss = forward()?;
        self.after_forward(std::slice::from_ref(&loss))?;
        Ok(loss)
    }

    /// What comes before a forward pass: buffers of rank 0 for all, and once, after the first backward,
    /// buckets in the order in which gradients come. [`forward`](Self::forward) calls it.
    ///
    /// # Errors
    /// [`Error::Collective`]; [`Error::UnusedParameters`] if some got no gradient in the last backward and
    /// unused ones are not looked for.
    pub fn before_forward(&self) -> Result<()> {
        let Some(reducer) = &self.reducer else {
            return Ok(());
        };
        if !tch_grad_enabled() {
            return Ok(());
        }
        if self.syncs() {
            self.told(reducer.prepare_for_forward())?;
        }
        self.told(reducer.rebuild_buckets())?;
        if self.config.broadcast_buffers && self.buffers_due.load(Ordering::SeqCst) {
            copy_from_main(&self.group, self.buffers.iter())?;
        }
        Ok(())
    }

    /// What comes between forward and backward. `outputs` are the tensors that backward will start from;
    /// they matter only where unused parameters are looked for. [`forward`](Self::forward) calls it.
    ///
    /// # Errors
    /// As [`before_forward`](Self::before_forward).
    pub fn after_forward(&self, outputs: &[Tensor]) -> Result<()> {
        let Some(reducer) = &self.reducer else {
            return Ok(());
        };
        let syncs = tch_grad_enabled() && self.syncs();
        self.buffers_due.store(syncs, Ordering::SeqCst);
        self.armed.store(syncs, Ordering::SeqCst);
        if !syncs {
            return Ok(());
        }
        self.prepare_for_backward(reducer, outputs)
    }

    fn prepare_for_backward(&self, reducer: &Reducer, outputs: &[Tensor]) -> Result<()> {
        let outputs = if self.config.find_unused_parameters {
            outputs
        } else {
            &[]
        };
        self.told(reducer.prepare_for_backward(outputs))
    }

    /// `loss.backward()`, with the error that names the rank at fault.
    ///
    /// # Errors
    /// [`Error::Collective`]; what libtorch says of the graph.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        loss.f_backward()
            .map_err(|error| match self.group.failure() {
                Some(failure) => Error::Collective {
                    ranks: failure.ranks,
                    message: first_line(&error),
                },
                None => error.into(),
            })
    }

    /// Until the guard is dropped, gradients are summed up on each rank and not reduced: for all
    /// micro-batches of a step but the last. The forward passes must run under it too.
    ///
    /// ```
    /// # use overdrive_distributed::{DdpConfig, DistributedDataParallel, ProcessGroup};
    /// # use tch::{Device, Kind, Tensor, nn};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let store = nn::VarStore::new(Device::Cpu);
    /// # let weight = store.root().ones("weight", &[2]);
    /// # let ddp = DistributedDataParallel::from_var_store(&ProcessGroup::single(), &store, DdpConfig::default())?;
    /// let micro_batches = 4;
    /// for number in 1..=micro_batches {
    ///     let _quiet = (number < micro_batches).then(|| ddp.no_sync());
    ///     let loss = ddp.forward(|| Ok::<_, overdrive_distributed::Error>(weight.sum(Kind::Float) / micro_batches))?;
    ///     ddp.backward(&loss)?;
    /// }
    /// assert_eq!(Vec::<f32>::try_from(weight.grad())?, [1.0, 1.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn no_sync(&self) -> NoSync<'_> {
        self.quiet.fetch_add(1, Ordering::SeqCst);
        NoSync(self)
    }

    /// Bytes of each bucket, in the order in which they are reduced. They are final after the second
    /// forward. Empty in a world of one.
    ///
    /// # Errors
    /// [`Error::Sys`] if libtorch refuses.
    pub fn bucket_bytes(&self) -> Result<Vec<usize>> {
        match &self.reducer {
            Some(reducer) => Ok(reducer.bucket_bytes()?),
            None => Ok(Vec::new()),
        }
    }

    /// The parameters that are trained, by name.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.parameters
    }

    /// The group.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Prepares a backward whose forward did not run inside [`forward`](Self::forward).
    pub(crate) fn arm_after_forward(&self, loss: &Tensor) -> Result<()> {
        let Some(reducer) = &self.reducer else {
            return Ok(());
        };
        self.told(reducer.prepare_for_forward())?;
        self.told(reducer.rebuild_buckets())?;
        self.prepare_for_backward(reducer, std::slice::from_ref(loss))?;
        self.armed.store(true, Ordering::SeqCst);
        Ok(())
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst)
    }

    /// Whether the last backward reduced gradients; that is noted once.
    pub(crate) fn disarm(&self) -> bool {
        self.armed.swap(false, Ordering::SeqCst)
    }

    /// Buffers of rank 0 for all, before the next forward does so.
    pub(crate) fn copy_buffers(&self) -> Result<()> {
        if self.reducer.is_some() && self.config.broadcast_buffers {
            copy_from_main(&self.group, self.buffers.iter())?;
        }
        self.buffers_due.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn syncs(&self) -> bool {
        self.quiet.load(Ordering::SeqCst) == 0
    }

    fn told<T>(&self, result: overdrive_sys::Result<T>) -> Result<T> {
        result.map_err(|error| match without_gradient(&error.to_string()) {
            Some(indices) if self.group.failure().is_none() => Error::UnusedParameters {
                rank: self.group.rank(),
                names: self.names(&indices),
            },
            _ => self.group.error(error),
        })
    }

    fn names(&self, indices: &[usize]) -> String {
        let names = indices
            .iter()
            .filter_map(|index| self.parameters.get(*index));
        let mut names: Vec<&str> = names.map(|(name, _)| name.as_str()).collect();
        let more = names.len().saturating_sub(MAX_LISTED);
        names.truncate(MAX_LISTED);
        match (names.is_empty(), more) {
            (true, _) => "none here: another rank left some out".to_owned(),
            (_, 0) => names.join(", "),
            _ => format!("{} and {more} more", names.join(", ")),
        }
    }
}

/// The parameters that libtorch's reducer still waits for, if that is what it says.
fn without_gradient(text: &str) -> Option<Vec<usize>> {
    text.contains("Expected to have finished reduction")
        .then(|| {
            let list = text
                .split("did not receive grad for rank")
                .nth(1)
                .unwrap_or_default();
            let list = list.split(':').nth(1).unwrap_or_default();
            let list = list.lines().next().unwrap_or_default();
            list.split_whitespace()
                .map_while(|word| word.parse().ok())
                .collect()
        })
}

/// tch keeps this state to itself.
fn tch_grad_enabled() -> bool {
    overdrive_sys::engine::is_grad_enabled()
}

fn first_line(error: &tch::TchError) -> String {
    let text = match error {
        tch::TchError::Torch(text) => text.clone(),
        other => other.to_string(),
    };
    // libtorch appends a C++ stack.
    text.split("\nException raised from")
        .next()
        .unwrap_or(&text)
        .trim()
        .to_owned()
}
