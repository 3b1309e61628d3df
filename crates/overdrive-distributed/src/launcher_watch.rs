//! The end of a process whose launcher is lost.
//!
//! A killed launcher can no longer end its processes, which would hold their GPUs and their locks forever. The store
//! that it hosts ends with it, so the monitor of each process notices, and ends the process as the launcher would
//! have done.

use std::io::Write;
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::monitor::MonitorOptions;

/// The variable with which a launcher announces how long a process may run after SIGTERM, in seconds.
pub(crate) const STOP_GRACE: &str = "OVERDRIVE_STOP_GRACE";
/// The time after which a launcher whose store is gone counts as lost. On Linux its processes have received SIGTERM
/// by then.
const LAUNCHER_TIMEOUT: Duration = Duration::from_secs(5);

/// The times at which a monitor found that the launcher is lost.
#[derive(Debug, Default)]
pub(crate) struct LauncherWatch {
    /// The time since which nothing listens at the address of the store.
    gone_since: Option<Instant>,
    /// The time at which this process received SIGTERM.
    terminated: Option<Instant>,
}

impl LauncherWatch {
    /// Ends this process if the launcher is lost: by SIGTERM, and by SIGKILL after the time that the launcher
    /// announced. Returns the failure of the group if this monitor must not end the process.
    pub(crate) fn check(&mut self, is_gone: bool, options: &MonitorOptions) -> Option<Failure> {
        let host = &options.store_host;
        // Once this process has received SIGTERM it ends, even if another program listens at the address meanwhile.
        if self.terminated.is_none() && !(host.is_launcher && is_gone) {
            self.gone_since = None;
            return None;
        }
        let since = *self.gone_since.get_or_insert_with(Instant::now);
        if since.elapsed() < LAUNCHER_TIMEOUT {
            return None;
        }
        let (name, port) = &host.address;
        let lost = format!(
            "the launcher is lost: nothing has listened at {name}:{port}, the address of its store, for {} s",
            LAUNCHER_TIMEOUT.as_secs()
        );
        let Some(grace) = options.stop_grace else {
            return Some(Failure {
                ranks: Vec::new(),
                text: lost,
            });
        };
        let rank = options.rank;
        match self.terminated {
            None => {
                let seconds = grace.as_secs_f64();
                warn(&format!(
                    "rank {rank}: {lost}; this process gets SIGTERM, and SIGKILL after {seconds} s"
                ));
                self.terminated = Some(Instant::now());
                terminate();
            }
            Some(when) if when.elapsed() > grace => {
                warn(&format!(
                    "rank {rank}: this process did not end after SIGTERM and is killed"
                ));
                kill();
            }
            Some(_) => {}
        }
        None
    }
}

/// Prints a line. Standard error may be a pipe to the launcher that is lost.
fn warn(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Sends SIGTERM to this process, which may then save.
fn terminate() {
    #[cfg(unix)]
    {
        // It cannot fail: a process may send itself signals.
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::TERM);
    }
}

/// Ends this process without running anything else.
fn kill() {
    #[cfg(unix)]
    {
        let own = rustix::process::getpid();
        let _ = rustix::process::kill_process(own, rustix::process::Signal::KILL);
    }
    std::process::abort();
}
