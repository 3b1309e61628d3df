//! Host copies of the tensors of a snapshot, which training may change while they are written.

use std::collections::HashMap;

use overdrive_optim::StateDict;
use tch::{Device, Tensor};

use crate::Result;
use crate::contents::{Content, Entry};

/// The host tensors of the last snapshot, which are reused: allocating new memory costs more than the copy.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    /// The free tensors by the names of their entry and tensor.
    free: HashMap<(String, String), Tensor>,
}

impl Staging {
    /// Copies all tensors of the entries to the host.
    pub(crate) fn copy(&mut self, entries: Vec<Entry>) -> Result<Vec<Entry>> {
        let _no_grad = tch::no_grad_guard();
        entries
            .into_iter()
            .map(|entry| {
                let copy = |(name, tensor): (String, Tensor)| -> Result<(String, Tensor)> {
                    let copy = self.copy_tensor(&entry.name, &name, &tensor)?;
                    Ok((name, copy))
                };
                let content = match entry.content {
                    Content::Tensors(tensors) => {
                        Content::Tensors(tensors.into_iter().map(copy).collect::<Result<_>>()?)
                    }
                    Content::State(StateDict { tensors, metadata }) => Content::State(StateDict {
                        tensors: tensors.into_iter().map(copy).collect::<Result<_>>()?,
                        metadata,
                    }),
                    bytes => bytes,
                };
                Ok(Entry { content, ..entry })
            })
            .collect()
    }

    fn copy_tensor(&mut self, entry: &str, name: &str, tensor: &Tensor) -> Result<Tensor> {
        // The handle without its autograd history: a copy must not keep a graph alive.
        let tensor = tensor.f_detach()?;
        let key = (entry.to_owned(), name.to_owned());
        // A parameter may have another shape or kind than at the last snapshot.
        if let Some(mut free) = self.free.remove(&key)
            && free.size() == tensor.size()
            && free.f_kind()? == tensor.f_kind()?
        {
            free.f_copy_(&tensor)?;
            return Ok(free);
        }
        let options = (tensor.f_kind()?, Device::Cpu);
        let mut copy = Tensor::f_empty(tensor.size(), options)?;
        copy.f_copy_(&tensor)?;
        Ok(copy)
    }

    /// Takes the copies back when they have been written.
    pub(crate) fn reuse(&mut self, entries: Vec<Entry>) {
        for entry in entries {
            let mut keep = |name: String, tensor: Tensor| {
                self.free.insert((entry.name.clone(), name), tensor);
            };
            match entry.content {
                Content::Tensors(tensors) => tensors.into_iter().for_each(|(n, t)| keep(n, t)),
                Content::State(state) => state.tensors.into_iter().for_each(|(n, t)| keep(n, t)),
                Content::Document(_) | Content::File(_) => {}
            }
        }
    }
}
