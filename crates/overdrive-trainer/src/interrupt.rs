//! Handling of the signals that end a run.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use overdrive_core::{INTERRUPTED_EXIT_CODE, files};
use overdrive_sys::process::ignores_signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::{self, emulate_default_handler};

use crate::{Error, Result};

/// The time after the first signal in which Ctrl-C counts as the same request: a launcher, a container and a
/// terminal may all send a signal to the same process.
const SAME_REQUEST: Duration = Duration::from_secs(1);

/// A flag that the first Ctrl-C sets, or SIGTERM, SIGHUP or SIGQUIT, which schedulers, containers and closed terminals
/// send. The training loop checks it after each step, saves and returns.
///
/// Ctrl-C again, at least one second after the first signal, ends the program at once with
/// [`overdrive_core::INTERRUPTED_EXIT_CODE`], 130: it comes from a person who waits. Other signals never do, however
/// often they come, because a control group sends SIGTERM to a process to which its launcher sends it too; SIGKILL
/// remains for those who insist. SIGHUP stays ignored in a program that `nohup` has started.
///
/// ```no_run
/// // Not run: it would change how the test program reacts to signals.
/// use overdrive_trainer::Interrupt;
///
/// let interrupt = Interrupt::install()?;
/// for _step in 0..1000 {
///     // … train …
///     if interrupt.requested() {
///         eprintln!("interrupted: saving (press Ctrl-C again to stop at once)");
///         break;
///     }
/// }
/// # Ok::<(), overdrive_trainer::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Interrupt {
    raised: Arc<AtomicBool>,
}

// The process has one set of signal handlers, so it has one flag.
static INSTALLED: Mutex<Option<Interrupt>> = Mutex::new(None);

/// The signals that end this process, each with a flag that says whether they still do.
static ENDING: OnceLock<Vec<(i32, AtomicBool)>> = OnceLock::new();

/// Removes the files and folders that this process has not finished when Ctrl-C, SIGTERM, SIGHUP or SIGQUIT ends it.
/// Process 1, such as the program of a container, needs these handlers to end at all: the system delivers only signals
/// that such a process handles. [`Interrupt`] takes over the signals when it is installed.
pub(crate) fn end_at_signals() -> io::Result<()> {
    let all = [SIGINT, SIGTERM, SIGQUIT, SIGHUP];
    let handled: Vec<i32> = all.into_iter().filter(|&it| !ignores_signal(it)).collect();
    let mut signals = Signals::new(&handled)?;
    let ending = handled.iter().map(|&it| (it, AtomicBool::new(true)));
    let ending = ENDING.get_or_init(|| ending.collect());
    thread::Builder::new()
        .name("od-ending".to_owned())
        .spawn(move || {
            for signal in signals.forever() {
                let ends = ending.iter().find(|(ending, _)| *ending == signal);
                if ends.is_some_and(|(_, ends)| ends.load(Ordering::SeqCst)) {
                    files::remove_unfinished();
                    // The process ends by the signal itself, as its parent expects. Process 1 cannot end this way.
                    if std::process::id() != 1 {
                        let _ended = emulate_default_handler(signal);
                    }
                    low_level::exit(INTERRUPTED_EXIT_CODE.into());
                }
            }
        })?;
    Ok(())
}

impl Interrupt {
    /// Leaves these signals to handlers of the program's own, such as those of a server. A program that
    /// [`run_main`](crate::run_main) runs ends at signals until then.
    pub fn hand_over(signals: &[i32]) {
        for (signal, ends) in ENDING.get().into_iter().flatten() {
            if signals.contains(signal) {
                ends.store(false, Ordering::SeqCst);
            }
        }
    }

    /// Installs handlers for the signals. Further calls return the same flag. A program that saved its state
    /// after a signal exits with [`overdrive_core::SAVED_EXIT_CODE`], so that schedulers can distinguish it
    /// from success and from failure, and one that saved nothing with [`overdrive_core::INTERRUPTED_EXIT_CODE`].
    ///
    /// # Errors
    /// [`Error::Signals`] if the system refuses.
    pub fn install() -> Result<Self> {
        Self::install_with(|| {
            files::remove_unfinished();
            // Exits without running destructors: they may wait for the threads that must be stopped.
            low_level::exit(INTERRUPTED_EXIT_CODE.into());
        })
    }

    /// Installs the handlers as [`install`](Self::install) does, for a program that has to end others first: the second
    /// Ctrl-C calls `at_once` instead of ending the program. The first call of either decides.
    ///
    /// # Errors
    /// [`Error::Signals`] if the system refuses.
    pub fn install_with(at_once: impl Fn() + Send + 'static) -> Result<Self> {
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(interrupt) = installed.as_ref() {
            return Ok(interrupt.clone());
        }
        let interrupt = Self::manual();
        interrupt
            .watch_signals(at_once)
            .map_err(|source| Error::Signals { source })?;
        Ok(installed.insert(interrupt).clone())
    }

    /// Returns a flag that no signal sets, for tests and for programs with their own signal handlers.
    pub fn manual() -> Self {
        Self {
            raised: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Returns `true` if the loop should save and return.
    pub fn requested(&self) -> bool {
        // The flag is read once per step, so the cost of this ordering does not matter.
        self.raised.load(Ordering::SeqCst)
    }

    /// Returns `true` if this process has installed the handlers and a signal has come, which ends every run of the process:
    /// for work deep inside a loop, such as an evaluation, that need not be finished.
    pub fn signal_received() -> bool {
        let installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        installed.as_ref().is_some_and(Self::requested)
    }

    /// Returns `true` if a run with this flag should end: it is set, or a signal has come.
    pub(crate) fn ends_run(&self) -> bool {
        self.requested() || Self::signal_received()
    }

    /// Sets the flag, as a signal does.
    pub fn request(&self) {
        self.raised.store(true, Ordering::SeqCst);
    }

    /// Returns the flag itself, such as for [`Launch::stop_when`](overdrive_distributed::Launch::stop_when).
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.raised)
    }

    fn watch_signals(&self, at_once: impl Fn() + Send + 'static) -> io::Result<()> {
        let mut handled = vec![SIGINT, SIGTERM, SIGQUIT];
        if !ignores_signal(SIGHUP) {
            handled.push(SIGHUP);
        }
        let mut signals = Signals::new(&handled)?;
        Self::hand_over(&handled);
        let interrupt = self.clone();
        thread::Builder::new()
            .name("od-signals".to_owned())
            .spawn(move || {
                let mut first = None;
                for signal in signals.forever() {
                    interrupt.request();
                    let since_first = first.get_or_insert_with(Instant::now).elapsed();
                    if ends_at_once(signal, since_first) {
                        at_once();
                    }
                }
            })?;
        Ok(())
    }
}

/// Returns `true` if a signal is a user's second request to stop; `since_first` is the time since the first signal.
fn ends_at_once(signal: i32, since_first: Duration) -> bool {
    signal == SIGINT && since_first >= SAME_REQUEST
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_is_clear_until_it_is_set_and_clones_share_it() {
        let interrupt = Interrupt::manual();
        let clone = interrupt.clone();
        assert!(!clone.requested());
        interrupt.request();
        assert!(clone.requested());
    }

    #[cfg(unix)]
    const FOLDER: &str = "OVERDRIVE_TEST_SIGNALS_FOLDER";

    #[cfg(unix)]
    #[test]
    #[ignore = "started by the other test, in a process of its own"]
    fn writes_until_a_signal_comes() {
        let folder = std::path::PathBuf::from(std::env::var_os(FOLDER).unwrap());
        end_at_signals().unwrap();
        let _file = files::unfinished(folder.join("a.bin")).unwrap();
        let model = files::unfinished_folder(folder.join("model")).unwrap();
        std::fs::write(model.path().join("model.safetensors"), "half").unwrap();
        std::fs::write(folder.join("ready"), "").unwrap();
        thread::sleep(Duration::from_secs(120));
    }

    #[cfg(unix)]
    #[test]
    fn a_signal_ends_a_program_by_itself_and_removes_what_is_not_finished() {
        use std::os::unix::process::ExitStatusExt;
        use std::process::{Command, Stdio};
        // A background job of a shell script ignores SIGINT, and so do the processes that it starts.
        let signals = [SIGINT, SIGTERM];
        for signal in signals.into_iter().filter(|it| !ignores_signal(*it)) {
            let dir = tempfile::tempdir().unwrap();
            let name = "interrupt::tests::writes_until_a_signal_comes";
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--ignored"])
                .env(FOLDER, dir.path())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let started = Instant::now();
            while !dir.path().join("ready").exists() {
                assert!(started.elapsed() < Duration::from_secs(60));
                assert!(child.try_wait().unwrap().is_none(), "it ended by itself");
                thread::sleep(Duration::from_millis(1));
            }
            let (flag, process) = (format!("-{signal}"), child.id().to_string());
            let sent = Command::new("kill").args([flag, process]).status();
            assert!(sent.unwrap().success());
            assert_eq!(child.wait().unwrap().signal(), Some(signal));
            let left = std::fs::read_dir(dir.path()).unwrap();
            let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
            assert_eq!(left, ["ready"]);
        }
    }

    #[test]
    fn only_ctrl_c_after_a_second_ends_at_once() {
        let (soon, later) = (Duration::from_millis(999), Duration::from_secs(1));
        for (signal, since_first, expected) in [
            (SIGINT, Duration::ZERO, false),
            (SIGINT, soon, false),
            (SIGINT, later, true),
            (SIGTERM, Duration::from_millis(20), false),
            (SIGTERM, later, false),
            (SIGHUP, later, false),
            (SIGQUIT, later, false),
        ] {
            let found = ends_at_once(signal, since_first);
            assert_eq!(found, expected, "{signal} after {since_first:?}");
        }
    }
}
