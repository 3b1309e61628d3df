//! Copies on the host of what training goes on changing.

use std::collections::HashMap;

use overdrive_optim::StateDict;
use tch::{Device, Tensor};

use crate::Result;
use crate::contents::{Content, Part};

/// Host tensors of the last snapshot, to be filled again: taking new memory from the system costs more
/// than the copy.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    free: HashMap<(String, String), Tensor>,
}

impl Staging {
    /// Copies all tensors of the parts.
    pub(crate) fn copy(&mut self, parts: Vec<Part>) -> Result<Vec<Part>> {
        let _no_grad = tch::no_grad_guard();
        parts
            .into_iter()
            .map(|part| {
                let content = match part.content {
                    Content::Tensors(tensors) => Content::Tensors(
                        tensors
                            .into_iter()
                            .map(|(name, tensor)| {
                                let copy = self.one(&part.name, &name, &tensor)?;
                                Ok((name, copy))
                            })
                            .collect::<Result<_>>()?,
                    ),
                    Content::State(state) => Content::State(StateDict {
                        tensors: state
                            .tensors
                            .into_iter()
                            .map(|(name, tensor)| {
                                let copy = self.one(&part.name, &name, &tensor)?;
                                Ok((name, copy))
                            })
                            .collect::<Result<_>>()?,
                        metadata: state.metadata,
                    }),
                    bytes => bytes,
                };
                Ok(Part { content, ..part })
            })
            .collect()
    }

    fn one(&mut self, part: &str, name: &str, tensor: &Tensor) -> Result<Tensor> {
        let tensor = tensor.f_detach()?;
        let place = (part.to_owned(), name.to_owned());
        if let Some(mut free) = self.free.remove(&place)
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

    /// Takes the copies back when they are written.
    pub(crate) fn reuse(&mut self, parts: Vec<Part>) {
        for part in parts {
            let mut keep = |name: String, tensor: Tensor| {
                self.free.insert((part.name.clone(), name), tensor);
            };
            match part.content {
                Content::Tensors(tensors) => tensors.into_iter().for_each(|(n, t)| keep(n, t)),
                Content::State(state) => state.tensors.into_iter().for_each(|(n, t)| keep(n, t)),
                Content::Document(_) | Content::File(_) => {}
            }
        }
    }
}
