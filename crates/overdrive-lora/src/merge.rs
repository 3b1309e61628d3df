//! Adapters as a part of the weights.

use overdrive_autograd::NoGradGuard;
use overdrive_quantization::{QuantizedWeight, Scheme};
use tch::{Kind, Tensor};

use crate::adapters::place_copies;
use crate::{AdaptedLinear, Adapter, AdapterHost, BaseWeight, Error, Result, dora};

/// How adapters are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MergeOptions {
    /// Computes each merged weight beside the old one and takes it only where all its numbers are
    /// finite (PEFT's `safe_merge`); default false.
    pub safe: bool,
    /// Keeps the dense weights as they were, so that [`unmerge_adapters`] gives them back bit for bit, at
    /// their memory's price; default false. Without it the change is subtracted again, which is exact to
    /// rounding only. Packed weights are always kept.
    pub keep_original: bool,
}

/// What merging did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MergeReport {
    /// Every map with a merged adapter, in the order of the model.
    pub maps: Vec<MergedMap>,
}

/// What merging did to one map.
#[derive(Debug, Clone, PartialEq)]
pub struct MergedMap {
    /// The map's name.
    pub name: String,
    /// The adapters, in the order in which they were merged.
    pub adapters: Vec<String>,
    /// What quantizing anew cost, where the weight is packed.
    pub requantized: Option<Requantized>,
}

/// The error of a packed weight that was merged into.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Requantized {
    /// How it is packed.
    pub scheme: Scheme,
    /// `‖Q − W‖ / ‖W‖` (Frobenius) of the new packed weight against the merged one in full.
    pub error: f64,
    /// `‖Q − W‖ / ‖change‖`: near or above 1 the adapter is lost in rounding.
    pub error_of_change: f64,
}

impl MergeReport {
    /// The largest [`Requantized::error`], or 0.
    pub fn worst_error(&self) -> f64 {
        let errors = self.maps.iter().filter_map(|map| map.requantized);
        errors
            .map(|requantized| requantized.error)
            .fold(0.0, f64::max)
    }
}

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

    fn unmerge_last(&mut self, count: usize) -> Result<()> {
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

/// The kind in which a weight is merged.
fn wide(base: &BaseWeight) -> Kind {
    match base.kind() {
        Some(Kind::Double) => Kind::Double,
        _ => Kind::Float,
    }
}

/// `weight += scale · B · A` in place.
fn add_change(weight: &mut Tensor, adapter: &Adapter, transposed: bool, scale: f64) -> Result<()> {
    let b = adapter.b.f_detach()?.f_mul_scalar(scale)?;
    let a = adapter.a.f_detach()?;
    let _same = if transposed {
        weight.f_addmm_(&a.f_tr()?, &b.f_tr()?)?
    } else {
        weight.f_addmm_(&b, &a)?
    };
    Ok(())
}

/// `scale · B · A`, `(O, I)`.
pub(crate) fn change(adapter: &Adapter, kind: Kind) -> Result<Tensor> {
    let b = adapter
        .b
        .f_detach()?
        .f_to_kind(kind)?
        .f_mul_scalar(adapter.scale)?;
    Ok(b.f_mm(&adapter.a.f_detach()?.f_to_kind(kind)?)?)
}

/// `factor · (W + scale · B · A)`, `(O, I)`, in fp32 or fp64.
fn merged_weight(base: &BaseWeight, adapter: &Adapter, factor: Option<&Tensor>) -> Result<Tensor> {
    let kind = wide(base);
    let merged = base.to_dense(kind)?.f_add(&change(adapter, kind)?)?;
    Ok(match factor {
        None => merged,
        Some(factor) => merged.f_mul(&factor.f_unsqueeze(1)?)?.f_to_kind(kind)?,
    })
}

/// `W / factor − scale · B · A`.
fn without(weight: &Tensor, adapter: &Adapter, factor: Option<&Tensor>) -> Result<Tensor> {
    let change = change(adapter, weight.kind())?;
    Ok(match factor {
        None => weight.f_sub(&change)?,
        Some(factor) => weight.f_div(&factor.f_unsqueeze(1)?)?.f_sub(&change)?,
    })
}

fn requantize(
    weight: &QuantizedWeight,
    adapter: &Adapter,
    factor: Option<&Tensor>,
) -> Result<(QuantizedWeight, Requantized)> {
    let before = weight.dequantize(Kind::Float)?;
    let base = BaseWeight::Dense {
        weight: before.shallow_clone(),
        transposed: false,
    };
    let merged = merged_weight(&base, adapter, factor)?;
    let packed = QuantizedWeight::quantize(&merged, weight.scheme())?;
    let lost = norm(&packed.dequantize(Kind::Float)?.f_sub(&merged)?)?;
    let change = norm(&merged.f_sub(&before)?)?;
    let ratio = |lost: f64, whole: f64| if lost == 0.0 { 0.0 } else { lost / whole };
    let error = Requantized {
        scheme: weight.scheme(),
        error: ratio(lost, norm(&merged)?),
        error_of_change: ratio(lost, change),
    };
    Ok((packed, error))
}

fn norm(tensor: &Tensor) -> Result<f64> {
    Ok(f64::try_from(tensor.f_norm()?)?)
}

fn is_finite(tensor: &Tensor) -> bool {
    let all = || bool::try_from(tensor.f_isfinite()?.f_all()?);
    all().unwrap_or(false)
}

/// Merges adapters into the weights of all maps (`None`: the active ones), as PEFT's `merge_adapter`: the
/// model then computes at the cost of the base alone, until [`unmerge_adapters`].
///
/// Packed weights are dequantized, changed, and quantized anew in their scheme; the report says at
/// what error.
///
/// # Errors
/// [`Error::UnknownAdapter`], and as [`AdaptedLinear::merge`]; what was merged by this call is then
/// unmerged again.
pub fn merge_adapters<H: AdapterHost + ?Sized>(
    host: &mut H,
    adapters: Option<&[&str]>,
    options: &MergeOptions,
) -> Result<MergeReport> {
    let active = crate::active_adapters(host)?;
    let active: Vec<&str> = active.iter().map(String::as_str).collect();
    let names = adapters.unwrap_or(&active);
    let available = crate::adapter_names(host)?;
    if let Some(unknown) = names
        .iter()
        .find(|name| !available.iter().any(|own| own == *name))
    {
        return Err(Error::UnknownAdapter {
            name: (*unknown).to_owned(),
            available,
        });
    }
    let mut report = MergeReport::default();
    let merged = host.visit_linears(&mut |name, map| {
        report.maps.extend(map.merge(name, names, options)?);
        Ok(())
    });
    if merged.is_err() {
        host.visit_linears(&mut |name, map| {
            let own = report.maps.iter().find(|own| own.name == name);
            map.unmerge_last(own.map_or(0, |own| own.adapters.len()))
        })?;
    }
    merged.map(|()| report)
}

/// Takes all merged adapters out of the weights again.
///
/// # Errors
/// When memory runs out.
pub fn unmerge_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    host.visit_linears(&mut |_, map| map.unmerge())
}

/// Merges the active adapters for good and removes all of them; full copies of active adapters
/// (`modules_to_save`) take the place of the model's own parameters. What remains is a plain model.
///
/// # Errors
/// As [`merge_adapters`]; [`Error::BadInput`] for a full copy of a parameter that the model uses in two
/// places (a tied embedding): it can only take one of them.
pub fn merge_and_unload<H: AdapterHost + ?Sized>(
    host: &mut H,
    options: &MergeOptions,
) -> Result<MergeReport> {
    // Nobody will unmerge.
    let options = MergeOptions {
        keep_original: false,
        ..*options
    };
    refuse_tied_copies(host)?;
    let report = merge_adapters(host, None, &options)?;
    let _no_grad = NoGradGuard::new();
    if let Some(copies) = host.module_copies() {
        let placed = copies
            .entries
            .iter()
            .filter(|entry| entry.original.is_some());
        for entry in placed {
            if let Some(original) = &entry.original {
                original.f_detach()?.f_copy_(&entry.copy)?;
            }
        }
    }
    host.visit_linears(&mut |_, map| {
        map.keep_copy()?;
        map.merged.clear();
        map.adapters.clear();
        map.copies.clear();
        map.set_active(&[]);
        map.set_enabled(true);
        Ok(())
    })?;
    drop_copies(host)?;
    Ok(report)
}

/// A tied parameter's copy is in one of its places; written to the parameter, it would be in both.
fn refuse_tied_copies<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    let mut places: Vec<(String, usize)> = Vec::new();
    let address = |tensor: &Tensor| tensor.data_ptr() as usize;
    host.visit_linears(&mut |name, map| {
        if let BaseWeight::Dense { weight, .. } = map.base() {
            places.push((format!("{name}.weight"), address(weight)));
        }
        Ok(())
    })?;
    let mut placed: Vec<(String, usize)> = Vec::new();
    if let Some(copies) = host.module_copies() {
        for entry in &copies.entries {
            let original = entry.original.as_ref().map(address);
            placed.extend(original.map(|address| (entry.name.clone(), address)));
        }
    }
    host.visit_linears(&mut |name, map| {
        if let (Some(_), BaseWeight::Dense { weight, .. }) = (map.active_copy(), map.base()) {
            placed.push((format!("{name}.weight"), address(weight)));
        }
        Ok(())
    })?;
    host.visit_parameters(&mut |name, tensor| {
        places.push((name.to_owned(), address(tensor)));
        Ok(())
    })?;
    for (name, address) in &placed {
        if let Some((other, _)) = places.iter().find(|(own, at)| at == address && own != name) {
            return Err(Error::BadInput {
                name: format!("the full copy of `{name}`"),
                found: format!("one of a parameter that is tied to `{other}`"),
                expected: "untied parameters: `unload` and keep the adapter, or untie them"
                    .to_owned(),
            });
        }
    }
    Ok(())
}

/// Removes all adapters and full copies without merging them; what was merged is unmerged first.
/// Biases stay as they were trained.
///
/// # Errors
/// As [`unmerge_adapters`].
pub fn unload<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    unmerge_adapters(host)?;
    host.visit_linears(&mut |_, map| {
        map.adapters.clear();
        map.copies.clear();
        map.set_active(&[]);
        map.set_enabled(true);
        Ok(())
    })?;
    drop_copies(host)
}

fn drop_copies<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    place_copies(host, &[])?;
    if let Some(copies) = host.module_copies() {
        copies.entries.clear();
    }
    Ok(())
}

impl AdaptedLinear {
    /// Makes the active full copy the map's own weight and bias.
    fn keep_copy(&mut self) -> Result<()> {
        let (base, bias) = self.in_use();
        if std::ptr::eq(base, &self.base) {
            return Ok(());
        }
        if let (BaseWeight::Dense { weight: copy, .. }, BaseWeight::Dense { weight, .. }) =
            (base, &self.base)
        {
            weight.f_detach()?.f_copy_(copy)?;
        }
        if let (Some(copy), Some(bias)) = (bias, &self.bias) {
            bias.f_detach()?.f_copy_(copy)?;
        }
        Ok(())
    }
}
