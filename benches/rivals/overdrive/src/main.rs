//! A training step of a Llama of 13.8 million parameters with Overdrive.

include!("../../common.rs");

use overdrive_optim::{AdamW, AdamWConfig, ClipOptions, Optimizer, clip_grad_norm, decay_groups};
use overdrive_transformer::{CausalLm, InitOptions, LabelShift, LlamaConfig};
use tch::Tensor;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let config = LlamaConfig {
        vocab_size: VOCAB as i64,
        hidden_size: DIM as i64,
        intermediate_size: HIDDEN as i64,
        num_hidden_layers: LAYERS as i64,
        num_attention_heads: HEADS as i64,
        max_position_embeddings: CONTEXT as i64,
        tie_word_embeddings: true,
        ..LlamaConfig::default()
    };
    let model = CausalLm::new(&config.into(), &InitOptions::default())?;
    model.set_requires_grad(true)?;
    let config = AdamWConfig {
        learning_rate: LEARNING_RATE,
        betas: (0.9, 0.95),
        ..AdamWConfig::default()
    };
    let mut optimizer = AdamW::new(decay_groups(model.named_parameters(), 0.1), config)?;
    let mut step = |inputs: Vec<i64>, labels: Vec<i64>| -> Result<f64> {
        let shape = [BATCH as i64, CONTEXT as i64];
        let (ids, labels) = (
            Tensor::from_slice(&inputs).view(shape),
            Tensor::from_slice(&labels).view(shape),
        );
        let loss = model.loss(&ids, &labels, LabelShift::Shifted)?.mean()?;
        loss.f_backward()?;
        let _norm = clip_grad_norm(&optimizer.parameters(), 1.0, ClipOptions::default())?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        Ok(loss.f_double_value(&[])?)
    };
    measure(|inputs, labels| step(inputs, labels).expect("a step"));
    Ok(())
}
