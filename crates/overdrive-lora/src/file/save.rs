use std::path::Path;

use super::keys::{PREFIX, visit};
use super::{CONFIG, WEIGHTS};
use crate::adapters::adapter_names;
use crate::{AdapterHost, Error, LoraConfig, Result};

/// Writes the adapter `name` as PEFT's `save_pretrained` does: `adapter_model.safetensors` and then
/// `adapter_config.json`, each whole or not at all. PEFT's `PeftModel.from_pretrained` and
/// [`load_adapter`](crate::load_adapter) read them. The folder is made where there is none.
///
/// The file says `inference_mode: true`, as PEFT's does. What was merged is no part of it: files hold
/// the adapter, merged or not.
///
/// # Errors
/// [`Error::UnknownAdapter`], [`Error::Io`] and [`Error::File`].
pub fn save_adapter<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    dir: impl AsRef<Path>,
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
        tensors.push((format!("{PREFIX}{key}"), tensor.f_detach()?));
        Ok(())
    })?;
    std::fs::create_dir_all(dir).map_err(|source| Error::Io {
        action: "make",
        path: dir.to_path_buf(),
        source,
    })?;
    let metadata = [("format".to_owned(), "pt".to_owned())].into();
    overdrive_safetensors::write(dir.join(WEIGHTS), &tensors, &metadata)?;
    let config = LoraConfig {
        inference_mode: true,
        ..config
    };
    let text = config.to_json();
    overdrive_safetensors::write_bytes(dir.join(CONFIG), text.as_bytes())?;
    Ok(())
}

/// The configuration that the adapter was made from.
fn config_of<H: AdapterHost + ?Sized>(host: &mut H, name: &str) -> Result<Option<LoraConfig>> {
    let mut config = None;
    host.visit_linears(&mut |_, map| {
        if let (None, Some(adapter)) = (&config, map.adapter(name)) {
            config = Some(adapter.config().clone());
        }
        Ok(())
    })?;
    if config.is_some() {
        return Ok(config);
    }
    // Only full copies: the configuration says no more than their names.
    let mut modules: Vec<String> = Vec::new();
    host.visit_linears(&mut |map_name, map| {
        if map.copies.iter().any(|(own, ..)| own == name) {
            modules.push(map_name.to_owned());
        }
        Ok(())
    })?;
    if let Some(copies) = host.module_copies() {
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
        target_modules: Some(crate::TargetModules::Names(Vec::new())),
        modules_to_save: Some(modules),
        ..LoraConfig::default()
    }))
}
