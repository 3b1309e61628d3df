//! A monitor thread that finds the rank at fault when a collective fails.
//!
//! libtorch's Gloo reports "connection closed by peer" or a timeout. The rank at fault is known only after
//! asking all ranks, so a thread of each process writes heartbeats into the store: the number of collectives
//! that the process has started, and the last of them. When a collective fails, the thread compares the
//! heartbeats: a rank without a new one is lost; a rank that has left says so; a rank that has started fewer
//! collectives is stuck before this one; a rank in another collective called a different one. The first rank
//! that reaches a verdict writes it into the store, and every active collective ends at once, on all ranks,
//! with the same message.
//!
//! Store requests run on a thread of their own, because the store of a hanging machine never answers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use overdrive_sys::c10d::{CollectiveFailure, Group, Store, WatchState};

use crate::failure::{Evidence, FailedCollective, Failure, Heartbeat, Started, State};
use crate::launcher_watch::LauncherWatch;
use crate::store_thread::StoreThread;
use crate::{Error, Result};

pub(crate) struct Monitor {
    group: Arc<Group>,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<Failure>>>,
    silence: Arc<Mutex<Silence>>,
    thread: Option<JoinHandle<()>>,
}

/// The ranks without heartbeats, as far as somebody asks: each look reads the heartbeats of all.
#[derive(Debug, Default)]
struct Silence {
    asked: Option<Instant>,
    ranks: Vec<usize>,
}

/// The time after a question for which heartbeats are compared.
const ASKED: Duration = Duration::from_secs(10);

pub(crate) struct MonitorOptions {
    pub(crate) rank: usize,
    /// The name of each rank in messages.
    pub(crate) names: Vec<String>,
    pub(crate) interval: Duration,
    pub(crate) store_host: StoreHost,
    /// The time between SIGTERM and SIGKILL that the launcher has announced for the end of this process; `None` if
    /// this monitor must not end it.
    pub(crate) stop_grace: Option<Duration>,
}

/// The process that hosts the store.
#[derive(Debug, Clone)]
pub(crate) struct StoreHost {
    /// Its rank; `None` for a launcher.
    pub(crate) rank: Option<usize>,
    /// If `true`, it is this process: after a failure it waits until the others have read the verdict.
    pub(crate) is_this_process: bool,
    /// Its name in messages.
    pub(crate) name: String,
    /// If `true`, it is a launcher, which ends after all ranks.
    pub(crate) is_launcher: bool,
    /// The host and port of the store.
    pub(crate) address: (String, u16),
}

impl Monitor {
    /// Starts the monitor; `store` is a connection that nothing else uses.
    pub(crate) fn start(group: Arc<Group>, store: Store, options: MonitorOptions) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let failure = Arc::new(Mutex::new(None));
        let silence = Arc::new(Mutex::new(Silence::default()));
        let store = StoreThread::start(store, options.store_host.address.clone())?;
        let mut watcher = Watcher {
            group: Arc::clone(&group),
            store,
            stop: Arc::clone(&stop),
            failure: Arc::clone(&failure),
            silence: Arc::clone(&silence),
            seen: BTreeMap::new(),
            options,
            beats_sent: 0,
            launcher: LauncherWatch::default(),
        };
        // Sent before the thread runs, so that a peer that looks for this rank's heartbeat finds one.
        watcher.send_heartbeat(&idle(), State::Running);
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
            silence,
            thread: Some(thread),
        })
    }

    /// Returns the ranks that are lost, have left, or have sent no heartbeat for a while.
    pub(crate) fn lost_ranks(&self) -> Vec<usize> {
        let mut silence = self.silence.lock().unwrap_or_else(PoisonError::into_inner);
        silence.asked = Some(Instant::now());
        let failed = self
            .failure()
            .map_or_else(Vec::new, |failure| failure.ranks);
        [failed, silence.ranks.clone()].concat()
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
            // A panic of the thread has no effect on the group, and a destructor cannot return it.
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
        aborted: false,
    }
}

struct Watcher {
    group: Arc<Group>,
    store: StoreThread,
    stop: Arc<AtomicBool>,
    failure: Arc<Mutex<Option<Failure>>>,
    silence: Arc<Mutex<Silence>>,
    /// The last heartbeat of each rank, and the time at which it was seen first.
    seen: BTreeMap<usize, (u64, Instant)>,
    options: MonitorOptions,
    beats_sent: u64,
    launcher: LauncherWatch,
}

const VERDICT: &str = "verdict";

fn heartbeat_key(rank: usize) -> String {
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
            if let Some(failed) = &known.failure {
                let failure = self.diagnose(&known, failed);
                self.decide(failure);
                break;
            }
            if self.stop.load(Ordering::SeqCst) {
                break;
            }
            self.send_heartbeat(&known, State::Running);
            if let Some(failure) = self.published_verdict() {
                self.decide(failure);
                break;
            }
            self.listen();
            let is_gone = self.store.is_gone();
            if let Some(failure) = self.launcher.check(is_gone, &self.options) {
                self.decide(failure);
                break;
            }
        }
        let failed = self.failed();
        // The last heartbeat: no rank waits for one that has failed or left.
        let state = if failed { State::Failed } else { State::Left };
        self.send_heartbeat(&known, state);
    }

    fn failed(&self) -> bool {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_some()
    }

    /// The time after which a rank without a new heartbeat is taken as lost.
    fn patience(&self) -> Duration {
        // Half a second more than three heartbeats: with short intervals a busy machine may miss three.
        let beats = self.options.interval.saturating_mul(3);
        beats.saturating_add(Duration::from_millis(500))
    }

    fn send_heartbeat(&mut self, known: &WatchState, state: State) -> bool {
        self.beats_sent += 1;
        let heartbeat = Heartbeat {
            count: self.beats_sent,
            started: known.started,
            recent: known.recent.iter().map(Started::from).collect(),
            state,
        };
        let Ok(bytes) = serde_json::to_vec(&heartbeat) else {
            return false;
        };
        let key = heartbeat_key(self.options.rank);
        self.store
            .request(self.patience(), move |store| store.set(&key, &bytes))
            .is_some()
    }

    /// Compares the heartbeats of the other ranks with those before, while somebody asks for them.
    fn listen(&mut self) {
        let silence = Arc::clone(&self.silence);
        let silence = || silence.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = silence().asked;
        if asked.is_none_or(|asked| asked.elapsed() >= ASKED) {
            // Heartbeats from before a pause prove nothing.
            self.seen.clear();
            silence().ranks.clear();
            return;
        }
        let ranks = match self.heartbeats() {
            Some(heartbeats) => heartbeats
                .into_iter()
                .filter(|(rank, heartbeat)| {
                    let new = (heartbeat.count, Instant::now());
                    let seen = self.seen.entry(*rank).or_insert(new);
                    if seen.0 != heartbeat.count {
                        *seen = new;
                    }
                    heartbeat.state == State::Left || seen.1.elapsed() >= self.patience()
                })
                .map(|(rank, _)| rank)
                .collect(),
            // It hosts the store, and its process is gone.
            None if self.store.is_gone() => self.options.store_host.rank.into_iter().collect(),
            None => return,
        };
        silence().ranks = ranks;
    }

    fn published_verdict(&self) -> Option<Failure> {
        let bytes = self
            .store
            // `check` first: `get` of a missing key would block.
            .request(self.patience(), |store| match store.check(&[VERDICT])? {
                true => store.get(VERDICT).map(Some),
                false => Ok(None),
            });
        serde_json::from_slice(&bytes.flatten()?).ok()
    }

    /// Returns the heartbeats of the other ranks, or `None` if the store does not answer.
    fn heartbeats(&self) -> Option<BTreeMap<usize, Heartbeat>> {
        let (own, world_size) = (self.options.rank, self.options.names.len());
        let found = self.store.request(self.patience(), move |store| {
            let mut found = Vec::new();
            for rank in (0..world_size).filter(|rank| *rank != own) {
                let key = heartbeat_key(rank);
                if store.check(&[&key])? {
                    found.push((rank, store.get(&key)?));
                }
            }
            Ok(found)
        })?;
        let heartbeats = found.into_iter();
        Some(
            heartbeats
                .filter_map(|(rank, bytes)| Some((rank, serde_json::from_slice(&bytes).ok()?)))
                .collect(),
        )
    }

    /// Waits for a new heartbeat of every rank, at most [`patience`](Self::patience), and returns the verdict.
    fn diagnose(&mut self, known: &WatchState, failed: &CollectiveFailure) -> Failure {
        let CollectiveFailure { number, what, text } = failed;
        let start = Instant::now();
        let Some(before) = self.heartbeats() else {
            return self.store_lost(text);
        };
        let mut now = before.clone();
        let fresh = |now: &BTreeMap<usize, Heartbeat>, rank: usize| match (
            before.get(&rank),
            now.get(&rank),
        ) {
            (_, Some(heartbeat)) if heartbeat.state == State::Left => true,
            (Some(old), Some(new)) => new.count > old.count,
            (None, Some(_)) => true,
            (_, None) => false,
        };
        let others: Vec<usize> = (0..self.options.names.len())
            .filter(|rank| *rank != self.options.rank)
            .collect();
        while start.elapsed() < self.patience() && !others.iter().all(|rank| fresh(&now, *rank)) {
            // Several polls per interval, so that the verdict comes soon after the last missing heartbeat.
            thread::sleep(self.options.interval / 4);
            if let Some(failure) = self.published_verdict() {
                return failure;
            }
            // The other ranks wait for this one's heartbeat in the same way.
            self.send_heartbeat(known, State::Running);
            match self.heartbeats() {
                Some(heartbeats) => now = heartbeats,
                None => return self.store_lost(text),
            }
        }
        // Ranks that have sent nothing since the failure; a heartbeat from before it proves nothing.
        let silent: Vec<usize> = others
            .iter()
            .copied()
            .filter(|rank| !fresh(&now, *rank))
            .collect();
        let waited = start.elapsed().as_secs_f64();
        let started = known
            .recent
            .iter()
            .find(|started| started.number == *number);
        let failed = FailedCollective {
            number: *number,
            what,
            tensors: started.map_or("", |started| &started.tensors),
            text,
        };
        let evidence = Evidence {
            rank: self.options.rank,
            names: &self.options.names,
            heartbeats: &now,
            silent: &silent,
            waited,
        };
        self.publish(evidence.verdict(&failed))
    }

    /// Writes a verdict into the store and returns the one that counts: the first.
    fn publish(&self, failure: Failure) -> Failure {
        let Ok(bytes) = serde_json::to_vec(&failure) else {
            return failure;
        };
        let answer = self.store.request(self.patience(), move |store| {
            store.compare_set(VERDICT, b"", &bytes)
        });
        answer
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or(failure)
    }

    fn store_lost(&self, text: &str) -> Failure {
        Failure {
            ranks: self.options.store_host.rank.into_iter().collect(),
            text: format!(
                "{} is lost: the store that it hosts does not answer (its process ended or hangs, or \
                 its machine or network is down) [libtorch: {}]",
                self.options.store_host.name,
                text.trim()
            ),
        }
    }

    fn decide(&mut self, failure: Failure) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure.clone());
        if self.options.store_host.is_this_process {
            // The error may end the process, and the store with it, before the others have read the verdict.
            self.send_heartbeat(&idle(), State::Failed);
            self.wait_for_readers();
        }
        // It fails only for a zero byte, and those are replaced.
        let _ = self.group.abort(&failure.text);
    }

    /// Waits until every living rank has read the verdict.
    fn wait_for_readers(&mut self) {
        let start = Instant::now();
        let lost = self
            .failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map_or_else(Vec::new, |failure| failure.ranks.clone());
        while start.elapsed() < self.patience() {
            let Some(heartbeats) = self.heartbeats() else {
                return;
            };
            let has_read = |rank: &usize| {
                lost.contains(rank)
                    || heartbeats
                        .get(rank)
                        .is_some_and(|heartbeat| heartbeat.state != State::Running)
            };
            if (0..self.options.names.len())
                .filter(|rank| *rank != self.options.rank)
                .all(|rank| has_read(&rank))
            {
                return;
            }
            thread::sleep(self.options.interval / 4);
            self.send_heartbeat(&idle(), State::Failed);
        }
    }
}
