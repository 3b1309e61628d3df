use std::path::Path;

use overdrive_nn::AdapterHost;
use tch::Tensor;

use super::experts::Places;
use super::keys::{PREFIX, visit};
use super::tokens::visit_tokens;
use super::{CONFIG, WEIGHTS};
use crate::adapters::adapter_names;
use crate::config::LayerParameter;
use crate::host::{module_copies, visit_linears};
use crate::layer_adapters::adapters_of;
use crate::{Error, LoraConfig, Result, TargetModules};

/// Writes the adapter `name` as PEFT's `save_pretrained` does: `adapter_model.safetensors` and then
/// `adapter_config.json`, each atomically. PEFT's `PeftModel.from_pretrained` and
/// [`load_adapter`](crate::load_adapter) read them. The folder is created if it does not exist.
///
/// The configuration has `inference_mode: true`, as PEFT's does, and `lora_dropout: 0` if experts or routers have adapters:
/// dropout only matters in training, and PEFT refuses it there, because with transformers 5 they are parameters. The
/// tensors are those of the adapter alone, even while it is merged. An adapter of the text model of a multimodal folder has
/// the names of the multimodal model, over which PEFT loads it.
///
/// # Errors
/// [`Error::UnknownAdapter`], [`Error::Common`] and [`Error::File`] if a file cannot be written.
pub fn save_adapter<H: AdapterHost + ?Sized>(
    host: &mut H,
    dir: impl AsRef<Path>,
    name: &str,
) -> Result<()> {
    let dir = dir.as_ref();
    let Some(config) = config_of(host, name)? else {
        return Err(Error::UnknownAdapter {
            name: name.to_owned(),
            available: adapter_names(host)?,
        });
    };
    let mut tensors = Vec::new();
    visit(host, name, config.bias, &mut |key, tensor| {
        tensors.push((key, tensor.f_detach()?));
        Ok(())
    })?;
    visit_tokens(host, &config, |key, _, weight, tokens| {
        let tokens = Tensor::f_from_slice(tokens)?.f_to_device(weight.device())?;
        tensors.push((key, weight.f_detach()?.f_index_select(0, &tokens)?));
        Ok(())
    })?;
    let is_of_mixture = |key: &str| {
        let layer = key.split_once(".lora_").map(|(layer, _)| layer);
        layer.is_some_and(|layer| LayerParameter::of(layer).is_of_mixture())
    };
    let has_mixture = tensors.iter().any(|(key, _)| is_of_mixture(key));
    let tensors = Places::of(host, &config)?.join(tensors)?.into_iter();
    let in_original = |key: &str| format!("{PREFIX}{}", host.name_in_original(key));
    let tensors: Vec<_> = tensors
        .map(|(key, tensor)| (in_original(&key), tensor))
        .collect();
    let config = for_original(host, name, config)?;
    std::fs::create_dir_all(dir).map_err(overdrive_core::Error::io("create", dir))?;
    // PEFT's own files have this key, and transformers refuses a file without it.
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    overdrive_safetensors::write(dir.join(WEIGHTS), &tensors, &metadata)?;
    // Writes the configuration last, so that a folder that has one is complete.
    let config = LoraConfig {
        inference_mode: true,
        lora_dropout: if has_mixture {
            0.0
        } else {
            config.lora_dropout
        },
        ..config
    };
    let text = config.to_json();
    overdrive_core::files::write(dir.join(CONFIG), text.as_bytes())?;
    Ok(())
}

/// Returns the configuration with the names of the model that transformers loads from the files of this one. Where they
/// differ, it lists every layer: a name such as `q_proj` also selects layers of a vision tower there.
fn for_original<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    mut config: LoraConfig,
) -> Result<LoraConfig> {
    let mut layers = Vec::new();
    visit_linears(host, |layer, linear| {
        let adapter = adapters_of(linear).and_then(|own| own.get(name));
        if adapter.is_some() && config.target_parameter(layer).is_none() {
            layers.push(layer.to_owned());
        }
        Ok(())
    })?;
    let mut unknown = layers.iter().filter(|layer| host.is_unknown_to_peft(layer));
    if let Some(first) = unknown.next() {
        tracing::warn!(
            "PEFT with transformers 5 does not load the adapters of {} layers of this model ({first}, ...), which are parameters \
             there or have the name of one; merge the adapter for Python, or train with `target_modules: all-linear` or \
             `target_parameters`",
            unknown.count() + 1
        );
    }
    let originals = layers.iter().map(|layer| host.name_in_original(layer));
    let originals: Vec<String> = originals.collect();
    if originals == layers {
        return Ok(config);
    }
    let rename = |name: &mut String| *name = host.name_in_original(name);
    let lists = [&mut config.modules_to_save, &mut config.target_parameters];
    lists.into_iter().flatten().flatten().for_each(rename);
    let ranks = config.rank_pattern.iter_mut().map(|(name, _)| name);
    let alphas = config.alpha_pattern.iter_mut().map(|(name, _)| name);
    ranks.chain(alphas).for_each(rename);
    Ok(LoraConfig {
        target_modules: Some(TargetModules::Names(originals)),
        exclude_modules: None,
        layers_to_transform: None,
        layers_pattern: None,
        ..config
    })
}

/// Returns the configuration that the adapter was made from.
fn config_of<H: AdapterHost + ?Sized>(host: &mut H, name: &str) -> Result<Option<LoraConfig>> {
    let mut config = None;
    visit_linears(host, |_, linear| {
        let adapter = adapters_of(linear).and_then(|own| own.get(name));
        if let (None, Some(adapter)) = (&config, adapter) {
            config = Some(adapter.config().clone());
        }
        Ok(())
    })?;
    if config.is_some() {
        return Ok(config);
    }
    // For an adapter of full copies alone, the configuration holds their names.
    let mut modules: Vec<String> = Vec::new();
    visit_linears(host, |layer, linear| {
        if adapters_of(linear).is_some_and(|own| own.copy(name).is_some()) {
            modules.push(layer.to_owned());
        }
        Ok(())
    })?;
    if let Some(copies) = module_copies(host) {
        for parameter in copies.names(name) {
            let module = parameter
                .rsplit_once('.')
                .map_or(parameter, |(module, _)| module);
            if !modules.iter().any(|own| own == module) {
                modules.push(module.to_owned());
            }
        }
    }
    Ok((!modules.is_empty()).then(|| LoraConfig {
        target_modules: Some(TargetModules::Names(Vec::new())),
        modules_to_save: Some(modules),
        ..LoraConfig::default()
    }))
}
