//! Adapters of a whole model.

use std::sync::Arc;

use crate::copies::{ModuleCopy, check_copies, place_copies};
use crate::linear::check_name;
use crate::selection::{SavedModules, modules_to_save, resolve};
use crate::trainable::mark_only_lora_as_trainable;
use crate::{AdapterHost, AddOptions, BaseWeight, Error, LoraConfig, ModuleCopies, Result};

/// Adds an adapter to the maps that `config` means, as PEFT's `get_peft_model` and `add_adapter`, and
/// returns their names.
///
/// The model's own parameters are frozen, but for the biases that `config.bias` names. The first adapter
/// is active at once; a later one waits for [`set_adapter`], and learns nothing until then.
///
/// # Errors
/// [`Error::BadConfig`], [`Error::BadName`], [`Error::NoTarget`] listing the maps there are,
/// [`Error::NoModule`], [`Error::Merged`]. The model is then as it was.
pub fn add_adapter<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    config: &LoraConfig,
    options: &AddOptions,
) -> Result<Vec<String>> {
    check_name(name)?;
    if adapter_names(host)?.iter().any(|own| own == name) {
        return Err(Error::BadName {
            name: name.to_owned(),
            reason: "it is taken",
        });
    }
    let (config, maps) = resolve(host, config)?;
    let saved = modules_to_save(host, &config)?;
    let config = Arc::new(config);
    let added = attach(host, name, &config, options, &maps, &saved);
    if added.is_err() {
        // What was attached before the failure; the first error is the one to tell.
        let _ = delete_adapter(host, name);
    }
    added?;
    if active_adapters(host)?.is_empty() {
        set_adapter(host, &[name])?;
    } else {
        set_requires_grad(host, &[name], false)?;
        mark_only_lora_as_trainable(host)?;
    }
    Ok(maps)
}

fn attach<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    config: &Arc<LoraConfig>,
    options: &AddOptions,
    maps: &[String],
    saved: &SavedModules,
) -> Result<()> {
    host.visit_linears(&mut |map_name, map| {
        map.refuse_merged("adding an adapter")?;
        if maps.iter().any(|own| own == map_name) {
            map.add_adapter(map_name, name, config, options)?;
        }
        if saved.maps.iter().any(|own| own == map_name) {
            let BaseWeight::Dense { weight, transposed } = map.base() else {
                return Err(Error::BadConfig {
                    key: "modules_to_save".to_owned(),
                    found: format!("`{map_name}`, which is quantized"),
                    expected: "modules with dense weights".to_owned(),
                });
            };
            let copy = BaseWeight::Dense {
                weight: weight.f_detach_copy()?,
                transposed: *transposed,
            };
            let bias = map.bias().map(|bias| bias.f_detach_copy()).transpose()?;
            map.copies.push((name.to_owned(), copy, bias));
        }
        Ok(())
    })?;
    let mut copies = Vec::new();
    host.visit_parameters(&mut |parameter, tensor| {
        if saved.parameters.iter().any(|own| own == parameter) {
            copies.push(ModuleCopy {
                adapter: name.to_owned(),
                name: parameter.to_owned(),
                copy: tensor.f_detach_copy()?,
                original: None,
            });
        }
        Ok(())
    })?;
    if let Some(own) = host.module_copies() {
        own.entries.extend(copies);
    }
    Ok(())
}

/// The names of all adapters, in the order in which they were added.
///
/// # Errors
/// Why the maps cannot be visited now.
pub fn adapter_names<H: AdapterHost + ?Sized>(host: &mut H) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    let mut note = |name: &str| {
        if !names.iter().any(|own| own == name) {
            names.push(name.to_owned());
        }
    };
    host.visit_linears(&mut |_, map| {
        map.adapters.iter().for_each(|(name, _)| note(name));
        map.copies.iter().for_each(|(name, ..)| note(name));
        Ok(())
    })?;
    if let Some(copies) = host.module_copies() {
        copies.entries.iter().for_each(|entry| note(&entry.adapter));
    }
    Ok(names)
}

/// The names of all adapters, if these are among them.
pub(crate) fn known<H: AdapterHost + ?Sized>(host: &mut H, names: &[&str]) -> Result<Vec<String>> {
    let available = adapter_names(host)?;
    let unknown = names
        .iter()
        .find(|name| !available.iter().any(|own| own == *name));
    match unknown {
        None => Ok(available),
        Some(unknown) => Err(Error::UnknownAdapter {
            name: (*unknown).to_owned(),
            available,
        }),
    }
}

/// The names of the active adapters.
///
/// # Errors
/// Why the maps cannot be visited now.
pub fn active_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    let mut note = |name: &str| {
        if !names.iter().any(|own| own == name) {
            names.push(name.to_owned());
        }
    };
    host.visit_linears(&mut |_, map| {
        map.active().into_iter().for_each(&mut note);
        map.active_copy().into_iter().for_each(&mut note);
        Ok(())
    })?;
    if let Some(copies) = host.module_copies() {
        copies
            .active
            .iter()
            .chain(&copies.waiting)
            .for_each(|name| note(name));
    }
    Ok(names)
}

/// Makes exactly these adapters active, and lets exactly them learn. Several add up, in this order. No
/// name at all leaves the model alone.
///
/// # Errors
/// [`Error::UnknownAdapter`]; [`Error::BadConfig`] where several have copies of modules
/// (`modules_to_save`), which cannot add up; [`Error::Merged`].
pub fn set_adapter<H: AdapterHost + ?Sized>(host: &mut H, names: &[&str]) -> Result<()> {
    let available = known(host, names)?;
    check_copies(host, names)?;
    host.visit_linears(&mut |_, map| map.refuse_merged("changing the active adapters"))?;
    host.visit_linears(&mut |_, map| {
        map.set_active(names);
        map.set_enabled(true);
        Ok(())
    })?;
    place_copies(host, names)?;
    set_requires_grad(
        host,
        &available.iter().map(String::as_str).collect::<Vec<_>>(),
        false,
    )?;
    set_requires_grad(host, names, true)?;
    mark_only_lora_as_trainable(host)
}

/// Makes every tensor of the adapters `names` require a gradient, or none (PEFT's `set_requires_grad`).
///
/// # Errors
/// An error of libtorch.
pub fn set_requires_grad<H: AdapterHost + ?Sized>(
    host: &mut H,
    names: &[&str],
    requires_grad: bool,
) -> Result<()> {
    host.visit_linears(&mut |_, map| {
        for (_, adapter) in map
            .adapters
            .iter()
            .filter(|(own, _)| names.contains(&own.as_str()))
        {
            for (_, _, tensor) in adapter.tensors() {
                let _same = tensor.f_set_requires_grad(requires_grad)?;
            }
        }
        for (_, base, bias) in map
            .copies
            .iter()
            .filter(|(own, ..)| names.contains(&own.as_str()))
        {
            if let BaseWeight::Dense { weight, .. } = base {
                let _same = weight.f_set_requires_grad(requires_grad)?;
            }
            if let Some(bias) = bias {
                let _same = bias.f_set_requires_grad(requires_grad)?;
            }
        }
        Ok(())
    })?;
    if let Some(copies) = host.module_copies() {
        for entry in copies
            .entries
            .iter()
            .filter(|entry| names.contains(&entry.adapter.as_str()))
        {
            let _same = entry.copy.f_set_requires_grad(requires_grad)?;
        }
    }
    Ok(())
}

/// Computes without adapters and full copies until [`enable_adapters`]. Trained biases stay, as in PEFT.
///
/// # Errors
/// [`Error::Merged`].
pub fn disable_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    host.visit_linears(&mut |_, map| map.refuse_merged("disabling adapters"))?;
    host.visit_linears(&mut |_, map| {
        map.set_enabled(false);
        Ok(())
    })?;
    let placed = host.module_copies().and_then(|copies| copies.active.take());
    place_copies(host, &[])?;
    if let Some(copies) = host.module_copies() {
        copies.waiting = placed;
    }
    Ok(())
}

/// Undoes [`disable_adapters`].
///
/// # Errors
/// Why the maps cannot be visited now.
pub fn enable_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    host.visit_linears(&mut |_, map| {
        map.set_enabled(true);
        Ok(())
    })?;
    let waiting = host
        .module_copies()
        .and_then(|copies| copies.waiting.take());
    match waiting {
        Some(name) => place_copies(host, &[&name]),
        None => Ok(()),
    }
}

/// Removes an adapter from all maps. Where it was the only active one, none is active then.
///
/// # Errors
/// [`Error::UnknownAdapter`], [`Error::Merged`].
pub fn delete_adapter<H: AdapterHost + ?Sized>(host: &mut H, name: &str) -> Result<()> {
    known(host, &[name])?;
    host.visit_linears(&mut |_, map| map.refuse_merged("deleting an adapter"))?;
    host.visit_linears(&mut |_, map| {
        map.delete_adapter(name)?;
        Ok(())
    })?;
    let is_placed = |copies: &mut ModuleCopies| copies.active.as_deref() == Some(name);
    if host.module_copies().is_some_and(is_placed) {
        place_copies(host, &[])?;
    }
    if let Some(copies) = host.module_copies() {
        copies.entries.retain(|entry| entry.adapter != name);
    }
    Ok(())
}

/// Switches the dropout of all maps.
///
/// # Errors
/// Why the maps cannot be visited now.
pub fn set_training<H: AdapterHost + ?Sized>(host: &mut H, training: bool) -> Result<()> {
    host.visit_linears(&mut |_, map| {
        map.set_training(training);
        Ok(())
    })
}
