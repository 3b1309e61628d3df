//! The kernels, on slices: no tensor, no autograd.

pub(crate) mod activation;
pub(crate) mod cross_entropy;
pub(crate) mod few_rows;
pub(crate) mod rms_norm;
pub(crate) mod rotary;
