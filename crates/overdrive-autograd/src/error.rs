use crate::FunctionError;

/// What can go wrong when gradients are made.
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
        /// What it did and what it must do.
        problem: String,
    },
    /// The analytical gradient differs from the numerical one.
    #[error(
        "the gradient of output {output} with respect to input {input} differs: at element \
         ({row}, {column}) of the Jacobian, {analytical:e} by backward and {numerical:e} by finite \
         differences (atol {atol:e}, rtol {rtol:e})"
    )]
    GradientMismatch {
        /// Which output.
        output: usize,
        /// Which input.
        input: usize,
        /// The element of the flattened input.
        row: usize,
        /// The element of the flattened output.
        column: usize,
        /// What backward gives.
        analytical: f64,
        /// What finite differences give.
        numerical: f64,
        /// The absolute tolerance.
        atol: f64,
        /// The relative tolerance.
        rtol: f64,
    },
    /// Two backward passes over the same values differ.
    #[error(
        "backward is not deterministic: input {input} had gradients {difference:e} apart in two \
         passes over the same values (nondet_tol {nondet_tol:e})"
    )]
    NonDeterministic {
        /// Which input.
        input: usize,
        /// The largest difference.
        difference: f64,
        /// The tolerance.
        nondet_tol: f64,
    },
    /// A gradient check was given what it cannot check.
    #[error("gradcheck: {problem}")]
    Unsuitable {
        /// What is wrong and what to give instead.
        problem: String,
    },
    /// The checked function returned this error.
    #[error("the function under test: {source}")]
    Tested {
        /// The error, as the function returned it.
        source: FunctionError,
    },
    /// libtorch, or a function or hook of yours that it called.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
