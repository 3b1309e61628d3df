//! Host copies of the tensors of a snapshot, so that training can change the originals while the copies are written.

use std::collections::HashMap;

use overdrive_optim::StateDict;
use overdrive_sys::transfer::{CopyEvent, copy_async, empty_pinned};
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::contents::{Content, Entry};

/// The host tensors of the last snapshot, which are reused: allocating new memory costs more than the copy.
#[derive(Debug)]
pub(crate) struct Staging {
    /// The free tensors, by the names of the entry and the tensor.
    free: HashMap<(String, String), Staged>,
    budget: PinnedBudget,
    /// The page-locked tensors that are being written, by the same names.
    pinned: HashMap<(String, String), u64>,
}

#[derive(Debug)]
struct Staged {
    tensor: Tensor,
    /// The bytes of page-locked memory that the tensor takes; 0 in ordinary memory.
    pinned_bytes: u64,
}

/// The page-locked memory that is still available.
#[derive(Debug)]
struct PinnedBudget {
    left: u64,
}

impl PinnedBudget {
    /// Reserves memory for a tensor of `bytes`, and returns the reserved amount; 0 if too little is left.
    fn take(&mut self, bytes: u64) -> u64 {
        // libtorch's allocator rounds up to a power of two.
        let taken = bytes.checked_next_power_of_two().unwrap_or(u64::MAX);
        if bytes == 0 || taken > self.left {
            return 0;
        }
        self.left -= taken;
        taken
    }

    fn give_back(&mut self, taken: u64) {
        self.left += taken;
    }
}

/// The event at the end of the last copy on each device; the copies of one device run in order.
type Ends = Vec<(Device, CopyEvent)>;

impl Staging {
    /// Returns a staging area with at most this many bytes of page-locked memory.
    pub(crate) fn new(max_pinned_bytes: u64) -> Self {
        Self {
            free: HashMap::new(),
            budget: PinnedBudget {
                left: max_pinned_bytes,
            },
            pinned: HashMap::new(),
        }
    }

    /// Copies all tensors of the entries to the host. Copies from a GPU may be read once the events have completed;
    /// later work on the GPU's current stream waits for them, but the host does not.
    pub(crate) fn copy(&mut self, entries: Vec<Entry>) -> Result<(Vec<Entry>, Vec<CopyEvent>)> {
        let _no_grad = tch::no_grad_guard();
        let mut ends = Ends::new();
        let mut copied = Vec::with_capacity(entries.len());
        for entry in entries {
            let mut copy = |(name, tensor): (String, Tensor)| -> Result<(String, Tensor)> {
                let copy = self.copy_tensor(&entry.name, &name, &tensor, &mut ends)?;
                Ok((name, copy))
            };
            let content = match entry.content {
                Content::Tensors(tensors) => {
                    Content::Tensors(tensors.into_iter().map(copy).collect::<Result<_>>()?)
                }
                Content::State(StateDict { tensors, metadata }) => Content::State(StateDict {
                    tensors: tensors.into_iter().map(&mut copy).collect::<Result<_>>()?,
                    metadata,
                }),
                bytes => bytes,
            };
            copied.push(Entry { content, ..entry });
        }
        for (device, end) in &ends {
            end.wait_on(*device)?;
        }
        Ok((copied, ends.into_iter().map(|(_, end)| end).collect()))
    }

    fn copy_tensor(
        &mut self,
        entry: &str,
        name: &str,
        tensor: &Tensor,
        ends: &mut Ends,
    ) -> Result<Tensor> {
        // Detached, so that a copy does not keep an autograd graph alive.
        let tensor = tensor.f_detach()?;
        let key = (entry.to_owned(), name.to_owned());
        let (size, kind, device) = (tensor.size(), tensor.f_kind()?, tensor.device());
        let Staged {
            tensor: copy,
            pinned_bytes,
        } = self.host_tensor(&key, &size, kind, device)?;
        if pinned_bytes > 0 {
            self.pinned.insert(key, pinned_bytes);
        }
        let end = copy_async(&tensor, &copy)?;
        ends.retain(|(other, _)| *other != device);
        ends.push((device, end));
        Ok(copy)
    }

    /// Returns the free tensor of this name, or a new one.
    fn host_tensor(
        &mut self,
        key: &(String, String),
        size: &[i64],
        kind: Kind,
        device: Device,
    ) -> Result<Staged> {
        if let Some(free) = self.free.remove(key) {
            // A parameter may have changed its shape or kind since the last snapshot.
            if free.tensor.size() == size && free.tensor.f_kind()? == kind {
                return Ok(free);
            }
            self.budget.give_back(free.pinned_bytes);
        }
        if device.is_cuda() {
            let elements: i64 = size.iter().product();
            let bytes = elements.unsigned_abs() * kind.elt_size_in_bytes() as u64;
            let pinned_bytes = self.budget.take(bytes);
            if pinned_bytes > 0 {
                if let Ok(tensor) = empty_pinned(size, kind) {
                    return Ok(Staged {
                        tensor,
                        pinned_bytes,
                    });
                }
                // The system cannot lock more pages, so the rest of the snapshot goes to ordinary memory.
                self.budget.left = 0;
            }
        }
        Ok(Staged {
            tensor: Tensor::f_empty(size, (kind, Device::Cpu))?,
            pinned_bytes: 0,
        })
    }

    /// Takes the copies back when they have been written.
    pub(crate) fn reuse(&mut self, entries: Vec<Entry>) {
        for entry in entries {
            let mut keep = |name: String, tensor: Tensor| {
                let key = (entry.name.clone(), name);
                let pinned_bytes = self.pinned.remove(&key).unwrap_or(0);
                let staged = Staged {
                    tensor,
                    pinned_bytes,
                };
                self.free.insert(key, staged);
            };
            match entry.content {
                Content::Tensors(tensors) => tensors.into_iter().for_each(|(n, t)| keep(n, t)),
                Content::State(state) => state.tensors.into_iter().for_each(|(n, t)| keep(n, t)),
                Content::Document(_) | Content::File(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_memory_is_bounded_and_counted_as_it_is_allocated() {
        let mut budget = PinnedBudget { left: 100 };
        assert_eq!(budget.take(33), 64);
        // Rounded up, it would be 64 again.
        assert_eq!(budget.take(36), 0);
        assert_eq!(budget.take(32), 32);
        assert_eq!(budget.take(0), 0);
        assert_eq!(budget.take(u64::MAX), 0);
        budget.give_back(64);
        assert_eq!(budget.take(36), 64);
        assert_eq!(budget.left, 4);
    }
}
