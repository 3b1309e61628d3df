//! Low-rank adapters for tch in PEFT's file format: LoRA, rsLoRA, DoRA, and QLoRA over quantized weights.
//!
//! A linear layer keeps its weight frozen and learns an update to it, the product of two thin matrices. This takes
//! about a thousandth of the parameters, the optimizer state and the file size. A model can have several such
//! adapters, which can be switched at run time, combined, or merged into the weights.
//!
//! | item | equals |
//! |---|---|
//! | [`LoraConfig`] | PEFT's `LoraConfig`, in `adapter_config.json` |
//! | [`add_lora`] | `get_peft_model` |
//! | [`add_adapter`], [`set_adapter`], [`disable_adapters`], [`delete_adapter`] | the same names |
//! | [`save_adapter`], [`load_adapter`] | `save_pretrained`, `PeftModel.from_pretrained`, with the same files |
//! | [`load_adapter_for_rows`] | `adapter_names`: each row of a batch chooses its adapter |
//! | [`merge_adapters`], [`unmerge_adapters`], [`merge_and_unload`], [`unload`] | the same, also for quantized weights |
//! | [`add_weighted_adapter`] | `add_weighted_adapter` |
//! | [`trainable_parameters`], [`parameter_counts`] | `named_parameters`, `print_trainable_parameters` |
//! | [`lora_adapter`] | the `lora_A` and `lora_B` of one [`Linear`](overdrive_nn::Linear) layer |
//! | [`set_adapter_scale`] | `set_scale`, for the whole model |
//!
//! Learning rates of their own for the matrices B (LoRA+) are groups of parameters, which overdrive-optim forms
//! (`parameter_groups.rs`).
//!
//! It works with any model that implements [`AdapterHost`](overdrive_nn::AdapterHost), which gives access to its
//! linear layers by name, such as `CausalLm` of overdrive-transformer:
//!
//! ```
//! use overdrive_lora::{
//!     LoadAdapterOptions, LoraConfig, MergeOptions, TargetModules, add_lora, load_adapter, merge_and_unload,
//!     parameter_counts, save_adapter,
//! };
//! use overdrive_nn::{AdapterHost, Linear, Result};
//! use tch::{Device, Kind, Tensor};
//!
//! struct Mlp {
//!     up: Linear,
//!     down: Linear,
//! }
//!
//! impl Mlp {
//!     fn new() -> Result<Mlp> {
//!         let weight = |o: i64, i: i64| Tensor::ones([o, i], (Kind::Float, Device::Cpu)) / i;
//!         Ok(Mlp { up: Linear::dense(weight(32, 8), None)?, down: Linear::dense(weight(8, 32), None)? })
//!     }
//!
//!     fn forward(&self, x: &Tensor) -> Result<Tensor> {
//!         self.down.forward(&self.up.forward(x)?.f_gelu("none")?)
//!     }
//! }
//!
//! impl AdapterHost for Mlp {
//!     fn visit_linears(
//!         &mut self,
//!         visit: &mut dyn FnMut(&str, &mut Linear) -> Result<()>,
//!     ) -> Result<()> {
//!         visit("mlp.up", &mut self.up)?;
//!         visit("mlp.down", &mut self.down)
//!     }
//! }
//!
//! # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
//! let mut model = Mlp::new()?;
//! let config = LoraConfig { r: 4, target_modules: Some(TargetModules::AllLinear), ..Default::default() };
//! let parameters = add_lora(&mut model, &config)?;
//! assert_eq!(parameter_counts(&mut model)?.trainable, 2 * 4 * (8 + 32));
//!
//! let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
//! for _ in 0..3 {
//!     (model.forward(&x)? - &x).square().mean(Kind::Float).f_backward()?;
//!     for (_, parameter) in &parameters {
//!         let step = parameter.grad() * -0.1;
//!         tch::no_grad(|| parameter.shallow_clone().f_add_(&step))?;
//!         parameter.grad().f_zero_()?;
//!     }
//! }
//!
//! let dir = tempfile::tempdir()?;
//! save_adapter(&mut model, dir.path(), "default")?; // what PEFT loads
//! let mut other = Mlp::new()?;
//! load_adapter(&mut other, dir.path(), "default", &LoadAdapterOptions::default())?;
//! assert!(other.forward(&x)?.allclose(&model.forward(&x)?, 1e-5, 1e-6, false));
//!
//! merge_and_unload(&mut other, &MergeOptions::default())?; // a plain model again
//! assert!(other.forward(&x)?.allclose(&model.forward(&x)?, 1e-5, 1e-6, false));
//! # Ok(())
//! # }
//! ```
//!
//! LoRA: Hu et al. 2021, [arXiv:2106.09685](https://arxiv.org/abs/2106.09685); QLoRA: Dettmers et al.
//! 2023, [arXiv:2305.14314](https://arxiv.org/abs/2305.14314); DoRA: Liu et al. 2024,
//! [arXiv:2402.09353](https://arxiv.org/abs/2402.09353). Reference implementation:
//! [PEFT](https://huggingface.co/docs/peft) 0.21.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod adapter;
mod adapters;
mod by_row;
mod config;
mod copies;
mod dora;
mod error;
mod file;
mod forward;
mod host;
mod init;
mod layer_adapters;
mod low_rank;
mod merge;
mod random;
mod selection;
mod trainable;
mod weighted;

pub use adapter::{LoraAdapter, lora_adapter};
pub use adapters::{
    DEFAULT_ADAPTER, active_adapters, adapter_names, add_adapter, add_lora, delete_adapter,
    disable_adapters, enable_adapters, set_adapter, set_adapter_scale, set_requires_grad,
    set_training,
};
pub use by_row::load_adapter_for_rows;
pub use config::{
    BiasMode, InitLoraWeights, LayerIndices, LoftqConfig, LoraConfig, Names, TargetModules,
    TokenIndices,
};
pub use error::{AdapterProblems, Error, Result};
pub use file::{LoadAdapterOptions, LoadedAdapter, load_adapter, read_config, save_adapter};
pub use init::AddOptions;
pub use merge::{
    MergeOptions, MergeReport, MergedLayer, Requantized, merge_adapters, merge_and_unload,
    merge_obstacle, unload, unmerge_adapters,
};
pub use trainable::{
    ParameterCounts, mark_only_lora_as_trainable, parameter_counts, trainable_parameters,
};
pub use weighted::{Combination, add_weighted_adapter};
