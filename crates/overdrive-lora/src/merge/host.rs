//! All maps of a model.

use overdrive_autograd::NoGradGuard;
use tch::Tensor;

use super::report::{MergeOptions, MergeReport};
use crate::adapters::known;
use crate::copies::place_copies;
use crate::{AdaptedLinear, AdapterHost, BaseWeight, Error, Result};

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
    known(host, names)?;
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
