//! Files of `torch.save`, intact, damaged and hostile.
#![allow(missing_docs, reason = "these are tests")]

mod hostile;
mod originals;
