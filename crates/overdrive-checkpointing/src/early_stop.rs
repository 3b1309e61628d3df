//! The early stop of a recomputation: an error that the operator that saves the last needed tensor
//! returns, and that the closure passes on.

use std::sync::Once;

/// The message of the error. Panics are searched for it, so it must be unique.
const TEXT: &str = "overdrive-checkpointing: the recomputation has all that backward needs";

/// The error of the operator that saves the last needed tensor.
#[derive(Debug, thiserror::Error)]
#[error("{}", TEXT)]
pub(crate) struct EarlyStop;

/// Installs a panic hook that does not print the panics of an early stop in closures that unwrap. Every
/// other panic goes to the previous hook.
pub(crate) fn silence_panics() {
    static INSTALLED: Once = Once::new();
    // A panicking thread cannot set hooks; the next recomputation will.
    if std::thread::panicking() {
        return;
    }
    INSTALLED.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let text = overdrive_core::panic_text(info.payload());
            if !text.contains(TEXT) {
                before(info);
            }
        }));
    });
}
