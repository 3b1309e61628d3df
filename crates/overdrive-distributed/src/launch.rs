//! Starts the processes of a group on this machine.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use overdrive_sys::c10d::{Store, StoreRole};

use crate::{Error, Result};

/// Lines of a failed process's standard error that its error repeats.
const LAST_LINES: usize = 8;
/// How often the processes are looked at.
const LOOK: Duration = Duration::from_millis(20);
/// What a process ends with that was interrupted and has saved what it takes to go on: `EX_TEMPFAIL` of
/// sysexits.h, "try again later".
const SAVED: i32 = 75;

/// How a launch ended that did not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Every process ended well.
    Finished,
    /// Processes were interrupted and ended with [`Ended::SAVED_EXIT_CODE`]: what they saved goes on when
    /// they are started again.
    Saved,
}

impl Ended {
    /// What a process ends with that was interrupted and has saved what it takes to go on: 75, "try again
    /// later" (`EX_TEMPFAIL` of sysexits.h). A launcher ends with it too.
    pub const SAVED_EXIT_CODE: u8 = SAVED as u8;
}

/// Starts `nproc` processes of a program with the variables of torchrun, prefixes their output with their
/// rank, ends all when one fails, and returns the first error.
///
/// The store is kept here, so that it outlives every process: a rank 0 that is killed is named by the
/// others like any rank. `OMP_NUM_THREADS` is set to the cores divided by `nproc` unless it is set.
///
/// ```no_run
/// # // Starts processes of a program that is not there in a test.
/// use overdrive_distributed::Launch;
///
/// Launch::new("target/release/examples/train").args(["--steps", "100"]).nproc(4).run()?;
/// # Ok::<(), overdrive_distributed::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Launch {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    nproc: usize,
    grace: Duration,
    stop_grace: Duration,
    max_restarts: usize,
    stop: Option<Arc<AtomicBool>>,
    kill: Option<Arc<AtomicBool>>,
}

impl Launch {
    /// A launch of one process without arguments.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            nproc: 1,
            grace: Duration::from_secs(10),
            stop_grace: Duration::from_secs(30),
            max_restarts: 0,
            stop: None,
            kill: None,
        }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        let args = args.into_iter().map(|arg| arg.as_ref().to_owned());
        self.args.extend(args);
        self
    }

    /// Sets a variable for all processes.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// How many processes. Default 1.
    #[must_use]
    pub fn nproc(mut self, nproc: usize) -> Self {
        self.nproc = nproc;
        self
    }

    /// How long the others may go on after one has failed, to say what they saw of it. Default 10 s; then
    /// they are asked to end (SIGTERM), and after [`stop_grace`](Self::stop_grace) ended.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// How often all are started again after one has failed. Default 0.
    #[must_use]
    pub fn max_restarts(mut self, max_restarts: usize) -> Self {
        self.max_restarts = max_restarts;
        self
    }

    /// Asks all processes to end (SIGTERM) when the flag becomes true, as a handler of SIGTERM and SIGINT
    /// sets it. They may save then, for as long as [`stop_grace`](Self::stop_grace).
    ///
    /// The processes have a process group of their own, so that Ctrl-C reaches them once, through here.
    #[must_use]
    pub fn stop_when(mut self, flag: Arc<AtomicBool>) -> Self {
        self.stop = Some(flag);
        self
    }

    /// Ends all processes at once when the flag becomes true, as a second signal does.
    #[must_use]
    pub fn kill_when(mut self, flag: Arc<AtomicBool>) -> Self {
        self.kill = Some(flag);
        self
    }

    /// How long processes may take to end that were asked to. Default 30 s, torchrun's and Kubernetes'; then
    /// they are ended.
    #[must_use]
    pub fn stop_grace(mut self, grace: Duration) -> Self {
        self.stop_grace = grace;
        self
    }

    /// Runs until all have ended. A process that ends with [`Ended::SAVED_EXIT_CODE`] has not failed.
    ///
    /// # Errors
    /// [`Error::Launched`] with the first process that failed and what it printed last; [`Error::Io`] if
    /// one cannot be started.
    pub fn run(&self) -> Result<Ended> {
        if self.nproc == 0 {
            return Err(Error::InvalidArgument {
                argument: "nproc",
                value: "0".to_owned(),
                expected: "1 or more".to_owned(),
            });
        }
        let (_store, port) =
            Store::tcp("127.0.0.1", 0, StoreRole::Server, Duration::from_secs(60))?;
        let mut restart = 0;
        loop {
            match self.run_once(port, restart) {
                Err(Error::Launched {
                    rank,
                    status,
                    last_lines,
                }) if restart < self.max_restarts && !self.stopped() => {
                    restart += 1;
                    eprintln!(
                        "rank {rank} failed first: {status}{last_lines}\nstarting all again ({restart} of \
                         {})",
                        self.max_restarts
                    );
                }
                other => return other,
            }
        }
    }

    fn stopped(&self) -> bool {
        is_up(self.stop.as_ref()) || is_up(self.kill.as_ref())
    }

    fn run_once(&self, port: u16, restart: usize) -> Result<Ended> {
        let mut running = Running(Vec::new());
        for rank in 0..self.nproc {
            running.0.push(self.spawn(rank, port, restart)?);
        }
        let mut first: Option<(usize, ExitStatus, Instant)> = None;
        let mut asked: Option<Instant> = None;
        while running.look(&mut first)? {
            let over = first.is_some_and(|(_, _, when)| when.elapsed() > self.grace);
            match asked {
                None if over || self.stopped() => {
                    running.terminate();
                    asked = Some(Instant::now());
                }
                Some(when) if when.elapsed() > self.stop_grace => running.kill(),
                _ => {}
            }
            if is_up(self.kill.as_ref()) {
                running.kill();
            }
            thread::sleep(LOOK);
        }
        running.drain_output();
        match first {
            None if running.0.iter().any(Process::saved) => Ok(Ended::Saved),
            None => Ok(Ended::Finished),
            Some((rank, status, _)) => Err(Error::Launched {
                rank,
                status: status.to_string(),
                last_lines: running.last_lines(rank),
            }),
        }
    }

    fn spawn(&self, rank: usize, port: u16, restart: usize) -> Result<Process> {
        let mut command = Command::new(&self.program);
        let nproc = self.nproc.to_string();
        command.args(&self.args).stdin(Stdio::null());
        if std::env::var_os("OMP_NUM_THREADS").is_none() {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            command.env("OMP_NUM_THREADS", (cores / self.nproc).max(1).to_string());
        }
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", &nproc)
            .env("LOCAL_WORLD_SIZE", &nproc)
            .env("GROUP_RANK", "0")
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env("TORCHELASTIC_RESTART_COUNT", restart.to_string())
            .env("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string())
            .env(
                "TORCHELASTIC_RUN_ID",
                format!("launch-{}", std::process::id()),
            )
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // A terminal's Ctrl-C comes through the launcher, as any other signal does, and so only once.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(|source| Error::Io {
            what: format!(
                "starting {} for rank {rank}",
                self.program.to_string_lossy()
            ),
            source,
        })?;
        let prefix = format!("[rank {rank}] ");
        let last = Arc::new(Mutex::new(VecDeque::new()));
        let mut readers = Vec::new();
        if let Some(out) = child.stdout.take() {
            let prefix = prefix.clone();
            readers.push(thread::spawn(move || {
                copy_lines(out, &prefix, || std::io::stdout().lock(), None);
            }));
        }
        if let Some(err) = child.stderr.take() {
            let last = Arc::clone(&last);
            readers.push(thread::spawn(move || {
                copy_lines(err, &prefix, || std::io::stderr().lock(), Some(&last));
            }));
        }
        Ok(Process {
            child,
            status: None,
            readers,
            last,
        })
    }
}

struct Process {
    child: Child,
    status: Option<ExitStatus>,
    readers: Vec<JoinHandle<()>>,
    last: Arc<Mutex<VecDeque<String>>>,
}

impl Process {
    fn saved(&self) -> bool {
        self.status.is_some_and(saved)
    }
}

fn saved(status: ExitStatus) -> bool {
    status.code() == Some(SAVED)
}

fn is_up(flag: Option<&Arc<AtomicBool>>) -> bool {
    flag.is_some_and(|flag| flag.load(Ordering::SeqCst))
}

/// The processes; what is left of them goes when this does.
struct Running(Vec<Process>);

impl Running {
    /// Notes who has ended, and whether anyone is left.
    fn look(&mut self, first: &mut Option<(usize, ExitStatus, Instant)>) -> Result<bool> {
        for (rank, process) in self.0.iter_mut().enumerate() {
            if process.status.is_some() {
                continue;
            }
            process.status = process.child.try_wait().map_err(|source| Error::Io {
                what: format!("waiting for rank {rank}"),
                source,
            })?;
            if let Some(status) = process
                .status
                .filter(|status| !status.success() && !saved(*status))
                && first.is_none()
            {
                *first = Some((rank, status, Instant::now()));
            }
        }
        Ok(self.0.iter().any(|process| process.status.is_none()))
    }

    fn alive(&mut self) -> impl Iterator<Item = &mut Child> {
        let processes = self.0.iter_mut();
        processes
            .filter(|process| process.status.is_none())
            .map(|process| &mut process.child)
    }

    fn terminate(&mut self) {
        for child in self.alive() {
            #[cfg(unix)]
            {
                let id = rustix::process::Pid::from_child(child);
                // It may have ended meanwhile.
                let _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
            }
            #[cfg(not(unix))]
            let _ = child.kill();
        }
    }

    fn kill(&mut self) {
        for child in self.alive() {
            // It may have ended meanwhile.
            let _ = child.kill();
        }
    }

    /// Waits for what the processes have written; not for a grandchild that keeps a pipe open.
    fn drain_output(&mut self) {
        let start = Instant::now();
        let done = |running: &Self| {
            let readers = running.0.iter().flat_map(|process| &process.readers);
            readers.into_iter().all(JoinHandle::is_finished)
        };
        while !done(self) && start.elapsed() < Duration::from_secs(2) {
            thread::sleep(LOOK);
        }
    }

    fn last_lines(&self, rank: usize) -> String {
        let last = self.0[rank]
            .last
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        last.iter().map(|line| format!("\n  {line}")).collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
        for process in &mut self.0 {
            if process.status.is_none() {
                // Killed: this only takes its status.
                let _ = process.child.wait();
            }
        }
    }
}

/// Copies lines as they come, each with one write.
fn copy_lines<W: Write>(
    from: impl Read,
    prefix: &str,
    to: impl Fn() -> W,
    last: Option<&Mutex<VecDeque<String>>>,
) {
    let mut reader = BufReader::new(from);
    let mut line = Vec::new();
    while reader
        .read_until(b'\n', &mut line)
        .is_ok_and(|read| read > 0)
    {
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        let mut whole = prefix.as_bytes().to_vec();
        whole.extend_from_slice(&line);
        // A reader that has gone is no reason to end the run.
        let _ = to().write_all(&whole);
        if let Some(last) = last {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            last.push_back(String::from_utf8_lossy(&line).trim_end().to_owned());
            if last.len() > LAST_LINES {
                last.pop_front();
            }
        }
        line.clear();
    }
}
