//! Ctrl-C and the termination signal.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::{Error, Result};

/// Lets a training loop end itself: the first Ctrl-C (or SIGTERM, which schedulers and containers
/// send) only raises a flag, which the loop looks at after each step, so that it can save and leave.
/// The second one ends the program at once with code 130.
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

/// The process has one set of signals, so it has one flag.
static INSTALLED: Mutex<Option<Interrupt>> = Mutex::new(None);

/// What shells report for a program that Ctrl-C has ended: 128 + SIGINT.
const EXIT_CODE: i32 = 130;

impl Interrupt {
    /// What a program ends with that was interrupted, and has saved all that it takes to go on: 75, "try
    /// again later" (`EX_TEMPFAIL` of sysexits.h). Schedulers can tell it from success and from failure.
    pub const SAVED_EXIT_CODE: u8 = 75;

    /// Catches both signals from now on. Further calls give the same flag.
    ///
    /// # Errors
    /// [`Error::Signals`] where the system refuses.
    pub fn install() -> Result<Self> {
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(interrupt) = installed.as_ref() {
            return Ok(interrupt.clone());
        }
        let interrupt = Self::manual();
        interrupt
            .register()
            .map_err(|source| Error::Signals { source })?;
        Ok(installed.insert(interrupt).clone())
    }

    /// A flag that no signal raises, for tests and for programs with signals of their own.
    pub fn manual() -> Self {
        Self {
            raised: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Whether the loop should save and leave.
    pub fn requested(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    /// Raises the flag, as a signal would.
    pub fn request(&self) {
        self.raised.store(true, Ordering::SeqCst);
    }

    fn register(&self) -> io::Result<()> {
        for signal in [SIGINT, SIGTERM] {
            // The order matters: a signal first sees whether the flag was up before it.
            flag::register_conditional_shutdown(signal, EXIT_CODE, Arc::clone(&self.raised))?;
            flag::register(signal, Arc::clone(&self.raised))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_down_until_it_is_raised_and_clones_share_it() {
        let interrupt = Interrupt::manual();
        let clone = interrupt.clone();
        assert!(!clone.requested());
        interrupt.request();
        assert!(clone.requested());
    }
}
