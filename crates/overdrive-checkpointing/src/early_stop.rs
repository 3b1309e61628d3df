//! Leaving a recomputation early: an error that travels through the operator that saves the last tensor
//! needed, and through the closure.

use std::sync::Once;

/// The text is looked for in panics, so it is one that nobody else writes.
const TEXT: &str = "overdrive-checkpointing: the recomputation has all that backward needs";

/// What the saving operator fails with.
#[derive(Debug, thiserror::Error)]
#[error("{}", TEXT)]
pub(crate) struct EarlyStop;

/// Keeps panics that an early stop causes, in closures that unwrap, from being printed. Every other
/// panic goes to the hook that was there before.
pub(crate) fn keep_quiet() {
    static INSTALLED: Once = Once::new();
    // Hooks cannot be set by a thread that panics; the next recomputation will.
    if std::thread::panicking() {
        return;
    }
    INSTALLED.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let text = overdrive_sys::panic_text(info.payload());
            if !text.contains(TEXT) {
                before(info);
            }
        }));
    });
}
