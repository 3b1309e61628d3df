//! Groups of parameters.

use tch::Tensor;

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
