//! Weights that change places without a new compilation.

use std::path::Path;

use overdrive_safetensors::MappedFile;
use overdrive_sys::compiled::Constant;
use tch::{Device, Tensor};

use crate::{CompiledModel, Error, Result};

/// How [`CompiledModel::replace_constants`] works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplaceOptions {
    /// Whether constants may be left out, which then stay as they are. Default false: every weight that
    /// the model has must be given. Buffers and constants of the code itself (rotary frequencies) may
    /// always be left out.
    pub partial: bool,
    /// Uses the memory of the given tensors instead of copying: one set of weights for this model and for
    /// whoever has them, so a change of theirs is a change of the model's. The model keeps them alive.
    /// Default false.
    pub share: bool,
    /// Passes over tensors that the model does not know. Default false: they are an error.
    pub ignore_unknown: bool,
}

impl CompiledModel {
    /// Its constants by name, as they are listed in the Python module: weights and buffers.
    ///
    /// # Errors
    /// libtorch's own, for constants that were packed for the processor.
    pub fn constants(&self) -> Result<Vec<Constant>> {
        Ok(self.package.constants()?)
    }

    /// A copy of a constant, by its name or that of a weight that is tied to it; `None` where there is
    /// none.
    ///
    /// # Errors
    /// libtorch's own.
    pub fn constant(&self, name: &str) -> Result<Option<Tensor>> {
        for name in std::iter::once(name).chain(self.names_tied_to(name)) {
            if let Some(found) = self.package.constant(name)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Replaces weights by tensors of the same names, shapes and kinds: those of another checkpoint of
    /// the model, or of this one after more training. Of tied weights one name is enough.
    ///
    /// Everything is checked before anything is changed. The new set is made ready while other threads
    /// run the old one, and takes its place between two runs: no run sees some of each. Until then there
    /// is memory for both.
    ///
    /// # Errors
    /// [`Error::BadConstants`] with all that is wrong; else libtorch's own. Nothing is changed then.
    pub fn replace_constants(
        &self,
        tensors: &[(String, Tensor)],
        options: ReplaceOptions,
    ) -> Result<()> {
        if self.info.manifest.as_ref().is_some_and(|m| !m.swappable) {
            return Err(Error::BadConstants {
                problems: vec![
                    "the weights of this package were packed for the processor; make it without --freeze"
                        .to_owned(),
                ],
            });
        }
        let held = self.constants()?;
        let mut problems = Vec::new();
        let mut given: Vec<Option<(&str, &Tensor)>> = vec![None; held.len()];
        for (name, tensor) in tensors {
            let Some(place) = self.place_of(&held, name) else {
                if !options.ignore_unknown {
                    problems.push(format!("there is no constant {name:?}"));
                }
                continue;
            };
            match given[place] {
                Some((before, other)) if before == name || !same(other, tensor)? => {
                    problems.push(format!(
                        "{name:?} and {before:?} stand for one constant and differ"
                    ));
                }
                _ => given[place] = Some((name, tensor)),
            }
            let constant = &held[place];
            let kind = tensor.f_kind()?;
            if kind != constant.kind || tensor.size() != constant.shape {
                problems.push(format!(
                    "{name:?} is {kind:?} of shape {:?} and not {:?} of shape {:?}",
                    tensor.size(),
                    constant.kind,
                    constant.shape
                ));
            }
        }
        for (constant, given) in held.iter().zip(&given) {
            if given.is_none() && !options.partial && is_weight(&constant.name) {
                problems.push(format!("{:?} is missing", constant.name));
            }
        }
        if !problems.is_empty() {
            return Err(Error::BadConstants { problems });
        }
        let pairs = held.iter().zip(&given);
        let (names, tensors): (Vec<&str>, Vec<&Tensor>) = pairs
            .filter_map(|(constant, given)| Some((constant.name.as_str(), given.as_ref()?.1)))
            .unzip();
        Ok(self
            .package
            .replace_constants(&names, &tensors, options.share)?)
    }

    /// Replaces the weights by those of a Hugging Face folder (`model.safetensors`, or the shards that
    /// `model.safetensors.index.json` names) or of one safetensors file. Each is read in the kind that
    /// the model was compiled for.
    ///
    /// # Errors
    /// [`Error::BadConstants`] and [`Error::Weights`]; nothing is changed then.
    pub fn replace_constants_from(&self, path: impl AsRef<Path>) -> Result<()> {
        let held = self.constants()?;
        let mut tensors = Vec::new();
        for file in weight_files(path.as_ref())? {
            let file = MappedFile::open(&file)?;
            for stored in file.tensors() {
                let place = self.place_of(&held, stored.name());
                let kind = place.map(|place| held[place].kind);
                let tensor = stored.copy_to_tensor(kind, Device::Cpu)?;
                tensors.push((stored.name().to_owned(), tensor));
            }
        }
        self.replace_constants(&tensors, ReplaceOptions::default())
    }

    fn place_of(&self, held: &[Constant], name: &str) -> Option<usize> {
        let direct = held.iter().position(|constant| constant.name == name);
        direct.or_else(|| {
            let tied: Vec<&str> = self.names_tied_to(name).collect();
            held.iter()
                .position(|constant| tied.contains(&constant.name.as_str()))
        })
    }

    fn names_tied_to<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        let groups = self
            .info
            .manifest
            .as_ref()
            .map_or(&[][..], |manifest| &manifest.tied);
        let name = name.to_owned();
        groups
            .iter()
            .filter(move |group| group.contains(&name))
            .flatten()
            .map(String::as_str)
    }
}

/// Parameters of modules are called so; buffers and lifted constants have names of their own.
fn is_weight(name: &str) -> bool {
    name.ends_with("weight") || name.ends_with("bias")
}

/// Whether two tensors hold the same numbers.
fn same(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(a.f_kind()? == b.f_kind()? && a.size() == b.size() && a.f_equal(b)?)
}

fn weight_files(path: &Path) -> Result<Vec<std::path::PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let index = path.join("model.safetensors.index.json");
    if !index.is_file() {
        return Ok(vec![path.join("model.safetensors")]);
    }
    let io = |source| Error::Io {
        path: index.clone(),
        source,
    };
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let text = std::fs::read(&index).map_err(io)?;
    let parsed: Index =
        serde_json::from_slice(&text).map_err(|error| io(std::io::Error::other(error)))?;
    let names: std::collections::BTreeSet<String> = parsed.weight_map.into_values().collect();
    Ok(names.into_iter().map(|name| path.join(name)).collect())
}
