//! The replacement of weights without recompiling.

use std::path::{Path, PathBuf};

use overdrive_safetensors::{MappedFile, weight_files};
use overdrive_sys::compiled::Constant;
use tch::{Device, Tensor};

use crate::{CompiledModel, Error, Result};

/// Options of [`CompiledModel::replace_constants`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ReplaceOptions {
    /// If `true`, weights may be left out and then keep their values. Buffers and constants of the code (such as
    /// rotary frequencies) may always be left out. Default `false`: every weight of the model must be given.
    pub partial: bool,
    /// If `true`, the model shares the memory of the given tensors instead of copying them: changing a tensor in
    /// place changes the model. Default `false`.
    pub share: bool,
    /// If `true`, tensors that the model does not have are ignored. Default `false`: they are an error.
    pub ignore_unknown: bool,
}

impl CompiledModel {
    /// Returns the model's constants: the weights and buffers of the Python module.
    ///
    /// # Errors
    /// Errors of libtorch for constants that were packed for the processor.
    pub fn constants(&self) -> Result<Vec<Constant>> {
        Ok(self.package.constants()?)
    }

    /// Returns a copy of the constant `name`, which may also be the name of a weight that is tied to it; `None` if
    /// there is none.
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn constant(&self, name: &str) -> Result<Option<Tensor>> {
        for name in std::iter::once(name).chain(self.names_tied_to(name)) {
            if let Some(found) = self.package.constant(name)? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Replaces weights by tensors of the same names, shapes and dtypes: those of another checkpoint of
    /// the model, or of this one after more training. For tied weights one name is enough.
    ///
    /// Everything is checked before anything is changed. The new weights are loaded beside the old ones while
    /// other threads run the model, and are swapped in between two runs, so no run sees a mixture. Until then,
    /// both sets occupy memory.
    ///
    /// # Errors
    /// [`Error::InvalidConstants`] with every problem, or errors of libtorch; the model is then unchanged.
    pub fn replace_constants(
        &self,
        tensors: &[(String, Tensor)],
        options: ReplaceOptions,
    ) -> Result<()> {
        if self.info.manifest.as_ref().is_some_and(|m| !m.swappable) {
            return Err(Error::InvalidConstants {
                problems: vec![
                    "the weights of this package are packed for the processor; compile it without --freeze"
                        .to_owned(),
                ],
            });
        }
        let held = self.constants()?;
        // Collects all problems, so that one attempt shows everything that is wrong with a checkpoint.
        let mut problems = Vec::new();
        let mut given: Vec<Option<(&str, &Tensor)>> = vec![None; held.len()];
        for (name, tensor) in tensors {
            let Some(index) = self.index_of(&held, name) else {
                if !options.ignore_unknown {
                    problems.push(format!("there is no constant {name:?}"));
                }
                continue;
            };
            // Both names of a tied weight may be given, as in many checkpoints, if their tensors agree.
            match given[index] {
                Some((before, other)) if before == name || !same(other, tensor)? => {
                    problems.push(format!(
                        "{name:?} and {before:?} name the same constant but differ"
                    ));
                }
                _ => given[index] = Some((name, tensor)),
            }
            let constant = &held[index];
            let kind = tensor.f_kind()?;
            if kind != constant.kind || tensor.size() != constant.shape {
                problems.push(format!(
                    "{name:?} is {kind:?} of shape {:?}; it must be {:?} of shape {:?}",
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
            return Err(Error::InvalidConstants { problems });
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
    /// `model.safetensors.index.json` names) or of one safetensors file, converted to the dtypes that the model was
    /// compiled for.
    ///
    /// # Errors
    /// [`Error::InvalidConstants`], [`Error::Weights`], and [`Error::Common`] for the index; the model is then
    /// unchanged.
    pub fn replace_constants_from(&self, path: impl AsRef<Path>) -> Result<()> {
        let held = self.constants()?;
        let mut tensors = Vec::new();
        for file in weight_paths(path.as_ref())? {
            let file = MappedFile::open(&file)?;
            for stored in file.tensors() {
                let index = self.index_of(&held, stored.name());
                let kind = index.map(|index| held[index].kind);
                let tensor = stored.copy_to_tensor(kind, Device::Cpu)?;
                tensors.push((stored.name().to_owned(), tensor));
            }
        }
        self.replace_constants(&tensors, ReplaceOptions::default())
    }

    /// Returns the index of the constant `name`, which may also be the name of a weight that is tied to it.
    fn index_of(&self, held: &[Constant], name: &str) -> Option<usize> {
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

/// Returns `true` if `name` is that of a parameter.
fn is_weight(name: &str) -> bool {
    // A heuristic: PyTorch's modules use these names for parameters, and buffers and lifted constants have others. The
    // package does not record which is which.
    name.ends_with("weight") || name.ends_with("bias")
}

/// Returns `true` if two tensors have the same dtype, shape and elements.
fn same(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(a.f_kind()? == b.f_kind()? && a.size() == b.size() && a.f_equal(b)?)
}

/// Returns the safetensors files of a Hugging Face folder, or the path itself if it is not a folder.
fn weight_paths(path: &Path) -> Result<Vec<PathBuf>> {
    const SINGLE: &str = "model.safetensors";
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let found = weight_files(path, SINGLE, "model.safetensors.index.json")?;
    // Without either file, opening `model.safetensors` returns the error that names it.
    Ok(found.map_or_else(|| vec![path.join(SINGLE)], |found| found.paths))
}
