//! Parameters that share a learning rate and a weight decay.

use tch::Tensor;

/// Parameters that share a learning rate and a weight decay.
#[derive(Debug)]
pub struct ParamGroup {
    /// Name of the group, unique in its optimizer; stored with the state.
    pub name: String,
    /// The parameters with their names, in the order of the names. The handles share memory with the
    /// model's.
    pub parameters: Vec<(String, Tensor)>,
    /// Learning rate of this group; `None` takes the optimizer's.
    pub learning_rate: Option<f64>,
    /// Weight decay of this group; `None` takes the optimizer's.
    pub weight_decay: Option<f64>,
}

impl ParamGroup {
    /// A group that takes its learning rate and weight decay from the optimizer's configuration.
    ///
    /// The parameters are sorted by name. A `VarStore` lists its variables in another order in each
    /// process, and sums over them (the norm that clipping divides by) round differently in another order.
    pub fn new(name: impl Into<String>, mut parameters: Vec<(String, Tensor)>) -> Self {
        parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self {
            name: name.into(),
            parameters,
            learning_rate: None,
            weight_decay: None,
        }
    }

    /// Gives the group its own learning rate.
    #[must_use]
    pub fn with_learning_rate(mut self, learning_rate: f64) -> Self {
        self.learning_rate = Some(learning_rate);
        self
    }

    /// Gives the group its own weight decay.
    #[must_use]
    pub fn with_weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = Some(weight_decay);
        self
    }
}

/// Which parameters are kept free of weight decay.
///
/// A parameter is left without decay if it has fewer than `min_decay_dim` dimensions, or if a
/// component of its dotted name contains one of `no_decay_names` (case-insensitive):
/// `model.layers.0.input_layernorm.weight` contains `norm`, `transformer.wte.weight` is `wte`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecayRule {
    /// Fewest dimensions that a decayed parameter has. Default 2, which exempts biases and the
    /// gains of norms whatever they are called.
    pub min_decay_dim: usize,
    /// Parts of name components that exempt a parameter. Default `bias`, `norm`, `ln_`, and for
    /// embeddings `embed`, `wte`, `wpe`.
    pub no_decay_names: Vec<String>,
}

impl Default for DecayRule {
    fn default() -> Self {
        let names = ["bias", "norm", "ln_", "embed", "wte", "wpe"];
        Self {
            min_decay_dim: 2,
            no_decay_names: names.map(String::from).to_vec(),
        }
    }
}

impl DecayRule {
    /// The rule of most pre-training code: by dimension alone, so that embeddings decay too.
    #[must_use]
    pub fn by_dimension() -> Self {
        Self {
            min_decay_dim: 2,
            no_decay_names: Vec::new(),
        }
    }

    /// Whether a parameter of this name and number of dimensions is decayed.
    #[must_use]
    pub fn decays(&self, name: &str, dim: usize) -> bool {
        let name = name.to_lowercase();
        dim >= self.min_decay_dim
            && !name.split('.').any(|component| {
                self.no_decay_names
                    .iter()
                    .any(|part| component.contains(&part.to_lowercase()))
            })
    }

    /// Splits parameters into a group `decay` with `weight_decay` and a group `no_decay` with
    /// none. Frozen parameters (`requires_grad` false) are left out, as are empty groups.
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
}

/// Splits parameters into decayed and exempt ones by the default [`DecayRule`]: no decay on
/// biases, norms and embeddings.
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
/// assert_eq!(groups[0].parameters[0].0, "layers.0.mlp.up_proj.weight");
/// assert_eq!(groups[1].parameters.len(), 2);
/// assert_eq!(groups[1].weight_decay, Some(0.0));
/// ```
#[must_use]
pub fn decay_groups(
    named_parameters: impl IntoIterator<Item = (String, Tensor)>,
    weight_decay: f64,
) -> Vec<ParamGroup> {
    DecayRule::default().groups(named_parameters, weight_decay)
}
