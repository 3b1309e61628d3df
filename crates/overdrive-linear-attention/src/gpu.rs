//! The steps of a pool of states by the kernels for GPUs.

use overdrive_gpu::{CausalConv1d, DeltaRule, Kernels, StatePlan, kernels};
use tch::{Device, Kind, Tensor};

use crate::{
    Backend, CausalConv1dOptions, ConvActivation, DeltaRuleInputs, DeltaRuleOptions, Result,
    StateSlot,
};

/// Returns the kernels for tensors of this device, unless another implementation is asked for.
fn available(device: Device, backend: Backend) -> Result<Option<&'static Kernels>> {
    match backend {
        Backend::Auto => Ok(kernels(device)?),
        Backend::Math | Backend::Fused => Ok(None),
    }
}

/// Returns what the kernels need of the sequences.
fn state_plan(slots: &[StateSlot], offsets: &[i64]) -> Result<StatePlan> {
    let from: Vec<Option<i64>> = slots.iter().map(|slot| slot.from).collect();
    let to: Vec<i64> = slots.iter().map(|slot| slot.to).collect();
    Ok(StatePlan::new(offsets, &from, &to)?)
}

/// Advances the states of a pool by packed inputs; `None`, with nothing done, if no kernel takes them.
pub(crate) fn delta_rule(
    inputs: &DeltaRuleInputs<'_>,
    states: &Tensor,
    slots: &[StateSlot],
    offsets: &[i64],
    scale: f64,
    options: &DeltaRuleOptions,
) -> Result<Option<Tensor>> {
    let Some(kernels) = available(inputs.value.device(), options.backend)? else {
        return Ok(None);
    };
    let float = |x: &Tensor| -> Result<Tensor> { Ok(x.f_to_kind(Kind::Float)?.f_contiguous()?) };
    Ok(kernels.delta_rule(&DeltaRule {
        query: inputs.query,
        key: inputs.key,
        value: inputs.value,
        decay: &float(inputs.decay)?,
        beta: &float(inputs.beta)?,
        states,
        plan: &state_plan(slots, offsets)?,
        scale,
        qk_l2norm: options.qk_l2norm,
    })?)
}

/// Convolves packed inputs whose last ones are in a pool; `None`, with nothing done, if no kernel takes them.
pub(crate) fn causal_conv1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    states: &Tensor,
    slots: &[StateSlot],
    offsets: &[i64],
    options: &CausalConv1dOptions,
) -> Result<Option<Tensor>> {
    if bias.is_some() || options.activation != ConvActivation::Silu {
        return Ok(None);
    }
    let Some(kernels) = available(x.device(), options.backend)? else {
        return Ok(None);
    };
    Ok(kernels.causal_conv1d(&CausalConv1d {
        x,
        weight,
        states,
        plan: &state_plan(slots, offsets)?,
    })?)
}
