use std::sync::Mutex;

use overdrive_nn::{Linear, LinearWeight};
use tch::Tensor;

use crate::merge::Merged;
use crate::{BiasMode, Error, LoraAdapter, Result};

/// All LoRA adapters of one linear layer, stored in the layer's adapter slot.
#[derive(Debug)]
pub(crate) struct LayerAdapters {
    pub(crate) adapters: Vec<(String, LoraAdapter)>,
    /// Full copies that replace the layer's own weight and bias (`modules_to_save`).
    pub(crate) copies: Vec<LayerCopy>,
    /// The indices of the active adapters in `adapters`, in the order in which their updates are added.
    pub(crate) active: Vec<usize>,
    /// The index of the active copy in `copies`.
    pub(crate) active_copy: Option<usize>,
    /// If `false`, adapters and copies are disabled.
    pub(crate) enabled: bool,
    /// The adapters that are merged into the weight, in the order in which they were merged.
    pub(crate) merged: Vec<Merged>,
}

/// A copy of a layer's weight and bias that one adapter trains in full.
#[derive(Debug)]
pub(crate) struct LayerCopy {
    pub(crate) adapter: String,
    pub(crate) weight: LinearWeight,
    pub(crate) bias: Option<Tensor>,
}

impl Default for LayerAdapters {
    fn default() -> Self {
        LayerAdapters {
            adapters: Vec::new(),
            copies: Vec::new(),
            active: Vec::new(),
            active_copy: None,
            enabled: true,
            merged: Vec::new(),
        }
    }
}

/// Returns the LoRA adapters of `linear`, if it has any.
pub(crate) fn adapters_of(linear: &Linear) -> Option<&LayerAdapters> {
    linear.adapter_as()
}

/// Returns the LoRA adapters of `linear`, if it has any.
pub(crate) fn adapters_mut(linear: &mut Linear) -> Option<&mut LayerAdapters> {
    linear.split_mut().2
}

/// Returns the weight, the bias and the LoRA adapters of `linear`, and fills its adapter slot if that is empty.
///
/// # Errors
/// [`Error::OtherAdapter`].
pub(crate) fn split_or_insert(
    linear: &mut Linear,
) -> Result<(&mut LinearWeight, Option<&Tensor>, &mut LayerAdapters)> {
    // Fills the slot on demand, so that layers without adapters stay plain.
    if linear.adapter().is_none() {
        linear.set_adapter(Box::new(LayerAdapters::default()));
    }
    match linear.split_mut() {
        (weight, bias, Some(own)) => Ok((weight, bias, own)),
        _ => Err(Error::OtherAdapter),
    }
}

impl LayerCopy {
    /// Copies the weight and bias of the layer `name` for `adapter`.
    ///
    /// # Errors
    /// [`Error::Common`] for a quantized weight, which cannot be trained.
    pub(crate) fn of(linear: &Linear, name: &str, adapter: &str) -> Result<LayerCopy> {
        let LinearWeight::Dense { weight, transposed } = linear.weight() else {
            let value = format!("`{name}`, which is quantized");
            let expected = "modules with dense weights";
            return Err(overdrive_core::Error::option("modules_to_save", value, expected).into());
        };
        Ok(LayerCopy {
            adapter: adapter.to_owned(),
            weight: LinearWeight::Dense {
                weight: weight.f_detach_copy()?,
                transposed: *transposed,
            },
            bias: linear.bias().map(Tensor::f_detach_copy).transpose()?,
        })
    }
}

impl LayerAdapters {
    /// Returns the adapter `name`.
    pub(crate) fn get(&self, name: &str) -> Option<&LoraAdapter> {
        let found = self.adapters.iter().find(|(own, _)| own == name);
        found.map(|(_, adapter)| adapter)
    }

    /// Returns the full copy that the adapter `name` trains.
    pub(crate) fn copy(&self, name: &str) -> Option<&LayerCopy> {
        self.copies.iter().find(|copy| copy.adapter == name)
    }

    /// Returns the names of the active adapters.
    pub(crate) fn active(&self) -> Vec<&str> {
        let name = |index: &usize| self.adapters[*index].0.as_str();
        self.active.iter().map(name).collect()
    }

    /// Returns the name of the adapter whose full copy replaces the weight.
    pub(crate) fn active_copy(&self) -> Option<&str> {
        self.active_copy
            .map(|index| self.copies[index].adapter.as_str())
    }

    /// Activates those of `names` that the layer has, and no others.
    pub(crate) fn set_active(&mut self, names: &[&str]) {
        let index = |name: &&str| self.adapters.iter().position(|(own, _)| own == name);
        self.active = names.iter().filter_map(index).collect();
        // At most one copy can replace the weight; `check_copies` has refused several.
        let copy = |name: &&str| self.copies.iter().position(|copy| copy.adapter == *name);
        self.active_copy = names.iter().find_map(copy);
    }

    /// Removes the adapter `name`, which is not merged.
    pub(crate) fn delete(&mut self, name: &str) {
        // The removal shifts the indices, so the active adapters are looked up again by name.
        let active: Vec<String> = self
            .active()
            .into_iter()
            .filter(|own| *own != name)
            .chain(self.active_copy())
            .map(str::to_owned)
            .collect();
        self.adapters.retain(|(own, _)| own != name);
        self.copies.retain(|copy| copy.adapter != name);
        self.set_active(&active.iter().map(String::as_str).collect::<Vec<_>>());
    }

    /// Returns the names of the merged adapters.
    pub(crate) fn merged(&self) -> Vec<&str> {
        let names = self.merged.iter().map(|merged| merged.adapter.as_str());
        names.collect()
    }

    /// Returns the bias modes of the active adapters.
    pub(crate) fn active_modes(&self) -> impl Iterator<Item = BiasMode> {
        self.active
            .iter()
            .map(|index| self.adapters[*index].1.config.bias)
    }

    /// Checks that no adapter is merged, since `operation` needs the unmerged weight.
    pub(crate) fn refuse_merged(&self, operation: &'static str) -> Result<()> {
        if self.merged.is_empty() {
            return Ok(());
        }
        Err(Error::Merged {
            operation,
            merged: self.merged().into_iter().map(str::to_owned).collect(),
        })
    }

    /// Drops the row norms that adapters have cached.
    pub(crate) fn forget_row_norms(&mut self) {
        for (_, adapter) in &mut self.adapters {
            adapter.row_norms = Mutex::default();
        }
    }
}

/// Checks that `name` can be a component of a parameter's name.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.contains('.') {
        "it contains a dot, which separates the components of parameter names"
    } else {
        return Ok(());
    };
    Err(Error::BadName {
        name: name.to_owned(),
        reason,
    })
}

/// Returns the error for a name that another adapter has.
pub(crate) fn taken(name: &str) -> Error {
    Error::BadName {
        name: name.to_owned(),
        reason: "another adapter has it",
    }
}
