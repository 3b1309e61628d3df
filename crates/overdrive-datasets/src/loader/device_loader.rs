//! A loader of batches on a device, which are copied while the previous one is used.

use overdrive_sys::transfer::{self, CopyEvent};
use tch::{Device, Tensor};

use super::{DataLoader, LoaderState, LoaderStats};
use crate::{MixtureSampler, Result};

/// A batch of tensors that can be copied to a device.
pub trait OnDevice: Sized + Send + 'static {
    /// Copies the batch to page-locked (pinned) host memory, from which a GPU copies asynchronously.
    ///
    /// # Errors
    /// Returns an error if there is no page-locked memory.
    fn pinned(self) -> Result<Self>;

    /// Copies the batch to `device`. With `non_blocking`, the copy from page-locked memory may still be running
    /// on return; kernels that are launched on the device's current stream afterwards run after it.
    ///
    /// A batch that is already on `device` stays there. It may have been allocated on another stream, that of the
    /// copies; this call records its use on the current stream, so that its memory is not reused before that stream
    /// has read it.
    ///
    /// # Errors
    /// Returns an error if the device has no memory for it.
    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self>;
}

impl OnDevice for Tensor {
    fn pinned(self) -> Result<Self> {
        Ok(transfer::pin_memory(&self)?)
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        let kind = self.f_kind()?;
        let there = self.f_to_device_(device, kind, non_blocking, false)?;
        transfer::record_stream(&there)?;
        Ok(there)
    }
}

impl<T: OnDevice> OnDevice for Vec<T> {
    fn pinned(self) -> Result<Self> {
        self.into_iter().map(T::pinned).collect()
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        let move_one = |tensor: T| tensor.on_device(device, non_blocking);
        self.into_iter().map(move_one).collect()
    }
}

/// A batch of two parts, such as inputs and labels.
impl<A: OnDevice, B: OnDevice> OnDevice for (A, B) {
    fn pinned(self) -> Result<Self> {
        Ok((self.0.pinned()?, self.1.pinned()?))
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        let first = self.0.on_device(device, non_blocking)?;
        Ok((first, self.1.on_device(device, non_blocking)?))
    }
}

/// Implements [`OnDevice`] for a batch with a method `map_tensors`, which changes each of its tensors.
macro_rules! on_device_by_map {
    ($batch:ty) => {
        impl crate::OnDevice for $batch {
            fn pinned(self) -> crate::Result<Self> {
                self.map_tensors(crate::OnDevice::pinned)
            }

            fn on_device(self, device: tch::Device, non_blocking: bool) -> crate::Result<Self> {
                self.map_tensors(|tensor| tensor.on_device(device, non_blocking))
            }
        }
    };
}
pub(super) use on_device_by_map;

/// A loader whose batches are on a device.
///
/// On a GPU, the copy of the next batch from page-locked memory (`pin_memory` of PyTorch) is queued on a separate
/// stream before the current batch is returned, so that it runs while the GPU computes the training step. The step of
/// the next batch waits for its copy on the device, not on the host. On the CPU nothing is copied.
/// [`DeviceLoader::state_dict`] counts only the returned batches: a batch whose copy is running is returned again
/// after a restart.
///
/// The iterator yields the batches of one pass and then `None`; iterating again yields those of the next
/// pass. An [`DeviceLoader::endless`] loader yields pass after pass without a `None` between them.
///
/// ```
/// use overdrive_datasets::prelude::*;
/// use overdrive_datasets::{RowLayout, TextLines, TextOptions, TokenizedExample, collate};
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("lines.txt");
/// # std::fs::write(&path, "some\nlines\n").unwrap();
/// let lines = TextLines::open([&path], &TextOptions::default())?;
/// // A byte is a token here.
/// let rows = lines.map(|line| {
///     let tokens: Vec<u32> = line.bytes().map(u32::from).collect();
///     Ok(TokenizedExample::from(tokens))
/// });
/// let options = DataLoaderOptions { batch_size: 2, num_workers: 1, ..Default::default() };
/// let padded = |rows: Vec<_>| collate(&rows, RowLayout::default());
/// let loader = DataLoader::with_collate(rows, padded, options)?;
/// let mut loader = DeviceLoader::new(loader, tch::Device::Cpu).endless();
/// for batch in loader.by_ref().take(3) {
///     let batch = batch?;
///     assert_eq!(batch.input_ids.size(), [2, 5]);
///     assert_eq!(batch.tokens, 9);
/// }
/// assert_eq!(loader.state_dict().epoch, 2); // one batch a pass
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceLoader<T> {
    loader: DataLoader<T>,
    device: Device,
    pin_memory: bool,
    endless: bool,
    mixture: Option<MixtureSampler>,
    /// If `true`, the copy of the next batch starts before the current batch is returned. Without a copy,
    /// preparing a batch ahead would gain nothing and cost its memory.
    ahead: bool,
    /// The next batch, whose copy has started, or the end of the epoch, and the state after it.
    next: Option<(Option<Result<Copying<T>>>, LoaderState)>,
    state: LoaderState,
}

/// A batch whose copy to the device has started.
#[derive(Debug)]
struct Copying<T> {
    batch: T,
    /// The end of the copy on the stream of the copies; `None` for a copy on the current stream.
    end: Option<CopyEvent>,
}

impl<T: OnDevice> DeviceLoader<T> {
    /// Returns a loader that copies the batches of `loader` to `device`.
    pub fn new(loader: DataLoader<T>, device: Device) -> Self {
        Self {
            state: loader.state_dict(),
            loader,
            device,
            pin_memory: true,
            endless: false,
            mixture: None,
            ahead: device.is_cuda(),
            next: None,
        }
    }

    /// Sets whether batches for a GPU go through page-locked memory (`pin_memory` of PyTorch), from
    /// which they are copied while the GPU computes; without it, each copy is waited for. Default: true.
    #[must_use]
    pub fn with_pin_memory(mut self, pin_memory: bool) -> Self {
        self.pin_memory = pin_memory;
        self
    }

    /// Sets the order of the records, by which [`source_epochs`](Self::source_epochs) counts the passes over each source.
    #[must_use]
    pub fn with_mixture(mut self, order: MixtureSampler) -> Self {
        self.mixture = Some(order);
        self
    }

    /// Lets the iterator continue with the next pass where one ends, for a training loop that counts
    /// steps. [`DeviceLoader::next_batch`] still returns `None` at the end of each pass.
    #[must_use]
    pub fn endless(mut self) -> Self {
        self.endless = true;
        self
    }

    /// Returns the next `count` batches of this epoch, such as the micro-batches of an optimizer step: fewer at its
    /// end, and then those of the next epoch. It is empty only if an epoch has no batches.
    ///
    /// # Errors
    /// Returns the error of the first batch that failed.
    pub fn next_batches(&mut self, count: usize) -> Result<Vec<T>> {
        let mut batches = Vec::new();
        let mut ended = false;
        while batches.len() < count {
            match self.next_batch() {
                Some(batch) => batches.push(batch?),
                // The previous call took the last batch of its epoch, and not the end after it.
                None if batches.is_empty() && !ended => ended = true,
                None => break,
            }
        }
        Ok(batches)
    }

    /// Returns the next batch of this epoch; `None` at its end, and then the first one of the next epoch.
    pub fn next_batch(&mut self) -> Option<Result<T>> {
        let (batch, state) = match self.next.take() {
            Some(next) => next,
            None => self.start_copy(),
        };
        self.state = state;
        // Finished before the next copy starts, because the stream of the copies waits for the work
        // of the current stream.
        let batch = batch.map(|batch| self.finish_copy(batch?));
        if self.ahead {
            self.next = Some(self.start_copy());
        }
        batch
    }

    fn start_copy(&mut self) -> (Option<Result<Copying<T>>>, LoaderState) {
        let batch = self.loader.next_batch();
        let device = self.device;
        let copy = |batch: T| -> Result<Copying<T>> {
            if !self.ahead || !self.pin_memory {
                let batch = batch.on_device(device, false)?;
                return Ok(Copying { batch, end: None });
            }
            let pinned = batch.pinned()?;
            let (batch, end) = transfer::on_side_stream(device, || pinned.on_device(device, true))?;
            Ok(Copying {
                batch: batch?,
                end: Some(end),
            })
        };
        let batch = batch.map(|batch| copy(batch?));
        (batch, self.loader.state_dict())
    }

    /// Lets the current stream of the device wait for the copy.
    fn finish_copy(&self, copying: Copying<T>) -> Result<T> {
        let Some(end) = copying.end else {
            return Ok(copying.batch);
        };
        end.wait_on(self.device)?;
        copying.batch.on_device(self.device, true)
    }

    /// Returns the position in the data: only batches that were handed out count.
    pub fn state_dict(&self) -> LoaderState {
        self.state
    }

    /// Returns the passes over each source of a mixture so far, as [`MixtureSampler::source_epochs`] does; an empty list
    /// without [`with_mixture`](Self::with_mixture).
    pub fn source_epochs(&self) -> Vec<(String, f64)> {
        let order = self.mixture.as_ref();
        order.map_or_else(Vec::new, |order| order.source_epochs(&self.state))
    }

    /// Resumes from `state`, with exactly the batches that came after it.
    ///
    /// # Errors
    /// Those of [`DataLoader::load_state_dict`].
    pub fn load_state_dict(&mut self, state: LoaderState) -> Result<()> {
        self.loader.load_state_dict(state)?;
        self.next = None;
        // Not `state`: its position may be counted in batches of another size.
        self.state = self.loader.state_dict();
        Ok(())
    }

    /// Returns the statistics of the loader; on a GPU it is one batch ahead.
    pub fn stats(&self) -> LoaderStats {
        self.loader.stats()
    }

    /// Returns the number of batches of the current pass, on this process.
    pub fn batches_per_epoch(&self) -> usize {
        self.loader.len()
    }

    /// Returns the loader in host memory.
    pub fn loader(&self) -> &DataLoader<T> {
        &self.loader
    }
}

impl<T: OnDevice> Iterator for DeviceLoader<T> {
    type Item = Result<T>;

    fn next(&mut self) -> Option<Result<T>> {
        match self.next_batch() {
            // The first batch of the next pass; `None` again if a pass has no batches.
            None if self.endless => self.next_batch(),
            batch => batch,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{DataLoaderOptions, Dataset};

    struct Numbers;

    impl Dataset for Numbers {
        type Item = usize;

        fn len(&self) -> usize {
            3
        }

        fn get(&self, index: usize) -> Result<usize> {
            Ok(index)
        }
    }

    type Calls = Arc<Mutex<Vec<(usize, &'static str)>>>;

    /// A batch that records the operations on it.
    #[derive(Debug)]
    struct Noted {
        number: usize,
        calls: Calls,
    }

    impl Noted {
        fn note(self, call: &'static str) -> Self {
            let mut calls = self.calls.lock().expect("no other thread");
            calls.push((self.number, call));
            drop(calls);
            self
        }
    }

    impl OnDevice for Noted {
        fn pinned(self) -> Result<Self> {
            Ok(self.note("pinned"))
        }

        fn on_device(self, _: Device, non_blocking: bool) -> Result<Self> {
            Ok(self.note(if non_blocking { "queued" } else { "copied" }))
        }
    }

    #[test]
    fn the_next_batch_is_queued_while_the_current_one_is_used() {
        for (pin_memory, own) in [
            (true, &["pinned", "queued", "queued"][..]),
            (false, &["copied"][..]),
        ] {
            let calls = Calls::default();
            let options = DataLoaderOptions {
                batch_size: 1,
                ..Default::default()
            };
            let of_batch = Arc::clone(&calls);
            let noted = move |rows: Vec<usize>| {
                Ok(Noted {
                    number: rows[0],
                    calls: Arc::clone(&of_batch),
                })
            };
            let loader = DataLoader::with_collate(Numbers, noted, options).expect("three");
            let loader = DeviceLoader::new(loader, Device::Cpu);
            // Works as on a GPU, but with a stream of the CPU, which runs its work at once.
            let mut loader = DeviceLoader {
                ahead: true,
                ..loader.with_pin_memory(pin_memory)
            };
            let first = loader.next_batch().expect("a batch").expect("no error");
            assert_eq!((first.number, loader.state_dict().next_batch), (0, 1));
            let found = calls.lock().expect("no other thread").clone();
            let of = |number| {
                let calls = found.iter().filter(move |(other, _)| *other == number);
                calls.map(|(_, call)| *call).collect::<Vec<_>>()
            };
            // The second batch was copied but not yet returned, and the third not even begun.
            assert_eq!(of(0), own);
            assert_eq!(of(1), &own[..own.len().min(2)]);
            assert!(of(2).is_empty());
            assert_eq!(loader.by_ref().count(), 2);
        }
    }
}
