use overdrive_autograd::NoGradGuard;
use tch::Tensor;

use crate::config::MapOptions;
use crate::selection::SavedModules;
use crate::{AdapterHost, BaseWeight, BiasMode, LoraConfig, Result};

/// A tensor of a file, and where it belongs.
#[derive(Debug)]
pub(super) struct Entry {
    /// Its key, without `base_model.model.`.
    pub(super) key: String,
    /// Another key under which older files have it.
    pub(super) older: Option<String>,
    pub(super) shape: Vec<i64>,
}

pub(super) const PREFIX: &str = "base_model.model.";

/// What a file of this configuration holds, in the order of the model.
pub(super) fn expected<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
    maps: &[String],
    saved: &SavedModules,
) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut push = |key: String, older: Option<String>, shape: &[i64]| {
        entries.push(Entry {
            key,
            older,
            shape: shape.to_vec(),
        });
    };
    host.visit_linears(&mut |name, map| {
        let [outputs, inputs] = map.base().size();
        let targeted = maps.iter().any(|own| own == name);
        if targeted {
            let MapOptions { rank, .. } = config.map_options(name)?;
            push(format!("{name}.lora_A.weight"), None, &[rank, inputs]);
            push(format!("{name}.lora_B.weight"), None, &[outputs, rank]);
            if config.lora_bias {
                push(format!("{name}.lora_B.bias"), None, &[outputs]);
            }
            if config.use_dora {
                let key = format!("{name}.lora_magnitude_vector");
                let older = format!("{key}.weight");
                push(key, Some(older), &[outputs]);
            }
        }
        if saved.maps.iter().any(|own| own == name) {
            if let BaseWeight::Dense { weight, .. } = map.base() {
                push(format!("{name}.weight"), None, &weight.size());
            }
            if map.bias().is_some() {
                push(format!("{name}.bias"), None, &[outputs]);
            }
            return Ok(());
        }
        let trained = match config.bias {
            BiasMode::None => false,
            BiasMode::All => true,
            BiasMode::LoraOnly => targeted,
        };
        if trained && map.bias().is_some() {
            let plain = format!("{name}.bias");
            if targeted {
                push(format!("{name}.base_layer.bias"), Some(plain), &[outputs]);
            } else {
                push(plain, None, &[outputs]);
            }
        }
        Ok(())
    })?;
    host.visit_parameters(&mut |name, tensor| {
        let is_copied = saved.parameters.iter().any(|own| own == name);
        let is_bias = name == "bias" || name.ends_with(".bias");
        if is_copied || (config.bias == BiasMode::All && is_bias) {
            push(name.to_owned(), None, &tensor.size());
        }
        Ok(())
    })?;
    Ok(entries)
}

/// Calls `see` with each of those tensors of the adapter `adapter` and its key.
pub(super) fn visit<H: AdapterHost + ?Sized>(
    host: &mut H,
    adapter: &str,
    mode: BiasMode,
    see: &mut dyn FnMut(String, &Tensor) -> Result<()>,
) -> Result<()> {
    let _no_grad = NoGradGuard::new();
    host.visit_linears(&mut |name, map| {
        let own = map.adapter(adapter);
        if let Some(own) = own {
            for (kind, last, tensor) in own.tensors() {
                let key = match kind {
                    "lora_magnitude_vector" => format!("{name}.{kind}"),
                    _ => format!("{name}.{kind}.{last}"),
                };
                see(key, tensor)?;
            }
        }
        if let Some((_, base, bias)) = map.copies.iter().find(|(own, ..)| own == adapter) {
            if let BaseWeight::Dense { weight, .. } = base {
                see(format!("{name}.weight"), weight)?;
            }
            if let Some(bias) = bias {
                see(format!("{name}.bias"), bias)?;
            }
            return Ok(());
        }
        let key = match (mode, own.is_some()) {
            (BiasMode::None, _) | (BiasMode::LoraOnly, false) => return Ok(()),
            (_, true) => format!("{name}.base_layer.bias"),
            (BiasMode::All, false) => format!("{name}.bias"),
        };
        match map.bias() {
            Some(bias) => see(key, bias),
            None => Ok(()),
        }
    })?;
    let mut copied = Vec::new();
    if let Some(copies) = host.module_copies() {
        for entry in copies
            .entries
            .iter()
            .filter(|entry| entry.adapter == adapter)
        {
            copied.push(entry.name.clone());
            see(entry.name.clone(), &entry.copy)?;
        }
    }
    if mode == BiasMode::All {
        host.visit_parameters(&mut |name, tensor| {
            let is_bias = name == "bias" || name.ends_with(".bias");
            if is_bias && !copied.iter().any(|own| own == name) {
                see(name.to_owned(), tensor)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}
