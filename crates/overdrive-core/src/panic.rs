//! The message of a panic.

use std::any::Any;

/// Returns the message of a panic from its payload, which [`catch_unwind`](std::panic::catch_unwind) and a panic hook pass.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    // `panic!` with a literal carries a `&str`, with arguments a `String`; `panic_any` may carry any value.
    if let Some(text) = payload.downcast_ref::<&'static str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text
    } else {
        "(a value that is not text)"
    }
}
