//! Reading a saved state.

use tch::Tensor;

use crate::{Error, Result};

/// The name of a tensor of a layer in a saved state.
pub(crate) fn name_of(layer: usize, name: &str) -> String {
    format!("layers.{layer}.{name}")
}

/// The tensors of a saved state that have not been taken yet.
pub(crate) struct Saved<'a>(Vec<&'a (String, Tensor)>);

impl<'a> Saved<'a> {
    pub(crate) fn new(state: &'a [(String, Tensor)]) -> Saved<'a> {
        Saved(state.iter().collect())
    }

    /// The tensor `name` of `layer`, where there is one.
    pub(crate) fn take(&mut self, layer: usize, name: &str) -> Option<&'a Tensor> {
        let name = name_of(layer, name);
        let place = self.0.iter().position(|(found, _)| *found == name)?;
        Some(&self.0.swap_remove(place).1)
    }

    /// The tensors `names` of `layer`: all, or none where the layer was empty.
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
        let mut found = found.into_iter().flatten();
        // `found` has all N: the default is never taken.
        let first = found.next();
        Ok(first.map(|first| {
            let mut all = [first; N];
            all[1..]
                .iter_mut()
                .zip(found)
                .for_each(|(to, from)| *to = from);
            all
        }))
    }

    /// An error if a tensor is left.
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

/// `N` whole numbers out of a saved tensor.
pub(crate) fn numbers<const N: usize>(
    layer: usize,
    name: &str,
    tensor: &Tensor,
) -> Result<[i64; N]> {
    let bad = |found: String| Error::BadState {
        name: name_of(layer, name),
        found,
    };
    if tensor.size() != [N as i64] || tensor.kind() != tch::Kind::Int64 {
        let found = format!("{:?} of shape {:?}", tensor.kind(), tensor.size());
        return Err(bad(format!("{found} instead of {N} whole numbers")));
    }
    let mut numbers = [0; N];
    for (place, number) in (0..).zip(&mut numbers) {
        *number = tensor.f_int64_value(&[place])?;
    }
    Ok(numbers)
}
