//! The five nouns of a training loop, for `use overdrive_datasets::prelude::*`: a [`Dataset`] has records,
//! [`DatasetExt`] transforms them, a [`DataLoader`] with [`DataLoaderOptions`] makes batches, and a [`DeviceLoader`]
//! copies them to a device.
//!
//! ```
//! use overdrive_datasets::InMemory;
//! use overdrive_datasets::prelude::*;
//! use tch::{Device, Tensor};
//!
//! let squares = InMemory((0..10).collect()).map(|number: i64| Ok(number * number));
//! let options = DataLoaderOptions { batch_size: 4, shuffle: true, ..Default::default() };
//! let loader = DataLoader::with_collate(squares, |rows| Ok(Tensor::from_slice(&rows)), options)?;
//! let mut sum = 0;
//! for batch in DeviceLoader::new(loader, Device::Cpu) {
//!     sum += batch?.sum(tch::Kind::Int64).int64_value(&[]);
//! }
//! assert_eq!(sum, 285);
//! # Ok::<(), overdrive_datasets::Error>(())
//! ```

pub use crate::dataset::Dataset;
#[cfg(feature = "tch")]
pub use crate::loader::DeviceLoader;
pub use crate::loader::{DataLoader, DataLoaderOptions};
pub use crate::transform::DatasetExt;
