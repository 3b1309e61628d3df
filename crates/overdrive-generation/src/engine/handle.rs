use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::engine::Engine;
use super::model::EngineModel;
use super::request::{Completion, Event, Request, RequestId, RequestLimits};
use super::statistics::EngineStatistics;
use crate::{Error, Result};

/// How often in a row a step may fail before the requests are given up. What failed may have been
/// for want of memory that another part of the program holds for a moment.
const ATTEMPTS: u32 = 3;

/// Between them.
const PAUSE: Duration = Duration::from_millis(20);

/// An [`Engine`] that runs on a thread of its own, for use from any number of others.
///
/// The thread owns the model, sleeps while there is nothing to do, and ends with the handle. Where a
/// step fails three times in a row the requests of that moment fail with [`Error::EngineFailed`], and
/// later ones are served again.
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
    next: AtomicU64,
    statistics: Arc<Mutex<EngineStatistics>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Command {
    Submit(u64, Box<Request>, Sender<Event>),
    Cancel(u64),
    /// End once all requests have.
    Finish,
    /// End now.
    Stop,
}

impl EngineHandle {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn spawn<M: EngineModel + Send + 'static>(engine: Engine<M>) -> Result<EngineHandle> {
        let (commands, inbox) = channel();
        let limits = engine.limits();
        let statistics = Arc::new(Mutex::new(engine.statistics()));
        let mut worker = Worker {
            engine,
            inbox,
            statistics: Arc::clone(&statistics),
            clients: HashMap::new(),
            tickets: HashMap::new(),
            is_finishing: false,
        };
        let thread = std::thread::Builder::new()
            .name("overdrive-engine".to_owned())
            .spawn(move || worker.run())
            .map_err(Error::Thread)?;
        Ok(EngineHandle {
            commands,
            limits,
            next: AtomicU64::new(0),
            statistics,
            thread: Some(thread),
        })
    }

    /// Takes a request, and returns at once with what will be its events.
    ///
    /// # Errors
    /// As [`Engine::submit`]; [`Error::EngineStopped`] where the thread has ended.
    pub fn submit(&self, request: Request) -> Result<Events> {
        self.limits.check(&request)?;
        let ticket = self.next.fetch_add(1, Ordering::Relaxed);
        let (events, receiver) = channel();
        self.commands
            .send(Command::Submit(ticket, Box::new(request), events))
            .map_err(|_| Error::EngineStopped)?;
        Ok(Events {
            receiver,
            cancel: self.commands.clone(),
            ticket,
        })
    }

    /// What the engine did up to its last step.
    pub fn statistics(&self) -> EngineStatistics {
        let shared = self.statistics.lock();
        shared.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until every request has ended, and ends the thread.
    ///
    /// # Errors
    /// [`Error::EngineStopped`] where the thread had ended before, by a panic of the model.
    pub fn finish(mut self) -> Result<EngineStatistics> {
        self.end(Command::Finish)?;
        Ok(self.statistics())
    }

    fn end(&mut self, command: Command) -> Result<()> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        let sent = self.commands.send(command);
        let joined = thread.join();
        sent.ok().and(joined.ok()).ok_or(Error::EngineStopped)
    }
}

impl Drop for EngineHandle {
    /// Ends the thread after its step; requests that go on end without another event.
    fn drop(&mut self) {
        // A thread that has panicked has said so itself.
        let _ended = self.end(Command::Stop);
    }
}

/// The events of one request, as they come. Dropping them cancels the request.
///
/// The iteration ends after the last event of the request, or when the engine stops.
#[derive(Debug)]
pub struct Events {
    receiver: Receiver<Event>,
    cancel: Sender<Command>,
    ticket: u64,
}

impl Events {
    /// Ends the request with what it has; the events that say so still come.
    pub fn cancel(&self) {
        // Where the engine has stopped there is nothing left to cancel.
        let _stopped = self.cancel.send(Command::Cancel(self.ticket));
    }

    /// Waits for the end: the completions in the order of their numbers.
    ///
    /// # Errors
    /// What the request failed with; [`Error::EngineStopped`] where the engine has stopped before.
    pub fn wait(mut self) -> Result<Vec<Completion>> {
        let mut completions: Vec<(usize, Completion)> = Vec::new();
        let mut is_whole = false;
        for event in &mut self {
            match event {
                Event::Token { .. } => {}
                Event::Finished {
                    sample,
                    completion,
                    is_last,
                    ..
                } => {
                    completions.push((sample, completion));
                    is_whole = is_last;
                }
                Event::Failed { error, .. } => return Err(error),
            }
        }
        if !is_whole {
            return Err(Error::EngineStopped);
        }
        completions.sort_by_key(|(sample, _)| *sample);
        Ok(completions.into_iter().map(|(_, one)| one).collect())
    }
}

impl Iterator for Events {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        self.receiver.recv().ok()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// What the thread holds.
struct Worker<M> {
    engine: Engine<M>,
    inbox: Receiver<Command>,
    statistics: Arc<Mutex<EngineStatistics>>,
    clients: HashMap<RequestId, (u64, Sender<Event>)>,
    tickets: HashMap<u64, RequestId>,
    is_finishing: bool,
}

impl<M: EngineModel> Worker<M> {
    fn run(&mut self) {
        let mut failures = 0;
        while self.listen() {
            match self.engine.step() {
                Ok(events) => {
                    failures = 0;
                    self.hand_out(events);
                }
                Err(error) => {
                    failures += 1;
                    if failures < ATTEMPTS {
                        std::thread::sleep(PAUSE);
                    } else if self.engine.fail_all(&error.to_string()).is_err() {
                        // The cache itself is broken: there is no engine any more, and every client
                        // sees its events end.
                        return;
                    } else {
                        failures = 0;
                    }
                }
            }
            let now = self.engine.statistics();
            *self
                .statistics
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = now;
        }
    }

    /// Takes what has been sent; waits for something where there is nothing to do. False at the end.
    fn listen(&mut self) -> bool {
        loop {
            let is_idle = self.engine.is_idle();
            if is_idle && self.is_finishing {
                return false;
            }
            let command = if is_idle {
                self.inbox.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                self.inbox.try_recv()
            };
            match command {
                Ok(Command::Submit(ticket, request, events)) => {
                    self.submit(ticket, *request, events)
                }
                Ok(Command::Cancel(ticket)) => self.cancel(ticket),
                Ok(Command::Finish) => self.is_finishing = true,
                Ok(Command::Stop) | Err(TryRecvError::Disconnected) => return false,
                Err(TryRecvError::Empty) => return true,
            }
        }
    }

    fn submit(&mut self, ticket: u64, request: Request, events: Sender<Event>) {
        // Checked by the handle already; an error here is one of memory, and the client sees its
        // events end.
        if let Ok(id) = self.engine.submit(request) {
            self.clients.insert(id, (ticket, events));
            self.tickets.insert(ticket, id);
        }
    }

    fn cancel(&mut self, ticket: u64) {
        if let Some(id) = self.tickets.get(&ticket)
            && let Err(error) = self.engine.cancel(*id)
        {
            // The events of all end with this.
            let _broken = self.engine.fail_all(&error.to_string());
        }
    }

    fn hand_out(&mut self, events: Vec<Event>) {
        for event in events {
            let id = event.request();
            let is_last = event.is_last();
            let Some((ticket, client)) = self.clients.get(&id) else {
                continue;
            };
            let ticket = *ticket;
            // A client that is gone has cancelled by going.
            let _gone = client.send(event);
            if is_last {
                self.clients.remove(&id);
                self.tickets.remove(&ticket);
            }
        }
    }
}
