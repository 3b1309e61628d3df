//! Reads of tensors by the host, each of which waits for the device.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use overdrive_sys::CallbackResult;
use overdrive_sys::dispatch_mode::{DispatchMode, ModeGuard, OperatorCall, Results, push_mode};
use overdrive_sys::saved_tensors::BackwardOnThisThread;
use overdrive_sys::transfer::{is_copying_to_host, is_pinned};
use tch::{Device, Kind, Tensor};

/// The operators whose result, or the size of it, the host reads. `item()`, `double_value` and their like are
/// `_local_scalar_dense`.
const READERS: [&str; 12] = [
    "aten::_local_scalar_dense",
    "aten::_unique",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::unique_dim_consecutive",
];

/// The operators that take a mask as an index, whose elements they count.
const INDEXERS: [&str; 3] = ["aten::index", "aten::index_put_", "aten::_index_put_impl_"];

/// Counts, while it lives, the operators of this thread with which the host reads from a device and so waits for all
/// work queued on it (`torch.cuda.set_sync_debug_mode`): reads of single values, operators whose result size depends
/// on the values, and copies to the host. A training step without any keeps a GPU busy while the host prepares the
/// next one.
///
/// It also sees the operators of backward passes, which stay on this thread while it lives, but not reads inside
/// operators, or of libraries that call CUDA themselves. On a CPU a copy to the host is not an operator; the reads
/// that Overdrive makes through [`overdrive_sys::transfer::to_host`] are counted there as well. A copy that does not
/// wait (`non_blocking`, to pinned memory) is not a read: the host reads the memory after an event reports that the
/// data has arrived.
///
/// [`HostReads::uploads`] lists the copies in the other direction that wait too.
///
/// ```
/// use overdrive_profiling::HostReads;
/// use tch::{Device, Kind, Tensor};
///
/// let loss = Tensor::ones([4], (Kind::Float, Device::Cpu)).mean(Kind::Float);
/// let reads = HostReads::of(Device::Cpu);
/// let twice = &loss * 2.0;
/// assert!(reads.names().is_empty());
/// let _value = twice.double_value(&[]);
/// assert_eq!(reads.names(), ["aten::_local_scalar_dense"]);
/// ```
#[derive(Debug)]
#[must_use = "reads are counted until the value is dropped"]
pub struct HostReads {
    names: Rc<RefCell<Vec<String>>>,
    uploads: Rc<RefCell<Vec<String>>>,
    _mode: ModeGuard,
    _backward: BackwardOnThisThread,
}

impl HostReads {
    /// Starts to count the reads of tensors on `device`. On a CPU no read waits; counting them there shows, on a
    /// machine without a GPU, what the same calls would cost on one.
    pub fn of(device: Device) -> Self {
        let names = Rc::new(RefCell::new(Vec::new()));
        let uploads = Rc::new(RefCell::new(Vec::new()));
        Self {
            names: Rc::clone(&names),
            uploads: Rc::clone(&uploads),
            _mode: push_mode(Rc::new(Counter {
                device,
                names,
                uploads,
                copies: Cell::new(None),
            })),
            _backward: BackwardOnThisThread::new(),
        }
    }

    /// Returns the names of the operators so far, in their order.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.names.borrow().clone()
    }

    /// Returns the names of the operators so far that copied to the device from host memory that is not pinned. The
    /// host waits for them as for a read; [`overdrive_sys::transfer::to_device`] does not wait. There are none on a
    /// CPU.
    #[must_use]
    pub fn uploads(&self) -> Vec<String> {
        self.uploads.borrow().clone()
    }
}

/// The source of a copy whose target is known only after it has run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CopyFrom {
    Device,
    PageableMemory,
}

struct Counter {
    device: Device,
    names: Rc<RefCell<Vec<String>>>,
    uploads: Rc<RefCell<Vec<String>>>,
    /// The current operator, if it is such a copy.
    copies: Cell<Option<CopyFrom>>,
}

impl Counter {
    fn push(&self, call: &OperatorCall) {
        self.names.borrow_mut().push(call.full_name());
    }

    /// Returns `true` for host memory that a GPU cannot read asynchronously.
    fn is_pageable(&self, tensor: Option<&Tensor>) -> CallbackResult<bool> {
        let host = tensor.filter(|tensor| {
            self.device != Device::Cpu && tensor.defined() && tensor.device() == Device::Cpu
        });
        Ok(match host {
            Some(tensor) => !is_pinned(tensor)?,
            None => false,
        })
    }
}

impl DispatchMode for Counter {
    fn before(&self, call: &OperatorCall) -> CallbackResult<Option<Arc<Results>>> {
        let tensors = call.tensors()?;
        let here = |index: usize| {
            let tensor = tensors.get(index);
            tensor.is_some_and(|tensor| tensor.defined() && tensor.device() == self.device)
        };
        let name = call.name();
        let is_copy = name == "aten::_to_copy";
        let is_blocking = !call.is_set(c"non_blocking")?;
        self.copies.set(match is_copy {
            // Without waiting libtorch copies to pinned memory.
            true if here(0) => is_blocking.then_some(CopyFrom::Device),
            true if self.is_pageable(tensors.first())? => Some(CopyFrom::PageableMemory),
            _ => None,
        });
        if name == "aten::copy_" && here(0) && self.is_pageable(tensors.get(1))? {
            self.uploads.borrow_mut().push(call.full_name());
        }
        // The first argument is what is indexed, the others are indices.
        let masks = || {
            let mut indices = tensors.iter().skip(1).filter(|index| index.defined());
            indices.any(|index| matches!(index.kind(), Kind::Bool | Kind::Uint8))
        };
        let reads = READERS.contains(&name) && here(0)
            || INDEXERS.contains(&name) && here(0) && masks()
            || name == "aten::copy_"
                && here(1)
                && (is_copying_to_host()
                    || self.device != Device::Cpu
                        && tensors[0].device() == Device::Cpu
                        && waits(is_blocking, self.is_pageable(tensors.first())?));
        if reads {
            self.push(call);
        }
        Ok(None)
    }

    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        let Some(from) = self.copies.take().filter(|_| self.device != Device::Cpu) else {
            return Ok(());
        };
        let results = call.tensors()?;
        let arrived = |device: Device| results.iter().any(|tensor| tensor.device() == device);
        match from {
            CopyFrom::Device if arrived(Device::Cpu) => self.push(call),
            CopyFrom::PageableMemory if arrived(self.device) => {
                self.uploads.borrow_mut().push(call.full_name());
            }
            _ => {}
        }
        Ok(())
    }
}

/// Returns `true` if the host waits for a copy to its memory: the device can copy to pageable memory only while it
/// waits.
fn waits(is_blocking: bool, is_pageable: bool) -> bool {
    is_blocking || is_pageable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_of_values_of_sizes_and_of_masks_are_counted_and_arithmetic_is_not() {
        let x = Tensor::from_slice(&[1.0_f32, 0.0, 2.0]).set_requires_grad(true);
        let reads = HostReads::of(Device::Cpu);
        let loss = (&x * &x).sum(Kind::Float);
        loss.backward();
        assert!(reads.names().is_empty(), "{:?}", reads.names());
        let _ = loss.double_value(&[]);
        let _ = x.nonzero();
        let _ = x.equal(&x);
        let mask = x.gt(0.0);
        let _ = x.index(&[Some(&mask)]);
        let _ = x.index(&[Some(Tensor::from_slice(&[0_i64]))]);
        let _ = x.masked_select(&mask);
        assert_eq!(
            reads.names(),
            [
                "aten::_local_scalar_dense",
                "aten::nonzero",
                "aten::equal",
                "aten::index.Tensor",
                "aten::masked_select"
            ]
        );
        drop(reads);
        let _ = loss.double_value(&[]);
    }

    #[test]
    fn copies_to_the_host_are_counted_on_a_cpu_too() {
        let x = Tensor::from_slice(&[1.0_f32, 2.0]);
        let reads = HostReads::of(Device::Cpu);
        let mut other = x.empty_like();
        other.copy_(&x);
        assert!(reads.names().is_empty(), "{:?}", reads.names());
        let host = overdrive_sys::transfer::to_host(&x).unwrap();
        assert_eq!(reads.names(), ["aten::copy_"]);
        drop(reads);
        assert_eq!((&host, &other), (&x, &x));
    }

    #[test]
    fn the_host_waits_for_every_copy_but_an_asynchronous_one_to_pinned_memory() {
        assert_eq!(
            [(true, true), (true, false), (false, true)].map(|(b, p)| waits(b, p)),
            [true; 3]
        );
        assert!(!waits(false, false));
    }

    #[test]
    #[ignore = "needs a CUDA GPU"]
    fn an_asynchronous_copy_to_pinned_memory_is_no_read_on_a_gpu() {
        use overdrive_sys::op::{Value, call};
        let gpu = Device::Cuda(0);
        let there = Tensor::ones([2], (Kind::Float, gpu));
        let mut host = overdrive_sys::transfer::empty_pinned(&[2], Kind::Float).unwrap();
        let reads = HostReads::of(gpu);
        let arguments = [
            Value::Tensor(&host),
            Value::Tensor(&there),
            Value::Bool(true),
        ];
        call("aten::copy_", "", &arguments).unwrap();
        let _there = there.to_device_(Device::Cpu, Kind::Float, true, false);
        assert!(reads.names().is_empty(), "{:?}", reads.names());
        host.copy_(&there);
        let _here = there.to_device(Device::Cpu);
        assert_eq!(reads.names(), ["aten::copy_", "aten::_to_copy"]);
    }

    #[test]
    #[ignore = "needs a CUDA GPU"]
    fn uploads_from_pageable_memory_are_counted_on_a_gpu() {
        let gpu = Device::Cuda(0);
        let x = Tensor::from_slice(&[1.0_f32, 2.0]);
        let mut there = Tensor::zeros([2], (Kind::Float, gpu));
        let reads = HostReads::of(gpu);
        let pinned = overdrive_sys::transfer::to_device(x.shallow_clone(), gpu).unwrap();
        there.copy_(&pinned);
        assert!(reads.uploads().is_empty(), "{:?}", reads.uploads());
        there.copy_(&x);
        let _copy = x.to_device(gpu);
        assert_eq!(reads.uploads(), ["aten::copy_", "aten::_to_copy"]);
        assert!(reads.names().is_empty(), "{:?}", reads.names());
    }

    #[test]
    fn reads_inside_backward_are_counted() {
        use tch::Reduction;
        let x = Tensor::ones([2, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
        let labels = Tensor::from_slice(&[0_i64, 2]);
        let reads = HostReads::of(Device::Cpu);
        let loss = x.cross_entropy_loss(&labels, None::<&Tensor>, Reduction::Mean, -100, 0.0);
        loss.backward();
        assert!(reads.names().is_empty(), "{:?}", reads.names());
    }
}
