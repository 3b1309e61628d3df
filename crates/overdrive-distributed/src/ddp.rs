//! Data parallel: each rank trains a copy of the model on its part of the batch.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use overdrive_sys::c10d::{Reducer, ReducerOptions};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor, nn};

use crate::{Error, ProcessGroup, Result};

const MIB: f64 = 1024.0 * 1024.0;
/// Differences listed in an error before it says how many more there are.
const MAX_LISTED: usize = 6;

/// The dtype that gradients travel in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientCompression {
    /// Their own.
    #[default]
    None,
    /// bfloat16 (`bf16_compress_hook`): half the bytes, 8 bits of precision.
    Bf16,
    /// float16 (`fp16_compress_hook`): half the bytes, 11 bits of precision, overflow from 65504.
    Fp16,
}

/// How [`DistributedDataParallel`] works. The names and defaults are torch's, except for
/// `gradient_as_bucket_view`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DdpConfig {
    /// MiB of gradients that are reduced together. Default 25; the bucket that is reduced first has at
    /// most 1 MiB, so that reducing begins early.
    pub bucket_cap_mb: f64,
    /// Looks through the graph before each backward for parameters that it will not reach. Without, one
    /// that gets no gradient is an error in the next forward. Default false: it costs a walk of the graph.
    pub find_unused_parameters: bool,
    /// Gradients are views of the buckets: no second copy of them. Default true (torch: false, because
    /// Python code may detach gradients in place).
    pub gradient_as_bucket_view: bool,
    /// Copies the buffers of rank 0 to all before each forward. Default true.
    pub broadcast_buffers: bool,
    /// The dtype that gradients travel in.
    pub compression: GradientCompression,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            find_unused_parameters: false,
            gradient_as_bucket_view: true,
            broadcast_buffers: true,
            compression: GradientCompression::None,
        }
    }
}

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
        if !(config.bucket_cap_mb > 0.0 && config.bucket_cap_mb.is_finite()) {
            return Err(Error::InvalidArgument {
                argument: "bucket_cap_mb",
                value: config.bucket_cap_mb.to_string(),
                expected: "a number above 0".to_owned(),
            });
        }
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
                let options = reducer_options(&config);
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
        if !syncs {
            return Ok(());
        }
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

fn reducer_options(config: &DdpConfig) -> ReducerOptions {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "above 0 and finite, and saturating"
    )]
    let bucket_bytes = (config.bucket_cap_mb * MIB).max(1.0) as usize;
    ReducerOptions {
        bucket_bytes,
        // torch does this for its default size only; a smaller first bucket than the others is never bad.
        first_bucket_bytes: bucket_bytes.min(1024 * 1024),
        find_unused_parameters: config.find_unused_parameters,
        gradient_as_bucket_view: config.gradient_as_bucket_view,
        compression: match config.compression {
            GradientCompression::None => None,
            GradientCompression::Bf16 => Some(Kind::BFloat16),
            GradientCompression::Fp16 => Some(Kind::Half),
        },
    }
}

/// The same order on every rank: stores hand their variables out in any.
fn by_name(tensors: impl IntoIterator<Item = (String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
    let mut sorted: Vec<_> = tensors.into_iter().collect();
    sorted.sort_by(|(a, _), (b, _)| a.cmp(b));
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::InvalidArgument {
            argument: "parameters",
            value: pair[0].0.clone(),
            expected: "a name of its own for every parameter and buffer".to_owned(),
        });
    }
    Ok(sorted)
}

/// What a rank says about one of its tensors.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Described {
    role: String,
    shape: Vec<i64>,
    kind: String,
}

type Description = BTreeMap<String, Described>;

fn describe(tensors: &[(String, Tensor)], role: &str, into: &mut Description) {
    for (name, tensor) in tensors {
        let described = Described {
            role: role.to_owned(),
            shape: tensor.size(),
            kind: format!("{:?}", tensor.kind()),
        };
        into.insert(format!("{role} {name}"), described);
    }
}

fn check_same_model(
    group: &ProcessGroup,
    trained: &[(String, Tensor)],
    frozen: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
) -> Result<()> {
    let mut own = Description::new();
    describe(trained, "parameter", &mut own);
    describe(frozen, "frozen parameter", &mut own);
    describe(buffers, "buffer", &mut own);
    let unreadable = |error: serde_json::Error| Error::Monitor {
        problem: format!("the description of a model: {error}"),
    };
    let bytes = serde_json::to_vec(&own).map_err(unreadable)?;
    let all = group.all_gather_bytes(&bytes)?;
    // Every rank sees every description, so all of them end with the same error.
    let Some(rank) = all.iter().position(|other| *other != all[0]) else {
        return Ok(());
    };
    let main: Description = serde_json::from_slice(&all[0]).map_err(unreadable)?;
    let other: Description = serde_json::from_slice(&all[rank]).map_err(unreadable)?;
    Err(Error::ModelMismatch {
        rank,
        differences: differences(&main, &other, rank),
    })
}

fn differences(main: &Description, other: &Description, rank: usize) -> String {
    let mut found = Vec::new();
    for (name, there) in main {
        match other.get(name) {
            None => found.push(format!(
                "{name} (shape {:?}) is missing on rank {rank}",
                there.shape
            )),
            Some(here) if here != there => found.push(format!(
                "{name} has shape {:?} and dtype {} on rank {rank}, {:?} and {} on rank 0",
                here.shape, here.kind, there.shape, there.kind
            )),
            Some(_) => {}
        }
    }
    for (name, here) in other {
        if !main.contains_key(name) {
            found.push(format!(
                "{name} (shape {:?}) of rank {rank} is missing on rank 0",
                here.shape
            ));
        }
    }
    let more = found.len().saturating_sub(MAX_LISTED);
    found.truncate(MAX_LISTED);
    let mut text = found.join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text
}

/// Copies tensors of rank 0 to all, many at a time.
pub(crate) fn copy_from_main<'a>(
    group: &ProcessGroup,
    tensors: impl Iterator<Item = &'a (String, Tensor)>,
) -> Result<()> {
    let pending = tensors
        .filter(|(_, tensor)| tensor.numel() > 0)
        .map(|(_, tensor)| group.broadcast_async(tensor, 0))
        .collect::<Result<Vec<_>>>()?;
    pending.into_iter().try_for_each(crate::Pending::wait)
}
