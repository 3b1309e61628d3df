//! A choice of adapters for each row of a batch: one matmul of the weight for all rows, and the low-rank update of
//! each adapter for its own rows.

use std::path::Path;

use overdrive_nn::{AdapterHost, AdapterRows, Linear, RowChoice, joint_base};
use tch::Tensor;

use crate::adapters::{are_disabled, as_strs};
use crate::layer_adapters::{LayerAdapters, adapters_of};
use crate::low_rank::{Addend, add_chosen, add_low_rank};
use crate::{
    BiasMode, Error, LoadAdapterOptions, LoadedAdapter, LoraAdapter, Result, active_adapters,
    disable_adapters, load_adapter, read_config, set_adapter,
};

/// Loads an adapter as [`load_adapter`] does, for batches whose rows choose their adapters with
/// [`AdapterRows`]. The adapter is inactive elsewhere, and does not change the results of the model or of other
/// adapters.
///
/// # Errors
/// [`Error::Common`] for an adapter that replaces parameters of the model, because it has trained biases (`bias`) or
/// full copies (`modules_to_save`) or its initialization changes the weights (PiSSA, OLoRA, LoftQ, CorDA); otherwise
/// as [`load_adapter`].
pub fn load_adapter_for_rows<H: AdapterHost + ?Sized>(
    host: &mut H,
    dir: impl AsRef<Path>,
    name: &str,
    options: &LoadAdapterOptions,
) -> Result<LoadedAdapter> {
    let config = read_config(&dir)?;
    let refuse = |option: &'static str, value: String, expected: &'static str| {
        Err(overdrive_core::Error::option(option, value, expected).into())
    };
    if config.bias != BiasMode::None {
        let expected = "none, because rows share the model's biases; merge this adapter instead";
        return refuse("bias", format!("{:?}", config.bias), expected);
    }
    if config.modules_to_save.is_some() {
        let expected = "unset, because rows share the model's modules; merge this adapter instead";
        return refuse("modules_to_save", "set".to_owned(), expected);
    }
    if config.trainable_token_indices.is_some() {
        let expected =
            "unset, because rows share the model's embedding; merge this adapter instead";
        return refuse("trainable_token_indices", "set".to_owned(), expected);
    }
    if config.init_lora_weights.changes_base() && !options.residual_base {
        let expected = "a method that does not change the model's weights, because rows share them; merge this \
                        adapter instead, or convert it with PEFT";
        let value = format!("{:?}", config.init_lora_weights);
        return refuse("init_lora_weights", value, expected);
    }
    let (active, disabled) = (active_adapters(host)?, are_disabled(host)?);
    let loaded = load_adapter(host, dir, name, options)?;
    // The first adapter of a model would be active immediately.
    set_adapter(host, &as_strs(&active))?;
    if disabled {
        // `set_adapter` enables adapters.
        disable_adapters(host)?;
    }
    Ok(loaded)
}

impl LayerAdapters {
    /// Returns the index of the adapter `name`.
    fn index(&self, name: &str) -> Option<usize> {
        self.adapters.iter().position(|(own, _)| own == name)
    }

    /// Returns the adapters of the rows of a run.
    fn of_run(&self, name: Option<&str>) -> Result<Vec<&LoraAdapter>> {
        let adapter = |index: &usize| &self.adapters[*index].1;
        let Some(name) = name else {
            return Ok(self.working().iter().map(adapter).collect());
        };
        let index = self.index(name);
        if index.is_some() {
            self.refuse_merged("choosing an adapter by row")?;
            if let Some(copy) = self.active_copy() {
                return Err(Error::NotCombinable {
                    adapters: format!("`{copy}` and `{name}`"),
                    reason: format!(
                        "`{copy}` is active and replaces the weight (`modules_to_save`) for all rows; deactivate it"
                    ),
                });
            }
        }
        Ok(index.iter().map(adapter).collect())
    }

    /// Returns `true` if any of the rows has an adapter here.
    pub(crate) fn is_active_for(&self, rows: &AdapterRows) -> bool {
        !self.working().is_empty() || rows.names().any(|name| self.index(name).is_some())
    }

    /// Computes the outputs of `x (…, I)`, each row with its adapter.
    pub(crate) fn forward_rows(
        &self,
        layer: &Linear,
        x: &Tensor,
        rows: &AdapterRows,
        fused: bool,
    ) -> Result<Tensor> {
        check(layer, x, rows)?;
        let (weight, bias) = layer.in_use();
        let y = weight.forward(x, bias, fused)?;
        let (inputs, outputs) = (matrix(x)?, matrix(&y)?);
        if let Some(choice) = rows.choice() {
            let Some(updates) = updates_of_choice(&[layer], choice)? else {
                let names: Vec<String> = choice.names().map(|name| format!("`{name}`")).collect();
                return Err(Error::NotCombinable {
                    adapters: names.join(", "),
                    reason: "DoRA (`use_dora`) scales the layer's output, which the device cannot choose by row"
                        .to_owned(),
                });
            };
            add_chosen(&outputs, &inputs, &updates, choice)?;
            return Ok(y);
        }
        for (start, count, name) in rows.runs() {
            let (start, count) = (start as i64, count as i64);
            let x = inputs.f_narrow(0, start, count)?;
            let mut y = outputs.f_narrow(0, start, count)?;
            match updates_of(&[layer], name)? {
                Some(addends) => drop(add_low_rank(y, &x, &addends)?),
                // DoRA scales the weight's output, from which the bias would have to be subtracted first.
                None => y.f_copy_(&self.adapted(layer, &x, &self.of_run(name)?, fused)?)?,
            }
        }
        Ok(y)
    }
}

/// Computes the outputs of several layers of the same `x` side by side, each row with its adapter, or returns `None`
/// if one of the adapters does more than add to the output.
pub(crate) fn joint_rows(
    layers: &[&Linear],
    x: &Tensor,
    rows: &AdapterRows,
) -> Result<Option<Tensor>> {
    let mut runs = Vec::new();
    for (first, count, name) in rows.runs() {
        let Some(addends) = updates_of(layers, name)? else {
            return Ok(None);
        };
        runs.push((first as i64, count as i64, addends));
    }
    let chosen = match rows.choice() {
        None => None,
        Some(choice) => match updates_of_choice(layers, choice)? {
            Some(updates) => Some((choice, updates)),
            None => return Ok(None),
        },
    };
    for layer in layers {
        check(layer, x, rows)?;
    }
    let y = joint_base(x, layers)?;
    let (inputs, outputs) = (matrix(x)?, matrix(&y)?);
    for (start, count, addends) in runs {
        let x = inputs.f_narrow(0, start, count)?;
        let _same = add_low_rank(outputs.f_narrow(0, start, count)?, &x, &addends)?;
    }
    if let Some((choice, updates)) = chosen {
        add_chosen(&outputs, &inputs, &updates, choice)?;
    }
    Ok(Some(y))
}

/// Returns the updates of the rows that choose the adapter `name`, or `None` if one of them does more than add to the
/// output of its layer.
fn updates_of<'m>(layers: &[&'m Linear], name: Option<&str>) -> Result<Option<Vec<Addend<'m>>>> {
    let (mut addends, mut start) = (Vec::new(), 0);
    for layer in layers {
        let own = adapters_of(layer);
        if own.is_none() && layer.adapter().is_some_and(|other| other.is_active()) {
            return Ok(None);
        }
        for adapter in own.map_or(Ok(Vec::new()), |own| own.of_run(name))? {
            if adapter.magnitude.is_some() {
                return Ok(None);
            }
            addends.push(Addend {
                start,
                adapter,
                dropout: 0.0,
            });
        }
        start += layer.weight().size()[0];
    }
    Ok(Some(addends))
}

/// Returns the updates of all adapters of `choice` with the indices of the adapters, those of the same columns side by
/// side, as [`updates_of`] does.
fn updates_of_choice<'m>(
    layers: &[&'m Linear],
    choice: &RowChoice,
) -> Result<Option<Vec<(usize, Addend<'m>)>>> {
    let mut updates = Vec::new();
    for (index, name) in choice.names().map(Some).chain([None]).enumerate() {
        let Some(addends) = updates_of(layers, name)? else {
            return Ok(None);
        };
        updates.extend(addends.into_iter().map(|addend| (index, addend)));
    }
    updates.sort_by_key(|(_, addend)| addend.start);
    Ok(Some(updates))
}

/// Checks that the layer has the rows of the batch and is not in training mode: updates are added in place.
fn check(layer: &Linear, x: &Tensor, rows: &AdapterRows) -> Result<()> {
    if layer.is_training() {
        let expected = "false: adapters are chosen by row for inference only, as in PEFT";
        return Err(overdrive_core::Error::option("training", true, expected).into());
    }
    Ok(rows.check(layer.name(), x)?)
}

/// Views `(…, C)` as a matrix.
fn matrix(tensor: &Tensor) -> Result<Tensor> {
    let columns = tensor.size().last().copied().unwrap_or(1);
    Ok(tensor.f_view([-1, columns])?)
}
