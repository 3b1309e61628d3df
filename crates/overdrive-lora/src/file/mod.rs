//! PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`.

mod experts;
mod keys;
mod load;
mod modules;
mod save;
mod tokens;

pub use load::{LoadAdapterOptions, LoadedAdapter, load_adapter, read_config};
pub use save::save_adapter;

/// The name of the file with the configuration.
pub(crate) const CONFIG: &str = "adapter_config.json";
/// The name of the file with the tensors.
pub(crate) const WEIGHTS: &str = "adapter_model.safetensors";
