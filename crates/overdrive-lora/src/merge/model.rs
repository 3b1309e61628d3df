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
use crate::{Error, LoraLinear, Result};

/// Merges adapters into the weights of all layers (`None`: the active ones), as PEFT's `merge_adapter`: the
/// model then computes at the cost of its weights alone, until [`unmerge_adapters`].
///
/// Quantized weights are dequantized, changed, and quantized again by their scheme; the report has the error
/// of that.
///
/// # Errors
/// [`Error::UnknownAdapter`], and as [`LoraLinear::merge_adapters`]; the layers that this call has merged are
/// then unmerged again.
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
        let merged = linear.merge_adapters(name, names, options)?;
        report.layers.extend(merged);
        Ok(())
    });
    // A model that is merged in some layers only would compute neither with nor without the adapter.
    if merged.is_err() {
        visit_linears(host, |name, linear| {
            let own = report.layers.iter().find(|own| own.name == name);
            super::unmerge(linear, own.map_or(0, |own| own.adapters.len()))
        })?;
    }
    merged.map(|()| report)
}

/// Takes all merged adapters out of the weights again.
///
/// # Errors
/// An error of libtorch when memory runs out.
pub fn unmerge_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    visit_linears(host, |_, linear| linear.unmerge_adapters())
}

/// Merges the active adapters permanently and removes all of them; full copies of active adapters
/// (`modules_to_save`) replace the elements of the model's own parameters. A plain model remains.
///
/// # Errors
/// As [`merge_adapters`], and those of [`merge_obstacle`]; the model is then unchanged.
pub fn merge_and_unload<H: AdapterHost + ?Sized>(
    host: &mut H,
    options: &MergeOptions,
) -> Result<MergeReport> {
    let options = MergeOptions {
        // Nobody can unmerge after this: a copy of the weights would be memory for nothing.
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

/// Returns the error that [`merge_and_unload`] would give because the active adapters cannot be merged, or `None`.
/// Such adapters work beside the weights. The model is not changed.
///
/// - [`Error::TiedCopy`]: a full copy (`modules_to_save`) of a parameter that the model uses twice, such as an
///   embedding with a tied head. It can replace one of the two only.
/// - [`Error::TiedAdapter`]: an adapter of such a parameter, whose change would reach the other use, too.
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

/// Returns the error of a full copy or an adapter of a tied parameter: only one of the two layers that share the
/// parameter uses it, and writing to the parameter would change both.
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

/// Removes all adapters and full copies without merging them; merged adapters are unmerged first. Biases stay
/// as they were trained.
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
    // An adapter of another crate stays.
    if adapters_of(linear).is_some() {
        linear.take_adapter();
    }
}

fn drop_copies<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    // The model's own tensors go back first: `clear` drops the copies for good.
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
