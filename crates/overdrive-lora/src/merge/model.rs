//! Merging into all layers of a model.

use overdrive_autograd::NoGradGuard;
use overdrive_nn::{AdapterHost, Linear, LinearWeight};
use tch::Tensor;

use super::layer::bias_obstacle;
use super::report::{MergeOptions, MergeReport};
use crate::adapters::known;
use crate::copies::place_copies;
use crate::host::{module_copies, visit_linears, visit_parameters};
use crate::layer_adapters::adapters_of;
use crate::{Error, Result};

/// Merges adapters into the weights of all layers (`None`: the active adapters), as PEFT's `merge_adapter` does.
/// Until [`unmerge_adapters`], the model runs at the cost of its weights alone.
///
/// Quantized weights are dequantized, updated, and quantized again by their scheme; the report has the resulting
/// error.
///
/// # Errors
/// [`Error::UnknownAdapter`]; [`Error::NotFinite`] with [`MergeOptions::safe`]; [`Error::Common`] for an adapter with a bias
/// on a layer without one. Everything that this call has merged is then unmerged again.
pub fn merge_adapters<H: AdapterHost + ?Sized>(
    host: &mut H,
    adapters: Option<&[&str]>,
    options: &MergeOptions,
) -> Result<MergeReport> {
    let active = crate::active_adapters(host)?;
    let active: Vec<&str> = active.iter().map(String::as_str).collect();
    let names = adapters.unwrap_or(&active);
    known(host, names)?;
    let mut report = MergeReport::default();
    let merged = visit_linears(host, |name, linear| {
        let merged = super::merge(linear, name, names, options)?;
        report.layers.extend(merged);
        Ok(())
    });
    // A model with merged adapters in only some layers would be neither with nor without the adapter.
    if merged.is_err() {
        visit_linears(host, |name, linear| {
            let own = report.layers.iter().find(|own| own.name == name);
            super::unmerge(linear, own.map_or(0, |own| own.adapters.len()))
        })?;
    }
    merged.map(|()| report)
}

/// Unmerges all merged adapters from the weights.
///
/// # Errors
/// An error of libtorch when memory runs out.
pub fn unmerge_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    visit_linears(host, |_, linear| super::unmerge(linear, usize::MAX))
}

/// Merges the active adapters permanently and removes all adapters, which leaves a plain model. Full copies of active
/// adapters (`modules_to_save`) overwrite the elements of the model's own parameters.
///
/// # Errors
/// As [`merge_adapters`], and those of [`merge_obstacle`]; the model is then unchanged.
pub fn merge_and_unload<H: AdapterHost + ?Sized>(
    host: &mut H,
    options: &MergeOptions,
) -> Result<MergeReport> {
    let options = MergeOptions {
        // Unmerging is impossible after this, so a copy of the weights would waste memory.
        keep_original: false,
        ..*options
    };
    if let Some(error) = merge_obstacle(host)? {
        return Err(error);
    }
    let report = merge_adapters(host, None, &options)?;
    let _no_grad = NoGradGuard::new();
    if let Some(copies) = module_copies(host) {
        for entry in &copies.entries {
            if let Some(original) = &entry.original {
                original.f_detach()?.f_copy_(&entry.copy)?;
            }
        }
    }
    visit_linears(host, |_, linear| {
        keep_copy(linear)?;
        remove_adapters(linear);
        Ok(())
    })?;
    drop_copies(host)?;
    Ok(report)
}

/// Returns the error that [`merge_and_unload`] would return because the active adapters cannot be merged, or `None`.
/// Such adapters still work unmerged. The model is not changed.
///
/// - [`Error::TiedCopy`]: a full copy (`modules_to_save`) of a parameter that the model uses twice, such as an
///   embedding with a tied head. It can only replace one of the two.
/// - [`Error::TiedAdapter`]: an adapter of such a parameter, whose update would affect the other use as well.
/// - [`Error::Common`]: `lora_bias` for a layer without a bias.
///
/// # Errors
/// The error of a model whose layers cannot be visited now.
pub fn merge_obstacle<H: AdapterHost + ?Sized>(host: &mut H) -> Result<Option<Error>> {
    let mut obstacle = tied_obstacle(host)?;
    visit_linears(host, |name, linear| {
        if let (None, Some(own)) = (&obstacle, adapters_of(linear)) {
            obstacle = bias_obstacle(own, linear.bias(), name, &own.active());
        }
        Ok(())
    })?;
    Ok(obstacle)
}

/// Returns the error for a full copy or an adapter of a tied parameter: only one of the two layers that share the
/// parameter uses the adapter, and writing to the parameter would change both.
fn tied_obstacle<H: AdapterHost + ?Sized>(host: &mut H) -> Result<Option<Error>> {
    let mut parameters: Vec<(String, usize)> = Vec::new();
    let (mut copied, mut adapted) = (Vec::new(), Vec::new());
    let address = |tensor: &Tensor| tensor.data_ptr() as usize;
    if let Some(copies) = module_copies(host) {
        for entry in &copies.entries {
            let original = entry.original.as_ref().map(address);
            copied.extend(original.map(|address| (entry.name.clone(), address)));
        }
    }
    visit_linears(host, |name, linear| {
        if let LinearWeight::Dense { weight, .. } = linear.weight() {
            let parameter = (format!("{name}.weight"), address(weight));
            if let Some(own) = adapters_of(linear) {
                if own.active_copy().is_some() {
                    copied.push(parameter.clone());
                }
                if !own.active.is_empty() {
                    adapted.push(parameter.clone());
                }
            }
            parameters.push(parameter);
        }
        Ok(())
    })?;
    visit_parameters(host, |name, tensor| {
        parameters.push((name.to_owned(), address(tensor)));
        Ok(())
    })?;
    let other_of = |(name, address): &(String, usize)| {
        let mut tied = parameters
            .iter()
            .filter(|(own, at)| at == address && own != name);
        tied.next().map(|(other, _)| (name.clone(), other.clone()))
    };
    if let Some((name, other)) = copied.iter().find_map(other_of) {
        return Ok(Some(Error::TiedCopy { name, other }));
    }
    let adapted = adapted.iter().find_map(other_of);
    Ok(adapted.map(|(name, other)| Error::TiedAdapter { name, other }))
}

/// Removes all adapters and full copies without merging them; merged adapters are unmerged first. Trained biases
/// stay.
///
/// # Errors
/// As [`unmerge_adapters`].
pub fn unload<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    unmerge_adapters(host)?;
    visit_linears(host, |_, linear| {
        remove_adapters(linear);
        Ok(())
    })?;
    drop_copies(host)
}

fn remove_adapters(linear: &mut Linear) {
    // Keeps adapters of other crates.
    if adapters_of(linear).is_some() {
        linear.take_adapter();
    }
}

fn drop_copies<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    // Restores the model's own tensors first, since `clear` drops the copies.
    place_copies(host, &[])?;
    if let Some(copies) = module_copies(host) {
        copies.entries.clear();
    }
    Ok(())
}

/// Writes the active full copy to the layer's own weight and bias.
fn keep_copy(linear: &Linear) -> Result<()> {
    let (copy, copied_bias) = linear.in_use();
    if std::ptr::eq(copy, linear.weight()) {
        return Ok(());
    }
    if let (LinearWeight::Dense { weight: copy, .. }, LinearWeight::Dense { weight, .. }) =
        (copy, linear.weight())
    {
        weight.f_detach()?.f_copy_(copy)?;
    }
    if let (Some(copy), Some(bias)) = (copied_bias, linear.bias()) {
        bias.f_detach()?.f_copy_(copy)?;
    }
    Ok(())
}
