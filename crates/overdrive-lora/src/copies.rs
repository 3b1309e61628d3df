//! Full copies of parameters (`modules_to_save`), and their exchange with the model's own tensors.

use overdrive_core::Error;
use overdrive_nn::AdapterHost;
use tch::Tensor;

use crate::Result;
use crate::host::{module_copies, visit_linears, visit_parameters};
use crate::layer_adapters::adapters_of;

/// The full copies of parameters that are trained and saved with an adapter (`modules_to_save`), stored in the
/// model's [`AdapterState`](overdrive_nn::AdapterState).
#[derive(Debug, Default)]
pub(crate) struct ModuleCopies {
    pub(crate) entries: Vec<ModuleCopy>,
    /// The adapters whose copies are active.
    pub(crate) active: Vec<String>,
    /// While adapters are disabled, the adapters whose copies become active again when they are enabled.
    pub(crate) waiting: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct ModuleCopy {
    pub(crate) adapter: String,
    /// The name of the parameter.
    pub(crate) name: String,
    pub(crate) copy: Tensor,
    /// The model's own tensor while the copy replaces it.
    pub(crate) original: Option<Tensor>,
}

impl ModuleCopies {
    /// Returns the names of the parameters that `adapter` has copies of.
    pub(crate) fn names(&self, adapter: &str) -> Vec<&str> {
        let own = self.entries.iter().filter(|entry| entry.adapter == adapter);
        own.map(|entry| entry.name.as_str()).collect()
    }
}

/// Checks that no two of the adapters `names` have a copy of the same module: only one can replace it.
pub(crate) fn check_copies<H: AdapterHost + ?Sized>(host: &mut H, names: &[&str]) -> Result<()> {
    let several = |owners: Vec<&str>, module: &str| {
        let wanted: Vec<&str> = owners
            .into_iter()
            .filter(|own| names.contains(own))
            .collect();
        if wanted.len() < 2 {
            return Ok(());
        }
        let value = format!("`{module}` in each of {}", wanted.join(", "));
        let expected = "a module that at most one active adapter has a copy of";
        Err(Error::option("modules_to_save", value, expected))
    };
    visit_linears(host, |name, linear| {
        let Some(own) = adapters_of(linear) else {
            return Ok(());
        };
        let owners = own.copies.iter().map(|copy| copy.adapter.as_str());
        Ok(several(owners.collect(), name)?)
    })?;
    let Some(copies) = module_copies(host) else {
        return Ok(());
    };
    for entry in &copies.entries {
        let same = copies
            .entries
            .iter()
            .filter(|other| other.name == entry.name);
        several(
            same.map(|other| other.adapter.as_str()).collect(),
            &entry.name,
        )?;
    }
    Ok(())
}

/// Activates the copies of the adapters `names`; the model uses its own parameters elsewhere.
pub(crate) fn place_copies<H: AdapterHost + ?Sized>(host: &mut H, names: &[&str]) -> Result<()> {
    let Some(own) = module_copies(host) else {
        return Ok(());
    };
    // Taken out because the visit borrows the model.
    let mut copies = std::mem::take(own);
    let has = |name: &&&str| copies.entries.iter().any(|entry| entry.adapter == **name);
    let active = names.iter().filter(has).map(|name| (*name).to_owned());
    let active: Vec<String> = active.collect();
    let visited = visit_parameters(host, |name, tensor| {
        for entry in copies.entries.iter_mut().filter(|entry| entry.name == name) {
            if let Some(original) = entry.original.take() {
                *tensor = original;
            }
        }
        let mut entries = copies.entries.iter_mut();
        // `check_copies` has verified that at most one of them has a copy of each parameter.
        let taken = entries.find(|entry| entry.name == name && active.contains(&entry.adapter));
        if let Some(entry) = taken {
            let copy = entry.copy.shallow_clone();
            entry.original = Some(std::mem::replace(tensor, copy));
        }
        Ok(())
    });
    if visited.is_ok() {
        copies.active = active;
        copies.waiting.clear();
    }
    if let Some(own) = module_copies(host) {
        *own = copies;
    }
    visited
}
