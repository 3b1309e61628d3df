//! What an optimizer stores so that a run can resume.

use std::collections::BTreeMap;

use tch::Tensor;

/// The state of an optimizer: tensors by name and a JSON value for the rest.
///
/// The names are `<parameter>.<part>`, for AdamW `blocks.0.mlp.up.weight.exp_avg`, so that a state
/// survives a reordering of the parameters. [`save`](Self::save) writes both into one safetensors
/// file.
#[derive(Debug)]
pub struct StateDict {
    /// The tensors. From `state_dict` they are handles that share memory with the optimizer.
    pub tensors: BTreeMap<String, Tensor>,
    /// Hyper-parameters and the list of parameters.
    pub metadata: serde_json::Value,
}
