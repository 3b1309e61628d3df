//! Recommended settings by device, model and task.

mod device;
mod devices_and_models;
mod settings;
#[cfg(test)]
mod tests;

pub use device::{DeviceFacts, DeviceKind};
pub use devices_and_models::{DEVICES, MODELS, ModelSize};
pub use settings::{RecommendedSettings, Task, TrainedWeights};
