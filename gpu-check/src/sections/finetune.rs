use std::time::Duration;

use anyhow::Result;
use overdrive::lora::{AddOptions, LoraConfig, TargetModules, add_adapter, trainable_parameters};
use overdrive::precision::Precision;
use overdrive::quantization::Scheme;
use overdrive::sys::memory;
use overdrive::transformer::{CausalLm, Execution, QuantizeOptions, Schedule};
use overdrive_benches::{Shape, random_model};
use tch::{Device, Kind, Tensor};

use super::train_step::{SMALL, shape_arguments, step_figures};
use crate::context::Context;
use crate::finding::Finding;
use crate::peer::{self, number};
use crate::timing::{kernels_set, other_kernels, seconds};
use crate::training::{Trainer, of_step};

/// Llama 3.1 8B with 8.03 billion parameters, and batches of 2 x 2048 tokens.
const LLAMA_8B: Shape = Shape {
    vocab: 128_256,
    dim: 4096,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    hidden: 14_336,
    context: 2048,
    batch: 2,
};
const RANK: i64 = 16;
/// The free bytes that the bf16 weights need before they are quantized one by one.
const DENSE_BYTES: u64 = 18_000_000_000;
/// The free bytes that a step without checkpoints needs on either side, by an estimate.
const STEP_BYTES: u64 = 60_000_000_000;
/// The time limit in seconds of PEFT with bitsandbytes.
const PEER: Duration = Duration::from_secs(60);
/// The time reserved for our variants.
const KEPT: Duration = Duration::from_secs(12);

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let shape = context.sized(LLAMA_8B, SMALL);
    let free = match device {
        Device::Cpu => u64::MAX,
        device => memory::free_bytes(device)?,
    };
    if free < DENSE_BYTES {
        return context.check("QLoRA", || {
            let reason = "needs 18 GB of device memory for the weights in bf16";
            Ok(Finding::skipped_allowed(reason))
        });
    }
    let mut tuning = Tuning::new(shape, device, context.sized(Kind::BFloat16, Kind::Float))?;
    let rounds = context.sized(4, 2);
    let mut every_block = Execution::default();
    every_block.checkpointing = Schedule::EveryBlock;
    if free >= STEP_BYTES {
        tuning.check(context, "QLoRA", Execution::default(), None, rounds)?;
        peft(context, shape)?;
        if let Some((on, name)) = other_kernels(device)? {
            let name = format!("QLoRA, {name}");
            tuning.check(context, &name, Execution::default(), Some(on), rounds)?;
        }
    }
    let name = "QLoRA, every block recomputed";
    tuning.check(context, name, every_block, None, rounds)
}

/// A quantized model with an adapter in training.
struct Tuning {
    model: CausalLm,
    trainer: Trainer,
    batch: Tensor,
    precision: Precision,
}

impl Tuning {
    /// Returns a model with random weights, which are drawn on the device and quantized one after another.
    fn new(shape: Shape, device: Device, kind: Kind) -> Result<Self> {
        let mut config = shape.config();
        config.tie_word_embeddings = false;
        let mut model = of_step(random_model(&config.into(), device, kind))?;
        model.quantize(&QuantizeOptions::new("nf4".parse::<Scheme>()?))?;
        model.set_requires_grad(false)?;
        let lora = LoraConfig {
            r: RANK,
            lora_alpha: RANK as f64,
            target_modules: Some(TargetModules::AllLinear),
            ..LoraConfig::default()
        };
        add_adapter(&mut model, "default", &lora, &AddOptions::default())?;
        let precision = match kind {
            Kind::BFloat16 => Precision::Bf16,
            _ => Precision::Fp32,
        };
        let size = [shape.batch, shape.context];
        Ok(Self {
            trainer: Trainer::new(trainable_parameters(&mut model)?, precision)?,
            batch: Tensor::f_randint(shape.vocab, size, (Kind::Int64, device))?,
            model,
            precision,
        })
    }

    /// Measures a step.
    fn check(
        &mut self,
        context: &mut Context,
        name: &str,
        execution: Execution,
        kernels: Option<bool>,
        rounds: usize,
    ) -> Result<()> {
        let device = context.device();
        context.check(name, || {
            let _kernels = kernels_set(kernels);
            self.precision.apply()?;
            self.model.set_execution(execution);
            memory::empty_cache(device)?;
            memory::reset_peak(device)?;
            let mut loss = None;
            let time = seconds(device, rounds, 1, || {
                loss = Some(self.trainer.step(&self.model, &self.batch)?);
                Ok(())
            })?;
            let loss = match loss {
                Some(loss) => loss.f_double_value(&[])?,
                None => f64::NAN,
            };
            let weights = self.model.memory_footprint() as f64 / f64::from(1 << 30);
            let peak = memory::stats(device)?.peak_allocated_bytes as f64;
            let finding = step_figures(self.batch.numel() as i64, time, peak, loss);
            Ok(finding.with("weights GiB", weights))
        })
    }
}

/// Measures the same step with PEFT and the layers of bitsandbytes.
fn peft(context: &mut Context, shape: Shape) -> Result<()> {
    let device = context.device();
    let limit = peer::time_for(context, PEER, KEPT);
    context.check("PEFT with bitsandbytes", || {
        let mut arguments = vec!["--rank".to_owned(), RANK.to_string()];
        arguments.extend(shape_arguments(shape));
        let found = match peer::measure("gpu_finetune.py", device, limit, &arguments)? {
            Ok(found) => found,
            Err(finding) => return Ok(finding),
        };
        let finding = step_figures(
            shape.tokens(),
            number(&found, "step_seconds")?,
            number(&found, "peak_bytes")?,
            number(&found, "loss")?,
        );
        Ok(finding.noting(found["side"].as_str().unwrap_or_default()))
    })
}
