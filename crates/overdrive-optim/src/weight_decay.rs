//! The rule that excludes parameters from weight decay.

use tch::Tensor;

use crate::ParamGroup;

/// The substrings by which the name of an embedding's table is recognized: `model.embed_tokens.weight` of
/// Llama and Gemma, `transformer.wte.weight` and `transformer.wpe.weight` of GPT-2.
pub const EMBEDDING_NAMES: [&str; 3] = ["embed", "wte", "wpe"];

/// Returns `true` if a component of a dotted parameter name contains one of `patterns`, in any case.
pub(crate) fn name_contains(name: &str, patterns: &[String]) -> bool {
    // Checkpoints write `LayerNorm` as well as `layer_norm`.
    let name = name.to_lowercase();
    name.split('.').any(|component| {
        let mut patterns = patterns.iter();
        patterns.any(|pattern| component.contains(&pattern.to_lowercase()))
    })
}

/// The rule that excludes parameters from weight decay.
///
/// A parameter is excluded if it has fewer than `min_decay_dim` dimensions, or if a component of its dotted name
/// contains one of `no_decay_names` (case-insensitive): `model.layers.0.input_layernorm.weight` contains `norm`. The
/// default is the rule of transformers (`get_decay_parameter_names`): biases and norms are excluded, and embeddings
/// decay, including one that the head shares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecayRule {
    /// The minimum number of dimensions of a decayed parameter. Default: 2, which excludes biases and the
    /// weights of norms whatever their names.
    pub min_decay_dim: usize,
    /// The substrings of name components that exclude a parameter. Default: `bias`, `norm`, `ln_`.
    pub no_decay_names: Vec<String>,
}

impl Default for DecayRule {
    fn default() -> Self {
        let names = ["bias", "norm", "ln_"];
        Self {
            min_decay_dim: 2,
            no_decay_names: names.map(String::from).to_vec(),
        }
    }
}

impl DecayRule {
    /// Returns the default rule that excludes embeddings ([`EMBEDDING_NAMES`]) too, as in the code of GPT-2's
    /// reproductions (minGPT) and OLMo's `decay_embeddings: false`. A head that shares the table of the
    /// embedding is excluded with it; one with a weight of its own decays.
    #[must_use]
    pub fn without_embeddings() -> Self {
        let mut rule = Self::default();
        rule.no_decay_names
            .extend(EMBEDDING_NAMES.map(String::from));
        rule
    }

    /// Returns the rule of nanoGPT, which uses only the number of dimensions.
    #[must_use]
    pub fn by_dimension() -> Self {
        Self {
            min_decay_dim: 2,
            no_decay_names: Vec::new(),
        }
    }

    /// Returns `true` if a parameter of this name and number of dimensions is decayed.
    #[must_use]
    pub fn decays(&self, name: &str, dim: usize) -> bool {
        dim >= self.min_decay_dim && !name_contains(name, &self.no_decay_names)
    }

    /// Splits parameters into a group `decay` with `weight_decay` and a group `no_decay` with 0. Frozen
    /// parameters (`requires_grad` false) and empty groups are left out.
    #[must_use]
    pub fn groups(
        &self,
        named_parameters: impl IntoIterator<Item = (String, Tensor)>,
        weight_decay: f64,
    ) -> Vec<ParamGroup> {
        let (decayed, exempt): (Vec<_>, Vec<_>) = named_parameters
            .into_iter()
            .filter(|(_, tensor)| tensor.requires_grad())
            .partition(|(name, tensor)| self.decays(name, tensor.dim()));
        [("decay", decayed, weight_decay), ("no_decay", exempt, 0.0)]
            .into_iter()
            .filter(|(_, parameters, _)| !parameters.is_empty())
            .map(|(name, parameters, decay)| {
                ParamGroup::new(name, parameters).with_weight_decay(decay)
            })
            .collect()
    }

    /// Splits parameters as [`groups`](Self::groups) does, with a group `muon` before the others: the decayed matrices
    /// except embeddings ([`EMBEDDING_NAMES`]) and the head (`lm_head`), which [`Muon`](crate::Muon) is not made for.
    #[must_use]
    pub fn groups_with_muon(
        &self,
        named_parameters: impl IntoIterator<Item = (String, Tensor)>,
        weight_decay: f64,
    ) -> Vec<ParamGroup> {
        let is_table = |name: &str| {
            let mut tables = EMBEDDING_NAMES.into_iter();
            name.contains("lm_head") || tables.any(|table| name.contains(table))
        };
        let (matrices, others): (Vec<_>, Vec<_>) =
            named_parameters.into_iter().partition(|(name, tensor)| {
                tensor.dim() == 2 && self.decays(name, 2) && !is_table(name)
            });
        let mut groups = self.groups(matrices, weight_decay);
        groups
            .iter_mut()
            .for_each(|group| group.name = "muon".to_owned());
        groups.extend(self.groups(others, weight_decay));
        groups
    }
}

/// Splits parameters into groups by the default [`DecayRule`], which excludes biases and norms from weight
/// decay.
///
/// ```
/// use overdrive_optim::decay_groups;
/// use tch::{Device, Kind, Tensor};
///
/// let weight = |shape: &[i64]| Tensor::zeros(shape, (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let groups = decay_groups(
///     [
///         ("embed_tokens.weight".to_string(), weight(&[32, 8])),
///         ("layers.0.mlp.up_proj.weight".to_string(), weight(&[16, 8])),
///         ("norm.weight".to_string(), weight(&[8])),
///     ],
///     0.1,
/// );
/// assert_eq!(groups[0].parameters.len(), 2);
/// assert_eq!(groups[1].parameters[0].0, "norm.weight");
/// assert_eq!(groups[1].weight_decay, Some(0.0));
/// ```
#[must_use]
pub fn decay_groups(
    named_parameters: impl IntoIterator<Item = (String, Tensor)>,
    weight_decay: f64,
) -> Vec<ParamGroup> {
    DecayRule::default().groups(named_parameters, weight_decay)
}
