//! The state of an optimizer, which a resumed run loads.

use std::collections::BTreeMap;

use tch::Tensor;

/// The state of an optimizer: tensors by name, and a JSON value for the rest.
///
/// The names are `<parameter>.<state tensor>`, for AdamW `blocks.0.mlp.up.weight.exp_avg`, so a state
/// does not depend on the order of the parameters. [`save`](Self::save) writes both into one safetensors
/// file.
#[derive(Debug)]
pub struct StateDict {
    /// The tensors. Those that `state_dict` returns share memory with the optimizer.
    // Ordered, so that the same state gives the same file.
    pub tensors: BTreeMap<String, Tensor>,
    /// The hyper-parameters and the list of parameters.
    pub metadata: serde_json::Value,
}
