//! Custom autograd functions, gradient hooks, and gradients with all options, for programs that use tch.
//!
//! tch records libtorch's operators and has `backward()` without options. This crate adds the rest of
//! PyTorch's Python interface to the same engine:
//!
//! * [`Function`] and [`apply`] – a function whose backward is written in Rust (`torch.autograd.Function`):
//!   several inputs and outputs, saved tensors that are checked for in-place changes, in-place functions,
//!   optional double backward; errors and panics reach the caller;
//! * [`grad`], [`backward`] – gradients with `retain_graph`, `create_graph`, `inputs`, `allow_unused`;
//! * [`register_hook`], [`register_post_accumulate_grad_hook`] – closures that read, replace or consume
//!   gradients during backward;
//! * [`NoGradGuard`], [`EnableGradGuard`], [`InferenceModeGuard`] – modes of the current thread that
//!   end with a scope, also by a panic;
//! * [`BackwardOnThisThread`] – a guard that keeps backward passes on the thread that starts them, on a GPU too;
//! * [`random`] – saving, restoring and forking the states of the devices' random generators;
//! * [`gradcheck`], [`gradgradcheck`] – comparisons of a function's gradients with numerical ones;
//! * [`op`] – operators of libtorch by their schema names, with typed arguments.
//!
//! ```
//! use overdrive_autograd::{apply, grad, BackwardContext, ForwardContext, Function, FunctionResult, GradOptions};
//! use tch::Tensor;
//!
//! /// exp, whose backward uses its own result.
//! struct Exp;
//!
//! impl Function for Exp {
//!     const NAME: &'static str = "Exp";
//!
//!     fn forward(&mut self, context: &mut ForwardContext<'_>, inputs: &[&Tensor]) -> FunctionResult<Vec<Tensor>> {
//!         let result = inputs[0].f_exp()?;
//!         context.save_for_backward(&[&result]);
//!         Ok(vec![result])
//!     }
//!
//!     fn backward(&self, context: &BackwardContext, gradients: &[Option<Tensor>]) -> FunctionResult<Vec<Option<Tensor>>> {
//!         let [result] = context.saved() else { unreachable!("one tensor was saved") };
//!         Ok(vec![match &gradients[0] {
//!             Some(gradient) => Some(gradient.f_mul(result)?),
//!             None => None,
//!         }])
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let x = Tensor::from_slice(&[0.0, 1.0]).set_requires_grad(true);
//! let y = apply(Exp, &[&x])?.remove(0);
//! let gradients = grad(&[&y.sum(None)], &[&x], &GradOptions::default())?;
//! assert_eq!(gradients[0].as_ref().map(|g| g.double_value(&[1])), Some(std::f64::consts::E));
//! # Ok(())
//! # }
//! ```
//!
//! The original in PyTorch: [Extending PyTorch](https://docs.pytorch.org/docs/2.11/notes/extending.html).
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod apply;
mod error;
mod function;
mod gradcheck;
mod gradients;
mod guards;
mod hooks;
mod jacobian;
pub mod random;

pub use apply::apply;
pub use error::{Error, Result};
pub use function::{BackwardContext, ForwardContext, Function, FunctionError, FunctionResult};
pub use gradcheck::{GradcheckOptions, gradcheck, gradgradcheck};
pub use gradients::{BackwardOptions, GradOptions, backward, grad};
pub use guards::{
    BackwardOnThisThread, EnableGradGuard, InferenceModeGuard, NoGradGuard,
    backward_stays_on_this_thread, is_grad_enabled, is_inference, is_inference_mode_enabled,
    no_grad,
};
pub use hooks::{HookHandle, register_hook, register_post_accumulate_grad_hook};
pub use overdrive_sys::op;
