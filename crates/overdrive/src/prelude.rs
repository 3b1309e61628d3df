//! The items that most training loops use, for `use overdrive::prelude::*`.

#[cfg(feature = "datasets")]
pub use overdrive_datasets::prelude::*;
#[cfg(feature = "optim")]
pub use overdrive_optim::{
    AdamW, AdamWConfig, ClipOptions, Optimizer, ParamGroup, clip_grad_norm, decay_groups,
};
#[cfg(feature = "precision")]
pub use overdrive_precision::{Autocast, GradScaler, GradScalerConfig, Precision, autocast};
