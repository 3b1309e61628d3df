//! The names of tensors in checkpoints of encoders.

use std::borrow::Cow;
use std::cell::RefCell;

use serde_json::{Map, Value};

use super::config::EncoderConfig;
use super::parameters::{architecture, head_names, own_prefix, parameters, prefix, qkv_names};
use super::{HeadKind, config_json};
use crate::ParameterSpec;
use crate::checkpoint::CheckpointConfig;

/// The first components of the backbone's names, without the prefix of a model with a head.
const BACKBONE: [&str; 5] = [
    "embeddings.",
    "encoder.",
    "layers.",
    "final_norm.",
    "pooler.",
];

/// The layout of a checkpoint of an encoder with one head.
pub(super) struct Layout<'c> {
    config: Cow<'c, EncoderConfig>,
    kind: HeadKind,
    /// The tensors that were found and that the model does not use.
    unused: RefCell<Vec<String>>,
}

impl<'c> Layout<'c> {
    pub(super) fn new(config: &'c EncoderConfig, kind: HeadKind) -> Layout<'c> {
        Layout {
            config: Cow::Borrowed(config),
            kind,
            unused: RefCell::default(),
        }
    }

    /// Returns the configuration, in which reading may have untied the head, and the tensors without a use, sorted.
    pub(super) fn into_parts(self) -> (EncoderConfig, Vec<String>) {
        let mut unused = self.unused.into_inner();
        unused.sort();
        (self.config.into_owned(), unused)
    }

    /// Returns `true` if the tensor belongs to the head of this model.
    fn is_of_head(&self, name: &str) -> bool {
        let names = head_names(self.config.family, self.kind);
        let modules = [names.dense, names.norm, names.output];
        let module = |module: &str| {
            let rest = name.strip_prefix(module);
            rest.is_some_and(|rest| rest.starts_with('.'))
        };
        modules.into_iter().flatten().any(module) || names.output_bias == Some(name)
    }

    /// Returns the one name of the bias of the output layer, which some checkpoints hold under two.
    fn settled(&self, name: String) -> String {
        let names = head_names(self.config.family, self.kind);
        let (Some(bias), Some(output)) = (names.output_bias, names.output) else {
            return name;
        };
        let own = format!("{output}.bias");
        match self.config.tie_word_embeddings {
            true if name == own => bias.to_owned(),
            false if name == bias => own,
            _ => name,
        }
    }
}

impl CheckpointConfig for Layout<'_> {
    fn parameters(&self) -> Vec<ParameterSpec> {
        parameters(&self.config, self.kind)
    }

    fn layers(&self) -> (&'static str, i64) {
        ("num_hidden_layers", self.config.num_hidden_layers)
    }

    fn extra(&self) -> &Map<String, Value> {
        &self.config.extra
    }

    fn to_json(&self) -> Map<String, Value> {
        config_json::write(&self.config, architecture(self.config.family, self.kind))
    }

    fn adjacent(&self) -> Vec<Vec<String>> {
        let prefix = own_prefix(&self.config, self.kind);
        let groups = (0..self.config.num_hidden_layers).flat_map(|layer| {
            let names = qkv_names(&self.config, prefix, layer);
            ["weight", "bias"]
                .map(|part| names.iter().map(|name| format!("{name}.{part}")).collect())
        });
        // One projection has nothing to lie next to.
        groups
            .filter(|group: &Vec<String>| group.len() > 1)
            .collect()
    }

    fn tied_head(&self) -> Option<&'static str> {
        let names = head_names(self.config.family, self.kind);
        let tied = self.kind == HeadKind::MaskedLm && self.config.tie_word_embeddings;
        names.output.filter(|_| tied)
    }

    fn untie_head(&mut self) {
        self.config.to_mut().tie_word_embeddings = false;
    }

    fn prefix(&self) -> &'static str {
        prefix(self.config.family)
    }

    fn parameter_name(&self, name: &str, prefixed: bool) -> Option<String> {
        let inside = name.strip_prefix(self.prefix());
        let bare = inside.unwrap_or(name);
        // Checkpoints converted from TensorFlow keep its names of the parameters of norms.
        let bare = match (bare.strip_suffix(".gamma"), bare.strip_suffix(".beta")) {
            (Some(norm), _) => format!("{norm}.weight"),
            (_, Some(norm)) => format!("{norm}.bias"),
            _ => bare.to_owned(),
        };
        let in_backbone =
            inside.is_some() || (!prefixed && BACKBONE.iter().any(|root| bare.starts_with(root)));
        let own = match in_backbone {
            true => format!("{}{bare}", own_prefix(&self.config, self.kind)),
            false => bare,
        };
        let used = match in_backbone && !own.contains("pooler.") {
            true => true,
            false => self.is_of_head(&own),
        };
        if !used {
            self.unused.borrow_mut().push(name.to_owned());
            return None;
        }
        Some(self.settled(own))
    }

    fn may_be_missing(&self, parameter: &ParameterSpec) -> bool {
        self.is_of_head(&parameter.name)
    }
}
