//! Batches that are ready before they are asked for.

mod data_loader;
#[cfg(feature = "tch")]
mod device_loader;
mod options;
mod pad;
mod rows;
#[cfg(feature = "tch")]
mod token_tensors;
mod workers;

pub use data_loader::{DataLoader, Epoch, LoaderState, LoaderStats};
#[cfg(feature = "tch")]
pub use device_loader::{DeviceLoader, OnDevice, PaddedTensors};
pub use options::DataLoaderOptions;
pub use pad::{PadOptions, PadSide, PaddedBatch, pad_sequences};
pub use rows::{RowLayout, SequenceRows, collate_rows};
