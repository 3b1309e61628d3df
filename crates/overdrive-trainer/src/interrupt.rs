//! Handling of Ctrl-C and SIGTERM.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use overdrive_core::INTERRUPTED_EXIT_CODE;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::{Error, Result};

/// A flag that the first Ctrl-C (or SIGTERM, which schedulers and containers send) sets. The training loop
/// checks it after each step, saves and returns. The second signal ends the program at once with
/// [`overdrive_core::INTERRUPTED_EXIT_CODE`], 130.
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

impl Interrupt {
    /// Installs handlers for both signals. Further calls return the same flag. A program that saved its state
    /// after a signal exits with [`overdrive_core::SAVED_EXIT_CODE`], so that schedulers can distinguish it
    /// from success and from failure, and one that saved nothing with [`overdrive_core::INTERRUPTED_EXIT_CODE`].
    ///
    /// # Errors
    /// [`Error::Signals`] if the system refuses.
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

    /// Returns a flag that no signal sets, for tests and for programs with their own signal handlers.
    pub fn manual() -> Self {
        Self {
            raised: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Returns `true` if the loop should save and return.
    pub fn requested(&self) -> bool {
        // The ordering that signal-hook stores with; once a step its cost does not matter.
        self.raised.load(Ordering::SeqCst)
    }

    /// Sets the flag, as a signal does.
    pub fn request(&self) {
        self.raised.store(true, Ordering::SeqCst);
    }

    fn register(&self) -> io::Result<()> {
        for signal in [SIGINT, SIGTERM] {
            // The order matters: the shutdown handler must see the flag as it was before this signal.
            let raised = Arc::clone(&self.raised);
            flag::register_conditional_shutdown(signal, INTERRUPTED_EXIT_CODE.into(), raised)?;
            flag::register(signal, Arc::clone(&self.raised))?;
        }
        Ok(())
    }
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
}
