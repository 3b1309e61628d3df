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
use overdrive_sys::process::terminate_with_parent;

use overdrive_core::{
    INTERRUPTED_EXIT_CODE, LOST_PEER_EXIT_CODE, RunEnd, SAVED_EXIT_CODE, print_error_line,
};

use crate::launcher_watch::STOP_GRACE;
use crate::{Error, Result};

/// The number of lines of a failed process's standard error that the error repeats.
const LAST_LINES: usize = 8;
/// The interval at which the processes are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Starts `nproc` processes of a program with the variables of torchrun, prefixes their output with the
/// rank, ends all when one fails, and returns the first error.
///
/// The launcher hosts the store, so the store outlives every process, and a killed rank 0 is reported like
/// any other rank. It listens on the loopback interface only, because it has no authentication. `OMP_NUM_THREADS` is
/// set to the number of cores divided by `nproc` unless it is set.
///
/// No process outlives a killed launcher: on Linux each process gets SIGTERM at once. On every system the processes
/// that have joined their group notice within seconds and send themselves SIGTERM, then SIGKILL after
/// [`stop_grace`](Self::stop_grace).
///
/// ```no_run
/// # // Not run: it starts processes of a program that does not exist in a test.
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
    /// Returns a launch of one process without arguments.
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

    /// Sets an environment variable for all processes.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env
            .push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets the number of processes. Default 1.
    #[must_use]
    pub fn nproc(mut self, nproc: usize) -> Self {
        self.nproc = nproc;
        self
    }

    /// Sets how long the other processes may continue after one has failed, to report its failure. Default
    /// 10 s. Then they get SIGTERM and, after [`stop_grace`](Self::stop_grace), SIGKILL.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Sets how often all processes are restarted after one has failed. Default 0.
    #[must_use]
    pub fn max_restarts(mut self, max_restarts: usize) -> Self {
        self.max_restarts = max_restarts;
        self
    }

    /// Sends SIGTERM to all processes when the flag becomes `true`; a handler of SIGTERM and SIGINT may set it. The
    /// processes may then save, for at most [`stop_grace`](Self::stop_grace).
    ///
    /// The processes are in a process group of their own, so that Ctrl-C reaches them once, through the launcher.
    #[must_use]
    pub fn stop_when(mut self, flag: Arc<AtomicBool>) -> Self {
        self.stop = Some(flag);
        self
    }

    /// Kills all processes when the flag becomes `true`, as a second signal does.
    #[must_use]
    pub fn kill_when(mut self, flag: Arc<AtomicBool>) -> Self {
        self.kill = Some(flag);
        self
    }

    /// Sets how long processes may run after SIGTERM before they are killed. Default 30 s, as in torchrun and
    /// Kubernetes.
    #[must_use]
    pub fn stop_grace(mut self, grace: Duration) -> Self {
        self.stop_grace = grace;
        self
    }

    /// Runs until all processes have ended. A process that exits with [`SAVED_EXIT_CODE`] or
    /// [`INTERRUPTED_EXIT_CODE`] has not failed: the launch returns `NotSaved` if any process did, else `Saved` if any
    /// did.
    ///
    /// # Errors
    /// [`Error::Launched`] with the first process that failed for a reason of its own (one that only lost another exits
    /// with [`LOST_PEER_EXIT_CODE`]) and its last output; [`Error::Common`] if the program cannot be started.
    pub fn run(&self) -> Result<RunEnd> {
        overdrive_core::check_at_least("nproc", self.nproc, 1)?;
        let (_store, port) =
            // Port 0: the system chooses a free one, so that two launches on a machine do not collide.
            Store::tcp("127.0.0.1", 0, StoreRole::LocalServer, Duration::from_secs(60))?;
        let mut restart = 0;
        loop {
            match self.run_once(port, restart) {
                Err(Error::Launched {
                    rank,
                    status,
                    last_lines,
                }) if restart < self.max_restarts && !self.stopped() => {
                    restart += 1;
                    print_error_line(format_args!(
                        "rank {rank} failed first: {status}{last_lines}\nrestarting all processes ({restart} \
                         of {})",
                        self.max_restarts
                    ));
                }
                other => return other,
            }
        }
    }

    fn stopped(&self) -> bool {
        is_set(self.stop.as_ref()) || is_set(self.kill.as_ref())
    }

    fn run_once(&self, port: u16, restart: usize) -> Result<RunEnd> {
        let mut running = Running(Vec::new());
        for rank in 0..self.nproc {
            running.0.push(self.spawn(rank, port, restart)?);
        }
        let mut first_failure: Option<(usize, ExitStatus, Instant)> = None;
        let mut terminated: Option<Instant> = None;
        while self.poll(&mut running, &mut first_failure)? {
            let over = first_failure.is_some_and(|(_, _, when)| when.elapsed() > self.grace);
            match terminated {
                None if over || self.stopped() => {
                    running.terminate();
                    terminated = Some(Instant::now());
                }
                Some(when) if when.elapsed() > self.stop_grace => running.kill(),
                _ => {}
            }
            if is_set(self.kill.as_ref()) {
                running.kill();
            }
            thread::sleep(POLL_INTERVAL);
        }
        running.drain_output();
        match first_failure {
            None if running.any_exited_with(INTERRUPTED_EXIT_CODE) => Ok(RunEnd::NotSaved),
            None if running.any_exited_with(SAVED_EXIT_CODE) => Ok(RunEnd::Saved),
            None => Ok(RunEnd::Finished),
            Some((rank, status, _)) => Err(Error::Launched {
                rank,
                status: status.to_string(),
                last_lines: running.last_lines(rank),
            }),
        }
    }

    /// Records the processes that have ended and the first that failed; returns `true` while any is running.
    fn poll(
        &self,
        running: &mut Running,
        first_failure: &mut Option<(usize, ExitStatus, Instant)>,
    ) -> Result<bool> {
        for (rank, process) in running.0.iter_mut().enumerate() {
            if process.status.is_some() {
                continue;
            }
            let status = process.child.try_wait();
            process.status =
                status.map_err(overdrive_core::Error::io("wait for", &self.program))?;
            let Some(status) = process
                .status
                .filter(|status| !status.success() && !interrupted(*status))
            else {
                continue;
            };
            // A process may end because of another one that has not ended yet.
            match first_failure {
                None => *first_failure = Some((rank, status, Instant::now())),
                Some((first, of_first, _)) if lost_a_peer(*of_first) && !lost_a_peer(status) => {
                    (*first, *of_first) = (rank, status);
                }
                Some(_) => {}
            }
        }
        Ok(running.0.iter().any(|process| process.status.is_none()))
    }

    fn spawn(&self, rank: usize, port: u16, restart: usize) -> Result<Process> {
        let mut command = Command::new(&self.program);
        let nproc = self.nproc.to_string();
        // Several processes cannot share the input of a terminal.
        command.args(&self.args).stdin(Stdio::null());
        // Otherwise every process would start a thread per core of the machine.
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
            // Without it, rank 0 would try to host the store itself, on the port of the launcher.
            .env("TORCHELASTIC_USE_AGENT_STORE", "True")
            .env("TORCHELASTIC_RESTART_COUNT", restart.to_string())
            .env("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string())
            .env(STOP_GRACE, self.stop_grace.as_secs_f64().to_string())
            .env(
                "TORCHELASTIC_RUN_ID",
                format!("launch-{}", std::process::id()),
            )
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // A terminal sends Ctrl-C to its whole process group; the launcher forwards it, so that each process
        // gets it once.
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        // This thread waits for the processes, so that it ends before them only if the launcher is lost.
        terminate_with_parent(&mut command);
        let mut child = command
            .spawn()
            .map_err(overdrive_core::Error::io("start", &self.program))?;
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

/// Returns `true` for the exit codes of a process that was interrupted, with or without a snapshot.
fn interrupted(status: ExitStatus) -> bool {
    let codes = [SAVED_EXIT_CODE, INTERRUPTED_EXIT_CODE].map(i32::from);
    status.code().is_some_and(|code| codes.contains(&code))
}

/// Returns `true` for the exit code of a process that failed because of another one.
fn lost_a_peer(status: ExitStatus) -> bool {
    status.code() == Some(i32::from(LOST_PEER_EXIT_CODE))
}

fn is_set(flag: Option<&Arc<AtomicBool>>) -> bool {
    flag.is_some_and(|flag| flag.load(Ordering::SeqCst))
}

/// The processes of a launch; those still running are killed when it is dropped.
struct Running(Vec<Process>);

impl Running {
    fn any_exited_with(&self, code: u8) -> bool {
        let mut statuses = self.0.iter().filter_map(|process| process.status);
        statuses.any(|status| status.code() == Some(i32::from(code)))
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
                // An error means that the process has ended meanwhile.
                let _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
            }
            #[cfg(not(unix))]
            let _ = child.kill();
        }
    }

    fn kill(&mut self) {
        for child in self.alive() {
            // An error means that the process has ended meanwhile.
            let _ = child.kill();
        }
    }

    /// Waits until the output of the processes is copied, for at most two seconds: a grandchild may keep a
    /// pipe open.
    fn drain_output(&mut self) {
        // The threads end when the pipes are closed, usually just after the process.
        let start = Instant::now();
        let done = |running: &Self| {
            let readers = running.0.iter().flat_map(|process| &process.readers);
            readers.into_iter().all(JoinHandle::is_finished)
        };
        while !done(self) && start.elapsed() < Duration::from_secs(2) {
            thread::sleep(POLL_INTERVAL);
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
                // Without this call the killed process would stay a zombie.
                let _ = process.child.wait();
            }
        }
    }
}

/// Copies the lines of a stream as they arrive, each with one write.
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
        // A closed standard output must not end the run.
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
