//! The errors, checks, constants and random numbers that all crates of Overdrive share, [atomic file writes](files),
//! [output folders that never overwrite an input](OutputFolder), [lines on standard output](print_line), [decoding of
//! text files](text), [number formatting](units), and the [table of GPUs](gpu_peaks).
//!
//! Every crate has its own error enum for the errors that only it can return. The errors common to all of them (an
//! option out of its range, a tensor of the wrong shape, dtype or device, a file that cannot be read, written or
//! parsed) are variants of [`Error`], which each crate's enum wraps in one transparent variant. The same mistake
//! therefore has the same message everywhere, and a program can match on it in one place.
//!
//! ```
//! use overdrive_core::{Error, check_positive};
//!
//! # fn main() {
//! let error = check_positive("learning_rate", -0.1).unwrap_err();
//! assert_eq!(error.to_string(), "`learning_rate` is -0.1; it must be positive");
//! assert!(matches!(error, Error::InvalidOption { option, .. } if option == "learning_rate"));
//! # }
//! ```
//!
//! A crate's own enum:
//!
//! ```
//! #[derive(Debug, thiserror::Error)]
//! pub enum CacheError {
//!     #[error(transparent)]
//!     Common(#[from] overdrive_core::Error),
//!     #[error("the cache holds {held} tokens; it cannot be truncated to {len}")]
//!     TruncateBeyondEnd { len: usize, held: usize },
//! }
//!
//! fn set_window(window: usize) -> Result<(), CacheError> {
//!     overdrive_core::check_at_least("window", window, 1)?;
//!     Ok(())
//! }
//! assert!(set_window(0).is_err());
//! ```
#![deny(missing_docs)]

mod check;
mod constants;
mod error;
mod file_map;
pub mod files;
pub mod gpu_peaks;
mod lock;
mod network;
mod output;
mod panic;
mod print;
pub mod random;
mod switch;
pub mod text;
mod unfinished;
pub mod units;

pub use check::{
    Number, check_at_least, check_fraction, check_non_negative, check_option, check_positive,
};
pub use constants::{
    IGNORE_INDEX, INTERRUPTED_EXIT_CODE, LOST_PEER_EXIT_CODE, RunEnd, SAVED_EXIT_CODE,
};
pub use error::{Error, Result};
pub use network::is_loopback;
pub use output::{OutputFolder, UnfinishedOutput, check_not_read, is_same_file};
pub use panic::panic_text;
pub use print::{print_error_line, print_line};
pub use switch::Switch;
