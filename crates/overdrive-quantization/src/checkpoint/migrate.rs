//! Migration in a whole model: the division of a layer's inputs is folded into the norm or the layer before it.

use std::collections::BTreeMap;

use tch::{Device, Kind, Tensor};

use super::source::SourceFolder;
use crate::calibrate::{
    InputCollector, Migration, fold_into_columns, fold_into_rows, migration_scales,
};
use crate::{Error, InputStatistics, Result, Scheme};

/// The scales that a tensor is multiplied with or divided by before it is quantized or copied.
#[derive(Debug, Default)]
pub(super) struct Change {
    columns: Option<Tensor>,
    rows: Option<Tensor>,
    adds_one: bool,
}

/// The changes of tensors and of statistics, by name.
#[derive(Debug, Default)]
pub(super) struct Migrations {
    changes: BTreeMap<String, Change>,
    statistics: BTreeMap<String, InputStatistics>,
}

impl Change {
    pub(super) fn apply(&self, tensor: &Tensor) -> Result<Tensor> {
        let mut changed = tensor.f_to_kind(Kind::Float)?;
        if let Some(scales) = &self.columns {
            changed = fold_into_columns(&changed, scales)?;
        }
        if let Some(scales) = &self.rows {
            changed = fold_into_rows(&changed, scales, self.adds_one)?;
        }
        Ok(changed.f_to_kind(tensor.kind())?)
    }
}

/// The name of a norm or of a layer, and those of all the layers that read its output.
type Group = (&'static str, &'static [&'static str]);

/// Returns the groups of a layer. `doubled` is `true` if norms also follow attention and the feed-forward block.
fn groups(model_type: &str, doubled: bool) -> &'static [Group] {
    const QKV: Group = (
        "input_layernorm",
        &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    );
    // The gate is elementwise: dividing the rows of `up_proj` divides the input of `down_proj`.
    const DOWN: Group = ("mlp.up_proj", &["mlp.down_proj"]);
    match (model_type, doubled) {
        // One norm for attention and the feed-forward block. The activation between its layers is not linear.
        ("phi", _) => &[(
            "input_layernorm",
            &[
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "mlp.fc1",
            ],
        )],
        // The rows of `up` are a part of a layer, so none are divided.
        ("phi3", _) => &[
            ("input_layernorm", &["self_attn.qkv_proj"]),
            ("post_attention_layernorm", &["mlp.gate_up_proj"]),
        ],
        // As Phi-3's. The norm that follows attention has another name.
        ("granitemoehybrid", _) => &[
            QKV,
            ("post_attention_layernorm", &["shared_mlp.input_linear"]),
        ],
        ("glm4", _) => &[QKV, ("post_attention_layernorm", &["mlp.gate_up_proj"])],
        (_, true) => &[
            QKV,
            (
                "pre_feedforward_layernorm",
                &["mlp.gate_proj", "mlp.up_proj"],
            ),
            DOWN,
        ],
        (_, false) => &[
            QKV,
            (
                "post_attention_layernorm",
                &["mlp.gate_proj", "mlp.up_proj"],
            ),
            DOWN,
        ],
    }
}

impl Migrations {
    /// Computes the migrations of every norm and every gated feed-forward block of a model of the Llama family
    /// of which all linear layers are quantized and were observed.
    ///
    /// # Errors
    /// [`Error::Common`] if there is none: the folder would be quantized as without migration.
    pub(super) fn find(
        source: &SourceFolder,
        collector: &InputCollector,
        migration: Migration,
        scheme: Scheme,
        is_quantized: impl Fn(&str) -> Result<bool>,
    ) -> Result<Migrations> {
        let mut found = Migrations::default();
        let model_type = source.model_type();
        let adds_one = model_type.starts_with("gemma");
        // The number of layers is found by their names, since `config.json` has it under several keys.
        for layer in 0.. {
            let prefix = format!("model.layers.{layer}");
            if !source.has(&format!("{prefix}.input_layernorm.weight")) {
                break;
            }
            // Gemma 2 and 3 have a norm on both sides of each block; the one before the MLP has another name.
            let doubled = source.has(&format!("{prefix}.pre_feedforward_layernorm.weight"));
            for &(before, layers) in groups(model_type, doubled) {
                let layers: Vec<String> = layers
                    .iter()
                    .map(|name| format!("{prefix}.{name}"))
                    .collect();
                let mut fits = true;
                for name in &layers {
                    fits = fits && is_quantized(name)? && source.has(&format!("{name}.weight"));
                }
                if !fits {
                    continue;
                }
                let Some(statistics) = collector.get(&layers[0]) else {
                    continue;
                };
                let read = |name: &String| -> Result<Tensor> {
                    let stored = source.tensor(&format!("{name}.weight"))?;
                    Ok(stored.copy_to_tensor(Some(Kind::Float), Device::Cpu)?)
                };
                let weights: Vec<Tensor> = layers.iter().map(read).collect::<Result<_>>()?;
                let weights: Vec<&Tensor> = weights.iter().collect();
                let scales = migration_scales(&weights, statistics, migration, scheme)?;
                found.add(
                    &prefix, before, &layers, &scales, adds_one, statistics, source,
                )?;
            }
        }
        if found.changes.is_empty() {
            let value =
                format!("enabled for a model `{model_type}`, in which it finds nothing to change");
            let expected = "unset for this folder: it needs norms called `model.layers.*.input_layernorm`, and all \
                            layers after them must be quantized and observed";
            return Err(Error::option("migration", value, expected));
        }
        Ok(found)
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "one caller, which has all of them"
    )]
    fn add(
        &mut self,
        prefix: &str,
        before: &str,
        layers: &[String],
        scales: &Tensor,
        adds_one: bool,
        statistics: &InputStatistics,
        source: &SourceFolder,
    ) -> Result<()> {
        for layer in layers {
            let change = self.changes.entry(format!("{layer}.weight")).or_default();
            change.columns = Some(scales.shallow_clone());
            let divided = statistics.divided_by(scales)?;
            self.statistics.insert(layer.clone(), divided);
        }
        for end in ["weight", "bias"] {
            let name = format!("{prefix}.{before}.{end}");
            if source.has(&name) {
                let change = self.changes.entry(name).or_default();
                change.rows = Some(scales.shallow_clone());
                change.adds_one = adds_one && before.ends_with("norm");
            }
        }
        Ok(())
    }

    /// Returns the change of the tensor `name`.
    pub(super) fn change(&self, name: &str) -> Option<&Change> {
        self.changes.get(name)
    }

    /// Returns the statistics of a layer whose inputs were divided.
    pub(super) fn statistics(&self, layer: &str) -> Option<&InputStatistics> {
        self.statistics.get(layer)
    }
}
