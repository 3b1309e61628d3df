//! Merging into the weight of one layer.

use overdrive_autograd::NoGradGuard;
use overdrive_nn::{Linear, LinearWeight};
use tch::Tensor;

use super::arithmetic::{add_change, is_finite, merged_weight, requantize, wide, without};
use super::report::{MergeOptions, MergedLayer, Requantized};
use crate::layer_adapters::LayerAdapters;
use crate::{Error, Result, dora};

/// An adapter that is merged into the weight, and the values that unmerging needs.
#[derive(Debug)]
pub(crate) struct Merged {
    pub(crate) adapter: String,
    /// DoRA's factor, from the weight before the merge.
    factor: Option<Tensor>,
    /// The weight and bias before this merge.
    original: Option<(LinearWeight, Option<Tensor>)>,
}

/// Merges those of the adapters `names` that the layer has and that are not merged, in this order. Returns `None` if there
/// are none. `layer` is the layer's name in the report. An error leaves the layer unchanged.
pub(crate) fn merge(
    linear: &mut Linear,
    layer: &str,
    names: &[&str],
    options: &MergeOptions,
) -> Result<Option<MergedLayer>> {
    let _no_grad = NoGradGuard::new();
    let (weight, bias, Some(own)) = linear.split_mut::<LayerAdapters>() else {
        return Ok(None);
    };
    let wanted: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| own.get(name).is_some() && !own.merged().contains(name))
        .collect();
    if wanted.is_empty() {
        return Ok(None);
    }
    if let Some(error) = bias_obstacle(own, bias, layer, &wanted) {
        return Err(error);
    }
    let mut target = Target { own, weight, bias };
    let mut done = Vec::new();
    let mut requantized = None;
    for name in &wanted {
        match target.merge(layer, name, options) {
            Ok(error) => {
                requantized = error.or(requantized);
                done.push((*name).to_owned());
            }
            Err(error) => {
                // Unmerges only what this call has merged; earlier merges stay.
                target.unmerge(done.len())?;
                return Err(error);
            }
        }
    }
    Ok(Some(MergedLayer {
        name: layer.to_owned(),
        adapters: done,
        requantized,
    }))
}

/// Returns the error of merging an adapter with a bias into a layer without one.
pub(crate) fn bias_obstacle(
    own: &LayerAdapters,
    bias: Option<&Tensor>,
    layer: &str,
    names: &[&str],
) -> Option<Error> {
    let biased = |name: &&&str| own.get(name).is_some_and(|own| own.bias.is_some());
    let name = names.iter().find(biased).filter(|_| bias.is_none())?;
    let value = format!("true for the adapter `{name}` of `{layer}`");
    let expected = "false for merging, since the layer has no bias to merge into";
    Some(overdrive_core::Error::option("lora_bias", value, expected).into())
}

/// Unmerges the last `count` merged adapters, or all.
pub(crate) fn unmerge(linear: &mut Linear, count: usize) -> Result<()> {
    match linear.split_mut() {
        (weight, bias, Some(own)) => Target { own, weight, bias }.unmerge(count),
        _ => Ok(()),
    }
}

/// A layer whose weight is changed.
struct Target<'l> {
    own: &'l mut LayerAdapters,
    weight: &'l mut LinearWeight,
    bias: Option<&'l Tensor>,
}

impl Target<'_> {
    fn merge(
        &mut self,
        layer: &str,
        name: &str,
        options: &MergeOptions,
    ) -> Result<Option<Requantized>> {
        let Some(adapter) = self.own.get(name) else {
            return Ok(None);
        };
        let factor = match &adapter.magnitude {
            None => None,
            // As in the forward pass, the norm is that of the weight without any adapter.
            Some(magnitude) => {
                let clean = self.unmerged_weight()?;
                let clean = clean.as_ref().unwrap_or(self.weight);
                Some(dora::factor(clean, adapter, magnitude)?)
            }
        };
        let bias = match (self.bias, &adapter.bias) {
            (Some(bias), Some(own)) => {
                let own = own.f_mul_scalar(adapter.scale)?;
                Some(bias.f_detach()?.f_add(&own)?.f_to_kind(bias.kind())?)
            }
            _ => None,
        };
        let refuse = || Error::NotFinite {
            adapter: name.to_owned(),
            layer: layer.to_owned(),
        };
        // Checked before the weight is changed, so that the error leaves the layer unchanged.
        if options.safe && bias.as_ref().is_some_and(|bias| !is_finite(bias)) {
            return Err(refuse());
        }
        let keep_bias =
            || -> Result<Option<Tensor>> { Ok(self.bias.map(Tensor::f_detach_copy).transpose()?) };
        let mut report = None;
        let original = match &*self.weight {
            LinearWeight::Quantized(weight) => {
                let (quantized, error) = requantize(weight, adapter, factor.as_ref())?;
                if options.safe && !error.error.is_finite() {
                    return Err(refuse());
                }
                report = Some(error);
                // Always kept: a subtraction cannot undo the rounding of quantization.
                let bias = keep_bias()?;
                Some((self.exchange(LinearWeight::Quantized(quantized)), bias))
            }
            LinearWeight::Dense { weight, transposed } => {
                let transposed = *transposed;
                let mut target = weight.f_detach()?;
                let kept = options
                    .keep_original
                    .then(|| target.f_detach_copy())
                    .transpose()?;
                let same_kind = weight.kind() == adapter.a.kind();
                // Updates in place, without a temporary of the weight's size, if this rounds the same.
                if factor.is_none() && same_kind && !options.safe {
                    add_change(&mut target, adapter, transposed, adapter.scale)?;
                } else {
                    let merged = merged_weight(self.weight, adapter, factor.as_ref())?;
                    let merged = merged.f_to_kind(weight.kind())?;
                    if options.safe && !is_finite(&merged) {
                        return Err(refuse());
                    }
                    let merged = if transposed { merged.f_tr()? } else { merged };
                    target.f_copy_(&merged)?;
                }
                let restored = |weight| LinearWeight::Dense { weight, transposed };
                match kept {
                    Some(weight) => Some((restored(weight), keep_bias()?)),
                    None => None,
                }
            }
        };
        if let (Some(own), Some(merged)) = (self.bias, bias) {
            own.f_detach()?.f_copy_(&merged)?;
        }
        self.own.merged.push(Merged {
            adapter: name.to_owned(),
            factor,
            original,
        });
        Ok(report)
    }

    /// Replaces the weight and drops the cached row norms. The list of merged adapters stays.
    fn exchange(&mut self, weight: LinearWeight) -> LinearWeight {
        self.own.forget_row_norms();
        std::mem::replace(self.weight, weight)
    }

    /// Returns the weight before the first merge, or `None` if nothing is merged.
    fn unmerged_weight(&self) -> Result<Option<LinearWeight>> {
        let Some(first) = self.own.merged.first() else {
            return Ok(None);
        };
        if let Some((original, _)) = &first.original {
            return Ok(Some(original.shallow_clone()));
        }
        let mut weight = self.weight.to_dense(wide(self.weight))?;
        // In reverse, as DoRA's factors scale what was merged before them.
        for merged in self.own.merged.iter().rev() {
            let Some(adapter) = self.own.get(&merged.adapter) else {
                continue;
            };
            weight = without(&weight, adapter, merged.factor.as_ref())?;
        }
        Ok(Some(LinearWeight::Dense {
            weight,
            transposed: false,
        }))
    }

    fn unmerge(&mut self, count: usize) -> Result<()> {
        let _no_grad = NoGradGuard::new();
        for _ in 0..count {
            let Some(merged) = self.own.merged.pop() else {
                return Ok(());
            };
            if let Some((original, bias)) = merged.original {
                self.restore(original)?;
                if let (Some(own), Some(bias)) = (self.bias, bias) {
                    own.f_detach()?.f_copy_(&bias)?;
                }
                continue;
            }
            let Some(adapter) = self.own.get(&merged.adapter) else {
                continue;
            };
            if let LinearWeight::Dense { weight, transposed } = &*self.weight {
                let mut target = weight.f_detach()?;
                if merged.factor.is_none() && weight.kind() == adapter.a.kind() {
                    add_change(&mut target, adapter, *transposed, -adapter.scale)?;
                } else {
                    let clean = self.weight.to_dense(wide(self.weight))?;
                    let clean = without(&clean, adapter, merged.factor.as_ref())?;
                    let clean = if *transposed { clean.f_tr()? } else { clean };
                    target.f_copy_(&clean)?;
                }
            }
            if let (Some(own), Some(bias)) = (self.bias, &adapter.bias) {
                let mut own = own.f_detach()?;
                let _same = own.f_sub_(&bias.f_detach()?.f_mul_scalar(adapter.scale)?)?;
            }
        }
        Ok(())
    }

    fn restore(&mut self, original: LinearWeight) -> Result<()> {
        match (&*self.weight, &original) {
            // Copies the elements back and keeps the tensor, since an optimizer or a tied layer may hold it.
            (LinearWeight::Dense { weight, .. }, LinearWeight::Dense { weight: old, .. }) => {
                weight.f_detach()?.f_copy_(old)?;
            }
            _ => {
                self.exchange(original);
            }
        }
        Ok(())
    }
}
