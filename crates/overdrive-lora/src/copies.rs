//! Full copies of modules, and which of them the model computes with.

use tch::Tensor;

use crate::{AdapterHost, Error, Result};

/// Full copies of parameters that are trained and saved with an adapter (`modules_to_save`). A model that
/// offers its parameters ([`AdapterHost::visit_parameters`](crate::AdapterHost::visit_parameters)) owns
/// one.
#[derive(Debug, Default)]
pub struct ModuleCopies {
    pub(crate) entries: Vec<ModuleCopy>,
    /// The adapter whose copies the model computes with.
    pub(crate) active: Option<String>,
    /// The one that it will compute with again when adapters are enabled.
    pub(crate) waiting: Option<String>,
}

#[derive(Debug)]
pub(crate) struct ModuleCopy {
    pub(crate) adapter: String,
    /// Of the parameter.
    pub(crate) name: String,
    pub(crate) copy: Tensor,
    /// The model's own, while the copy is in its place.
    pub(crate) original: Option<Tensor>,
}

impl ModuleCopies {
    /// No copies.
    pub fn new() -> ModuleCopies {
        ModuleCopies::default()
    }

    /// Names of the parameters that `adapter` has copies of.
    pub fn names(&self, adapter: &str) -> Vec<&str> {
        let own = self.entries.iter().filter(|entry| entry.adapter == adapter);
        own.map(|entry| entry.name.as_str()).collect()
    }
}

/// Only one adapter can be in a module's place.
pub(crate) fn check_copies<H: AdapterHost + ?Sized>(host: &mut H, names: &[&str]) -> Result<()> {
    let several = |owners: Vec<&str>, module: &str| {
        let meant: Vec<&str> = owners
            .into_iter()
            .filter(|own| names.contains(own))
            .collect();
        if meant.len() < 2 {
            return Ok(());
        }
        Err(Error::BadConfig {
            key: "modules_to_save".to_owned(),
            found: format!("`{module}` in each of {}", meant.join(", ")),
            expected: "at most one active adapter with a copy of it".to_owned(),
        })
    };
    host.visit_linears(&mut |name, map| {
        several(
            map.copies.iter().map(|(own, ..)| own.as_str()).collect(),
            name,
        )
    })?;
    let Some(copies) = host.module_copies() else {
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

/// Puts the copies of the first of `names` that has any in the places of the model's own parameters, and
/// all others back.
pub(crate) fn place_copies<H: AdapterHost + ?Sized>(host: &mut H, names: &[&str]) -> Result<()> {
    let Some(own) = host.module_copies() else {
        return Ok(());
    };
    let mut copies = std::mem::take(own);
    let has = |name: &&&str| copies.entries.iter().any(|entry| entry.adapter == **name);
    let active = names.iter().find(has).map(|name| (*name).to_owned());
    let visited = host.visit_parameters(&mut |name, tensor| {
        for entry in copies.entries.iter_mut().filter(|entry| entry.name == name) {
            if let Some(original) = entry.original.take() {
                *tensor = original;
            }
        }
        let mut entries = copies.entries.iter_mut();
        let taken =
            entries.find(|entry| entry.name == name && Some(&entry.adapter) == active.as_ref());
        if let Some(entry) = taken {
            let copy = entry.copy.shallow_clone();
            entry.original = Some(std::mem::replace(tensor, copy));
        }
        Ok(())
    });
    if visited.is_ok() {
        copies.active = active;
        copies.waiting = None;
    }
    if let Some(own) = host.module_copies() {
        *own = copies;
    }
    visited
}
