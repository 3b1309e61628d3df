//! The errors of this crate.

use crate::FunctionError;

/// An error of computing or checking gradients.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The forward of a function returned this error.
    #[error("forward of {function}: {source}")]
    Forward {
        /// [`crate::Function::NAME`].
        function: &'static str,
        /// The error, as the function returned it.
        source: FunctionError,
    },
    /// A function broke the contract of [`crate::Function`].
    #[error("{function} {problem}")]
    Contract {
        /// [`crate::Function::NAME`].
        function: &'static str,
        /// The rule that it broke, with the values.
        problem: String,
    },
    /// The analytical gradient differs from the numerical one.
    #[error(
        "the gradient of output {output} with respect to input {input} differs: at element \
         ({row}, {column}) of the Jacobian, {analytical:e} by backward and {numerical:e} by finite \
         differences (atol {atol:e}, rtol {rtol:e})"
    )]
    GradientMismatch {
        /// The index of the output.
        output: usize,
        /// The index of the input.
        input: usize,
        /// The index of the element in the flattened input.
        row: usize,
        /// The index of the element in the flattened output.
        column: usize,
        /// The value by backward.
        analytical: f64,
        /// The value by finite differences.
        numerical: f64,
        /// The absolute tolerance.
        atol: f64,
        /// The relative tolerance.
        rtol: f64,
    },
    /// Two backward passes over the same values differ.
    #[error(
        "backward is not deterministic: in two passes over the same values the gradients of input \
         {input} differ by {difference:e} (nondet_tol {nondet_tol:e})"
    )]
    NonDeterministic {
        /// The index of the input.
        input: usize,
        /// The largest absolute difference.
        difference: f64,
        /// The tolerance.
        nondet_tol: f64,
    },
    /// There is no gradient to check.
    #[error("gradcheck has nothing to check: {reason}")]
    NothingToCheck {
        /// The reason, with the remedy.
        reason: &'static str,
    },
    /// The checked function returned this error.
    #[error("the checked function failed: {source}")]
    Tested {
        /// The error, as the function returned it.
        source: FunctionError,
    },
    /// A tensor of the wrong dtype.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// An error of libtorch, or of a function or a hook that it called.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
