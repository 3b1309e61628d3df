//! What learns.

use std::collections::HashSet;
use std::fmt;

use tch::Tensor;

use crate::{AdapterHost, BaseWeight, BiasMode, Result};

/// Everything that requires a gradient, with the names that PEFT gives it:
/// `base_model.model.….q_proj.lora_A.{adapter}.weight`, `….base_layer.bias`,
/// `….modules_to_save.{adapter}.weight`. The tensors are the model's own: what an optimizer is given.
///
/// # Errors
/// Why the maps cannot be visited now.
pub fn trainable_parameters<H: AdapterHost + ?Sized>(
    host: &mut H,
) -> Result<Vec<(String, Tensor)>> {
    let mut parameters = Vec::new();
    visit_all(host, &mut |name, tensor| {
        if tensor.requires_grad() {
            parameters.push((name, tensor.shallow_clone()));
        }
    })?;
    Ok(parameters)
}

/// Calls `see` with every dense parameter there is and PEFT's name for it. Tied ones come twice.
fn visit_all<H: AdapterHost + ?Sized>(
    host: &mut H,
    see: &mut dyn FnMut(String, &Tensor),
) -> Result<()> {
    let mut replaced: Vec<(String, String)> = Vec::new();
    if let Some(copies) = host.module_copies() {
        for entry in &copies.entries {
            let (module, last) = entry
                .name
                .rsplit_once('.')
                .unwrap_or((&entry.name, "weight"));
            let stem = format!("base_model.model.{module}");
            see(
                format!("{stem}.modules_to_save.{}.{last}", entry.adapter),
                &entry.copy,
            );
            if let Some(original) = &entry.original {
                see(format!("{stem}.original_module.{last}"), original);
                replaced.push((entry.name.clone(), entry.adapter.clone()));
            }
        }
    }
    host.visit_parameters(&mut |name, tensor| {
        // A copy in the parameter's place was seen under its own name.
        if !replaced.iter().any(|(own, _)| own == name) {
            see(format!("base_model.model.{name}"), tensor);
        }
        Ok(())
    })?;
    host.visit_linears(&mut |name, map| {
        let stem = format!("base_model.model.{name}");
        let own = if !map.adapters.is_empty() {
            format!("{stem}.base_layer")
        } else if !map.copies.is_empty() {
            format!("{stem}.original_module")
        } else {
            stem.clone()
        };
        if let BaseWeight::Dense { weight, .. } = map.base() {
            see(format!("{own}.weight"), weight);
        }
        if let Some(bias) = map.bias() {
            see(format!("{own}.bias"), bias);
        }
        for (adapter_name, adapter) in map.adapters() {
            for (kind, last, tensor) in adapter.tensors() {
                see(format!("{stem}.{kind}.{adapter_name}.{last}"), tensor);
            }
        }
        for (adapter_name, base, bias) in &map.copies {
            let stem = format!("{stem}.modules_to_save.{adapter_name}");
            if let BaseWeight::Dense { weight, .. } = base {
                see(format!("{stem}.weight"), weight);
            }
            if let Some(bias) = bias {
                see(format!("{stem}.bias"), bias);
            }
        }
        Ok(())
    })
}

/// Freezes all parameters of the model itself: weights and biases of linear maps, and what
/// [`AdapterHost::visit_parameters`] shows.
///
/// # Errors
/// An error of libtorch.
fn freeze_base<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    let mut copied = HashSet::new();
    if let Some(copies) = host.module_copies() {
        let placed = copies
            .entries
            .iter()
            .filter(|entry| entry.original.is_some());
        for entry in placed {
            copied.insert(entry.name.clone());
            if let Some(original) = &entry.original {
                let _same = original.f_set_requires_grad(false)?;
            }
        }
    }
    host.visit_parameters(&mut |name, tensor| {
        if !copied.contains(name) && tensor.requires_grad() {
            let _same = tensor.f_set_requires_grad(false)?;
        }
        Ok(())
    })?;
    host.visit_linears(&mut |_, map| {
        if let BaseWeight::Dense { weight, .. } = map.base() {
            let _same = weight.f_set_requires_grad(false)?;
        }
        if let Some(bias) = map.bias() {
            let _same = bias.f_set_requires_grad(false)?;
        }
        Ok(())
    })
}

/// Freezes the model, but for the biases that the active adapters train ([`BiasMode`]), as PEFT does when
/// an adapter is added or chosen.
///
/// # Errors
/// An error of libtorch.
pub fn mark_only_lora_as_trainable<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    freeze_base(host)?;
    let mut all = false;
    host.visit_linears(&mut |_, map| {
        let modes: Vec<BiasMode> = map.active_modes().collect();
        all |= modes.contains(&BiasMode::All);
        if let (true, Some(bias)) = (modes.contains(&BiasMode::LoraOnly), map.bias()) {
            let _same = bias.f_set_requires_grad(true)?;
        }
        Ok(())
    })?;
    if !all {
        return Ok(());
    }
    host.visit_linears(&mut |_, map| {
        if let Some(bias) = map.bias() {
            let _same = bias.f_set_requires_grad(true)?;
        }
        Ok(())
    })?;
    host.visit_parameters(&mut |name, tensor| {
        if name == "bias" || name.ends_with(".bias") {
            let _same = tensor.f_set_requires_grad(true)?;
        }
        Ok(())
    })
}

/// How many numbers learn, of how many there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterCounts {
    /// Those that require a gradient.
    pub trainable: u64,
    /// All: quantized weights by the numbers they stand for, tied ones once, adapters too.
    pub all: u64,
}

impl ParameterCounts {
    /// `100 · trainable / all`.
    pub fn percent(&self) -> f64 {
        100.0 * self.trainable as f64 / (self.all as f64).max(1.0)
    }
}

impl fmt::Display for ParameterCounts {
    /// The line of PEFT's `print_trainable_parameters`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "trainable params: {} || all params: {} || trainable%: {:.4}",
            grouped(self.trainable),
            grouped(self.all),
            self.percent()
        )
    }
}

/// With commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Counts parameters (PEFT's `get_nb_trainable_parameters`): those of linear maps, of adapters, and what
/// [`AdapterHost::visit_parameters`] shows.
///
/// # Errors
/// Why the maps cannot be visited now.
pub fn parameter_counts<H: AdapterHost + ?Sized>(host: &mut H) -> Result<ParameterCounts> {
    let mut counts = ParameterCounts {
        trainable: 0,
        all: 0,
    };
    let mut seen = HashSet::new();
    visit_all(host, &mut |_, tensor| {
        if seen.insert((tensor.data_ptr() as usize, tensor.numel())) {
            let numbers = tensor.numel() as u64;
            counts.all += numbers;
            counts.trainable += if tensor.requires_grad() { numbers } else { 0 };
        }
    })?;
    host.visit_linears(&mut |_, map| {
        if let BaseWeight::Quantized(weight) = map.base() {
            let [outputs, inputs] = weight.size();
            counts.all += outputs.unsigned_abs() * inputs.unsigned_abs();
        }
        Ok(())
    })?;
    Ok(counts)
}
