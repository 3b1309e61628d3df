//! One checkpointed region: what is kept of its first pass, and how backward gets the rest again.
//!
//! Life of a frame: the first pass runs the closure with a hook that leaves a [`Placeholder`] in the
//! graph for each saved tensor. The first of them that backward asks for runs the closure again, whose
//! saved tensors, in the same order, fill the slots; the others find theirs there. The frame lives as
//! long as a placeholder does.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use overdrive_autograd::EnableGradGuard;
use overdrive_sys::dispatch_mode::{
    DispatchMode, ModeGuard, OperatorNames, operator_under_way, push_mode,
};
use overdrive_sys::saved_tensors::{
    HooksGuard, Lent, Packed, Saved, SavedVariable, backward_pass, push_hooks,
};
use overdrive_sys::{CallbackError, CallbackResult, panic_text};
use tch::Tensor;

use crate::ambient::Ambient;
use crate::determinism::{Log, Logging, Metadata};
use crate::early_stop::{EarlyStop, keep_quiet};
use crate::policy::{Answering, Keeping, Kept};
use crate::versioned::Versioned;
use crate::{CheckpointOptions, DeterminismCheck, Error, Result};

type Owned = Box<dyn Fn(&[Tensor]) -> CallbackResult<()> + Send + Sync>;

/// The closure, its result thrown away.
pub(crate) enum Region {
    /// Owns or shares what it uses: any thread may run it.
    Owned(Owned),
    /// Borrows.
    Lent(Lent),
}

impl Region {
    fn run(&self, inputs: &[Tensor]) -> CallbackResult<()> {
        match self {
            Self::Owned(closure) => closure(inputs),
            Self::Lent(closure) => closure.call(inputs),
        }
    }
}

pub(crate) struct Frame {
    region: Region,
    inputs: Mutex<Vec<SavedVariable>>,
    ambient: Mutex<Ambient>,
    options: CheckpointOptions,
    kept: Arc<Kept>,
    first_log: Arc<Log>,
    /// Held while the closure runs again.
    turn: Mutex<()>,
    /// The thread that holds it.
    running: Mutex<Option<ThreadId>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    forward_done: bool,
    /// The backward pass that the values in the slots were computed for.
    pass: Option<u64>,
    /// How many tensors the recomputation has saved.
    count: usize,
    /// The recomputation ends with this slot, if it ends early.
    last: Option<usize>,
    stopped: bool,
    /// Found out inside of an operator; goes before the closure's own error, which tells it in C++'s
    /// words.
    failure: Option<Error>,
}

/// A tensor that the first pass saved.
struct Slot {
    metadata: Option<Metadata>,
    /// Whether the graph still has its placeholder.
    alive: bool,
    value: Option<Versioned>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of the closure leaves nothing half done: what it saved is thrown away.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The hooks and modes of one pass, taken down together.
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
        let ambient = Ambient::now(inputs, options.preserve_rng_state)?;
        // Through the hooks of a surrounding checkpoint, so that it keeps or recomputes these.
        let inputs = inputs
            .iter()
            .map(SavedVariable::new)
            .collect::<overdrive_sys::Result<Vec<_>>>()?;
        Ok(Arc::new(Self {
            region,
            inputs: Mutex::new(inputs),
            ambient: Mutex::new(ambient),
            options: options.clone(),
            kept: Arc::default(),
            first_log: Arc::default(),
            turn: Mutex::new(()),
            running: Mutex::new(None),
            state: Mutex::default(),
        }))
    }

    /// Begins the first pass: until the guard is dropped, placeholders take the place of what is saved.
    pub(crate) fn record(self: &Arc<Self>) -> Result<Recording> {
        let frame = Arc::clone(self);
        let check = self.options.determinism_check;
        let hooks = push_hooks(move |saved: Saved| {
            let metadata = match check {
                DeterminismCheck::Default => Some(Metadata::of(&saved.tensor)?),
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
            }) as Box<dyn Packed>)
        })?;
        let mut modes: Vec<Rc<dyn DispatchMode>> = Vec::new();
        if !self.options.policy.keeps_nothing() {
            modes.push(Rc::new(Keeping {
                policy: self.options.policy.clone(),
                kept: Arc::clone(&self.kept),
            }));
        }
        if self.options.debug {
            modes.push(Rc::new(Logging(Arc::clone(&self.first_log))));
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
        if state.pass != pass {
            return None;
        }
        state.slots[index].value.take()
    }

    /// Runs the closure again and takes the value of slot `index`.
    fn recompute(self: &Arc<Self>, index: usize, pass: Option<u64>) -> Result<Versioned> {
        let this_thread = thread::current().id();
        if *lock(&self.running) == Some(this_thread) {
            return Err(Error::Recursion);
        }
        // May run the closure of a surrounding checkpoint again, which saved these.
        let inputs = lock(&self.inputs)
            .iter()
            .map(SavedVariable::unpack)
            .collect::<overdrive_sys::Result<Vec<_>>>()
            .map_err(unwrap_own)?;
        // Backward passes on several threads over one graph take turns; the value is taken within.
        let _turn = Turn::take(self, this_thread);
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
        let _ambient = lock(&self.ambient).enter()?;
        let _grad = EnableGradGuard::new();
        let _recording = self.record_again(log)?;
        if self.options.early_stop {
            keep_quiet();
        }
        // The closure must bear being left in the middle by the error of an early stop anyway.
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
        drop(old);
    }

    fn record_again(self: &Arc<Self>, log: &Arc<Log>) -> Result<Recording> {
        let frame = Arc::clone(self);
        let now_log = Arc::clone(log);
        let hooks = push_hooks(move |saved: Saved| frame.refill(&saved.tensor, &now_log))?;
        let mut modes: Vec<Rc<dyn DispatchMode>> = Vec::new();
        if !self.options.policy.keeps_nothing() {
            modes.push(Rc::new(Answering::new(
                self.options.policy.clone(),
                Arc::clone(&self.kept),
                self.options.preserve_rng_state,
            )));
        }
        if self.options.debug {
            modes.push(Rc::new(Logging(Arc::clone(log))));
        }
        let checked = self.options.determinism_check == DeterminismCheck::Default;
        Ok(Recording {
            _hooks: hooks,
            _modes: modes.into_iter().map(push_mode).collect(),
            _names: checked.then(OperatorNames::new),
        })
    }

    /// The hook of the recomputation.
    fn refill(&self, tensor: &Tensor, log: &Log) -> CallbackResult<Box<dyn Packed>> {
        let value = Versioned::new(tensor)?;
        let again = Box::new(Again(value.tensor().shallow_clone()));
        let mut state = lock(&self.state);
        if state.stopped {
            return Err(Box::new(EarlyStop));
        }
        let index = state.count;
        state.count += 1;
        let (known, forward_done) = (state.slots.len(), state.forward_done);
        let Some(slot) = state.slots.get_mut(index) else {
            if !forward_done {
                // Backward ran inside of the closure, before its end: this is past what was needed.
                return Ok(again);
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
            let now = Metadata::of(tensor)?;
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
        if slot.alive {
            slot.value = Some(value);
        }
        if state.last == Some(index) {
            state.stopped = true;
            return Err(Box::new(EarlyStop));
        }
        Ok(again)
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
        if let Region::Lent(lent) = &self.region {
            lent.end();
        }
    }
}

impl State {
    /// Keeps the error for the end, and gives what stops the closure.
    fn fail(&mut self, error: Error) -> CallbackError {
        let text = CallbackError::from(error.to_string());
        self.failure = Some(error);
        text
    }
}

fn operator(before: &str) -> CallbackResult<String> {
    Ok(operator_under_way()?.map_or_else(String::new, |name| format!("{before} {name}")))
}

/// An error of this crate that came back through C++, as itself.
fn unwrap_own(error: overdrive_sys::Error) -> Error {
    match error {
        overdrive_sys::Error::Callback { operation, source } => match source.downcast::<Error>() {
            Ok(own) => *own,
            Err(source) => overdrive_sys::Error::Callback { operation, source }.into(),
        },
        other => other.into(),
    }
}

/// The right to run the closure again.
struct Turn<'a> {
    running: &'a Mutex<Option<ThreadId>>,
    _held: MutexGuard<'a, ()>,
}

impl<'a> Turn<'a> {
    fn take(frame: &'a Frame, thread: ThreadId) -> Self {
        let held = lock(&frame.turn);
        *lock(&frame.running) = Some(thread);
        Self {
            running: &frame.running,
            _held: held,
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *lock(self.running) = None;
    }
}

/// What the graph of the first pass holds for a saved tensor.
struct Placeholder {
    frame: Arc<Frame>,
    index: usize,
}

impl Packed for Placeholder {
    fn unpack(&self) -> CallbackResult<Tensor> {
        Ok(self.frame.unpack(self.index)?)
    }
}

impl Drop for Placeholder {
    fn drop(&mut self) {
        let value = {
            let mut state = lock(&self.frame.state);
            let slot = &mut state.slots[self.index];
            slot.alive = false;
            slot.value.take()
        };
        drop(value);
    }
}

/// What the graph of the recomputation holds: it is thrown away at the end, unless the closure runs
/// backward itself.
struct Again(Tensor);

impl Packed for Again {
    fn unpack(&self) -> CallbackResult<Tensor> {
        Ok(self.0.shallow_clone())
    }
}
