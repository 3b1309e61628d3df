//! The trainable parameters.

use std::collections::HashSet;
use std::fmt;

use overdrive_nn::{AdapterHost, LinearWeight};
use tch::Tensor;

use crate::host::{is_bias, module_copies, visit_linears, visit_parameters};
use crate::layer_adapters::adapters_of;
use crate::{BiasMode, Result};

/// Returns every tensor that requires a gradient with PEFT's name for it:
/// `base_model.model.….q_proj.lora_A.{adapter}.weight`, `….base_layer.bias`,
/// `….modules_to_save.{adapter}.weight`. The tensors share storage with the model's, for an optimizer.
///
/// # Errors
/// The error of a model whose layers cannot be visited now.
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

/// Calls `see` with every dense parameter and PEFT's name for it. Tied parameters are visited twice.
fn visit_all<H: AdapterHost + ?Sized>(
    host: &mut H,
    see: &mut dyn FnMut(String, &Tensor),
) -> Result<()> {
    let mut replaced: Vec<(String, String)> = Vec::new();
    if let Some(copies) = module_copies(host) {
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
    visit_parameters(host, |name, tensor| {
        // A copy that replaces the parameter was seen above, under its own name.
        if !replaced.iter().any(|(own, _)| own == name) {
            see(format!("base_model.model.{name}"), tensor);
        }
        Ok(())
    })?;
    visit_linears(host, |name, linear| {
        let stem = format!("base_model.model.{name}");
        let own = match adapters_of(linear) {
            Some(own) if !own.adapters.is_empty() => format!("{stem}.base_layer"),
            Some(own) if !own.copies.is_empty() => format!("{stem}.original_module"),
            _ => stem.clone(),
        };
        if let LinearWeight::Dense { weight, .. } = linear.weight() {
            see(format!("{own}.weight"), weight);
        }
        if let Some(bias) = linear.bias() {
            see(format!("{own}.bias"), bias);
        }
        let Some(own) = adapters_of(linear) else {
            return Ok(());
        };
        for (adapter_name, adapter) in &own.adapters {
            for (kind, last, tensor) in adapter.tensors() {
                see(format!("{stem}.{kind}.{adapter_name}.{last}"), tensor);
            }
        }
        for copy in &own.copies {
            let stem = format!("{stem}.modules_to_save.{}", copy.adapter);
            if let LinearWeight::Dense { weight, .. } = &copy.weight {
                see(format!("{stem}.weight"), weight);
            }
            if let Some(bias) = &copy.bias {
                see(format!("{stem}.bias"), bias);
            }
        }
        Ok(())
    })
}

/// Freezes all parameters of the model itself: weights and biases of linear layers, and the parameters that
/// [`AdapterHost::visit_parameters`] visits.
///
/// # Errors
/// An error of libtorch.
fn freeze_base<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    let mut copied = HashSet::new();
    if let Some(copies) = module_copies(host) {
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
    visit_parameters(host, |name, tensor| {
        // A copy that replaces the parameter belongs to the adapter and stays trainable.
        if !copied.contains(name) && tensor.requires_grad() {
            let _same = tensor.f_set_requires_grad(false)?;
        }
        Ok(())
    })?;
    visit_linears(host, |_, linear| {
        if let LinearWeight::Dense { weight, .. } = linear.weight() {
            let _same = weight.f_set_requires_grad(false)?;
        }
        if let Some(bias) = linear.bias() {
            let _same = bias.f_set_requires_grad(false)?;
        }
        Ok(())
    })
}

/// Freezes the model except for the biases that the active adapters train ([`BiasMode`]), as PEFT does when
/// an adapter is added or made active.
///
/// # Errors
/// An error of libtorch.
pub fn mark_only_lora_as_trainable<H: AdapterHost + ?Sized>(host: &mut H) -> Result<()> {
    freeze_base(host)?;
    let mut all = false;
    visit_linears(host, |_, linear| {
        let Some(own) = adapters_of(linear) else {
            return Ok(());
        };
        let modes: Vec<BiasMode> = own.active_modes().collect();
        all |= modes.contains(&BiasMode::All);
        if let (true, Some(bias)) = (modes.contains(&BiasMode::LoraOnly), linear.bias()) {
            let _same = bias.f_set_requires_grad(true)?;
        }
        Ok(())
    })?;
    if !all {
        return Ok(());
    }
    visit_linears(host, |_, linear| {
        if let Some(bias) = linear.bias() {
            let _same = bias.f_set_requires_grad(true)?;
        }
        Ok(())
    })?;
    visit_parameters(host, |name, tensor| {
        if is_bias(name) {
            let _same = tensor.f_set_requires_grad(true)?;
        }
        Ok(())
    })
}

/// The number of trainable parameters and of all parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterCounts {
    /// The number of elements that require a gradient.
    pub trainable: u64,
    /// The number of all elements, adapters included. Quantized weights count their elements before
    /// quantization; tied parameters count once.
    pub all: u64,
}

impl ParameterCounts {
    /// Returns `100 · trainable / all`.
    pub fn percent(&self) -> f64 {
        // `max(1)`: a model without parameters has 0 %, not NaN.
        100.0 * self.trainable as f64 / (self.all as f64).max(1.0)
    }
}

impl fmt::Display for ParameterCounts {
    /// Writes the line of PEFT's `print_trainable_parameters`.
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

/// Formats a number with commas between thousands.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Counts the parameters (PEFT's `get_nb_trainable_parameters`) of linear layers and adapters, and those that
/// [`AdapterHost::visit_parameters`] visits.
///
/// # Errors
/// The error of a model whose layers cannot be visited now.
pub fn parameter_counts<H: AdapterHost + ?Sized>(host: &mut H) -> Result<ParameterCounts> {
    let mut counts = ParameterCounts {
        trainable: 0,
        all: 0,
    };
    let mut seen = HashSet::new();
    visit_all(host, &mut |_, tensor| {
        // Tied parameters are visited twice and share their memory. The size distinguishes a tensor from
        // a slice at its beginning.
        if seen.insert((tensor.data_ptr() as usize, tensor.numel())) {
            let elements = tensor.numel() as u64;
            counts.all += elements;
            counts.trainable += if tensor.requires_grad() { elements } else { 0 };
        }
    })?;
    visit_linears(host, |_, linear| {
        if let LinearWeight::Quantized(weight) = linear.weight() {
            let [outputs, inputs] = weight.size();
            counts.all += outputs.unsigned_abs() * inputs.unsigned_abs();
        }
        Ok(())
    })?;
    Ok(counts)
}
