//! Thread counts of libtorch's CPU kernels.
//!
//! Rule for kernels of Overdrive's own that run inside a step: they use [`intra_op`] threads and no
//! more, because a second full set beside OpenMP's halves both.

use crate::error::{Error, Result};

/// Threads inside one operator (OpenMP's; `torch.get_num_threads`).
pub fn intra_op() -> usize {
    usize::try_from(tch::get_num_threads()).unwrap_or(1)
}

/// Sets the threads inside one operator.
///
/// # Errors
/// [`Error::BadArgument`] for 0 or more than `i32::MAX`.
pub fn set_intra_op(threads: usize) -> Result<()> {
    match i32::try_from(threads) {
        Ok(count) if count > 0 => {
            tch::set_num_threads(count);
            Ok(())
        }
        _ => Err(Error::BadArgument {
            operation: "setting the number of threads".to_owned(),
            message: format!("{threads} threads; give at least 1 and no more than the machine has"),
        }),
    }
}

/// Threads across independent operators (`torch.get_num_interop_threads`).
pub fn inter_op() -> usize {
    usize::try_from(tch::get_num_interop_threads()).unwrap_or(1)
}
