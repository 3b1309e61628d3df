//! The launches and the bytes of the operators of a thread.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use overdrive_sys::CallbackResult;
use overdrive_sys::dispatch_mode::{DispatchMode, ModeGuard, OperatorCall, Results, push_mode};
use overdrive_sys::saved_tensors::BackwardOnThisThread;
use tch::Tensor;

/// The operators that compute nothing: they allocate memory, or return a view that their schema does not declare as
/// one.
const IDLE: [&str; 7] = [
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::resize_",
];

/// The operators that overwrite their first argument without reading it, beside those with `out`.
const OVERWRITERS: [&str; 4] = [
    "aten::copy_",
    "aten::fill_",
    "aten::zero_",
    "aten::uniform_",
];

/// Counts, while it lives, the operators of this thread that launch work on a device, and the bytes of the tensors
/// that they read and write.
///
/// Views and allocations are not counted. An operator counts once, even if it launches several kernels (a sort) or
/// one kernel for many tensors (`_foreach_mul_`), and the operators that a kernel calls itself are not seen. The
/// bytes are those of the arguments and the results: what a GPU moves at least if nothing stays in a cache. On a CPU
/// the counts show, without a GPU, what the same calls would launch on one.
///
/// ```
/// use overdrive_profiling::OperatorCounts;
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::ones([1024], (Kind::Float, Device::Cpu));
/// let counts = OperatorCounts::new();
/// let _ = (&x * 2.0).view([32, 32]).sum(Kind::Float);
/// assert_eq!(counts.launches(), 2);
/// // Read and written by the product, read by the sum, whose result is one number.
/// assert_eq!(counts.bytes(), 3 * 4096 + 4);
/// ```
#[derive(Debug)]
#[must_use = "operators are counted until the value is dropped"]
pub struct OperatorCounts {
    counts: Rc<RefCell<Counts>>,
    _mode: ModeGuard,
    _backward: BackwardOnThisThread,
}

#[derive(Debug, Default)]
struct Counts {
    by_name: BTreeMap<String, usize>,
    bytes: u64,
    /// The bytes that the running operator reads.
    read: u64,
}

impl OperatorCounts {
    /// Starts to count.
    #[expect(clippy::new_without_default, reason = "it starts something")]
    pub fn new() -> Self {
        let counts = Rc::new(RefCell::new(Counts::default()));
        Self {
            counts: Rc::clone(&counts),
            _mode: push_mode(Rc::new(Counter { counts })),
            _backward: BackwardOnThisThread::new(),
        }
    }

    /// Returns the number of operators so far that launch work.
    #[must_use]
    pub fn launches(&self) -> usize {
        self.counts.borrow().by_name.values().sum()
    }

    /// Returns the bytes that these operators read and wrote.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.counts.borrow().bytes
    }

    /// Returns how often each operator was called, by its name with the overload, such as `aten::add.Tensor`.
    #[must_use]
    pub fn by_name(&self) -> BTreeMap<String, usize> {
        self.counts.borrow().by_name.clone()
    }
}

struct Counter {
    counts: Rc<RefCell<Counts>>,
}

/// Returns `true` if the operator computes something.
fn launches(call: &OperatorCall) -> CallbackResult<bool> {
    let is_view = call.aliases()? && !call.mutates()?;
    Ok(!is_view && !IDLE.contains(&call.name()))
}

impl DispatchMode for Counter {
    fn before(&self, call: &OperatorCall) -> CallbackResult<Option<Arc<Results>>> {
        if !launches(call)? {
            return Ok(None);
        }
        let tensors = call.tensors()?;
        let mut read: u64 = tensors.iter().map(bytes).sum();
        if OVERWRITERS.contains(&call.name()) {
            read -= tensors.first().map_or(0, bytes);
        } else if call.overload().ends_with("out") {
            // The targets come last.
            read -= tensors.last().map_or(0, bytes);
        }
        self.counts.borrow_mut().read = read;
        Ok(None)
    }

    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        if !launches(call)? {
            return Ok(());
        }
        let written: u64 = call.tensors()?.iter().map(bytes).sum();
        let mut counts = self.counts.borrow_mut();
        counts.bytes += counts.read + written;
        *counts.by_name.entry(call.full_name()).or_default() += 1;
        Ok(())
    }
}

/// Returns the bytes of the elements that are apart in memory: an expanded dimension counts once.
fn bytes(tensor: &Tensor) -> u64 {
    // CUDA's random states are uint64, which tch does not know.
    let element = tensor.f_kind().map_or(8, |kind| kind.elt_size_in_bytes());
    let sizes = tensor.size().into_iter().zip(tensor.stride());
    let apart = sizes.map(|(size, stride)| if stride == 0 { size.min(1) } else { size });
    apart.product::<i64>().unsigned_abs() * element as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Device, Kind};

    #[test]
    fn arithmetic_is_counted_and_views_are_not() {
        let x = Tensor::ones([8, 16], (Kind::Float, Device::Cpu));
        let row = Tensor::ones([16], (Kind::BFloat16, Device::Cpu)).expand([8, 16], true);
        let counts = OperatorCounts::new();
        let transposed = x.tr().view([16, 2, 4]);
        let target = Tensor::empty([8, 16], (Kind::Float, Device::Cpu));
        assert_eq!((counts.launches(), counts.bytes()), (0, 0));
        let _ = transposed.sum(Kind::Float);
        assert_eq!((counts.launches(), counts.bytes()), (1, 512 + 4));
        // The target is not read, and the row is read once.
        let _ = x.f_mul_out(&target, &row).expect("the shapes fit");
        assert_eq!((counts.launches(), counts.bytes()), (2, 516 + 1024 + 32));
        target.shallow_clone().copy_(&x);
        assert_eq!((counts.launches(), counts.bytes()), (3, 1572 + 1024));
        let names = counts.by_name();
        assert_eq!(names["aten::mul.out"], 1, "{names:?}");
        drop(counts);
        let _ = &x + 1.0;
    }
}
