//! The weights of a model by name.

use std::collections::HashMap;

use overdrive_nn::{AdapterHost, LinearWeight};
use overdrive_quantization::QuantizedWeight;
use overdrive_transformer::CausalLm;
use tch::Tensor;

use crate::{Error, Result};

/// Handles of all weights of a model; nothing is copied.
#[derive(Debug)]
pub(crate) struct Source {
    linears: HashMap<String, LinearSource>,
    parameters: HashMap<String, Tensor>,
    /// The table of token embeddings, if it is quantized.
    quantized_table: Option<QuantizedWeight>,
}

/// The name of the head's module.
const HEAD: &str = "lm_head";

/// The weights of a linear layer.
#[derive(Debug)]
pub(crate) struct LinearSource {
    pub(crate) weight: LinearWeight,
    pub(crate) bias: Option<Tensor>,
}

/// The table of token embeddings.
#[derive(Debug)]
pub(crate) enum Table<'s> {
    Dense(&'s Tensor),
    Quantized {
        weight: &'s QuantizedWeight,
        /// The module whose codes the graph holds: the head's, if it shares the table.
        module: &'s str,
    },
}

impl Source {
    /// Collects the weights of `model`.
    ///
    /// # Errors
    /// [`Error::Adapters`] if a layer's output depends on adapters beside its weight.
    pub(crate) fn of(model: &mut CausalLm) -> Result<Source> {
        let mut linears = HashMap::new();
        let mut adapted: Option<Error> = None;
        model.visit_linears(&mut |name, linear| {
            let active = linear.adapter().map(|adapter| adapter.active_names());
            // The first layer is enough for the message. The visit continues, since only an error would stop it.
            if let Some(names @ [_, ..]) = active.as_deref()
                && adapted.is_none()
            {
                adapted = Some(Error::Adapters {
                    layer: name.to_owned(),
                    names: names.iter().map(|name| (*name).to_owned()).collect(),
                });
            }
            let weight = linear.weight().shallow_clone();
            let bias = linear.bias().map(Tensor::shallow_clone);
            linears.insert(name.to_owned(), LinearSource { weight, bias });
            Ok(())
        })?;
        if let Some(error) = adapted {
            return Err(error);
        }
        let mut parameters = HashMap::new();
        model.visit_parameters(&mut |name, tensor| {
            parameters.insert(name.to_owned(), tensor.shallow_clone());
            Ok(())
        })?;
        let table = model.quantized_embedding();
        Ok(Source {
            linears,
            parameters,
            quantized_table: table.map(QuantizedWeight::shallow_clone),
        })
    }

    pub(crate) fn linear(&self, name: &str) -> Result<&LinearSource> {
        self.linears.get(name).ok_or_else(|| missing(name))
    }

    /// Returns a parameter outside the linear layers.
    pub(crate) fn parameter(&self, name: &str) -> Result<&Tensor> {
        self.parameters.get(name).ok_or_else(|| missing(name))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    /// Returns `true` if the head is the dense table `{name}.weight` itself.
    pub(crate) fn ties_head(&self, name: &str) -> bool {
        let table = self.parameters.get(&format!("{name}.weight"));
        match (table, self.linears.get(HEAD).map(|head| &head.weight)) {
            (Some(table), Some(LinearWeight::Dense { weight, .. })) => {
                table.data_ptr() == weight.data_ptr() && table.size() == weight.size()
            }
            _ => false,
        }
    }

    /// Returns the names of the schemes of quantized weights, each once.
    pub(crate) fn schemes(&self) -> Vec<String> {
        let mut names: Vec<String> = self
            .linears
            .values()
            .filter_map(|linear| match &linear.weight {
                LinearWeight::Quantized(weight) => Some(weight.scheme().to_string()),
                LinearWeight::Dense { .. } => None,
            })
            .collect();
        names.sort();
        names.dedup();
        names
    }

    /// Returns the table `{name}.weight`.
    pub(crate) fn table<'s>(&'s self, name: &'s str) -> Result<Table<'s>> {
        let Some(weight) = &self.quantized_table else {
            return Ok(Table::Dense(self.parameter(&format!("{name}.weight"))?));
        };
        // `tie_word_embeddings` does not tell whether they share codes: merging gives a tied head its own codes.
        let module = match self.linears.get(HEAD).map(|head| &head.weight) {
            Some(LinearWeight::Quantized(head)) if head.shares_storage_with(weight) => HEAD,
            _ => name,
        };
        Ok(Table::Quantized { weight, module })
    }
}

fn missing(name: &str) -> Error {
    Error::MissingParameter {
        name: name.to_owned(),
    }
}
