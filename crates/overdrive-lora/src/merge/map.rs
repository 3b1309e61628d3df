//! One map and the adapters in its weight.

use overdrive_autograd::NoGradGuard;
use tch::Tensor;

use super::arithmetic::{add_change, is_finite, merged_weight, requantize, wide, without};
use super::report::{MergeOptions, MergedMap, Requantized};
use crate::{AdaptedLinear, BaseWeight, Error, Result, dora};

/// An adapter that is in the weight, and what takes it out again.
#[derive(Debug)]
pub(crate) struct Merged {
    pub(crate) adapter: String,
    /// DoRA's factor, from the weight before.
    factor: Option<Tensor>,
    /// The weight and bias before this one was merged.
    original: Option<(BaseWeight, Option<Tensor>)>,
}

impl AdaptedLinear {
    /// Merges these adapters of the map, in this order, into its weight and bias; those that it does not
    /// have or that are merged are passed over. `None` where nothing was left to do.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with [`MergeOptions::safe`], [`Error::BadInput`] for an adapter with a bias
    /// on a map without one. The map is then as it was.
    pub fn merge(
        &mut self,
        map_name: &str,
        adapters: &[&str],
        options: &MergeOptions,
    ) -> Result<Option<MergedMap>> {
        let _no_grad = NoGradGuard::new();
        let wanted: Vec<&str> = adapters
            .iter()
            .copied()
            .filter(|name| self.adapter(name).is_some() && !self.merged().contains(name))
            .collect();
        if wanted.is_empty() {
            return Ok(None);
        }
        let biased = |name: &&&str| self.adapter(name).is_some_and(|own| own.bias.is_some());
        if let (Some(name), None) = (wanted.iter().find(biased), &self.bias) {
            return Err(Error::BadInput {
                name: format!("the adapter `{name}` of `{map_name}`"),
                found: "one with a bias (`lora_bias`)".to_owned(),
                expected: "one without, as the map has no bias to merge it into".to_owned(),
            });
        }
        let mut done = Vec::new();
        let mut requantized = None;
        for name in &wanted {
            match self.merge_one(name, options) {
                Ok(error) => {
                    requantized = error.or(requantized);
                    done.push((*name).to_owned());
                }
                Err(error) => {
                    self.unmerge_last(done.len())?;
                    return Err(match error {
                        Error::NotFinite { adapter, .. } => Error::NotFinite {
                            adapter,
                            map: map_name.to_owned(),
                        },
                        other => other,
                    });
                }
            }
        }
        Ok(Some(MergedMap {
            name: map_name.to_owned(),
            adapters: done,
            requantized,
        }))
    }

    fn merge_one(&mut self, name: &str, options: &MergeOptions) -> Result<Option<Requantized>> {
        let Some((_, adapter)) = self.adapters.iter().find(|(own, _)| own == name) else {
            return Ok(None);
        };
        let factor = match &adapter.magnitude {
            None => None,
            // The length is that of the weight without any adapter, as in forward.
            Some(magnitude) => {
                let clean = self.unmerged_weight()?;
                let clean = clean.as_ref().unwrap_or(&self.base);
                Some(dora::factor(clean, adapter, magnitude)?)
            }
        };
        let bias = match (&self.bias, &adapter.bias) {
            (Some(bias), Some(own)) => {
                let own = own.f_mul_scalar(adapter.scale)?;
                Some(bias.f_detach()?.f_add(&own)?.f_to_kind(bias.kind())?)
            }
            _ => None,
        };
        let refuse = || Error::NotFinite {
            adapter: name.to_owned(),
            map: String::new(),
        };
        if options.safe && bias.as_ref().is_some_and(|bias| !is_finite(bias)) {
            return Err(refuse());
        }
        let keep = |bias: &Option<Tensor>| -> Result<Option<Tensor>> {
            Ok(bias.as_ref().map(|bias| bias.f_detach_copy()).transpose()?)
        };
        let mut report = None;
        let original = match &self.base {
            BaseWeight::Quantized(weight) => {
                let (packed, error) = requantize(weight, adapter, factor.as_ref())?;
                if options.safe && !error.error.is_finite() {
                    return Err(refuse());
                }
                report = Some(error);
                let old = self.exchange_base(BaseWeight::Quantized(packed));
                Some((old, keep(&self.bias)?))
            }
            BaseWeight::Dense { weight, transposed } => {
                let mut target = weight.f_detach()?;
                let kept = options
                    .keep_original
                    .then(|| target.f_detach_copy())
                    .transpose()?;
                let same_kind = weight.kind() == adapter.a.kind();
                if factor.is_none() && same_kind && !options.safe {
                    add_change(&mut target, adapter, *transposed, adapter.scale)?;
                } else {
                    let merged = merged_weight(&self.base, adapter, factor.as_ref())?;
                    let merged = merged.f_to_kind(weight.kind())?;
                    if options.safe && !is_finite(&merged) {
                        return Err(refuse());
                    }
                    let merged = if *transposed { merged.f_tr()? } else { merged };
                    target.f_copy_(&merged)?;
                }
                let transposed = *transposed;
                let restored = |weight| BaseWeight::Dense { weight, transposed };
                match kept {
                    Some(weight) => Some((restored(weight), keep(&self.bias)?)),
                    None => None,
                }
            }
        };
        if let (Some(own), Some(merged)) = (&self.bias, bias) {
            own.f_detach()?.f_copy_(&merged)?;
        }
        self.merged.push(Merged {
            adapter: name.to_owned(),
            factor,
            original,
        });
        Ok(report)
    }

    /// The weight before the first merge, or `None` where nothing is merged.
    fn unmerged_weight(&self) -> Result<Option<BaseWeight>> {
        let Some(first) = self.merged.first() else {
            return Ok(None);
        };
        if let Some((original, _)) = &first.original {
            return Ok(Some(original.shallow_clone()));
        }
        let kind = wide(&self.base);
        let mut weight = self.base.to_dense(kind)?;
        for merged in self.merged.iter().rev() {
            let Some(adapter) = self.adapter(&merged.adapter) else {
                continue;
            };
            weight = without(&weight, adapter, merged.factor.as_ref())?;
        }
        Ok(Some(BaseWeight::Dense {
            weight,
            transposed: false,
        }))
    }

    /// Takes all merged adapters out of the weight again.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn unmerge(&mut self) -> Result<()> {
        self.unmerge_last(self.merged.len())
    }

    pub(super) fn unmerge_last(&mut self, count: usize) -> Result<()> {
        let _no_grad = NoGradGuard::new();
        for _ in 0..count {
            let Some(merged) = self.merged.pop() else {
                return Ok(());
            };
            if let Some((original, bias)) = merged.original {
                self.restore(original)?;
                if let (Some(own), Some(bias)) = (&self.bias, bias) {
                    own.f_detach()?.f_copy_(&bias)?;
                }
                continue;
            }
            let Some(adapter) = self.adapter(&merged.adapter) else {
                continue;
            };
            if let BaseWeight::Dense { weight, transposed } = &self.base {
                let mut target = weight.f_detach()?;
                if merged.factor.is_none() && weight.kind() == adapter.a.kind() {
                    add_change(&mut target, adapter, *transposed, -adapter.scale)?;
                } else {
                    let clean = self.base.to_dense(wide(&self.base))?;
                    let clean = without(&clean, adapter, merged.factor.as_ref())?;
                    let clean = if *transposed { clean.f_tr()? } else { clean };
                    target.f_copy_(&clean)?;
                }
            }
            if let (Some(own), Some(bias)) = (&self.bias, &adapter.bias) {
                let mut own = own.f_detach()?;
                let _same = own.f_sub_(&bias.f_detach()?.f_mul_scalar(adapter.scale)?)?;
            }
        }
        Ok(())
    }

    /// Dense numbers go back to where they were: others may hold the tensor.
    fn restore(&mut self, original: BaseWeight) -> Result<()> {
        match (&self.base, &original) {
            (BaseWeight::Dense { weight, .. }, BaseWeight::Dense { weight: old, .. }) => {
                weight.f_detach()?.f_copy_(old)?;
            }
            _ => {
                self.exchange_base(original);
            }
        }
        Ok(())
    }
}
