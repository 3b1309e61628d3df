use overdrive_autograd::NoGradGuard;
use overdrive_nn::{AdapterHost, LinearWeight};
use tch::Tensor;

use super::experts::Places;
use crate::config::LayerOptions;
use crate::host::{is_bias, module_copies, visit_linears, visit_parameters};
use crate::layer_adapters::adapters_of;
use crate::selection::SavedModules;
use crate::{BiasMode, LoraConfig, Result};

/// A tensor that a file should hold.
#[derive(Debug)]
pub(super) struct Entry {
    /// The key, without `base_model.model.`.
    pub(super) key: String,
    /// The key in files of older PEFT versions.
    pub(super) older: Option<String>,
    pub(super) shape: Vec<i64>,
}

pub(super) const PREFIX: &str = "base_model.model.";

/// Returns the tensors that a file of this configuration holds, in the order of the model.
pub(super) fn expected<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
    layers: &[String],
    saved: &SavedModules,
    places: &Places,
) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut push = |key: String, older: Option<String>, shape: &[i64]| {
        entries.push(Entry {
            key,
            older,
            shape: shape.to_vec(),
        });
    };
    visit_linears(host, |name, linear| {
        let [outputs, inputs] = linear.weight().size();
        let targeted = layers.iter().any(|own| own == name);
        if targeted {
            let LayerOptions { rank, .. } = config.layer_options(name)?;
            let (module, ranks, outputs) = match places.get(name) {
                None => (name, rank, outputs),
                // One entry for all.
                Some(place) if place.expert > 0 || place.half == Some(1) => return Ok(()),
                Some(place) => {
                    let halves = if place.half.is_some() { 2 } else { 1 };
                    (
                        place.module.as_str(),
                        rank * place.experts,
                        halves * outputs,
                    )
                }
            };
            push(format!("{module}.lora_A.weight"), None, &[ranks, inputs]);
            push(format!("{module}.lora_B.weight"), None, &[outputs, ranks]);
            if config.lora_bias {
                push(format!("{name}.lora_B.bias"), None, &[outputs]);
            }
            if config.use_dora {
                let key = format!("{name}.lora_magnitude_vector");
                let older = format!("{key}.weight");
                push(key, Some(older), &[outputs]);
            }
        }
        if saved.layers.iter().any(|own| own == name) {
            if let LinearWeight::Dense { weight, .. } = linear.weight() {
                push(format!("{name}.weight"), None, &weight.size());
            }
            if linear.bias().is_some() {
                push(format!("{name}.bias"), None, &[outputs]);
            }
            return Ok(());
        }
        let trained = match config.bias {
            BiasMode::None => false,
            BiasMode::All => true,
            BiasMode::LoraOnly => targeted,
        };
        if trained && linear.bias().is_some() {
            let plain = format!("{name}.bias");
            if targeted {
                push(format!("{name}.base_layer.bias"), Some(plain), &[outputs]);
            } else {
                push(plain, None, &[outputs]);
            }
        }
        Ok(())
    })?;
    visit_parameters(host, |name, tensor| {
        let is_copied = saved.parameters.iter().any(|own| own == name);
        if is_copied || (config.bias == BiasMode::All && is_bias(name)) {
            push(name.to_owned(), None, &tensor.size());
        }
        Ok(())
    })?;
    Ok(entries)
}

/// Calls `see` with the key and the tensor of each entry of the file of the adapter `adapter`.
pub(super) fn visit<H: AdapterHost + ?Sized>(
    host: &mut H,
    adapter: &str,
    mode: BiasMode,
    see: &mut dyn FnMut(String, &Tensor) -> Result<()>,
) -> Result<()> {
    let _no_grad = NoGradGuard::new();
    visit_linears(host, |name, linear| {
        let adapters = adapters_of(linear);
        let own = adapters.and_then(|adapters| adapters.get(adapter));
        if let Some(own) = own {
            for (kind, last, tensor) in own.tensors() {
                let key = match kind {
                    "lora_magnitude_vector" => format!("{name}.{kind}"),
                    _ => format!("{name}.{kind}.{last}"),
                };
                see(key, tensor)?;
            }
        }
        if let Some(copy) = adapters.and_then(|adapters| adapters.copy(adapter)) {
            if let LinearWeight::Dense { weight, .. } = &copy.weight {
                see(format!("{name}.weight"), weight)?;
            }
            if let Some(bias) = &copy.bias {
                see(format!("{name}.bias"), bias)?;
            }
            return Ok(());
        }
        let key = match (mode, own.is_some()) {
            (BiasMode::None, _) | (BiasMode::LoraOnly, false) => return Ok(()),
            (_, true) => format!("{name}.base_layer.bias"),
            (BiasMode::All, false) => format!("{name}.bias"),
        };
        match linear.bias() {
            Some(bias) => see(key, bias),
            None => Ok(()),
        }
    })?;
    let mut copied = Vec::new();
    if let Some(copies) = module_copies(host) {
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
        visit_parameters(host, |name, tensor| {
            if is_bias(name) && !copied.iter().any(|own| own == name) {
                see(name.to_owned(), tensor)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}
