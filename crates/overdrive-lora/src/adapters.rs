//! Adapters of a whole model.

use std::sync::Arc;

use overdrive_nn::{AdapterHost, LinearWeight};
use tch::Tensor;

use crate::copies::{ModuleCopy, check_copies, place_copies};
use crate::host::{module_copies, visit_linears, visit_parameters};
use crate::layer_adapters::{
    LayerAdapters, LayerCopy, adapters_mut, adapters_of, check_name, split_or_insert, taken,
};
use crate::selection::{SavedModules, modules_to_save, refuse_halves, refuse_tokens, resolve};
use crate::trainable::{mark_only_lora_as_trainable, trainable_parameters};
use crate::{AddOptions, Error, LoraConfig, Result, init};

/// The name of the adapter that [`add_lora`] adds, which is PEFT's.
pub const DEFAULT_ADAPTER: &str = "default";

/// Turns a model into one that trains a LoRA adapter: adds the adapter [`DEFAULT_ADAPTER`] to the linear layers that
/// `config` selects, makes it the active one, freezes all other parameters, and returns the trainable parameters with
/// PEFT's names, for an optimizer (PEFT's `get_peft_model`).
///
/// [`add_adapter`] takes another name and options.
///
/// # Errors
/// As [`add_adapter`].
///
/// ```
/// use overdrive_lora::{LoraConfig, add_lora};
/// use overdrive_nn::{AdapterHost, Linear, Result};
/// use overdrive_optim::{AdamW, AdamWConfig, ParamGroup};
/// use tch::{Device, Kind, Tensor};
///
/// struct Scorer {
///     score: Linear,
/// }
///
/// impl AdapterHost for Scorer {
///     fn visit_linears(&mut self, visit: &mut dyn FnMut(&str, &mut Linear) -> Result<()>) -> Result<()> {
///         visit("score", &mut self.score)
///     }
/// }
///
/// # fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
/// let weight = Tensor::ones([2, 16], (Kind::Float, Device::Cpu));
/// let mut model = Scorer { score: Linear::dense(weight, None)? };
/// let config = LoraConfig { r: 4, target_modules: Some("all-linear".into()), ..Default::default() };
/// let parameters = add_lora(&mut model, &config)?;
/// assert_eq!(parameters[0].0, "base_model.model.score.lora_A.default.weight");
/// let optimizer = AdamW::new(vec![ParamGroup::new("lora", parameters)], AdamWConfig::default())?;
/// # let _ = optimizer;
/// # Ok(())
/// # }
/// ```
pub fn add_lora<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
) -> Result<Vec<(String, Tensor)>> {
    add_adapter(host, DEFAULT_ADAPTER, config, &AddOptions::default())?;
    // A model that had an adapter keeps that one active otherwise.
    set_adapter(host, &[DEFAULT_ADAPTER])?;
    trainable_parameters(host)
}

/// Adds an adapter to the linear layers that `config` selects and returns their names (PEFT's `add_adapter`).
///
/// The model's own parameters are frozen, except for the biases that `config.bias` selects. The first adapter
/// is active immediately; later adapters are neither computed nor trained until [`set_adapter`] activates them.
///
/// # Errors
/// [`Error::Common`] for an invalid configuration, [`Error::BadName`], [`Error::NoTarget`] with the layers of the
/// model, [`Error::NoModule`], [`Error::Merged`], [`Error::OtherAdapter`]. The model is then unchanged.
pub fn add_adapter<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    config: &LoraConfig,
    options: &AddOptions,
) -> Result<Vec<String>> {
    refuse_halves(host, config)?;
    refuse_tokens(config)?;
    add(host, name, config, options)
}

/// Adds an adapter as [`add_adapter`] does, also one that cannot be trained.
pub(crate) fn add<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    config: &LoraConfig,
    options: &AddOptions,
) -> Result<Vec<String>> {
    check_name(name)?;
    if adapter_names(host)?.iter().any(|own| own == name) {
        return Err(taken(name));
    }
    // All checks come before the first change to a layer.
    let (config, layers) = resolve(host, config)?;
    let saved = modules_to_save(host, &config)?;
    saved.refuse_unmatched()?;
    let config = Arc::new(config);
    let added = attach(host, name, &config, options, &layers, &saved);
    if added.is_err() {
        // Removes what was attached before the failure, and reports the first error.
        let _ = delete_adapter(host, name);
    }
    added?;
    // As in PEFT, the first adapter is active immediately and later ones are not.
    if active_adapters(host)?.is_empty() {
        set_adapter(host, &[name])?;
    } else {
        // `attach` leaves new tensors trainable, but an inactive adapter gets no gradients to train with.
        set_requires_grad(host, &[name], false)?;
        mark_only_lora_as_trainable(host)?;
    }
    Ok(layers)
}

fn attach<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    config: &Arc<LoraConfig>,
    options: &AddOptions,
    layers: &[String],
    saved: &SavedModules,
) -> Result<()> {
    // All that a layer can refuse comes before the first change: PiSSA, OLoRA and LoftQ change the weights.
    let mut additions = Vec::new();
    visit_linears(host, |layer, linear| {
        let own = adapters_of(linear);
        if let Some(own) = own {
            own.refuse_merged("adding an adapter")?;
        }
        let is_in = |names: &[String]| names.iter().any(|own| own == layer);
        let (is_adapted, is_copied) = (is_in(layers), is_in(&saved.layers));
        if (is_adapted || is_copied) && own.is_none() && linear.adapter().is_some() {
            return Err(Error::OtherAdapter);
        }
        let adapter = is_adapted.then(|| init::adapter(linear.weight(), layer, config, options));
        let copy = is_copied.then(|| LayerCopy::of(linear, layer, name));
        additions.push((adapter.transpose()?, copy.transpose()?));
        Ok(())
    })?;
    let mut additions = additions.into_iter();
    visit_linears(host, |_, linear| {
        let Some((adapter, copy)) = additions.next() else {
            return Ok(());
        };
        if adapter.is_none() && copy.is_none() {
            return Ok(());
        }
        let (weight, _, own) = split_or_insert(linear)?;
        if let Some(adapter) = adapter {
            if adapter.changes_base() {
                own.forget_row_norms();
            }
            own.adapters.push((name.to_owned(), adapter.place(weight)?));
        }
        own.copies.extend(copy);
        Ok(())
    })?;
    // Collects the copies first: the visit borrows the model, which holds their list.
    let mut copies = Vec::new();
    visit_parameters(host, |parameter, tensor| {
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
    if let Some(own) = module_copies(host) {
        own.entries.extend(copies);
    }
    Ok(())
}

/// Returns the names of all adapters, in the order in which they were added.
///
/// # Errors
/// The error of a model whose layers cannot be visited now.
pub fn adapter_names<H: AdapterHost + ?Sized>(host: &mut H) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    visit_linears(host, |_, linear| {
        if let Some(own) = adapters_of(linear) {
            let copies = own.copies.iter().map(|copy| &copy.adapter);
            let all = own.adapters.iter().map(|(name, _)| name).chain(copies);
            all.for_each(|name| push_new(&mut names, name));
        }
        Ok(())
    })?;
    if let Some(copies) = module_copies(host) {
        let all = copies.entries.iter().map(|entry| &entry.adapter);
        all.for_each(|name| push_new(&mut names, name));
    }
    Ok(names)
}

/// Appends `name` unless it is there already.
fn push_new(names: &mut Vec<String>, name: &str) {
    if !names.iter().any(|own| own == name) {
        names.push(name.to_owned());
    }
}

/// Returns the names of all adapters, or an error if one of `names` is not among them.
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

/// Returns the names of the active adapters.
///
/// # Errors
/// The error of a model whose layers cannot be visited now.
pub fn active_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<Vec<String>> {
    let mut names: Vec<String> = Vec::new();
    visit_linears(host, |_, linear| {
        if let Some(own) = adapters_of(linear) {
            let all = own.active().into_iter().chain(own.active_copy());
            all.for_each(|name| push_new(&mut names, name));
        }
        Ok(())
    })?;
    if let Some(copies) = module_copies(host) {
        let all = copies.active.iter().chain(&copies.waiting);
        all.for_each(|name| push_new(&mut names, name));
    }
    Ok(names)
}

/// Makes exactly these adapters active and trainable. The updates of several adapters are added in this order. With
/// no names, the model computes its weights alone.
///
/// # Errors
/// [`Error::UnknownAdapter`]; [`Error::Common`] if several have copies of one module (`modules_to_save`),
/// which cannot be added; [`Error::Merged`].
pub fn set_adapter<H: AdapterHost + ?Sized>(host: &mut H, names: &[&str]) -> Result<()> {
    let available = known(host, names)?;
    check_copies(host, names)?;
    // Switching would leave the old adapter merged into the weight.
    refuse_merged(host, "changing the active adapters")?;
    each_layer(host, |own| {
        own.set_active(names);
        own.enabled = true;
    })?;
    place_copies(host, names)?;
    // Freezes all adapters first, so that one that was active before stops training.
    set_requires_grad(host, &as_strs(&available), false)?;
    set_requires_grad(host, names, true)?;
    mark_only_lora_as_trainable(host)
}

/// Sets whether the tensors of the adapters `names` require gradients (PEFT's `set_requires_grad`).
///
/// # Errors
/// An error of libtorch.
pub fn set_requires_grad<H: AdapterHost + ?Sized>(
    host: &mut H,
    names: &[&str],
    requires_grad: bool,
) -> Result<()> {
    // The flag belongs to the tensor, so it also applies to an optimizer's handles.
    let wanted = |name: &String| names.contains(&name.as_str());
    visit_linears(host, |_, linear| {
        let Some(own) = adapters_of(linear) else {
            return Ok(());
        };
        for (_, adapter) in own.adapters.iter().filter(|(name, _)| wanted(name)) {
            for (_, _, tensor) in adapter.tensors() {
                let _same = tensor.f_set_requires_grad(requires_grad)?;
            }
        }
        for copy in own.copies.iter().filter(|copy| wanted(&copy.adapter)) {
            if let LinearWeight::Dense { weight, .. } = &copy.weight {
                let _same = weight.f_set_requires_grad(requires_grad)?;
            }
            if let Some(bias) = &copy.bias {
                let _same = bias.f_set_requires_grad(requires_grad)?;
            }
        }
        Ok(())
    })?;
    if let Some(copies) = module_copies(host) {
        for entry in copies.entries.iter().filter(|entry| wanted(&entry.adapter)) {
            let _same = entry.copy.f_set_requires_grad(requires_grad)?;
        }
    }
    Ok(())
}

/// Multiplies the adapter's own scale by `factor` in all layers: 0 switches the adapter off, 1 restores the scale. It is not
/// saved.
///
/// # Errors
/// [`Error::UnknownAdapter`], [`Error::Merged`].
pub fn set_adapter_scale<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    factor: f64,
) -> Result<()> {
    known(host, &[name])?;
    // Unmerging subtracts with the scale of the merge.
    refuse_merged(host, "changing the scale of an adapter")?;
    each_layer(host, |own| {
        for (_, adapter) in own.adapters.iter_mut().filter(|(own, _)| own == name) {
            adapter.scale = factor * adapter.config.scale_of(adapter.rank(), adapter.alpha);
        }
    })
}

/// Disables all adapters and full copies until [`enable_adapters`]. As in PEFT, trained biases stay.
///
/// # Errors
/// [`Error::Merged`].
pub fn disable_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    refuse_merged(host, "disabling adapters")?;
    each_layer(host, |own| own.enabled = false)?;
    // Remembers the copies for `enable_adapters`, unless an earlier call already has.
    let placed = module_copies(host).map(|copies| {
        let waiting = std::mem::take(&mut copies.waiting);
        [std::mem::take(&mut copies.active), waiting].concat()
    });
    place_copies(host, &[])?;
    if let Some(copies) = module_copies(host) {
        copies.waiting = placed.unwrap_or_default();
    }
    Ok(())
}

/// Undoes [`disable_adapters`].
///
/// # Errors
/// The error of a model whose layers cannot be visited now.
pub fn enable_adapters<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    each_layer(host, |own| own.enabled = true)?;
    match module_copies(host).map(|copies| std::mem::take(&mut copies.waiting)) {
        Some(waiting) if !waiting.is_empty() => place_copies(host, &as_strs(&waiting)),
        _ => Ok(()),
    }
}

/// Returns `true` after [`disable_adapters`], until adapters are enabled again.
pub(crate) fn are_disabled<H: AdapterHost + ?Sized>(host: &mut H) -> Result<bool> {
    let mut disabled = module_copies(host).is_some_and(|copies| !copies.waiting.is_empty());
    each_layer(host, |own| disabled |= !own.enabled)?;
    Ok(disabled)
}

/// Removes an adapter from all layers. If it was the only active adapter, none is active afterwards.
///
/// # Errors
/// [`Error::UnknownAdapter`], [`Error::Merged`].
pub fn delete_adapter<H: AdapterHost + ?Sized>(host: &mut H, name: &str) -> Result<()> {
    known(host, &[name])?;
    refuse_merged(host, "deleting an adapter")?;
    each_layer(host, |own| own.delete(name))?;
    // Restores the model's own tensors before their copies are dropped.
    let mut active = module_copies(host).map_or(Vec::new(), |copies| copies.active.clone());
    if active.iter().any(|own| own == name) {
        active.retain(|own| own != name);
        place_copies(host, &as_strs(&active))?;
    }
    if let Some(copies) = module_copies(host) {
        copies.entries.retain(|entry| entry.adapter != name);
        copies.waiting.retain(|own| own != name);
    }
    Ok(())
}

/// Switches training mode on or off, and with it the dropout of all adapters.
///
/// # Errors
/// The error of a model whose layers cannot be visited now.
pub fn set_training<H: AdapterHost + ?Sized>(host: &mut H, training: bool) -> Result<()> {
    visit_linears(host, |_, linear| {
        linear.set_training(training);
        Ok(())
    })
}

/// Borrows the names.
pub(crate) fn as_strs(names: &[String]) -> Vec<&str> {
    names.iter().map(String::as_str).collect()
}

/// Checks that no layer has a merged adapter, before anything is changed.
fn refuse_merged<H: AdapterHost + ?Sized>(host: &mut H, operation: &'static str) -> Result<()> {
    visit_linears(host, |_, linear| {
        adapters_of(linear).map_or(Ok(()), |own| own.refuse_merged(operation))
    })
}

/// Calls `change` with the adapters of each layer that has any.
fn each_layer<H: AdapterHost + ?Sized>(
    host: &mut H,
    mut change: impl FnMut(&mut LayerAdapters),
) -> Result<()> {
    visit_linears(host, |_, linear| {
        adapters_mut(linear).into_iter().for_each(&mut change);
        Ok(())
    })
}
