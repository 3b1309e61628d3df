use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use overdrive_sys::denormals::set_flush_denormals;
use overdrive_transformer::VisionConfig;
use tracing::warn;

use super::Engine;
use super::model::EngineModel;
use super::request::{Completion, Completions, Event, Request, RequestId, RequestLimits};
use super::statistics::{EngineStatistics, LatencyWindow};
use crate::{Error, Result};

/// The number of consecutive failures of a step after which its sequences are computed one by one. A step may fail
/// because another thread temporarily holds memory that it needs.
const ATTEMPTS: u32 = 3;

/// The pause between the attempts.
const PAUSE: Duration = Duration::from_millis(20);

/// An [`Engine`] that runs on a thread of its own, for use from any number of other threads.
///
/// The thread owns the model, sleeps while there is nothing to do, and ends with the handle. If a step
/// fails three times in a row, its sequences are computed one by one, and the requests of those that fail alone, too, fail
/// with [`Error::EngineFailed`].
///
/// ```
/// use overdrive_generation::{Engine, EngineConfig, EngineHandle, GenerationConfig, Request};
/// use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let config = LlamaConfig { vocab_size: 100, hidden_size: 32, intermediate_size: 64,
/// #     num_hidden_layers: 2, num_attention_heads: 4, ..LlamaConfig::default() };
/// let model = CausalLm::new(&config.into(), &InitOptions::default())?;
/// let engine = EngineHandle::spawn(Engine::new(model, EngineConfig::default())?)?;
/// std::thread::scope(|scope| {
///     for client in 0..4 {
///         let engine = &engine;
///         scope.spawn(move || {
///             let request = Request::new([client, 1, 2], GenerationConfig::default());
///             let completions = engine.submit(request)?.wait()?;
///             assert_eq!(completions[0].tokens.len(), 20);
///             overdrive_generation::Result::Ok(())
///         });
///     }
/// });
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct EngineHandle {
    commands: Sender<Command>,
    limits: RequestLimits,
    /// The number of the next request.
    next: AtomicU64,
    counts: Arc<Mutex<EngineStatistics>>,
    first_tokens: LatencyWindow,
    thread: Option<JoinHandle<()>>,
}

/// The receiver of a request's events, called on the engine's thread.
struct Sink(Box<dyn FnMut(Event) + Send>);

/// A computation over the model, called on the engine's thread.
struct Job(Box<ModelFn>);

type ModelFn = dyn FnOnce(&dyn EngineModel) + Send;

impl std::fmt::Debug for Sink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sink")
    }
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Job")
    }
}

#[derive(Debug)]
enum Command {
    Submit(RequestId, Box<Request>, Sink),
    Cancel(RequestId),
    Run(Job),
    /// Ends the thread once all requests have ended.
    Finish,
    /// Ends the thread now.
    Stop,
}

impl EngineHandle {
    /// Starts the thread with an engine that exists. On a CPU [`spawn_with`](EngineHandle::spawn_with) computes
    /// faster, if the thread that has loaded the model lives on.
    ///
    /// # Errors
    /// When the system cannot start a thread, or the warm-up fails.
    pub fn spawn<M: EngineModel + Send + 'static>(engine: Engine<M>) -> Result<EngineHandle> {
        EngineHandle::spawn_with(|| Ok::<_, Error>(engine))
    }

    /// Starts the thread, makes the engine on it, [warms it up](Engine::warm_up), and waits until it is ready.
    ///
    /// `make` should load the model. OpenMP keeps a set of threads for each thread that has computed something. Once
    /// there are more of these threads than cores, GNU's OpenMP lets them sleep between operators instead of spinning,
    /// and a small model decodes at two thirds of its speed. Loading on the engine's thread leaves only one set.
    ///
    /// The thread, and those that compute for it, flush subnormal numbers to zero. `make` may switch this off with
    /// [`set_flush_denormals`].
    ///
    /// ```
    /// use overdrive_generation::{Engine, EngineConfig, EngineHandle, Error};
    /// use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
    ///
    /// # fn main() -> Result<(), Error> {
    /// # let config = LlamaConfig { vocab_size: 100, hidden_size: 32, intermediate_size: 64,
    /// #     num_hidden_layers: 2, num_attention_heads: 4, ..LlamaConfig::default() };
    /// let engine = EngineHandle::spawn_with(move || {
    ///     let model = CausalLm::new(&config.into(), &InitOptions::default())?;
    ///     Engine::new(model, EngineConfig::default())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The error of `make` or of the warm-up; when the system cannot start a thread; [`Error::EngineStopped`] if `make`
    /// panics.
    pub fn spawn_with<M, E>(
        make: impl FnOnce() -> std::result::Result<Engine<M>, E> + Send + 'static,
    ) -> std::result::Result<EngineHandle, E>
    where
        M: EngineModel + 'static,
        E: From<Error> + Send + 'static,
    {
        let (commands, inbox) = channel();
        let (ready, made) = channel();
        let thread = std::thread::Builder::new()
            .name("overdrive-engine".to_owned())
            .spawn(move || {
                // The thread belongs to the engine, and so do the threads that OpenMP starts for it.
                set_flush_denormals(true);
                let made = make().and_then(|mut engine| {
                    engine.warm_up()?;
                    Ok(engine)
                });
                let engine = match made {
                    Ok(engine) => engine,
                    Err(error) => {
                        // `spawn_with` waits for this message.
                        let _sent = ready.send(Err(error));
                        return;
                    }
                };
                let counts = Arc::new(Mutex::new(engine.counts()));
                let handle = EngineHandle {
                    commands,
                    limits: engine.limits(),
                    next: AtomicU64::new(engine.next),
                    counts: Arc::clone(&counts),
                    first_tokens: engine.first_tokens.clone(),
                    thread: None,
                };
                let _sent = ready.send(Ok(handle));
                let mut worker = Worker {
                    engine,
                    inbox,
                    counts,
                    clients: HashMap::new(),
                    jobs: VecDeque::new(),
                    is_finishing: false,
                };
                worker.run();
            })
            .map_err(Error::Thread)?;
        let mut handle = made.recv().map_err(|_| Error::EngineStopped)??;
        handle.thread = Some(thread);
        Ok(handle)
    }

    /// Submits a request, and returns its events without waiting.
    ///
    /// # Errors
    /// As [`Engine::submit`]; [`Error::EngineStopped`] if the thread has ended.
    pub fn submit(&self, request: Request) -> Result<Events> {
        let (events, receiver) = channel();
        let ticket = self.submit_with(request, move |event| {
            // A client that has dropped its events has cancelled its request.
            let _gone = events.send(event);
        })?;
        Ok(Events { receiver, ticket })
    }

    /// Submits a request whose events are passed to `on_event` as they occur, for a caller that cannot wait on a
    /// thread, such as an asynchronous server. Dropping the ticket cancels the request.
    ///
    /// `on_event` is called on the engine's thread, which computes nothing in the meantime, and is dropped after
    /// the last event of the request or when the engine stops.
    ///
    /// # Errors
    /// As [`EngineHandle::submit`].
    pub fn submit_with(
        &self,
        request: Request,
        on_event: impl FnMut(Event) + Send + 'static,
    ) -> Result<Ticket> {
        self.limits.check(&request)?;
        let id = RequestId(self.next.fetch_add(1, Ordering::Relaxed));
        let sink = Sink(Box::new(on_event));
        self.commands
            .send(Command::Submit(id, Box::new(request), sink))
            .map_err(|_| Error::EngineStopped)?;
        Ok(Ticket {
            commands: self.commands.clone(),
            id,
        })
    }

    /// Calls `job` with the model on the engine's thread, between two steps, for a computation beside the
    /// requests, such as an embedding. While there are requests, at most one job is called between two steps;
    /// those that wait delay neither new requests nor cancellations. If the engine stops before, `job` is dropped.
    ///
    /// # Errors
    /// [`Error::EngineStopped`] if the thread has ended.
    pub fn run(&self, job: impl FnOnce(&dyn EngineModel) + Send + 'static) -> Result<()> {
        let sent = self.commands.send(Command::Run(Job(Box::new(job))));
        sent.map_err(|_| Error::EngineStopped)
    }

    /// Returns `true` while the thread runs. It ends before the handle only if a job or the model panics, or if the cache
    /// fails.
    pub fn is_running(&self) -> bool {
        let thread = self.thread.as_ref();
        thread.is_some_and(|thread| !thread.is_finished())
    }

    /// Returns the largest number of tokens of a prompt and its continuation.
    pub fn max_model_len(&self) -> usize {
        self.limits.length
    }

    /// Returns `true` if a request has the same bits whatever else the engine computes
    /// ([`EngineModel::is_batch_invariant`]).
    pub fn is_batch_invariant(&self) -> bool {
        self.limits.is_batch_invariant
    }

    /// Returns `true` if the engine verifies proposed tokens (`prompt_lookup_num_tokens`, a draft model): on CPUs.
    pub fn speculates(&self) -> bool {
        self.limits.speculates
    }

    /// Returns the largest number of tokens of a prompt.
    pub fn max_prompt_len(&self) -> usize {
        self.limits.context
    }

    /// Returns the vision tower and the tokens of images, if the model sees images.
    pub fn vision(&self) -> Option<&VisionConfig> {
        self.limits.vision.as_deref()
    }

    /// Returns the names of the adapters that requests can choose.
    pub fn adapters(&self) -> &[Arc<str>] {
        &self.limits.adapters
    }

    /// Returns the size of the model's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.limits.vocab_size
    }

    /// Returns the statistics of the engine after its last step.
    pub fn statistics(&self) -> EngineStatistics {
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = counts.clone();
        EngineStatistics {
            time_to_first_token: self.first_tokens.summary(),
            ..counts
        }
    }

    /// Waits until every request has ended, and ends the thread.
    ///
    /// # Errors
    /// [`Error::EngineStopped`] if the thread had ended before, by a panic of the model.
    pub fn finish(mut self) -> Result<EngineStatistics> {
        self.end(Command::Finish)?;
        Ok(self.statistics())
    }

    fn end(&mut self, command: Command) -> Result<()> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        let sent = self.commands.send(command);
        // Joined even if the thread no longer listens: it has then ended, but it holds the model until it is joined.
        let joined = thread.join();
        sent.ok().and(joined.ok()).ok_or(Error::EngineStopped)
    }
}

impl Drop for EngineHandle {
    /// Ends the thread after its current step; unfinished requests end without another event.
    fn drop(&mut self) {
        // A thread that has panicked has printed its message already.
        let _ended = self.end(Command::Stop);
    }
}

/// A submitted request. Dropping the ticket cancels the request, if it has not ended.
#[derive(Debug)]
pub struct Ticket {
    commands: Sender<Command>,
    id: RequestId,
}

impl Ticket {
    /// Cancels the request; the events that report its end still arrive.
    pub fn cancel(&self) {
        // If the engine has stopped, nothing is left to cancel.
        let _stopped = self.commands.send(Command::Cancel(self.id));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The events of one request, as they occur. Dropping them cancels the request.
///
/// The iteration ends after the last event of the request, or when the engine stops.
#[derive(Debug)]
pub struct Events {
    receiver: Receiver<Event>,
    ticket: Ticket,
}

impl Events {
    /// Cancels the request; the events that report its end still arrive.
    pub fn cancel(&self) {
        self.ticket.cancel();
    }

    /// Waits for the end of the request, and returns the completions in the order of their numbers.
    ///
    /// # Errors
    /// The error with which the request failed; [`Error::EngineStopped`] if the engine has stopped
    /// before.
    pub fn wait(mut self) -> Result<Vec<Completion>> {
        let mut completions = Completions::default();
        self.find_map(|event| completions.take(event))
            .unwrap_or(Err(Error::EngineStopped))
    }
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.receiver.recv().ok()
    }
}

/// The state of the thread.
struct Worker<M> {
    engine: Engine<M>,
    inbox: Receiver<Command>,
    counts: Arc<Mutex<EngineStatistics>>,
    clients: HashMap<RequestId, Sink>,
    /// The jobs that wait.
    jobs: VecDeque<Job>,
    is_finishing: bool,
}

impl<M: EngineModel> Worker<M> {
    fn run(&mut self) {
        let mut failures = 0;
        while self.listen() {
            // One job per step: otherwise clients that keep sending jobs would block all requests.
            if let Some(job) = self.jobs.pop_front() {
                (job.0)(self.engine.model());
            }
            match self.engine.step() {
                Ok(events) => {
                    failures = 0;
                    self.send_events(events);
                }
                Err(error) => {
                    failures += 1;
                    if failures < ATTEMPTS {
                        std::thread::sleep(PAUSE);
                    } else {
                        failures = 0;
                        warn!(
                            "a step has failed {ATTEMPTS} times, and its sequences are computed one by one: {error}"
                        );
                        if let Err(error) = self.engine.compute_separately()
                            && self.engine.fail_all(&error.to_string()).is_err()
                        {
                            // The cache itself is broken: the engine cannot continue, and the events of
                            // every client end.
                            return;
                        }
                    }
                }
            }
            let now = self.engine.counts();
            *self.counts.lock().unwrap_or_else(PoisonError::into_inner) = now;
        }
    }

    /// Handles the commands that have been sent, and waits for one if there is nothing to do. Returns `false` when the
    /// thread must end.
    fn listen(&mut self) -> bool {
        loop {
            let is_idle = self.engine.is_idle() && self.jobs.is_empty();
            if is_idle && self.is_finishing {
                return false;
            }
            let command = if is_idle {
                self.inbox.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                self.inbox.try_recv()
            };
            match command {
                Ok(Command::Submit(id, request, sink)) => self.submit(id, *request, sink),
                Ok(Command::Run(job)) => self.jobs.push_back(job),
                Ok(Command::Cancel(id)) => self.cancel(id),
                Ok(Command::Finish) => self.is_finishing = true,
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn submit(&mut self, id: RequestId, request: Request, mut sink: Sink) {
        match self.engine.submit_as(id, request) {
            Ok(()) => {
                self.clients.insert(id, sink);
            }
            // The handle has already checked the request, so this is rare.
            Err(error) => (sink.0)(Event::Failed { request: id, error }),
        }
    }

    fn cancel(&mut self, id: RequestId) {
        if let Err(error) = self.engine.cancel(id) {
            // This ends the events of all requests.
            let _broken = self.engine.fail_all(&error.to_string());
        }
    }

    fn send_events(&mut self, events: Vec<Event>) {
        for event in events {
            let (id, is_last) = (event.request(), event.is_last());
            if let Some(sink) = self.clients.get_mut(&id) {
                (sink.0)(event);
            }
            if is_last {
                self.clients.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};

    use super::*;
    use crate::{EngineConfig, GenerationConfig};

    #[test]
    fn an_error_at_submission_reaches_the_client_as_itself() {
        tch::set_num_threads(1);
        let config = LlamaConfig {
            vocab_size: 16,
            hidden_size: 32,
            intermediate_size: 32,
            num_hidden_layers: 1,
            num_attention_heads: 4,
            ..LlamaConfig::default()
        };
        let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
        let (_commands, inbox) = channel();
        let engine = Engine::new(model, EngineConfig::default()).unwrap();
        let mut worker = Worker {
            counts: Arc::new(Mutex::new(engine.counts())),
            engine,
            inbox,
            clients: HashMap::new(),
            jobs: VecDeque::new(),
            is_finishing: false,
        };
        let (events, receiver) = channel();
        let sink = Sink(Box::new(move |event| events.send(event).unwrap()));
        // The handle would refuse this request; here it goes directly to the engine.
        let id = RequestId(0);
        worker.submit(id, Request::new([99], GenerationConfig::default()), sink);
        let events: Vec<Event> = receiver.iter().collect();
        let [Event::Failed { error, .. }] = &events[..] else {
            panic!("{events:?}");
        };
        assert!(
            matches!(error, Error::TokenOutOfRange { id: 99, .. }),
            "{error}"
        );
    }
}
