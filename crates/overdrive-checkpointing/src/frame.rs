//! The state of one checkpointed region: the data of its first pass, and the recomputation in backward.
//!
//! Life cycle of a frame: the first pass runs the closure with a hook that puts a [`Placeholder`] into
//! the graph for each saved tensor. The first placeholder that backward unpacks runs the closure again,
//! whose saved tensors fill the slots in the same order; the other placeholders take theirs from the
//! slots. The frame lives as long as a placeholder does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use overdrive_autograd::EnableGradGuard;
use overdrive_core::panic_text;
use overdrive_sys::dispatch_mode::{
    DispatchMode, ModeGuard, OperatorNames, current_operator, push_mode,
};
use overdrive_sys::saved_tensors::{
    HooksGuard, PackedTensor, SavedTensor, SavedVariable, backward_pass, push_hooks,
};
use overdrive_sys::scoped_closure::ScopedClosure;
use overdrive_sys::{CallbackError, CallbackResult};
use tch::Tensor;

use crate::context::Context;
use crate::determinism::{Log, LogMode, Metadata};
use crate::early_stop::{EarlyStop, silence_panics};
use crate::policy::{KeepMode, KeptResults, ReplayMode};
use crate::versioned::Versioned;
use crate::{CheckpointOptions, DeterminismCheck, Error, Result};

type Owned = Box<dyn Fn(&[Tensor]) -> CallbackResult<()> + Send + Sync>;

/// The closure of a region; its result is discarded.
pub(crate) enum Region {
    /// A closure that owns its captures: any thread may run it.
    Owned(Owned),
    /// A closure that borrows from the thread of its scope.
    Scoped(ScopedClosure),
}

impl Region {
    fn run(&self, inputs: &[Tensor]) -> CallbackResult<()> {
        match self {
            Self::Owned(closure) => closure(inputs),
            Self::Scoped(closure) => closure.call(inputs),
        }
    }
}

pub(crate) struct Frame {
    region: Region,
    inputs: Mutex<Vec<SavedVariable>>,
    context: Mutex<Context>,
    options: CheckpointOptions,
    kept: Arc<KeptResults>,
    first_log: Arc<Log>,
    /// Held during a recomputation.
    recomputing: Mutex<()>,
    /// The thread that holds `recomputing`.
    running_thread: Mutex<Option<ThreadId>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    forward_done: bool,
    /// The backward pass that the values in the slots were computed for.
    pass: Option<u64>,
    /// The number of tensors that the recomputation has saved.
    count: usize,
    /// The slot at which the recomputation stops early.
    last: Option<usize>,
    stopped: bool,
    /// An error that was found inside an operator. It takes precedence over the closure's error, which is
    /// the same error as text that went through C++.
    failure: Option<Error>,
}

/// A tensor that the first pass saved.
struct Slot {
    metadata: Option<Metadata>,
    /// If `true`, the graph still holds the placeholder.
    alive: bool,
    value: Option<Versioned>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of the closure leaves no inconsistent state: the tensors that it saved are discarded.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The hooks and modes of one pass.
pub(crate) struct Recording {
    _hooks: HooksGuard,
    _modes: Vec<ModeGuard>,
    _names: Option<OperatorNames>,
}

impl Frame {
    pub(crate) fn new(
        region: Region,
        inputs: &[Tensor],
        options: &CheckpointOptions,
    ) -> Result<Arc<Self>> {
        options.policy.check()?;
        let context = Context::capture(inputs, options.preserve_rng_state)?;
        // A `SavedVariable` goes through the hooks of a surrounding checkpoint, which can so recompute
        // the inputs.
        let inputs = inputs
            .iter()
            .map(SavedVariable::new)
            .collect::<overdrive_sys::Result<Vec<_>>>()?;
        Ok(Arc::new(Self {
            region,
            inputs: Mutex::new(inputs),
            context: Mutex::new(context),
            options: options.clone(),
            kept: Arc::default(),
            first_log: Arc::default(),
            recomputing: Mutex::new(()),
            running_thread: Mutex::new(None),
            state: Mutex::default(),
        }))
    }

    /// Begins the first pass: until the guard is dropped, the graph holds placeholders for saved tensors.
    pub(crate) fn record(self: &Arc<Self>) -> Result<Recording> {
        let frame = Arc::clone(self);
        let check = self.options.determinism_check;
        let hooks = push_hooks(move |saved: SavedTensor| {
            let metadata = match check {
                DeterminismCheck::Default => Some(Metadata::of(&saved.tensor)),
                DeterminismCheck::None => None,
            };
            let mut state = lock(&frame.state);
            let index = state.slots.len();
            state.slots.push(Slot {
                metadata,
                alive: true,
                value: None,
            });
            Ok(Box::new(Placeholder {
                frame: Arc::clone(&frame),
                index,
            }) as Box<dyn PackedTensor>)
        })?;
        let mut modes: Vec<Rc<dyn DispatchMode>> = Vec::new();
        if !self.options.policy.keeps_nothing() {
            modes.push(Rc::new(KeepMode {
                policy: self.options.policy.clone(),
                kept: Arc::clone(&self.kept),
            }));
        }
        if self.options.debug {
            modes.push(Rc::new(LogMode(Arc::clone(&self.first_log))));
        }
        Ok(Recording {
            _hooks: hooks,
            _modes: modes.into_iter().map(push_mode).collect(),
            _names: None,
        })
    }

    /// Ends the first pass.
    pub(crate) fn forward_done(&self) {
        lock(&self.state).forward_done = true;
    }

    fn unpack(self: &Arc<Self>, index: usize) -> Result<Tensor> {
        let pass = backward_pass();
        match self.take(index, pass) {
            Some(value) => value.get(),
            None => self.recompute(index, pass)?.get(),
        }
    }

    fn take(&self, index: usize, pass: Option<u64>) -> Option<Versioned> {
        let mut state = lock(&self.state);
        // Each pass computes its own values: an earlier one over a retained graph may have stopped halfway.
        if state.pass != pass {
            return None;
        }
        state.slots[index].value.take()
    }

    /// Runs the closure again and returns the value of slot `index`.
    fn recompute(self: &Arc<Self>, index: usize, pass: Option<u64>) -> Result<Versioned> {
        let this_thread = thread::current().id();
        // Without this check the thread would wait for itself.
        if *lock(&self.running_thread) == Some(this_thread) {
            return Err(Error::Recursion);
        }
        // Before `recomputing` is locked: unpacking may run the recomputation of a surrounding checkpoint.
        let inputs = lock(&self.inputs)
            .iter()
            .map(SavedVariable::unpack)
            .collect::<overdrive_sys::Result<Vec<_>>>()
            .map_err(unwrap_own)?;
        // Backward passes of several threads over one graph recompute one after another. While this one
        // waited, another thread may have computed the value.
        let _guard = RecomputeGuard::acquire(self, this_thread);
        if let Some(value) = self.take(index, pass) {
            return Ok(value);
        }
        let log = Arc::<Log>::default();
        self.begin(pass);
        let outcome = self.run_again(&inputs, &log)?;
        self.finish(outcome, &log)?;
        self.take(index, pass).ok_or(Error::Recursion)
    }

    fn run_again(
        self: &Arc<Self>,
        inputs: &[Tensor],
        log: &Arc<Log>,
    ) -> Result<thread::Result<CallbackResult<()>>> {
        let _context = lock(&self.context).enter()?;
        // Backward disables recording, but only recorded operators save tensors.
        let _grad = EnableGradGuard::new();
        let _recording = self.record_again(log)?;
        if self.options.early_stop {
            silence_panics();
        }
        // `AssertUnwindSafe`: an early stop leaves the closure in the middle too, by an error.
        Ok(catch_unwind(AssertUnwindSafe(|| self.region.run(inputs))))
    }

    fn begin(&self, pass: Option<u64>) {
        let old: Vec<Versioned> = {
            let mut state = lock(&self.state);
            state.pass = pass;
            state.count = 0;
            state.stopped = false;
            state.failure = None;
            let early = self.options.early_stop && state.forward_done;
            state.last = early
                .then(|| state.slots.iter().rposition(|slot| slot.alive))
                .flatten();
            let values = state.slots.iter_mut().filter_map(|slot| slot.value.take());
            values.collect()
        };
        // After the lock is released: dropping a tensor may free a graph whose placeholders take the lock.
        drop(old);
    }

    fn record_again(self: &Arc<Self>, log: &Arc<Log>) -> Result<Recording> {
        let frame = Arc::clone(self);
        let now_log = Arc::clone(log);
        let hooks = push_hooks(move |saved: SavedTensor| frame.fill_slot(&saved.tensor, &now_log))?;
        let mut modes: Vec<Rc<dyn DispatchMode>> = Vec::new();
        if !self.options.policy.keeps_nothing() {
            modes.push(Rc::new(ReplayMode::new(
                self.options.policy.clone(),
                Arc::clone(&self.kept),
                self.options.preserve_rng_state,
            )));
        }
        if self.options.debug {
            modes.push(Rc::new(LogMode(Arc::clone(log))));
        }
        let checked = self.options.determinism_check == DeterminismCheck::Default;
        Ok(Recording {
            _hooks: hooks,
            _modes: modes.into_iter().map(push_mode).collect(),
            _names: checked.then(OperatorNames::new),
        })
    }

    /// The hook of the recomputation: stores a saved tensor in its slot.
    fn fill_slot(&self, tensor: &Tensor, log: &Log) -> CallbackResult<Box<dyn PackedTensor>> {
        let value = Versioned::new(tensor)?;
        let recomputed = Box::new(Recomputed(value.tensor().shallow_clone()));
        let mut state = lock(&self.state);
        if state.stopped {
            return Err(Box::new(EarlyStop));
        }
        let index = state.count;
        state.count += 1;
        let (known, forward_done) = (state.slots.len(), state.forward_done);
        let Some(slot) = state.slots.get_mut(index) else {
            if !forward_done {
                // Backward runs inside the closure, before its end: the first pass has not come this far yet.
                return Ok(recomputed);
            }
            let error = Error::Count {
                first: known,
                now: format!("more than {known}"),
                operator: operator(", the last by")?,
                log: self.compare(log),
            };
            return Err(state.fail(error));
        };
        if let Some(first) = &slot.metadata {
            let now = Metadata::of(tensor);
            if *first != now {
                let error = Error::Mismatch {
                    index,
                    operator: operator(", saved by")?,
                    first: first.to_string(),
                    now: now.to_string(),
                    log: self.compare(log),
                };
                return Err(state.fail(error));
            }
        }
        // A placeholder that was freed needs no value, which would only occupy memory.
        if slot.alive {
            slot.value = Some(value);
        }
        if state.last == Some(index) {
            state.stopped = true;
            return Err(Box::new(EarlyStop));
        }
        Ok(recomputed)
    }

    fn finish(&self, outcome: thread::Result<CallbackResult<()>>, log: &Log) -> Result<()> {
        let mut state = lock(&self.state);
        if let Some(failure) = state.failure.take() {
            return Err(failure);
        }
        if state.stopped {
            return Ok(());
        }
        match outcome {
            Ok(Ok(())) => {}
            Ok(Err(source)) => return Err(Error::Recomputation { source }),
            Err(payload) => {
                return Err(Error::Panic {
                    message: panic_text(&*payload).to_owned(),
                });
            }
        }
        if state.forward_done && state.count != state.slots.len() {
            return Err(Error::Count {
                first: state.slots.len(),
                now: state.count.to_string(),
                operator: String::new(),
                log: self.compare(log),
            });
        }
        Ok(())
    }

    fn compare(&self, log: &Log) -> String {
        if self.options.debug {
            Log::compare(&self.first_log, log)
        } else {
            String::new()
        }
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        if let Region::Scoped(closure) = &self.region {
            closure.end();
        }
    }
}

impl State {
    /// Stores the error for the end of the recomputation, and returns one that stops the closure.
    fn fail(&mut self, error: Error) -> CallbackError {
        let text = CallbackError::from(error.to_string());
        self.failure = Some(error);
        text
    }
}

fn operator(before: &str) -> CallbackResult<String> {
    Ok(current_operator()?.map_or_else(String::new, |name| format!("{before} {name}")))
}

/// Converts an error that went through C++ back into this crate's error.
fn unwrap_own(error: overdrive_sys::Error) -> Error {
    match error {
        overdrive_sys::Error::Callback { operation, source } => match source.downcast::<Error>() {
            Ok(own) => *own,
            Err(source) => overdrive_sys::Error::Callback { operation, source }.into(),
        },
        other => other.into(),
    }
}

/// A guard that lets one thread recompute.
struct RecomputeGuard<'a> {
    running_thread: &'a Mutex<Option<ThreadId>>,
    _held: MutexGuard<'a, ()>,
}

impl<'a> RecomputeGuard<'a> {
    fn acquire(frame: &'a Frame, thread: ThreadId) -> Self {
        let held = lock(&frame.recomputing);
        *lock(&frame.running_thread) = Some(thread);
        Self {
            running_thread: &frame.running_thread,
            _held: held,
        }
    }
}

impl Drop for RecomputeGuard<'_> {
    fn drop(&mut self) {
        *lock(self.running_thread) = None;
    }
}

/// The value that the graph of the first pass holds for a saved tensor.
struct Placeholder {
    frame: Arc<Frame>,
    index: usize,
}

impl PackedTensor for Placeholder {
    fn unpack(&self) -> CallbackResult<Tensor> {
        Ok(self.frame.unpack(self.index)?)
    }
}

impl Drop for Placeholder {
    fn drop(&mut self) {
        // The value is dropped after the lock is released, as in `begin`.
        let value = {
            let mut state = lock(&self.frame.state);
            let slot = &mut state.slots[self.index];
            slot.alive = false;
            slot.value.take()
        };
        drop(value);
    }
}

/// The value that the graph of the recomputation holds for a saved tensor. This graph is discarded at the
/// end, unless the closure runs backward itself.
struct Recomputed(Tensor);

impl PackedTensor for Recomputed {
    fn unpack(&self) -> CallbackResult<Tensor> {
        Ok(self.0.shallow_clone())
    }
}
