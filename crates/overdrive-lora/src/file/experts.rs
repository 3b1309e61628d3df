//! The adapters over parameters (`target_parameters`). That of all experts of a layer is one adapter in PEFT's files: the
//! rows of A are those of one expert after the other, `(E · r, I)`, and the columns of B are those of all experts for one
//! rank after the other, `(O, r · E)`.

use std::collections::{BTreeMap, HashMap};

use overdrive_nn::AdapterHost;
use tch::Tensor;

use crate::host::visit_linears;
use crate::{LoraConfig, Result};

/// The place of the adapter of one linear layer in that of its parameter.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// The name of the module in the file.
    pub(super) module: String,
    pub(super) expert: i64,
    pub(super) experts: i64,
    /// The layer is the gate (0) or the projection up (1), which are one parameter, one below the other, in transformers.
    pub(super) half: Option<i64>,
}

/// The places of the linear layers that `target_parameters` selects, by their names.
#[derive(Debug, Default)]
pub(super) struct Places(HashMap<String, Place>);

impl Places {
    pub(super) fn of<H: AdapterHost + ?Sized>(host: &mut H, config: &LoraConfig) -> Result<Places> {
        let mut layers = Vec::new();
        // The number of experts of each parameter, and the parameters of each module in the order of the model.
        let mut experts: HashMap<String, i64> = HashMap::new();
        let mut modules: HashMap<String, Vec<String>> = HashMap::new();
        visit_linears(host, |name, _| {
            let Some(own) = config.target_parameter(name) else {
                return Ok(());
            };
            let count = experts.entry(own.name()).or_default();
            *count = (*count).max(own.expert.unwrap_or(0) + 1);
            let parameters = modules.entry(own.module.clone()).or_default();
            if !parameters.contains(&own.parameter) {
                parameters.push(own.parameter.clone());
            }
            layers.push((name.to_owned(), own));
            Ok(())
        })?;
        let places = layers.into_iter().map(|(layer, own)| {
            let parameters = modules.get(&own.module).into_iter().flatten();
            // PEFT wraps the module once for each of its parameters, so that the last one is the outermost.
            let outside = parameters
                .skip_while(|parameter| **parameter != own.parameter)
                .count();
            let place = Place {
                module: own.module.clone() + &".base_layer".repeat(outside.saturating_sub(1)),
                expert: own.expert.unwrap_or(0),
                experts: experts.get(&own.name()).copied().unwrap_or(1),
                half: own.half,
            };
            (layer, place)
        });
        Ok(Places(places.collect()))
    }

    pub(super) fn get(&self, layer: &str) -> Option<&Place> {
        self.0.get(layer)
    }

    /// Returns the place of a tensor with its key in the file.
    fn of_key(&self, key: &str) -> Option<(&Place, String)> {
        [A, B].iter().find_map(|end| {
            let place = self.get(key.strip_suffix(end)?)?;
            Some((place, format!("{}{end}", place.module)))
        })
    }

    /// Returns the part of the adapter of all experts that belongs to the layer of `key`; `stored` returns the tensor of a
    /// key of the file.
    pub(super) fn part(
        &self,
        key: &str,
        stored: impl FnOnce(String) -> Result<Option<Tensor>>,
    ) -> Result<Option<Tensor>> {
        let Some((place, whole)) = self.of_key(key) else {
            return Ok(None);
        };
        let is_a = whole.ends_with(A);
        let Some(stored) = stored(whole)? else {
            return Ok(None);
        };
        let (rows, columns) = stored.size2()?;
        if is_a {
            let rank = rows / place.experts;
            return Ok(Some(stored.f_narrow(0, place.expert * rank, rank)?));
        }
        let each = stored.f_view([rows, columns / place.experts, place.experts])?;
        let own = each.f_select(2, place.expert)?;
        Ok(Some(match place.half {
            None => own,
            Some(half) => own.f_narrow(0, half * (rows / 2), rows / 2)?,
        }))
    }

    /// Joins the tensors of single experts to those of the file.
    pub(super) fn join(&self, tensors: Vec<(String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        let mut parts: BTreeMap<String, Vec<(Place, Tensor)>> = BTreeMap::new();
        for (key, tensor) in tensors {
            match self.of_key(&key) {
                None => all.push((key, tensor)),
                Some((place, whole)) => parts
                    .entry(whole)
                    .or_default()
                    .push((place.clone(), tensor)),
            }
        }
        for (key, mut parts) in parts {
            parts.sort_by_key(|(place, _)| (place.half, place.expert));
            // Both halves have the A of their parameter.
            let is_first = |half: Option<i64>| half.is_none_or(|half| half == 0);
            let of = |wanted: bool| -> Vec<&Tensor> {
                let chosen = parts
                    .iter()
                    .filter(|(place, _)| is_first(place.half) == wanted);
                chosen.map(|(_, tensor)| tensor).collect()
            };
            let (first, second) = (of(true), of(false));
            let joined = match key.ends_with(A) {
                true => Tensor::f_cat(&first, 0)?,
                false => {
                    let mut columns = Tensor::f_stack(&first, 2)?;
                    if !second.is_empty() {
                        columns = Tensor::f_cat(&[columns, Tensor::f_stack(&second, 2)?], 0)?;
                    }
                    columns.f_flatten(1, 2)?.f_contiguous()?
                }
            };
            all.push((key, joined));
        }
        Ok(all)
    }
}

/// The ends of the keys of an adapter over a parameter, which has neither a bias nor a magnitude.
const A: &str = ".lora_A.weight";
const B: &str = ".lora_B.weight";
