//! Finds out which rank is at fault when a collective fails.
//!
//! libtorch's Gloo says "connection closed by peer", or that time is over. Which rank is at fault is known
//! only by asking all of them, so a thread of each process writes a heartbeat into the store: how many
//! collectives it has begun and what the last one was. When a collective fails here, the thread compares:
//! who has sent no heartbeat since is lost; who has left says so; who has begun fewer collectives is stuck
//! before this one; who is in another one has gone another way. The first rank that knows writes it down
//! for all, and every collective under way ends at once, on all ranks, with the same words.
//!
//! Requests to the store run on a thread of their own, because a store whose machine hangs never answers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use overdrive_sys::c10d::{Group, Store, WatchState};

use crate::verdict::{Beat, Evidence, Failed, Failure, State};
use crate::{Error, Result};

pub(crate) struct Monitor {
    group: Arc<Group>,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<Failure>>>,
    thread: Option<JoinHandle<()>>,
}

pub(crate) struct MonitorOptions {
    pub(crate) rank: usize,
    /// What each rank is called.
    pub(crate) names: Vec<String>,
    pub(crate) interval: Duration,
    pub(crate) keeper: Keeper,
}

/// Who keeps the store.
#[derive(Debug, Clone)]
pub(crate) struct Keeper {
    /// The rank that does, if one of the group.
    pub(crate) rank: Option<usize>,
    /// Whether it is this process: then it waits, when the group fails, until the others have read why.
    pub(crate) is_here: bool,
    /// What it is called.
    pub(crate) name: String,
}

impl Monitor {
    /// `store` is a connection that nobody else uses.
    pub(crate) fn start(group: Arc<Group>, store: Store, options: MonitorOptions) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let failure = Arc::new(Mutex::new(None));
        let requests = Requests::start(store)?;
        let mut watcher = Watcher {
            group: Arc::clone(&group),
            requests,
            stop: Arc::clone(&stop),
            failure: Arc::clone(&failure),
            options,
            count: 0,
        };
        // Before the thread runs: a peer that looks for this rank's heartbeat finds one.
        watcher.beat(&idle(), State::Running);
        group.begin_watch();
        let thread = thread::Builder::new()
            .name("od-monitor".to_owned())
            .spawn(move || watcher.run())
            .map_err(|error| Error::Monitor {
                problem: error.to_string(),
            })?;
        Ok(Self {
            group,
            stop,
            failure,
            thread: Some(thread),
        })
    }

    pub(crate) fn failure(&self) -> Option<Failure> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        self.group.wake();
        if let Some(thread) = self.thread.take() {
            // The thread catches nothing that could panic with a promise to the caller.
            let _ = thread.join();
        }
    }
}

fn idle() -> WatchState {
    WatchState {
        started: 0,
        finished: 0,
        recent: Vec::new(),
        failure: None,
        decided: false,
    }
}

/// Store requests on a thread of their own.
#[derive(Clone)]
struct Requests(mpsc::Sender<Request>);

type Request = Box<dyn FnOnce(&Store) + Send>;

impl Requests {
    fn start(store: Store) -> Result<Self> {
        let (sender, receiver) = mpsc::channel::<Request>();
        thread::Builder::new()
            .name("od-store".to_owned())
            .spawn(move || {
                for request in receiver {
                    request(&store);
                }
            })
            .map_err(|error| Error::Monitor {
                problem: error.to_string(),
            })?;
        Ok(Self(sender))
    }

    /// The answer, or nothing if the store refuses or does not answer in time.
    fn ask<T: Send + 'static>(
        &self,
        patience: Duration,
        question: impl FnOnce(&Store) -> overdrive_sys::Result<T> + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = mpsc::channel();
        let request = move |store: &Store| {
            // The asker may have given up.
            let _ = sender.send(question(store).ok());
        };
        self.0.send(Box::new(request)).ok()?;
        receiver.recv_timeout(patience).ok().flatten()
    }
}

struct Watcher {
    group: Arc<Group>,
    requests: Requests,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<Failure>>>,
    options: MonitorOptions,
    count: u64,
}

const VERDICT: &str = "verdict";

fn beat_key(rank: usize) -> String {
    format!("beat/{rank}")
}

impl Watcher {
    fn run(&mut self) {
        let mut known = idle();
        while !self.stop.load(Ordering::SeqCst) {
            match self.group.poll(self.options.interval) {
                Ok(state) => known = state,
                Err(error) => return self.decide(Failure::unknown(&error.to_string())),
            }
            if let Some((number, what, text)) = known.failure.clone() {
                let failure = self.diagnose(&known, number, &what, &text);
                self.decide(failure);
                break;
            }
            if self.stop.load(Ordering::SeqCst) {
                break;
            }
            self.beat(&known, State::Running);
            if let Some(failure) = self.verdict() {
                self.decide(failure);
                break;
            }
        }
        let failed = self.failed();
        // Nobody will wait for a rank that says that it has gone.
        let state = if failed { State::Failed } else { State::Left };
        self.beat(&known, state);
    }

    fn failed(&self) -> bool {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    fn patience(&self) -> Duration {
        self.options.interval * 3 + Duration::from_millis(500)
    }

    fn beat(&mut self, known: &WatchState, state: State) -> bool {
        self.count += 1;
        let beat = Beat {
            count: self.count,
            started: known.started,
            recent: known
                .recent
                .iter()
                .map(|begun| (begun.number, begun.what.clone(), begun.tensors.clone()))
                .collect(),
            state,
        };
        let Ok(bytes) = serde_json::to_vec(&beat) else {
            return false;
        };
        let key = beat_key(self.options.rank);
        self.requests
            .ask(self.patience(), move |store| store.set(&key, &bytes))
            .is_some()
    }

    fn verdict(&self) -> Option<Failure> {
        let bytes = self
            .requests
            .ask(self.patience(), |store| match store.check(&[VERDICT])? {
                true => store.get(VERDICT).map(Some),
                false => Ok(None),
            });
        serde_json::from_slice(&bytes.flatten()?).ok()
    }

    /// The heartbeats of the other ranks; nothing if the store is gone.
    fn beats(&self) -> Option<BTreeMap<usize, Beat>> {
        let (own, world_size) = (self.options.rank, self.options.names.len());
        let found = self.requests.ask(self.patience(), move |store| {
            let mut found = Vec::new();
            for rank in (0..world_size).filter(|rank| *rank != own) {
                let key = beat_key(rank);
                if store.check(&[&key])? {
                    found.push((rank, store.get(&key)?));
                }
            }
            Ok(found)
        })?;
        let beats = found.into_iter();
        Some(
            beats
                .filter_map(|(rank, bytes)| Some((rank, serde_json::from_slice(&bytes).ok()?)))
                .collect(),
        )
    }

    /// Waits for a new heartbeat of every rank, or as long as one may stay away.
    fn diagnose(&mut self, known: &WatchState, number: u64, what: &str, text: &str) -> Failure {
        let start = Instant::now();
        let Some(before) = self.beats() else {
            return self.store_is_gone(text);
        };
        let mut now = before.clone();
        let fresh =
            |now: &BTreeMap<usize, Beat>, rank: usize| match (before.get(&rank), now.get(&rank)) {
                (_, Some(beat)) if beat.state == State::Left => true,
                (Some(old), Some(new)) => new.count > old.count,
                (None, Some(_)) => true,
                (_, None) => false,
            };
        let others: Vec<usize> = (0..self.options.names.len())
            .filter(|rank| *rank != self.options.rank)
            .collect();
        while start.elapsed() < self.patience() && !others.iter().all(|rank| fresh(&now, *rank)) {
            thread::sleep(self.options.interval / 4);
            if let Some(failure) = self.verdict() {
                return failure;
            }
            self.beat(known, State::Running);
            match self.beats() {
                Some(beats) => now = beats,
                None => return self.store_is_gone(text),
            }
        }
        let silent: Vec<usize> = others
            .iter()
            .copied()
            .filter(|rank| !fresh(&now, *rank))
            .collect();
        let waited = start.elapsed().as_secs_f64();
        let begun = known.recent.iter().find(|begun| begun.number == number);
        let failed = Failed {
            number,
            what,
            tensors: begun.map_or("", |begun| &begun.tensors),
            text,
        };
        let evidence = Evidence {
            rank: self.options.rank,
            names: &self.options.names,
            beats: &now,
            silent: &silent,
            waited,
        };
        self.write_down(evidence.judge(&failed))
    }

    /// The first verdict counts for all.
    fn write_down(&self, failure: Failure) -> Failure {
        let Ok(bytes) = serde_json::to_vec(&failure) else {
            return failure;
        };
        let answer = self.requests.ask(self.patience(), move |store| {
            store.compare_set(VERDICT, b"", &bytes)
        });
        answer
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or(failure)
    }

    fn store_is_gone(&self, text: &str) -> Failure {
        Failure {
            ranks: self.options.keeper.rank.into_iter().collect(),
            text: format!(
                "{} is lost: the store that it keeps does not answer (its process ended or hangs, or \
                 its machine or network is down) [libtorch: {}]",
                self.options.keeper.name,
                text.trim()
            ),
        }
    }

    fn decide(&mut self, failure: Failure) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure.clone());
        if self.options.keeper.is_here {
            // Whoever gets the error may end the process, and the store with it.
            self.beat(&idle(), State::Failed);
            self.wait_for_readers();
        }
        // Only a zero byte is refused, and those are replaced.
        let _ = self.group.decide(&failure.text);
    }

    /// Until every rank that is alive has seen the verdict.
    fn wait_for_readers(&mut self) {
        let start = Instant::now();
        let lost = self
            .failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map_or_else(Vec::new, |failure| failure.ranks.clone());
        while start.elapsed() < self.patience() {
            let Some(beats) = self.beats() else { return };
            let told = |rank: &usize| {
                lost.contains(rank)
                    || beats
                        .get(rank)
                        .is_some_and(|beat| beat.state != State::Running)
            };
            if (0..self.options.names.len())
                .filter(|rank| *rank != self.options.rank)
                .all(|rank| told(&rank))
            {
                return;
            }
            thread::sleep(self.options.interval / 4);
            self.beat(&idle(), State::Failed);
        }
    }
}
