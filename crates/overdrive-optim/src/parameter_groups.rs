//! Groups of parameters, and their division.

use tch::Tensor;

use crate::weight_decay::name_contains;
use crate::{DecayRule, EMBEDDING_NAMES};

/// The patterns by which the name of a head is recognized, as [`EMBEDDING_NAMES`] are. The head of a masked language
/// model is called `decoder`, as are whole modules of other models.
const HEAD_NAMES: [&str; 3] = ["lm_head", ".classifier.", ".score."];

/// A group of parameters that share a learning rate and a weight decay.
#[derive(Debug)]
pub struct ParamGroup {
    /// The name of the group, unique in its optimizer. It is stored with the state.
    pub name: String,
    /// The parameters with their names, in the order of the names. The handles share memory with the
    /// model's.
    pub parameters: Vec<(String, Tensor)>,
    /// The learning rate of this group; `None` for that of the optimizer.
    pub learning_rate: Option<f64>,
    /// The weight decay of this group; `None` for that of the optimizer.
    pub weight_decay: Option<f64>,
}

impl ParamGroup {
    /// Returns a group with the learning rate and weight decay of the optimizer's configuration.
    ///
    /// The parameters are sorted by name. A `VarStore` lists its variables in a different order in each
    /// process, and sums over them (the norm of clipping) round differently in another order.
    pub fn new(name: impl Into<String>, mut parameters: Vec<(String, Tensor)>) -> Self {
        parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self {
            name: name.into(),
            parameters,
            learning_rate: None,
            weight_decay: None,
        }
    }

    /// Sets the learning rate of the group.
    #[must_use]
    pub fn with_learning_rate(mut self, learning_rate: f64) -> Self {
        self.learning_rate = Some(learning_rate);
        self
    }

    /// Sets the weight decay of the group.
    #[must_use]
    pub fn with_weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }
}

impl DecayRule {
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
    /// except embeddings ([`EMBEDDING_NAMES`]) and the head (`lm_head`, `classifier`, `score`, and the `decoder` of a
    /// masked language model), which [`Muon`](crate::Muon) is not made for.
    #[must_use]
    pub fn groups_with_muon(
        &self,
        named_parameters: impl IntoIterator<Item = (String, Tensor)>,
        weight_decay: f64,
    ) -> Vec<ParamGroup> {
        let is_table = |name: &str| {
            name_contains(name, &EMBEDDING_NAMES)
                || name_contains(name, &HEAD_NAMES)
                || name == "decoder.weight"
                || name.ends_with(".decoder.weight")
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
