//! Data parallel training: each rank trains a copy of the model on its shard of the batch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use overdrive_sys::c10d::Reducer;
use tch::{Tensor, nn};

use crate::model_check::{MAX_LISTED, by_name, check_same_model, copy_from_main};
use crate::{DdpConfig, Error, ProcessGroup, Result};

/// Averages gradients over the ranks, bucket by bucket, while backward runs
/// (`torch.nn.parallel.DistributedDataParallel`).
///
/// It holds handles of the parameters, not the model: the forward pass runs inside
/// [`forward`](Self::forward), and backward is unchanged. After backward the gradients are the mean over the
/// ranks, so a loss that is the mean over each rank's shard trains like the mean over the whole batch. In a
/// world of one it does nothing.
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
    /// The number of live [`NoSync`] guards.
    no_sync_guards: AtomicUsize,
    /// If `true`, the last forward was one whose gradients are reduced, so buffers are broadcast before the next.
    buffers_due: AtomicBool,
    /// If `true`, the next backward reduces gradients, or the last one did.
    armed: AtomicBool,
}

/// A guard: while it lives, gradients accumulate on each rank and are not reduced.
#[derive(Debug)]
#[must_use = "gradients are reduced again as soon as the guard is dropped"]
pub struct NoSync<'a>(&'a DistributedDataParallel);

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        self.0.no_sync_guards.fetch_sub(1, Ordering::SeqCst);
    }
}

impl DistributedDataParallel {
    /// Wraps the variables of a store: the trainable ones are parameters, the others buffers.
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

    /// Checks that all ranks have the same parameters and buffers, copies those of rank 0 to all ranks, and
    /// registers hooks on the parameters. The order does not matter. Parameters without gradients (frozen
    /// ones) are copied once, here.
    ///
    /// # Errors
    /// [`Error::ModelMismatch`] with the rank, the names and the shapes; [`Error::Common`] for a bucket size
    /// that is not positive, or two parameters of one name; [`Error::Collective`].
    pub fn new(
        group: &ProcessGroup,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
        buffers: impl IntoIterator<Item = (String, Tensor)>,
        config: DdpConfig,
    ) -> Result<Self> {
        config.validate()?;
        let parameters = by_name(parameters)?;
        let buffers = by_name(buffers)?;
        // Frozen parameters get no hooks: they would never receive a gradient, and the reducer would wait for it.
        let (trained, frozen): (Vec<_>, Vec<_>) = parameters
            .into_iter()
            .partition(|(_, tensor)| tensor.requires_grad());
        let mut reducer = None;
        // The reducer of c10d needs a group with peers; a world of one has none.
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
            no_sync_guards: AtomicUsize::new(0),
            buffers_due: AtomicBool::new(true),
            armed: AtomicBool::new(false),
        })
    }

    /// Runs a forward pass; `forward` returns the loss, or another tensor that backward starts from.
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

    /// Prepares a forward pass: broadcasts the buffers of rank 0 and, once, after the first backward, rebuilds
    /// the buckets in the order in which gradients arrive. [`forward`](Self::forward) calls it.
    ///
    /// # Errors
    /// [`Error::Collective`]; [`Error::UnusedParameters`] if some parameters got no gradient in the last
    /// backward and `find_unused_parameters` is off.
    pub fn before_forward(&self) -> Result<()> {
        let Some(reducer) = &self.reducer else {
            return Ok(());
        };
        if !tch_grad_enabled() {
            return Ok(());
        }
        // As in torch: the reducer counts iterations, and a forward under `no_sync` is not one.
        if self.syncs() {
            self.map_error(reducer.prepare_for_forward())?;
        }
        self.map_error(reducer.rebuild_buckets())?;
        if self.config.broadcast_buffers && self.buffers_due.load(Ordering::SeqCst) {
            copy_from_main(&self.group, self.buffers.iter())?;
        }
        Ok(())
    }

    /// Prepares the backward pass. `outputs` are the tensors that backward will start from; they matter only
    /// with `find_unused_parameters` and `static_graph`. [`forward`](Self::forward) calls it.
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
        self.map_error(reducer.prepare_for_backward(outputs))
    }

    /// Runs `loss.backward()`; its error names the rank at fault.
    ///
    /// # Errors
    /// [`Error::Collective`]; errors of libtorch about the graph.
    pub fn backward(&self, loss: &Tensor) -> Result<()> {
        loss.f_backward()
            .map_err(|error| match self.group.failure() {
                Some(failure) => Error::Collective {
                    ranks: failure.ranks,
                    message: without_backtrace(&error),
                },
                None => error.into(),
            })
    }

    /// Returns a guard under which gradients accumulate on each rank and are not reduced: for all
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
    /// for micro_batch in 1..=micro_batches {
    ///     let _no_sync = (micro_batch < micro_batches).then(|| ddp.no_sync());
    ///     let loss = ddp.forward(|| Ok::<_, overdrive_distributed::Error>(weight.sum(Kind::Float) / micro_batches))?;
    ///     ddp.backward(&loss)?;
    /// }
    /// assert_eq!(Vec::<f32>::try_from(weight.grad())?, [1.0, 1.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn no_sync(&self) -> NoSync<'_> {
        self.no_sync_guards.fetch_add(1, Ordering::SeqCst);
        NoSync(self)
    }

    /// Returns the size of each bucket in bytes, in the order of reduction. The sizes are final after the
    /// second forward. The list is empty in a world of one.
    ///
    /// # Errors
    /// [`Error::Sys`] for an error of libtorch.
    pub fn bucket_bytes(&self) -> Result<Vec<usize>> {
        match &self.reducer {
            Some(reducer) => Ok(reducer.bucket_bytes()?),
            None => Ok(Vec::new()),
        }
    }

    /// Returns the trainable parameters, sorted by name.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.parameters
    }

    /// Returns the process group.
    #[must_use]
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Prepares a backward pass whose forward did not run inside [`forward`](Self::forward).
    pub(crate) fn arm_after_forward(&self, loss: &Tensor) -> Result<()> {
        let Some(reducer) = &self.reducer else {
            return Ok(());
        };
        self.map_error(reducer.prepare_for_forward())?;
        self.map_error(reducer.rebuild_buckets())?;
        self.prepare_for_backward(reducer, std::slice::from_ref(loss))?;
        self.armed.store(true, Ordering::SeqCst);
        Ok(())
    }

    pub(crate) fn is_armed(&self) -> bool {
        self.armed.load(Ordering::SeqCst)
    }

    /// Returns `true` if the last backward reduced gradients, and clears that state.
    pub(crate) fn disarm(&self) -> bool {
        self.armed.swap(false, Ordering::SeqCst)
    }

    /// Broadcasts the buffers of rank 0 now, in place of the next forward.
    pub(crate) fn copy_buffers(&self) -> Result<()> {
        if self.reducer.is_some() && self.config.broadcast_buffers {
            copy_from_main(&self.group, self.buffers.iter())?;
        }
        self.buffers_due.store(false, Ordering::SeqCst);
        Ok(())
    }

    fn syncs(&self) -> bool {
        self.no_sync_guards.load(Ordering::SeqCst) == 0
    }

    fn map_error<T>(&self, result: overdrive_sys::Result<T>) -> Result<T> {
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
            (true, _) => "none here: another rank left parameters out".to_owned(),
            (_, 0) => names.join(", "),
            _ => format!("{} and {more} more", names.join(", ")),
        }
    }
}

/// Parses the indices of the parameters that libtorch's reducer still waits for out of its error message.
fn without_gradient(text: &str) -> Option<Vec<usize>> {
    // The reducer throws a plain `RuntimeError`: its message is the only way to recognize the case.
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

/// Returns autograd's gradient mode; tch has no getter for it.
fn tch_grad_enabled() -> bool {
    overdrive_sys::engine::is_grad_enabled()
}

fn without_backtrace(error: &tch::TchError) -> String {
    let text = match error {
        tch::TchError::Torch(text) => text.clone(),
        other => other.to_string(),
    };
    overdrive_sys::without_backtrace(&text)
}
