//! Automatic mixed precision for `tch`: what `torch.amp` is to PyTorch.
//!
//! * [`autocast()`] and [`Autocast`] – guards of regions in which operators run in fp16 or bf16, on any device,
//!   with a chosen dtype, nested, switched off inside, and restored by an early return or a panic;
//! * [`GradScaler`] – dynamic loss scaling for fp16, equal to PyTorch's step for step, with overflow
//!   statistics and a warning when the scale collapses;
//! * [`Precision`] – fp32, TF32, fp16, bf16 or FP8, and the recommendation for a device, with its reason
//!   ([`GPU_GENERATIONS`], [`CpuClass`]);
//! * [`tf32`] – the switches for TF32 and for the precision of fp32 matrix products.
//!
//! tch's own `autocast` works on CUDA alone, cannot choose the dtype, and stays on after a panic.
//!
//! # A training step in mixed precision
//!
//! ```
//! use overdrive_optim::{AdamW, AdamWConfig, Optimizer, ParamGroup};
//! use overdrive_precision::{GradScaler, GradScalerConfig, Precision};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::cuda_if_available();
//! let choice = Precision::recommend(device);
//! println!("{}: {}", choice.precision, choice.reason);
//!
//! let weight = Tensor::ones([4, 4], (Kind::Float, device)).set_requires_grad(true);
//! let groups = vec![ParamGroup::new("all", vec![("weight".to_owned(), weight.shallow_clone())])];
//! let mut optimizer = AdamW::new(groups, AdamWConfig::default())?;
//! let mut scaler = GradScaler::new(GradScalerConfig {
//!     enabled: choice.precision.needs_grad_scaler(),
//!     ..GradScalerConfig::default()
//! })?;
//!
//! let x = Tensor::ones([2, 4], (Kind::Float, device));
//! let loss = {
//!     let _autocast = choice.precision.autocast(device)?;
//!     x.f_linear::<Tensor>(&weight, None)?.f_sum(Kind::Float)?
//! };
//! scaler.scale(&loss)?.f_backward()?;
//! scaler.step(&mut optimizer)?;
//! scaler.update()?;
//! optimizer.zero_grad()?;
//! # Ok(())
//! # }
//! ```
//!
//! Micikevicius et al., *Mixed Precision Training*, 2018, <https://arxiv.org/abs/1710.03740>;
//! [`torch.amp`](https://pytorch.org/docs/stable/amp.html).
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod autocast;
mod cpu_class;
mod cpu_speed;
mod error;
mod grad_scaler;
mod precision;
mod scale_monitor;
mod scaler_config;
mod scaler_statistics;
pub mod tf32;
mod unscale;

pub use autocast::{Autocast, AutocastGuard, autocast, is_autocast_enabled};
pub use cpu_class::CpuClass;
pub use error::{Error, Result};
pub use grad_scaler::{GradScaler, StepOutcome};
pub use overdrive_build::MatmulSpeed;
pub use overdrive_core::gpu_peaks::{GPU_GENERATIONS, GpuGeneration};
pub use precision::{ParsePrecisionError, Precision, Recommendation};
pub use scaler_config::{GradScalerConfig, GradScalerState};
pub use scaler_statistics::{
    CollapseKind, CollapseThresholds, ScaleChange, ScaleWarning, ScalerStatistics,
};
