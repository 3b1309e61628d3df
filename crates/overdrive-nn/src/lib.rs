//! The layers of a model: linear layers with dense or quantized weights, and embeddings.
//!
//! [`Linear`] is the one linear layer of this workspace. Its weight ([`LinearWeight`]) is dense or quantized,
//! and an [`Adapter`] may change its output: overdrive-lora implements that trait. Layers of the same input
//! (query, key and value; gate and up) are computed by one matmul with [`joint_forward`].
//!
//! ```
//! use overdrive_nn::Linear;
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let weight = Tensor::randn([96, 64], (Kind::Float, Device::Cpu));
//! let dense = Linear::dense(weight.shallow_clone(), None)?;
//! let quantized = Linear::quantize(&weight, None, "int8".parse()?)?;
//!
//! let x = Tensor::randn([3, 64], (Kind::Float, Device::Cpu));
//! let error = (dense.forward(&x)? - quantized.forward(&x)?).abs().max();
//! assert!(error.double_value(&[]) < 1.0);
//! assert!(quantized.bytes() * 3 < dense.bytes());
//! # Ok(())
//! # }
//! ```
//!
//! A model gives access to its layers through [`AdapterHost`]; adapters, quantization and exporters work with any
//! model that implements it.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod adapter;
mod adapter_rows;
mod embedding;
mod error;
mod host;
mod joint;
mod linear;
pub mod multimodal;
mod row_choice;
mod rows;
mod weight;

pub use adapter::Adapter;
pub use adapter_rows::{AdapterRows, AdapterRowsScope};
pub use embedding::Embedding;
pub use error::{Error, Result};
pub use host::{AdapterHost, AdapterState};
pub use joint::{joint_base, joint_forward};
pub use linear::Linear;
pub use row_choice::{RowChoice, RowUpdate};
pub use rows::joint_forward_into;
pub use weight::LinearWeight;
