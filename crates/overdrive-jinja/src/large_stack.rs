use crate::limits::MAX_LEVELS;
use crate::{Error, Result};

/// The bytes of the stack on which a template is parsed and rendered: 64 KiB for each level, of which an optimized
/// build needs a small part.
const STACK_BYTES: usize = MAX_LEVELS * (64 << 10);

/// Runs `work` on a thread whose stack is large enough for the levels of a template, however little is left of the
/// caller's stack.
pub(crate) fn on_large_stack<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("overdrive-jinja".to_owned())
            // The system reserves addresses, and takes memory only for the part that is used.
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, work);
        match thread.map(std::thread::ScopedJoinHandle::join) {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(Error::limit(
                "its rendering panicked; the message is on standard error",
            )),
            Err(error) => Err(Error::limit(format!(
                "no thread can be started for it: {error}"
            ))),
        }
    })
}
