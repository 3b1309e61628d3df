use overdrive_attention::PackedLengths;
use overdrive_datasets::{Batch, DeviceLoader};
use overdrive_distributed::ProcessGroup;
use overdrive_precision::Precision;
use overdrive_profiling::ModelFlops;
use overdrive_transformer::{
    CausalLm, ForwardInput, InitOptions, LabelShift, LossOutput, ModelConfig,
};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::arguments::{SaveStrategy, TrainingArguments};
use crate::data::TextData;
use crate::memory_estimate::{DecoderShape, ExpertShape, MemoryPlan};
use crate::run::gpu_memory;
use crate::{Interrupt, Result};
use overdrive_core::Error as CommonError;
use overdrive_core::files;

/// Returns a new model of the shape in the configuration, for the tokenizer of `data`, with trainable fp32 weights drawn
/// from the seed.
///
/// # Errors
/// An error if no model can have this shape, or memory runs out.
pub fn new_model(
    arguments: &TrainingArguments,
    data: &TextData,
    device: Device,
) -> Result<CausalLm> {
    let config = ModelConfig::try_from(arguments.model_config(data))?;
    let init = InitOptions {
        device,
        kind: Kind::Float,
        seed: arguments.seed,
    };
    let mut model = CausalLm::new(&config, &init)?;
    model.set_requires_grad(true)?;
    model.set_execution(arguments.execution());
    Ok(model)
}

/// Describes the model and the memory for training it, one line each.
///
/// # Errors
/// An error if the memory cannot be estimated.
pub fn describe_model(
    model: &CausalLm,
    arguments: &TrainingArguments,
    precision: Precision,
    group: &ProcessGroup,
    mut say: impl FnMut(&str),
) -> Result<()> {
    let device = model.device();
    say(&format!(
        "model       {:.2}M parameters on {device:?}, {precision}{}",
        model.num_parameters() as f64 / 1e6,
        match group.world_size() {
            1 => String::new(),
            processes => format!(", {processes} processes"),
        }
    ));
    if let Some(warning) = precision.warning(device) {
        say(&format!("            warning: {warning}"));
    }
    let memory = MemoryPlan {
        gpu_memory: gpu_memory(device),
        ..arguments.memory_plan_of(decoder_shape(model), precision)
    };
    let memory = memory.estimate()?;
    // Weights and optimizer states are copied, so that they can be written while training continues.
    let snapshot = match arguments.save_strategy {
        SaveStrategy::No => String::new(),
        _ => format!(
            ", and {} MiB for the copy of a snapshot",
            (memory.parameters + memory.optimizer) >> 20
        ),
    };
    say(&format!(
        "memory      about {} MiB of tensors at most{snapshot}, by estimate",
        memory.peak >> 20
    ));
    Ok(())
}

/// Returns the summed loss of a batch, whose labels [`Batch::label_count`](Batch) counts.
///
/// Padding is on the right, where causal attention does not look, and its labels are ignored. So no mask is
/// needed, and the fastest attention kernel can be used.
///
/// # Errors
/// An error if the batch has a token that is not in the model's vocabulary, or memory runs out.
pub fn batch_loss(model: &CausalLm, batch: &Batch) -> Result<LossOutput> {
    // The ids were checked and counted when the batch was made, so nothing is read from a device.
    batch.check_ids(model.config().vocab_size())?;
    let mut input = ForwardInput::new(&batch.input_ids).with_label_count(batch.label_count);
    if let Some(positions) = &batch.position_ids {
        input = input.with_position_ids(positions);
        // Positions start at 0 in each sequence of the row.
        if let Some(&longest) = batch.sequence_lengths.iter().max() {
            input = input.with_position_bound(longest);
        }
    }
    let packed = (!batch.sequence_lengths.is_empty())
        .then(|| PackedLengths::from_lengths(&batch.sequence_lengths, batch.input_ids.device()))
        .transpose()
        .map_err(overdrive_transformer::Error::from)?;
    if let Some(sequences) = &packed {
        input = input.with_sequences(sequences);
    }
    Ok(model.loss_of(input, &batch.labels, LabelShift::HuggingFace)?)
}

/// Returns the mean negative log-likelihood in nats per token over all labels of `batches` of all processes, without
/// gradients. It weights every token alike; transformers' Trainer averages the means of the batches, which
/// differs where batches have different numbers of labels. A signal that stops the run ends it early; the
/// result is then one to discard.
///
/// # Errors
/// An error if a batch cannot be read, or a process is lost.
pub fn evaluate(
    model: &CausalLm,
    batches: DeviceLoader<Batch>,
    precision: Precision,
    group: &ProcessGroup,
) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let device = model.device();
    // Summed on the device, so that the host does not wait for it after each batch.
    let mut sum = Tensor::f_zeros([0i64; 0], (Kind::Double, device))?;
    let mut tokens = 0;
    for batch in batches {
        if Interrupt::signal_received() {
            break;
        }
        let batch = batch?;
        let _autocast = precision.autocast(device)?;
        let loss = batch_loss(model, &batch)?;
        sum = sum.f_add(&loss.sum)?;
        tokens += batch.label_count;
    }
    Ok(group.weighted_mean(f64::try_from(sum)?, tokens as f64)?)
}

/// Returns the shape of a model, for estimates of its memory. The feed-forward layer of GPT-2 has two matrices,
/// that of Llama three: its width is scaled so that the number of weights is the same. A model of which some layers
/// have experts is taken for one of which all have.
pub fn decoder_shape(model: &CausalLm) -> DecoderShape {
    let count = |number: i64| u64::try_from(number).unwrap_or(0);
    let config = model.config();
    let intermediate = match config {
        ModelConfig::Llama(llama) => llama.expert_intermediate_size(),
        ModelConfig::Gpt2(gpt2) => gpt2.inner() * 2 / 3,
        // An unknown family: the usual ratio.
        _ => config.hidden_size() * 8 / 3,
    };
    let experts = match config {
        ModelConfig::Llama(llama) => llama.experts.as_ref(),
        _ => None,
    };
    DecoderShape {
        layers: model.num_layers() as u64,
        hidden: count(config.hidden_size()),
        intermediate: count(intermediate),
        heads: count(config.num_attention_heads()),
        kv_heads: count(config.num_key_value_heads()),
        head_dim: count(config.head_dim()),
        vocabulary: count(config.vocab_size()),
        tied_embeddings: config.tie_word_embeddings(),
        experts: experts.map(|experts| ExpertShape {
            count: count(experts.num_experts),
            per_token: count(experts.num_experts_per_tok),
        }),
    }
}

/// Returns the FLOPs of a token in `model`, of which `trained` are the trainable parameters, adapters included. Of the
/// experts those count that compute a token.
pub fn model_flops(model: &CausalLm, trained: &[(String, Tensor)]) -> ModelFlops {
    let shape = decoder_shape(model);
    let weights = |parameters: &[(String, Tensor)]| -> u64 {
        let trained = parameters.iter().filter(|(_, p)| p.requires_grad());
        let active = trained.map(|(name, p)| p.numel() as f64 * model.active_share(name));
        active.sum::<f64>() as u64
    };
    let trainable_parameters = weights(trained);
    // The model's own parameters do not include adapters.
    let adapters = trainable_parameters.saturating_sub(weights(&model.named_parameters()));
    ModelFlops {
        parameters: u64::try_from(model.num_active_parameters()).unwrap_or(0) + adapters,
        trainable_parameters,
        layers: shape.layers,
        heads: shape.heads,
        head_dim: shape.head_dim,
        sequence_length: 0,
    }
}

/// Returns the files that make a snapshot of `model` a folder for transformers and [`CausalLm::from_pretrained`]: its
/// configuration and its tokenizer.
///
/// # Errors
/// An error if a temporary folder cannot be written.
pub fn snapshot_files(
    model: &CausalLm,
    data: &TextData,
    arguments: &TrainingArguments,
) -> Result<Vec<(String, Vec<u8>)>> {
    let config = format!("{:#}\n", Value::Object(model.config().to_json()));
    let mut files = vec![("config.json".to_owned(), config.into_bytes())];
    let folder = files::unfinished_folder(std::env::temp_dir().join("snapshot_files"))?;
    data.save_tokenizer(folder.path(), arguments)?;
    let read = || -> std::io::Result<()> {
        for entry in std::fs::read_dir(folder.path())? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            files.push((name.into_owned(), std::fs::read(&path)?));
        }
        Ok(())
    };
    let mut read = read;
    read().map_err(CommonError::io("read", folder.path()))?;
    Ok(files)
}
