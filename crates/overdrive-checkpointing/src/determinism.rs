//! The comparison of the recomputation with the first pass.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use overdrive_sys::dispatch_mode::{DispatchMode, OperatorCall};
use overdrive_sys::{CallbackResult, ScalarType};
use tch::{Device, Tensor};

/// The properties of a saved tensor that are compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Metadata {
    shape: Vec<i64>,
    // Not tch's `Kind`: flash attention on a GPU saves its random state as unsigned integers of 64 bits.
    dtype: ScalarType,
    device: Device,
}

impl Metadata {
    pub(crate) fn of(tensor: &Tensor) -> Self {
        Self {
            shape: tensor.size(),
            dtype: ScalarType::of(tensor),
            device: tensor.device(),
        }
    }
}

impl fmt::Display for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {} on {:?}", self.shape, self.dtype, self.device)
    }
}

/// The operators of one pass, for the debug option.
#[derive(Debug, Default)]
pub(crate) struct Log {
    lines: Mutex<Vec<String>>,
}

impl Log {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the operators of both passes side by side, with the first difference marked.
    pub(crate) fn compare(first: &Self, now: &Self) -> String {
        use fmt::Write;

        let (first, now) = (first.lock(), now.lock());
        let mut text = String::from("\noperators of the first pass | of the recomputation");
        let mut same = true;
        for index in 0..first.len().max(now.len()) {
            let of = |lines: &[String]| lines.get(index).map_or("-", |line| line).to_owned();
            let (left, right) = (of(&first), of(&now));
            let mark = if same && left != right {
                same = false;
                "  <- the first difference"
            } else {
                ""
            };
            // Writing to a string cannot fail.
            let _ = write!(text, "\n  {left} | {right}{mark}");
        }
        text
    }
}

/// The dispatch mode that writes the log.
pub(crate) struct LogMode(pub(crate) Arc<Log>);

impl DispatchMode for LogMode {
    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        // Shapes, because a changed shape is the usual difference between two passes.
        let tensors = call.tensors()?;
        let shapes: Vec<String> = tensors.iter().map(|t| format!("{:?}", t.size())).collect();
        let line = format!("{} -> {}", call.full_name(), shapes.join(", "));
        self.0.lock().push(line);
        Ok(())
    }
}
