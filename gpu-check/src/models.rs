//! The small models and their inputs.

use anyhow::Result;
use overdrive::transformer::{CausalLm, InitOptions, LlamaConfig};
use tch::{Device, Kind, TchError, Tensor};

use crate::context::Context;

/// Returns the configuration of the small Llama, with grouped heads of a size that every kernel supports.
pub(crate) fn config(context: &Context) -> LlamaConfig {
    LlamaConfig {
        vocab_size: 512,
        hidden_size: context.sized(512, 128),
        intermediate_size: context.sized(1408, 256),
        num_hidden_layers: context.sized(4, 2),
        num_attention_heads: context.sized(8, 4),
        num_key_value_heads: Some(2),
        max_position_embeddings: 512,
        eos_token_id: Vec::new(),
        ..LlamaConfig::default()
    }
}

/// Returns a model of this configuration, the same on every device.
pub(crate) fn model(config: &LlamaConfig, device: Device, kind: Kind) -> Result<CausalLm> {
    let options = InitOptions {
        device,
        kind,
        ..InitOptions::default()
    };
    Ok(CausalLm::new(&config.clone().into(), &options)?)
}

/// Returns token ids `(rows, len)` that repeat with a period of 31, so that a model can learn them.
pub(crate) fn tokens(rows: i64, len: i64, device: Device) -> Result<Tensor, TchError> {
    let values: Vec<i64> = (0..rows)
        .flat_map(|row| (0..len).map(move |at| ((at + row * 5) % 31 * 16 + 3) % 512))
        .collect();
    Tensor::f_from_slice(&values)?
        .f_view([rows, len])?
        .f_to_device(device)
}

/// Returns prompts of different lengths.
pub(crate) fn prompts(count: usize) -> Vec<Vec<i64>> {
    let of = |row: usize| 5 + row * 7 % 23;
    (0..count)
        .map(|row| {
            (0..of(row))
                .map(|at| ((row * 7919 + at * 104_729 + 13) % 512) as i64)
                .collect()
        })
        .collect()
}
