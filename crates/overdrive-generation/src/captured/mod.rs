//! Decoding steps of a GPU as CUDA graphs, one for each number of rows.

use std::collections::BTreeMap;
use std::sync::{Arc, Once};

use overdrive_graphs::{BareGraph, CaptureOptions};
use overdrive_kv_cache::{
    KvCacheDtype, PagedCache, PagedDecodeInputs, PagedDecodeStep, SequenceId,
};
use overdrive_nn::{AdapterRows, RowChoice};
use overdrive_sys::transfer::to_device;
use tch::{Device, Kind, Tensor};
use tracing::{debug, warn};

use crate::Result;
use crate::engine::{EngineModel, RaggedStep, StepAdapters};

/// The maximum number of rows of a captured step, as in vLLM: in a larger step, the host's share of
/// the time is small.
const MOST_ROWS: usize = 512;

/// The maximum number of graphs of steps in which all rows have one adapter; beyond it, such steps use the graphs of several
/// adapters.
const MOST_OF_ONE_ADAPTER: usize = 64;

/// The number of runs before a capture. They load what a capture cannot load: the kernels for these shapes, and
/// the tables of all positions.
const WARM_UPS: usize = 1;

/// The decoding steps of a model over a paged cache: one new token for each of some sequences. A step is captured ahead
/// of time ([`prepare`](CapturedSteps::prepare)) or when its number of rows first appears, and replayed from then on.
///
/// A graph has as many rows as there are sequences, or up to seven more ([`rows_for`]). It reads from
/// [`PagedDecodeInputs`] and writes to [`Outputs`], whose addresses stay the same, like those of the cache's pool
/// and the weights.
#[derive(Debug)]
pub(crate) struct CapturedSteps {
    // Dropped first: the graphs use the fields below, and dropping a graph waits for a running replay.
    graphs: BTreeMap<Key, BareGraph<()>>,
    inputs: PagedDecodeInputs,
    outputs: Outputs,
    /// The numbers of the rows, i64.
    rows: Tensor,
    /// The adapters of steps that have several.
    mixed: MixedAdapters,
    /// An exclusive upper bound of all positions.
    position_bound: i64,
    /// `true` after a capture that failed.
    is_off: bool,
    replays: u64,
}

/// The adapters of the rows of a step that has several, which its graph reads on the device.
#[derive(Debug)]
struct MixedAdapters {
    names: Arc<[Arc<str>]>,
    choice: RowChoice,
    /// The tensor of `choice`, i64 `(rows,)`.
    numbers: Tensor,
    /// The values of `numbers`.
    written: Vec<i64>,
    /// `true` after a capture that failed.
    is_off: bool,
}

/// The tensors that a graph writes; their first rows belong to the sequences of the step.
#[derive(Debug)]
struct Outputs {
    /// The logits, f32 `(rows, V)`.
    scores: Tensor,
    /// The largest logit, as its bits, and its first token: i32 `(rows, 2)`.
    best: Tensor,
}

/// A step that has been launched on the device. The next step overwrites its tensors.
#[derive(Debug)]
pub(crate) struct Replayed<'a> {
    /// The step of the cache, which the caller must commit or launch.
    pub(crate) step: PagedDecodeStep<'a>,
    /// The logits, f32 `(N, V)`.
    pub(crate) logits: Tensor,
    /// The largest logit of each sequence, as its bits, and its first token: i32 `(N, 2)`.
    pub(crate) best: Tensor,
}

/// The number of rows of a step, and their adapters.
type Key = (usize, Adapters);

/// The adapters of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Adapters {
    /// All rows have this one.
    All(Option<usize>),
    /// The rows have different ones.
    Mixed,
}

/// Returns the key of a step of sequences with these adapters, beside the `graphs` that there are.
fn key_of<G>(adapters: &[Option<usize>], graphs: &BTreeMap<Key, G>) -> Key {
    let rows = rows_for(adapters.len());
    let first = adapters.first().copied().flatten();
    let key = (rows, Adapters::All(first));
    let of_one = |(_, adapters): &&Key| matches!(adapters, Adapters::All(Some(_)));
    let fits = || graphs.keys().filter(of_one).count() < MOST_OF_ONE_ADAPTER;
    let is_one = adapters.iter().all(|row| *row == first);
    match is_one && (first.is_none() || graphs.contains_key(&key) || fits()) {
        true => key,
        false => (rows, Adapters::Mixed),
    }
}

/// The graphs of an engine.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct GraphCounts {
    pub(crate) graphs: usize,
    /// The size of the pools of all graphs, and of the tensors that the graphs read and write.
    pub(crate) bytes: u64,
    pub(crate) replays: u64,
}

impl CapturedSteps {
    /// Returns the steps of up to `sequences` sequences of up to `longest` tokens. Returns `None` if steps cannot be
    /// captured: on a CPU, on a GPU without the kernels of overdrive-gpu, or if there is too little memory, which is
    /// logged.
    pub(crate) fn new<M: EngineModel>(
        model: &M,
        cache: &PagedCache,
        sequences: usize,
        longest: usize,
    ) -> Option<CapturedSteps> {
        let device = cache.config().device;
        if !PagedCache::can_be_captured(device) && !is_forced() {
            return None;
        }
        if cache.config().kv_cache_dtype != KvCacheDtype::Auto {
            report(&"no kernel on a GPU reads a cache in int8 or fp8");
            return None;
        }
        if cache.config().recurrent.contains(&true) {
            report(&"the states of its recurrent layers move between steps");
            return None;
        }
        match CapturedSteps::allocate(model, cache, sequences, longest) {
            Ok(steps) => Some(steps),
            Err(error) => {
                report(&error);
                None
            }
        }
    }

    fn allocate<M: EngineModel>(
        model: &M,
        cache: &PagedCache,
        sequences: usize,
        longest: usize,
    ) -> Result<CapturedSteps> {
        let device = cache.config().device;
        let rows = rows_for(sequences.clamp(1, MOST_ROWS));
        let context = model.context().min(longest);
        let int = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let scores = [int(rows), int(model.vocab_size())];
        let names: Arc<[Arc<str>]> = model.adapters().into_iter().map(Arc::from).collect();
        let numbers = Tensor::f_zeros([int(rows)], (Kind::Int64, device))?;
        Ok(CapturedSteps {
            graphs: BTreeMap::new(),
            inputs: cache.decode_inputs(rows, longest)?,
            outputs: Outputs {
                scores: Tensor::f_empty(scores, (Kind::Float, device))?,
                best: Tensor::f_zeros([int(rows), 2], (Kind::Int, device))?,
            },
            rows: Tensor::f_arange(int(rows), (Kind::Int64, device))?,
            mixed: MixedAdapters {
                choice: RowChoice::new(Arc::clone(&names), &numbers)?,
                names,
                numbers,
                written: vec![0; rows],
                is_off: false,
            },
            position_bound: int(context),
            is_off: false,
            replays: 0,
        })
    }

    /// Returns `true` if steps of sequences with these adapters are captured already.
    pub(crate) fn knows(&self, adapters: &[Option<usize>]) -> bool {
        let key = key_of(adapters, &self.graphs);
        !self.is_off && (is_forced() || self.graphs.contains_key(&key))
    }

    /// Launches a step with one new token for each of some sequences; `adapters` are the indices of their adapters among
    /// those of the model. If `ids`, i32 or i64 `(N,)`, is given, it replaces the tokens. Returns `None` if the step cannot
    /// be replayed; the caller then runs the plain step.
    ///
    /// # Errors
    /// When the cache has no room, or a replay fails.
    pub(crate) fn run<'a, M: EngineModel>(
        &'a mut self,
        model: &M,
        cache: &'a mut PagedCache,
        new_tokens: &[(SequenceId, i64)],
        ids: Option<&Tensor>,
        adapters: &[Option<usize>],
    ) -> Result<Option<Replayed<'a>>> {
        let CapturedSteps {
            graphs,
            inputs,
            outputs,
            rows: numbers,
            mixed,
            position_bound,
            is_off,
            replays,
        } = self;
        let key @ (rows, kind) = key_of(adapters, graphs);
        let is_mixed = kind == Adapters::Mixed;
        if *is_off || (is_mixed && mixed.is_off) || rows > inputs.rows() {
            return Ok(None);
        }
        let Some(mut step) = cache.decode_step(inputs, new_tokens, rows)? else {
            return Ok(None);
        };
        if let Some(ids) = ids {
            step.set_input_ids(ids)?;
        }
        if is_mixed {
            mixed.write(adapters)?;
        }
        let all = mixed.of_rows(&key)?;
        let all = all.as_ref();
        let work = || forward(model, &mut step, outputs, numbers, *position_bound, all);
        if !captured(graphs, &key, numbers.device(), work)? {
            match is_mixed {
                true => mixed.is_off = true,
                false => *is_off = true,
            }
            return Ok(None);
        }
        if let Some(graph) = graphs.get(&key) {
            graph.replay()?;
        }
        *replays += 1;
        let count = new_tokens.len() as i64;
        Ok(Some(Replayed {
            step,
            logits: outputs.scores.f_narrow(0, 0, count)?,
            best: outputs.best.f_narrow(0, 0, count)?,
        }))
    }

    /// Captures the steps without an adapter for every number of rows up to that of `sequences` sequences, so that no
    /// request waits for a capture. The rows are tokens in a block of the cache that belongs to no sequence.
    ///
    /// # Errors
    /// When the model fails.
    pub(crate) fn prepare<M: EngineModel>(
        &mut self,
        model: &M,
        cache: &mut PagedCache,
        sequences: usize,
    ) -> Result<()> {
        let CapturedSteps {
            graphs,
            inputs,
            outputs,
            rows: numbers,
            position_bound,
            is_off,
            ..
        } = self;
        let most = rows_for(sequences).min(inputs.rows());
        let mut sizes: Vec<usize> = (1..=most)
            .map(rows_for)
            .filter(|rows| *rows <= most)
            .collect();
        sizes.dedup();
        // The largest step is captured first: the others fit into its memory.
        for rows in sizes.into_iter().rev() {
            let key = (rows, Adapters::All(None));
            if *is_off || graphs.contains_key(&key) {
                continue;
            }
            let Some(mut step) = cache.decode_step(inputs, &[], rows)? else {
                continue;
            };
            let work = || forward(model, &mut step, outputs, numbers, *position_bound, None);
            *is_off = !captured(graphs, &key, numbers.device(), work)?;
        }
        Ok(())
    }

    /// Returns the counters of captures and replays.
    pub(crate) fn counts(&self) -> GraphCounts {
        let bytes = self.outputs.scores.numel() as u64 * 4 + self.inputs.bytes();
        GraphCounts {
            graphs: self.graphs.len(),
            bytes: bytes + self.graphs.values().map(BareGraph::pool_bytes).sum::<u64>(),
            replays: self.replays,
        }
    }
}

impl MixedAdapters {
    /// Writes the adapters of the first rows.
    fn write(&mut self, adapters: &[Option<usize>]) -> Result<()> {
        let number = |adapter: &Option<usize>| adapter.unwrap_or(self.names.len()) as i64;
        let numbers: Vec<i64> = adapters.iter().map(number).collect();
        // Most steps have the sequences of the step before.
        if self.written[..numbers.len()] == numbers {
            return Ok(());
        }
        let new = to_device(Tensor::f_from_slice(&numbers)?, self.numbers.device())?;
        let mut own = self.numbers.f_narrow(0, 0, numbers.len() as i64)?;
        own.f_copy_(&new)?;
        self.written[..numbers.len()].copy_from_slice(&numbers);
        Ok(())
    }

    /// Returns the adapters of the rows of a step.
    fn of_rows(&self, (rows, adapters): &Key) -> Result<Option<StepAdapters>> {
        let all = match adapters {
            Adapters::All(None) => return Ok(None),
            Adapters::All(Some(index)) => {
                AdapterRows::new([(*rows, self.names.get(*index).cloned())])
            }
            Adapters::Mixed => self.choice.narrow(0, *rows)?.into(),
        };
        Ok(Some(StepAdapters {
            tokens: all.clone(),
            logits: all,
        }))
    }
}

/// Captures a step unless it is captured already. Returns `false` if the capture fails, which is logged. On a CPU
/// with forced capturing, runs the step instead.
fn captured(
    graphs: &mut BTreeMap<Key, BareGraph<()>>,
    key: &Key,
    device: Device,
    mut work: impl FnMut() -> Result<()>,
) -> Result<bool> {
    if is_forced() {
        return work().map(|()| true);
    }
    if graphs.contains_key(key) {
        return Ok(true);
    }
    // Only one graph runs at a time, so all of them share the memory of the largest.
    let pool_of = graphs.values().next();
    let options = CaptureOptions { warm_ups: WARM_UPS };
    match BareGraph::capture(device, options, pool_of, work) {
        Ok(graph) => {
            let (rows, bytes) = (key.0, graph.pool_bytes());
            debug!("captured a decoding step of {rows} rows: {bytes} bytes");
            graphs.insert(*key, graph);
            Ok(true)
        }
        Err(error) => {
            match key.1 {
                Adapters::All(_) => report(&error),
                Adapters::Mixed => warn!(
                    "cannot capture decoding steps of several adapters, so their operations are launched one by one, \
                     which is slower: {error}"
                ),
            }
            Ok(false)
        }
    }
}

/// Returns the rows of the graph for a number of sequences: 1, 2, 4, 8, 16, 24, …
fn rows_for(sequences: usize) -> usize {
    match sequences {
        0..=4 => sequences.max(1).next_power_of_two(),
        _ => sequences.next_multiple_of(8),
    }
}

/// Runs the model over a step, and writes its results to `outputs`.
fn forward<M: EngineModel>(
    model: &M,
    step: &mut PagedDecodeStep<'_>,
    outputs: &Outputs,
    numbers: &Tensor,
    position_bound: i64,
    adapters: Option<&StepAdapters>,
) -> Result<()> {
    let (input_ids, position_ids) = (step.input_ids()?, step.position_ids()?);
    let count = input_ids.numel() as i64;
    let logits = model.forward(RaggedStep {
        input_ids: &input_ids,
        position_ids: &position_ids,
        position_bound,
        cache: &mut step.batch()?,
        logits_indices: &numbers.f_narrow(0, 0, count)?,
        images: None,
        adapters,
    })?;
    let mut to = outputs.scores.f_narrow(0, 0, count)?;
    if logits.size() != to.size() {
        let expected = format!("{:?}", to.size());
        return Err(overdrive_core::Error::shape("logits", logits.size(), expected).into());
    }
    to.f_copy_(&logits)?;
    let (largest, first) = to.f_max_dim(-1, true)?;
    let best = [
        largest.f_view_dtype(Kind::Int)?,
        first.f_to_kind(Kind::Int)?,
    ];
    let mut to = outputs.best.f_narrow(0, 0, count)?;
    Ok(to.f_copy_(&Tensor::f_cat(&best, 1)?)?)
}

/// Logs the reason why steps are not captured, once per process.
fn report(reason: &dyn std::fmt::Display) {
    static REPORTED: Once = Once::new();
    REPORTED.call_once(|| {
        warn!("cannot capture decoding steps, so their operations are launched one by one, which is slower: {reason}");
    });
}

/// Returns `true` if the steps of a CPU run as captured ones would.
#[cfg(not(test))]
pub(crate) const fn is_forced() -> bool {
    false
}

#[cfg(test)]
pub(crate) use tests::is_forced;

#[cfg(test)]
mod tests;
