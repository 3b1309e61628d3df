use std::collections::HashMap;

use tch::Tensor;

use crate::{Init, Result};

/// A parameter that a configuration calls for.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ParameterSpec {
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<i64>,
    /// How transformers initialises it.
    pub init: Init,
}

impl ParameterSpec {
    pub(crate) fn new(name: String, shape: &[i64], init: Init) -> Self {
        ParameterSpec {
            name,
            shape: shape.to_vec(),
            init,
        }
    }

    /// Number of elements.
    pub fn numel(&self) -> i64 {
        self.shape.iter().product()
    }
}

/// Parameters by name, for the modules to take theirs from.
#[derive(Debug)]
pub(crate) struct ParameterMap(HashMap<String, Tensor>);

impl ParameterMap {
    pub(crate) fn new(parameters: &[(String, Tensor)]) -> Self {
        // A shallow clone is the same tensor: its gradient and its flags are shared.
        ParameterMap(
            parameters
                .iter()
                .map(|(name, t)| (name.clone(), t.shallow_clone()))
                .collect(),
        )
    }

    pub(crate) fn take(&mut self, name: &str) -> Result<Tensor> {
        // The list of parameters and the modules are both derived from one configuration; a test
        // builds each architecture, so this is an error of this crate and not of its user.
        self.0.remove(name).ok_or_else(|| crate::Error::BadConfig {
            key: name.to_owned(),
            found: "not a parameter of this architecture".to_owned(),
            expected: "a name of `ModelConfig::parameters` (please report this)".to_owned(),
        })
    }
}
