//! Sampling where the logits are: the scores are changed on the device, and only the tokens among which one is
//! chosen come back.
//!
//! The order of all changes and cuts is that of the host, and mostly its code: [`process`] records the changes of a
//! row in [`RowChanges`], and [`Candidates::select`] cuts the best scores that the device returns. A draw uses the
//! number that the host would use. For equal logits, greedy search and all cuts that begin with `top_k`, `min_p` or
//! `top_h` give the tokens of the host; `top_p` alone, and sampling without a cut, sum probabilities on the device,
//! whose rounding (about 1e-7) decides only where a cut or a draw falls on the edge between two tokens.
//!
//! A step reads one tensor back. It reads more for single rows: the whole row where the cuts need all of its scores
//! (`typical_p`, `epsilon_cutoff` or `eta_cutoff` without `top_k`; a nucleus of more than 512 tokens; forced tokens,
//! `remove_invalid_values` and `exponential_decay_length_penalty`), and two numbers for the rank of a token that is
//! not among the candidates.
//!
//! The device also finds the tokens that the host is [`Expected`] to choose, from which the next step of the model can begin
//! before the host has read anything. If the host chooses otherwise, that step is discarded.

mod changes;
mod expected;
mod step;

use tch::{Device, Tensor};

use crate::Result;
pub(crate) use changes::RowChanges;
pub(crate) use expected::{Ahead, DeviceCut, Expected, LookAhead};
pub(crate) use step::{DeviceStep, Draw, RowPlan, RowResult, TIES};

/// The logits of one row.
pub(crate) enum RowLogits<'a> {
    /// All of them, on the host; choosing changes them.
    Host(&'a mut [f32]),
    /// Row `.1` of a step on a device.
    Device(&'a DeviceStep, usize),
}

/// Returns `true` if tokens are chosen from such logits on their device.
pub(crate) fn stays_on_device(logits: &Tensor) -> bool {
    logits.device() != Device::Cpu || is_forced()
}

#[cfg(not(test))]
const fn is_forced() -> bool {
    false
}

/// Copies a tensor of the host to the device of the logits.
fn upload(host: Tensor, device: Device) -> Result<Tensor> {
    Ok(overdrive_sys::transfer::to_device(host, device)?)
}

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::{Misled, is_forced};
