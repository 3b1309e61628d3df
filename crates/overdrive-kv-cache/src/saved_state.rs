//! Reading a saved state.

use tch::Tensor;

use crate::{Error, Result};

/// Returns the name of a tensor of a layer in a saved state.
pub(crate) fn name_of(layer: usize, name: &str) -> String {
    format!("layers.{layer}.{name}")
}

/// The remaining tensors of a saved state.
pub(crate) struct SavedState<'a>(Vec<&'a (String, Tensor)>);

impl<'a> SavedState<'a> {
    pub(crate) fn new(state: &'a [(String, Tensor)]) -> SavedState<'a> {
        SavedState(state.iter().collect())
    }

    /// Takes the tensor `name` of `layer`, if there is one.
    fn take(&mut self, layer: usize, name: &str) -> Option<&'a Tensor> {
        let name = name_of(layer, name);
        let index = self.0.iter().position(|(found, _)| *found == name)?;
        Some(&self.0.swap_remove(index).1)
    }

    /// Takes the tensors `names` of `layer`, all of them, or returns `None` if the layer was empty.
    pub(crate) fn take_all<const N: usize>(
        &mut self,
        layer: usize,
        names: [&str; N],
    ) -> Result<Option<[&'a Tensor; N]>> {
        let found = names.map(|name| self.take(layer, name));
        if found.iter().all(Option::is_none) {
            return Ok(None);
        }
        let mut missing = names
            .iter()
            .zip(&found)
            .filter(|(_, found)| found.is_none());
        if let Some((name, _)) = missing.next() {
            return Err(Error::BadState {
                name: name_of(layer, name),
                found: "missing".to_owned(),
            });
        }
        let all: Vec<&'a Tensor> = found.into_iter().flatten().collect();
        // No tensor is missing, so there are N.
        Ok(all.try_into().ok())
    }

    /// Checks that no tensor remains.
    pub(crate) fn finish(self) -> Result<()> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(Error::BadState {
                name: name.clone(),
                found: "unknown to this cache".to_owned(),
            }),
        }
    }
}

/// Reads `N` integers from a saved tensor.
pub(crate) fn integers<const N: usize>(
    layer: usize,
    name: &str,
    tensor: &Tensor,
) -> Result<[i64; N]> {
    if tensor.size() != [N as i64] || tensor.kind() != tch::Kind::Int64 {
        return Err(Error::BadState {
            name: name_of(layer, name),
            found: format!(
                "{:?} of shape {:?} instead of {N} integers",
                tensor.kind(),
                tensor.size()
            ),
        });
    }
    let mut integers = [0; N];
    for (index, integer) in (0..).zip(&mut integers) {
        *integer = tensor.f_int64_value(&[index])?;
    }
    Ok(integers)
}
