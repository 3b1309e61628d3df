//! Files of `torch.save`, intact, damaged and hostile.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod hostile;
mod originals;
