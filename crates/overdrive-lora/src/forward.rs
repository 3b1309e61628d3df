//! The output of a layer with adapters: the matmul with its weight plus the update of each active adapter.

use overdrive_nn::{Adapter, AdapterRows, Linear, LinearWeight, joint_base};
use overdrive_sys::autocast;
use tch::{Kind, Tensor};

use crate::by_row::joint_rows;
use crate::layer_adapters::{LayerAdapters, adapters_of};
use crate::low_rank::{Addend, add_low_rank};
use crate::{LoraAdapter, Result, dora};

impl Adapter for LayerAdapters {
    fn is_active(&self) -> bool {
        match AdapterRows::current() {
            Some(rows) => self.is_active_for(&rows),
            None => !self.working().is_empty(),
        }
    }

    fn names(&self) -> Vec<&str> {
        let adapters = self.adapters.iter().map(|(name, _)| name.as_str());
        adapters.collect()
    }

    fn active_names(&self) -> Vec<&str> {
        if !self.enabled {
            return Vec::new();
        }
        // A full copy replaces the layer's weight, including everything that is merged into it.
        let merged = self.merged();
        let mut names = self.active();
        names.retain(|name| !merged.contains(name));
        names.extend(self.active_copy());
        names
    }

    /// Computes adapters in their own dtype (under autocast, in autocast's); the result has the weight's dtype.
    fn forward(&self, layer: &Linear, x: &Tensor, fused: bool) -> overdrive_nn::Result<Tensor> {
        let shared = shared_input(x)?;
        let x = shared.as_ref().unwrap_or(x);
        Ok(match AdapterRows::current() {
            Some(rows) => self.forward_rows(layer, x, &rows, fused)?,
            None => {
                let adapter = |index: &usize| &self.adapters[*index].1;
                let working: Vec<_> = self.working().iter().map(adapter).collect();
                self.adapted(layer, x, &working, fused)?
            }
        })
    }

    fn forward_joint(
        &self,
        layers: &[&Linear],
        x: &Tensor,
    ) -> overdrive_nn::Result<Option<Tensor>> {
        if let Some(rows) = AdapterRows::current() {
            let shared = shared_input(x)?;
            return Ok(joint_rows(layers, shared.as_ref().unwrap_or(x), &rows)?);
        }
        // One autograd function for all layers saves x once and multiplies all A matrices in one matmul.
        let Some(addends) = joint_addends(layers) else {
            return Ok(None);
        };
        let shared = shared_input(x)?;
        let x = shared.as_ref().unwrap_or(x);
        Ok(Some(add_low_rank(joint_base(x, layers)?, x, &addends)?))
    }

    fn replacement(&self) -> Option<(&LinearWeight, Option<&Tensor>)> {
        let copy = &self.copies[self.active_copy.filter(|_| self.enabled)?];
        Some((&copy.weight, copy.bias.as_ref()))
    }

    fn weight_replaced(&mut self) {
        // Merged adapters are part of the new weight and must not be computed a second time.
        let merged = std::mem::take(&mut self.merged);
        let is_merged = |index: &usize| {
            let name = &self.adapters[*index].0;
            merged.iter().any(|merged| merged.adapter == *name)
        };
        self.active.retain(|index| !is_merged(index));
        self.forget_row_norms();
    }
}

impl LayerAdapters {
    /// Returns the indices of the adapters that are currently computed beside the weight.
    pub(crate) fn working(&self) -> &[usize] {
        if self.enabled && self.merged.is_empty() && self.active_copy.is_none() {
            &self.active
        } else {
            &[]
        }
    }

    /// Computes the weight and the adapters `working`, at least one, one after another in PEFT's order, since DoRA
    /// scales the sum up to it.
    pub(crate) fn adapted(
        &self,
        layer: &Linear,
        x: &Tensor,
        working: &[&LoraAdapter],
        fused: bool,
    ) -> Result<Tensor> {
        let (weight, bias) = (layer.weight(), layer.bias());
        // Not empty: a layer calls its adapter only if `is_active`.
        let first = working[0];
        // DoRA needs the output without the bias. If it is the first adapter, the bias is added after it
        // instead of being added and subtracted.
        let mut postponed = match (bias, &first.magnitude) {
            (Some(bias), Some(_)) if dropout(layer, first) == 0.0 => Some(bias),
            _ => None,
        };
        let mut y = weight.forward(x, bias.filter(|_| postponed.is_none()), fused)?;
        let kind = y.kind();
        let mut pending = Vec::new();
        for adapter in working {
            let addend = Addend {
                start: 0,
                adapter,
                dropout: dropout(layer, adapter),
            };
            // Plain adapters commute, so those between two DoRA adapters are added in one call.
            let Some(magnitude) = &adapter.magnitude else {
                pending.push(addend);
                continue;
            };
            y = add_low_rank(y, x, &std::mem::take(&mut pending))?;
            let factor = dora::factor(weight, adapter, magnitude)?;
            if addend.dropout > 0.0 {
                y = dora_with_dropout(y, x, &addend, weight, &factor, fused)?;
                continue;
            }
            // DoRA scales the sum so far except for the bias, which y already contains after an earlier adapter.
            if let (Some(bias), None) = (bias, postponed) {
                y = y.f_sub(bias)?;
            }
            let mut scaled = add_low_rank(y, x, &[addend])?.f_mul(&factor)?;
            y = match postponed.take().or(bias) {
                Some(bias) => scaled.f_add_(bias)?,
                None => scaled,
            };
            // With 16-bit weights, the factor is fp32 and has widened the result.
            y = y.f_to_kind(kind)?;
        }
        add_low_rank(y, x, &pending)
    }
}

/// Adds DoRA's update to `y`; dropout applies to the inputs of the update only.
fn dora_with_dropout(
    y: Tensor,
    x: &Tensor,
    addend: &Addend<'_>,
    weight: &LinearWeight,
    factor: &Tensor,
    fused: bool,
) -> Result<Tensor> {
    let none = None::<&Tensor>;
    let adapter = addend.adapter;
    // As in PEFT, both matmuls of the update use the same dropout mask.
    let dropped = x.f_dropout(addend.dropout, true)?;
    let base = weight.forward(&dropped, None, fused)?;
    let low_rank = dropped
        .f_to_kind(adapter.a.kind())?
        .f_linear(&adapter.a, none)?
        .f_linear(&adapter.b, none)?
        .f_mul_scalar(adapter.scale)?;
    let change = base
        .f_mul(&factor.f_sub_scalar(1.0)?)?
        .f_add(&low_rank.f_mul(factor)?)?;
    let kind = y.kind();
    Ok(y.f_add(&change)?.f_to_kind(kind)?)
}

/// Returns the active adapters of all layers with the first output column of their layer, or `None` if one does more
/// than add to the output: DoRA scales it, and what an adapter of another crate does is unknown.
fn joint_addends<'m>(layers: &[&'m Linear]) -> Option<Vec<Addend<'m>>> {
    let mut addends = Vec::new();
    let mut start = 0;
    for layer in layers {
        if let Some(own) = adapters_of(layer) {
            for index in own.working() {
                let adapter = &own.adapters[*index].1;
                if adapter.magnitude.is_some() {
                    return None;
                }
                addends.push(Addend {
                    start,
                    adapter,
                    dropout: dropout(layer, adapter),
                });
            }
        } else if layer.adapter().is_some_and(Adapter::is_active) {
            return None;
        }
        start += layer.weight().size()[0];
    }
    Some(addends)
}

/// Returns the dropout probability of the inputs of `adapter`.
fn dropout(layer: &Linear, adapter: &LoraAdapter) -> f64 {
    if layer.is_training() {
        adapter.config.lora_dropout
    } else {
        0.0
    }
}

/// Casts `x` to autocast's dtype if autocast is on, once for the weight and the adapters, which both save it for
/// backward.
fn shared_input(x: &Tensor) -> Result<Option<Tensor>> {
    match autocast::state(x.device()) {
        Ok(state) if state.enabled && x.kind() == Kind::Float => {
            Ok(Some(x.f_to_kind(state.dtype)?))
        }
        _ => Ok(None),
    }
}
