//! Mixtures of experts: a router chooses a few of many feed-forward blocks for each token.
//!
//! Tokens are sorted by expert once, and each expert that has tokens computes all of them by one matmul for its gate
//! and value and one for its output. Shazeer et al. 2017 (arXiv:1701.06538); Fedus et al. 2021 (Switch Transformer,
//! arXiv:2101.03961); Jiang et al. 2024 (Mixtral, arXiv:2401.04088).

mod active;
mod balance;
mod dispatch;
mod grouped;
mod layer;
mod names;
mod parameters;
mod router;
mod router_scales;
mod rows;
mod shared;
#[cfg(test)]
mod tests;

pub(crate) use balance::{ExpertLoad, LoadBalance};
pub(crate) use layer::MixtureOfExperts;
pub(crate) use names::{
    correction_name, expert_of, is_correction, is_unknown_to_peft, router_scale_names,
};
pub(crate) use parameters::{adjacent, weights};
pub(crate) use router::Routing;
