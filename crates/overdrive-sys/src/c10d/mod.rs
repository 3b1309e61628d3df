//! libtorch's c10d: the key-value store for the rendezvous, process groups, and the gradient reducer.
//!
//! These are plain handles whose calls return errors instead of throwing. [overdrive-distributed] adds ranks
//! from the environment, names in errors and the monitoring of peers.
//!
//! [overdrive-distributed]: ../../overdrive_distributed/index.html

mod ffi;
mod group;
mod reducer;
mod store;

pub use group::{
    Collective, CollectiveFailure, Group, NetworkDevice, ReduceOp, StartedCollective, WatchState,
    Work,
};
pub use reducer::{Reducer, ReducerOptions};
pub use store::{Store, StoreRole};

use std::ffi::{CString, c_char};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::ffi::RawTensor;

/// Returns milliseconds for the shim; at least 1, because 0 means "no limit" there, and at most `i32::MAX` (24 days):
/// libtorch adds them to the current time in nanoseconds and passes them to `poll` as an `int`.
fn millis(time: Duration) -> i64 {
    i32::try_from(time.as_millis())
        .unwrap_or(i32::MAX)
        .max(1)
        .into()
}

fn c_string(text: &str, operation: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::BadArgument {
        operation: operation.to_owned(),
        message: format!("{text:?} contains a zero byte"),
    })
}

fn c_strings<S: AsRef<str>>(texts: &[S], operation: &str) -> Result<Vec<CString>> {
    texts
        .iter()
        .map(|text| c_string(text.as_ref(), operation))
        .collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

fn handles(tensors: &[tch::Tensor]) -> Vec<RawTensor> {
    tensors.iter().map(crate::function::handle).collect()
}
