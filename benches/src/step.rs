//! One training step of a Llama on random tokens, the same as in `pytorch/train_step.py`.

use std::error::Error;

use overdrive::optim::{AdamW, AdamWConfig, ClipOptions, Optimizer, clip_grad_norm, decay_groups};
use overdrive::precision::{GradScaler, Precision};
use overdrive::trainer::Preset;
use overdrive::transformer::{CausalLm, Execution, ForwardInput, LabelShift, LlamaConfig};
use tch::{Device, Kind, Tensor};

use crate::random_model;

/// The shape of a model and of its batches.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// The size of the vocabulary.
    pub vocab: i64,
    /// The size of the hidden states.
    pub dim: i64,
    /// The number of decoder layers.
    pub layers: i64,
    /// The number of attention heads.
    pub heads: i64,
    /// The number of key/value heads.
    pub kv_heads: i64,
    /// The size of the feed-forward layers.
    pub hidden: i64,
    /// The number of tokens in a sequence.
    pub context: i64,
    /// The number of sequences in a batch.
    pub batch: i64,
}

impl Shape {
    /// The `tiny` preset: 5.8M parameters.
    pub const TINY: Self = Self {
        vocab: 4096,
        dim: 256,
        layers: 6,
        heads: 4,
        kv_heads: 4,
        hidden: 688,
        context: 256,
        batch: 8,
    };
    /// The `small` preset: 13.8M parameters.
    pub const SMALL: Self = Self {
        vocab: 8192,
        dim: 384,
        layers: 6,
        heads: 6,
        kv_heads: 6,
        hidden: 1024,
        context: 256,
        batch: 8,
    };
    /// The shape of Llama 3.2 1B, with 1.24B parameters, at 2048 tokens.
    pub const LLAMA_1B: Self = Self {
        vocab: 128_256,
        dim: 2048,
        layers: 16,
        heads: 32,
        kv_heads: 8,
        hidden: 8192,
        context: 2048,
        batch: 8,
    };

    /// Returns the shape of a preset of `train`.
    pub fn of(preset: Preset) -> Self {
        match preset {
            Preset::Small => Self::SMALL,
            _ => Self::TINY,
        }
    }

    /// Returns the number of tokens in a batch.
    pub fn tokens(&self) -> i64 {
        self.batch * self.context
    }

    /// Returns the configuration of a Llama of this shape.
    pub fn config(&self) -> LlamaConfig {
        LlamaConfig {
            vocab_size: self.vocab,
            hidden_size: self.dim,
            intermediate_size: self.hidden,
            num_hidden_layers: self.layers,
            num_attention_heads: self.heads,
            num_key_value_heads: Some(self.kv_heads),
            max_position_embeddings: self.context,
            tie_word_embeddings: true,
            ..LlamaConfig::default()
        }
    }
}

/// The components of a step.
#[derive(Debug)]
pub struct Step {
    model: CausalLm,
    optimizer: AdamW,
    shape: Shape,
    precision: Precision,
}

/// The result of the benchmark's functions.
pub type StepResult<T> = Result<T, Box<dyn Error>>;

impl Step {
    /// Returns a step with a new model and optimizer.
    ///
    /// # Errors
    /// An error if a Llama cannot have this shape.
    pub fn new(shape: Shape, device: Device) -> StepResult<Self> {
        let model = random_model(&shape.config().into(), device, Kind::Float)?;
        Self::of_model(model, shape)
    }

    /// Returns a step with a new optimizer for `model`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn of_model(model: CausalLm, shape: Shape) -> StepResult<Self> {
        model.set_requires_grad(true)?;
        let config = AdamWConfig {
            learning_rate: 2e-3,
            betas: (0.9, 0.95),
            ..AdamWConfig::default()
        };
        let optimizer = AdamW::new(decay_groups(model.named_parameters(), 0.1), config)?;
        Ok(Self {
            model,
            optimizer,
            shape,
            precision: Precision::Fp32,
        })
    }

    /// Returns the same step in another precision. fp16 is not scaled.
    #[must_use]
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.precision = precision;
        self
    }

    /// Returns the same step with other implementations.
    #[must_use]
    pub fn with_execution(mut self, execution: Execution) -> Self {
        self.model.set_execution(execution);
        self
    }

    /// Returns the same step without fused kernels, joint matmuls and the chunked loss.
    #[must_use]
    pub fn unfused(self) -> Self {
        let mut execution = Execution::default();
        execution.fused_kernels = false;
        self.with_execution(execution)
    }

    /// Returns the model.
    pub fn model(&self) -> &CausalLm {
        &self.model
    }

    /// Returns the number of parameters.
    pub fn parameters(&self) -> i64 {
        self.model.num_parameters()
    }

    /// Returns a batch of random tokens and the tokens after them.
    ///
    /// # Errors
    /// An error if memory runs out.
    pub fn batch(&self) -> StepResult<(Tensor, Tensor)> {
        let Shape {
            vocab,
            context,
            batch,
            ..
        } = self.shape;
        let device = self
            .optimizer
            .parameters()
            .first()
            .map_or(Device::Cpu, Tensor::device);
        let tokens = Tensor::f_randint(vocab, [batch, context + 1], (Kind::Int64, device))?;
        Ok((
            tokens.f_narrow(1, 0, context)?,
            tokens.f_narrow(1, 1, context)?,
        ))
    }

    /// Returns the loss of a batch, a scalar on the device.
    ///
    /// # Errors
    /// An error if memory runs out.
    pub fn loss(&self, (inputs, labels): &(Tensor, Tensor)) -> StepResult<Tensor> {
        let count = usize::try_from(self.shape.tokens())?;
        let _autocast = self.precision.autocast(inputs.device())?;
        let input = ForwardInput::new(inputs).with_label_count(count);
        let loss = self.model.loss_of(input, labels, LabelShift::Shifted)?;
        Ok(loss.mean()?)
    }

    /// Runs forward, backward, clipping and optimizer, and returns the loss as a scalar on the device.
    ///
    /// # Errors
    /// An error if memory runs out.
    pub fn run_on_device(&mut self, batch: &(Tensor, Tensor)) -> StepResult<Tensor> {
        step_from(self.loss(batch)?, &mut self.optimizer, None)
    }

    /// Runs a step as [`run_on_device`](Self::run_on_device) does, and reads the loss.
    ///
    /// # Errors
    /// An error if memory runs out.
    pub fn run(&mut self, batch: &(Tensor, Tensor)) -> StepResult<f64> {
        Ok(self.run_on_device(batch)?.f_double_value(&[])?)
    }
}

/// Runs backward, clipping and the optimizer's step from `loss`, and returns it as a scalar on the device.
///
/// This is no `TrainingRun`, whose loader, clock and log are in no step of the programs that it is compared with.
///
/// # Errors
/// An error if memory runs out.
pub fn step_from(
    loss: Tensor,
    optimizer: &mut AdamW,
    scaler: Option<&mut GradScaler>,
) -> StepResult<Tensor> {
    let clip = |optimizer: &AdamW| {
        clip_grad_norm(&optimizer.parameters(), 1.0, ClipOptions::default()).map(drop)
    };
    match scaler {
        None => {
            loss.f_backward()?;
            clip(optimizer)?;
            optimizer.step()?;
        }
        Some(scaler) => {
            scaler.scale(&loss)?.f_backward()?;
            scaler.unscale_(optimizer)?;
            clip(optimizer)?;
            scaler.step(optimizer)?;
            scaler.update()?;
        }
    }
    optimizer.zero_grad()?;
    Ok(loss.f_detach()?)
}
