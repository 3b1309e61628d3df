//! The common part of decoders, encoders and encoder-decoder models: their parameters, and their layers by name.

use std::collections::HashMap;

use overdrive_nn::{AdapterHost, Embedding, Linear, LinearWeight};
use overdrive_quantization::{QuantizedWeight, Scheme};
use tch::{Kind, Tensor};

use crate::parameters::ParameterRole;
use crate::quantize::as_rows;
use crate::{Error, ParameterSpec, QuantizeOptions, Result};

/// A function that quantizes the weight `(O, I)` in fp32 of the layer of a name.
pub(crate) type Pack<'p> =
    &'p mut dyn FnMut(&str, &Tensor, Scheme) -> overdrive_quantization::Result<QuantizedWeight>;

/// The parts of a model. The public methods of the three model types call these provided methods.
pub(crate) trait ModelParts: AdapterHost {
    /// Returns every parameter of the configuration, in its order.
    fn specs(&self) -> Vec<ParameterSpec>;

    /// Returns the dtype of a parameter in this model if it is dense.
    fn kind_of(&self, spec: &ParameterSpec) -> Kind {
        let _ = spec;
        self.table().kind()
    }

    /// Returns the dense parameters.
    fn dense(&self) -> &Vec<(String, Tensor)>;

    fn dense_mut(&mut self) -> &mut Vec<(String, Tensor)>;

    /// Returns the table of token embeddings.
    fn table(&self) -> &Embedding;

    fn table_mut(&mut self) -> &mut Embedding;

    /// Returns the table of the inputs of layers with its name, if the model has one.
    fn layer_inputs(&self) -> Option<(&'static str, &Embedding)> {
        None
    }

    fn layer_inputs_mut(&mut self) -> Option<(&'static str, &mut Embedding)> {
        None
    }

    /// Returns the output layer that shares the weight of the table by the configuration, if one does.
    fn tied_head(&self) -> Option<&'static str>;

    /// Unties the output layer in the configuration.
    fn untie(&mut self);

    /// Lends each linear layer, the head included.
    fn for_each_linear(&self, see: &mut dyn FnMut(&Linear));

    /// Returns the number of bytes of all parameters, dense and quantized, without adapters.
    fn bytes(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let dense = self.dense().iter().map(|(_, tensor)| bytes(tensor));
        let mut all = dense.sum();
        self.for_each_quantized(&mut |_, weight| all += weight.bytes());
        all
    }

    /// Returns `true` if any weight is quantized.
    fn any_quantized(&self) -> bool {
        let mut any = false;
        self.for_each_quantized(&mut |_, _| any = true);
        any
    }

    /// Lends each quantized weight with the name of its module; a table that the head shares comes once.
    fn for_each_quantized(&self, see: &mut dyn FnMut(&str, &QuantizedWeight)) {
        let table = self.table().quantized_table();
        if let Some(table) = table {
            let specs = self.specs();
            let spec = specs.iter().find(|spec| is_embedding(spec));
            see(spec.map_or("", ParameterSpec::module), table);
        }
        if let Some((name, inputs)) = self.layer_inputs()
            && let Some(table) = inputs.quantized_table()
        {
            see(name, table);
        }
        self.for_each_linear(&mut |linear| {
            if let LinearWeight::Quantized(weight) = linear.weight()
                && !table.is_some_and(|table| table.shares_storage_with(weight))
            {
                see(linear.name(), weight);
            }
        });
    }

    /// Returns handles to the quantized weights by the names of their modules.
    fn quantized_weights(&self) -> HashMap<String, QuantizedWeight> {
        let mut weights = HashMap::new();
        self.for_each_quantized(&mut |name, weight| {
            weights.insert(name.to_owned(), weight.shallow_clone());
        });
        weights
    }

    /// Returns the names of the adapters of all layers, active or not, in the order of their first layer.
    fn names_of_adapters(&self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        self.for_each_linear(&mut |linear| {
            for name in linear.adapter().map_or(Vec::new(), |own| own.names()) {
                if !names.iter().any(|own| own == name) {
                    names.push(name.to_owned());
                }
            }
        });
        names
    }

    /// Quantizes the dense weights that `options` name, in place.
    fn quantize_layers(&mut self, options: &QuantizeOptions, pack: Pack<'_>) -> Result<()> {
        let (specs, tied) = (self.specs(), self.tied_head());
        let mut wanted: HashMap<&str, (&ParameterSpec, Scheme)> = HashMap::new();
        for spec in &specs {
            if let Some(scheme) = options.scheme_of(spec, tied.is_some())? {
                // A tied head and the table are one weight.
                let layer = tied.filter(|_| is_embedding(spec));
                wanted.insert(layer.unwrap_or(spec.module()), (spec, scheme));
            }
        }
        let all = std::mem::take(self.dense_mut());
        let order: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
        let mut dense: HashMap<String, Tensor> = all.into_iter().collect();
        let mut table = None;
        let visited = self.visit_linears(&mut |name, linear| {
            let Some((spec, scheme)) = wanted.get(name) else {
                return Ok(());
            };
            let Some(own) = dense.get(&spec.name) else {
                // The weight is quantized already.
                return Ok(());
            };
            let weight = pack(name, &as_rows(own, spec)?, *scheme)?;
            if is_embedding(spec) {
                table = Some(weight.shallow_clone());
            }
            // Freed before the next weight is quantized: the peak is one dense weight above the result.
            dense.remove(&spec.name);
            linear.replace_weight(LinearWeight::Quantized(weight))?;
            Ok(())
        });
        let rest = order.into_iter();
        *self.dense_mut() = rest.filter_map(|name| dense.remove_entry(&name)).collect();
        if let Some(table) = table {
            *self.table_mut() = Embedding::quantized(table, self.table().kind())?;
        }
        visited.map_err(unwrapped)
    }

    /// Makes every quantized weight dense again. After an error, those that are dense by then are parameters, and
    /// another call makes the others dense.
    fn dequantize_layers(&mut self) -> Result<()> {
        let mut dense = Vec::new();
        let done = self.dequantize_into(&mut dense);
        if let Some(head) = self.tied_head() {
            let head = format!("{head}.weight");
            if dense.iter().any(|(name, _)| *name == head) {
                // The head is dense now and no longer the embedding, if it ever was.
                self.untie();
            }
        }
        // One map for all of them: a model with experts has tens of thousands.
        let specs = self.specs();
        let names = specs.iter().map(|spec| spec.name.as_str());
        let order: HashMap<&str, usize> = names.zip(0..).collect();
        let parameters = self.dense_mut();
        parameters.extend(dense);
        // `named_parameters` has transformers' order, so appending alone would not do.
        parameters.sort_by_key(|(name, _)| order.get(name.as_str()).copied());
        done
    }

    /// Makes every quantized weight dense, and adds the parameters that are dense by then to `dense`, also if it fails.
    fn dequantize_into(&mut self, dense: &mut Vec<(String, Tensor)>) -> Result<()> {
        let (specs, kind) = (self.specs(), self.table().kind());
        let own = |spec: &ParameterSpec| (spec.name.clone(), (spec.role, self.kind_of(spec)));
        let own: HashMap<String, (ParameterRole, Kind)> = specs.iter().map(own).collect();
        // A handle, as the visit below borrows the model.
        let table = self.table().quantized_table();
        let table = table.map(QuantizedWeight::shallow_clone);
        let mut shared = None;
        self.visit_linears(&mut |name, linear| {
            let LinearWeight::Quantized(weight) = linear.weight() else {
                return Ok(());
            };
            let is_table = table
                .as_ref()
                .is_some_and(|table| table.shares_storage_with(weight));
            let name = format!("{name}.weight");
            // A tied head is none of the parameters.
            let (role, kind) = own
                .get(&name)
                .copied()
                .unwrap_or((ParameterRole::Head, kind));
            let transposed = role == ParameterRole::Conv1d;
            let weight = weight.dequantize(kind)?;
            let weight = match transposed {
                // `Conv1D` has its weight as `(I, O)`, and a file takes contiguous tensors only.
                true => weight.f_tr()?.f_contiguous()?,
                false => weight,
            };
            let handle = weight.shallow_clone();
            let _quantized = linear.replace_weight(LinearWeight::Dense { weight, transposed })?;
            match is_table {
                true => shared = Some(handle),
                false => dense.push((name, handle)),
            }
            Ok(())
        })?;
        if let (Some(spec), Some(packed)) = (specs.iter().find(|spec| is_embedding(spec)), table) {
            let weight = match shared {
                Some(weight) => weight,
                None => packed.dequantize(kind)?,
            };
            *self.table_mut() = Embedding::dense(weight.shallow_clone())?;
            dense.push((spec.name.clone(), weight));
        }
        if let Some((name, table)) = self.layer_inputs_mut()
            && let Some(packed) = table.quantized_table()
        {
            let weight = packed.dequantize(kind)?;
            *table = Embedding::dense(weight.shallow_clone())?;
            dense.push((format!("{name}.weight"), weight));
        }
        Ok(())
    }
}

fn is_embedding(spec: &ParameterSpec) -> bool {
    spec.role == ParameterRole::Embedding
}

/// Returns the error of a weight as it is without the visit of its layer.
fn unwrapped(error: overdrive_nn::Error) -> Error {
    match error {
        overdrive_nn::Error::Quantization(error) => Error::Quantization(error),
        other => Error::Nn(other),
    }
}
