//! Batches on a device, copied there while the one before is used.

use tch::{Device, Tensor};

use super::{DataLoader, LoaderState, LoaderStats, PaddedBatch};
use crate::Result;

/// A batch made of tensors, which can go to a device.
pub trait OnDevice: Sized + Send + 'static {
    /// In page-locked host memory, from which a GPU copies without the processor's help.
    ///
    /// # Errors
    /// When there is none.
    fn pinned(self) -> Result<Self>;

    /// On `device`. With `non_blocking`, the copy from page-locked memory may still be under way when
    /// this returns; what is queued on the device's current stream afterwards sees it done.
    ///
    /// # Errors
    /// When the device has no memory for it.
    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self>;
}

impl OnDevice for Tensor {
    fn pinned(self) -> Result<Self> {
        // The device argument is of another time: libtorch pins for the accelerator that it has.
        Ok(self.f_pin_memory(Device::Cuda(0))?)
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        let kind = self.f_kind()?;
        Ok(self.f_to_device_(device, kind, non_blocking, false)?)
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

/// A [`PaddedBatch`] as tensors. B: sequences, T: the length of the longest.
#[derive(Debug)]
pub struct PaddedTensors {
    /// (B, T), Int64.
    pub input_ids: Tensor,
    /// (B, T), Int64: 1 where a token is, 0 where there is none.
    pub attention_mask: Tensor,
    /// (B, T), Int64: the tokens, [`crate::IGNORE_INDEX`] where there is none. Not shifted.
    pub labels: Tensor,
    /// How many tokens are no padding, counted on the host.
    pub tokens: usize,
}

impl PaddedTensors {
    /// The batch as tensors in host memory.
    ///
    /// # Errors
    /// When libtorch has no memory for them.
    pub fn from_padded(batch: &PaddedBatch) -> Result<Self> {
        let shape = [batch.rows as i64, batch.columns as i64];
        let block = |numbers: &[i64]| Tensor::f_from_slice(numbers)?.f_view(shape);
        Ok(Self {
            input_ids: block(&batch.input_ids)?,
            attention_mask: block(&batch.attention_mask)?,
            labels: block(&batch.labels())?,
            tokens: batch.tokens,
        })
    }
}

impl OnDevice for PaddedTensors {
    fn pinned(self) -> Result<Self> {
        Ok(Self {
            input_ids: self.input_ids.pinned()?,
            attention_mask: self.attention_mask.pinned()?,
            labels: self.labels.pinned()?,
            tokens: self.tokens,
        })
    }

    fn on_device(self, device: Device, non_blocking: bool) -> Result<Self> {
        Ok(Self {
            input_ids: self.input_ids.on_device(device, non_blocking)?,
            attention_mask: self.attention_mask.on_device(device, non_blocking)?,
            labels: self.labels.on_device(device, non_blocking)?,
            tokens: self.tokens,
        })
    }
}

/// A loader whose batches come on a device.
///
/// On a GPU, the copy of the next batch is queued before this one is handed out, from page-locked
/// memory (`pin_memory` of PyTorch), so that it runs beside the step. On the CPU nothing is copied.
/// [`DeviceLoader::state_dict`] counts what has been handed out: the batch whose copy is under way
/// comes again after a stop.
///
/// ```
/// use overdrive_datasets::{
///     DataLoader, DataLoaderOptions, DeviceLoader, PadOptions, PaddedTensors, TextLines,
///     TextOptions, pad_sequences,
/// };
/// # use overdrive_datasets::Dataset;
/// # let dir = tempfile::tempdir().unwrap();
/// # let path = dir.path().join("lines.txt");
/// # std::fs::write(&path, "some\nlines\n").unwrap();
/// let lines = TextLines::open([&path], &TextOptions::default())?;
/// let options = DataLoaderOptions { batch_size: 2, num_workers: 1, ..Default::default() };
/// let collate = |lines: Vec<String>| {
///     let tokens: Vec<Vec<u32>> = lines.iter().map(|line| line.bytes().map(u32::from).collect()).collect();
///     PaddedTensors::from_padded(&pad_sequences(&tokens, &PadOptions::default())?)
/// };
/// let batches = options.batches(lines.len())?;
/// let loader = DataLoader::with(lines, batches, collate, options)?;
/// let mut loader = DeviceLoader::new(loader, tch::Device::Cpu);
/// let batch = loader.next_batch().expect("an epoch of one batch")?;
/// assert_eq!(batch.input_ids.size(), [2, 5]);
/// assert_eq!(batch.tokens, 9);
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct DeviceLoader<T> {
    loader: DataLoader<T>,
    device: Device,
    pin_memory: bool,
    /// What is on its way: the next batch, or the end of the epoch, and the state behind it.
    next: Option<(Option<Result<T>>, LoaderState)>,
    state: LoaderState,
}

impl<T: OnDevice> DeviceLoader<T> {
    /// Batches of `loader` on `device`.
    pub fn new(loader: DataLoader<T>, device: Device) -> Self {
        Self {
            state: loader.state_dict(),
            loader,
            device,
            pin_memory: true,
            next: None,
        }
    }

    /// Whether batches for a GPU go through page-locked memory, from where it copies them while it
    /// computes (`pin_memory` of PyTorch); without, each copy is waited for. Default: true.
    #[must_use]
    pub fn with_pin_memory(mut self, pin_memory: bool) -> Self {
        self.pin_memory = pin_memory;
        self
    }

    /// The next batch of this epoch; `None` at its end, and then the first one of the next epoch.
    pub fn next_batch(&mut self) -> Option<Result<T>> {
        let (batch, state) = match self.next.take() {
            Some(next) => next,
            None => self.start_copy(),
        };
        self.state = state;
        // Without a copy there is nothing to gain from being ahead, and a batch more in memory.
        if self.device.is_cuda() {
            self.next = Some(self.start_copy());
        }
        batch
    }

    fn start_copy(&mut self) -> (Option<Result<T>>, LoaderState) {
        let batch = self.loader.next_batch();
        let device = self.device;
        let batch = batch.map(|batch| match device.is_cuda() && self.pin_memory {
            true => batch?.pinned()?.on_device(device, true),
            false => batch?.on_device(device, false),
        });
        (batch, self.loader.state_dict())
    }

    /// How far it has come.
    pub fn state_dict(&self) -> LoaderState {
        self.state
    }

    /// Goes on at `state`, with exactly the batches that came after it.
    ///
    /// # Errors
    /// As [`DataLoader::load_state_dict`].
    pub fn load_state_dict(&mut self, state: LoaderState) -> Result<()> {
        self.loader.load_state_dict(state)?;
        self.next = None;
        self.state = state;
        Ok(())
    }

    /// What the loader has done so far; on a GPU it is one batch ahead.
    pub fn stats(&self) -> LoaderStats {
        self.loader.stats()
    }

    /// The loader in host memory.
    pub fn loader(&self) -> &DataLoader<T> {
        &self.loader
    }
}
