use std::path::Path;

use overdrive_core::OutputFolder;
use overdrive_safetensors::StoredTensor;
use tch::{Device, Kind, Tensor};

use super::migrate::Migrations;
use super::options::CheckpointOptions;
use super::report::{CheckpointReport, TensorReport, relative};
use super::shard_writer::{ShardWriter, write_json};
use super::source::SourceFolder;
use super::tensor_role::{Role, role};
use crate::calibrate::quantize_calibrated;
use crate::{Error, QuantizationConfig, QuantizedWeight, Result, Scheme};

/// Quantizes the linear layers of the Hugging Face folder `dir` and writes the new folder `out`.
///
/// The folder is read tensor by tensor through a memory map and written at the same time. For a model of any
/// size, this takes the memory of one tensor in f32, its quantized form and a dequantized block for the report.
/// Norms, biases and position embeddings stay dense, and so do the embedding and the output head unless
/// [`CheckpointOptions`] has schemes for them. `config.json` gets a `quantization_config`; the tokenizer,
/// generation settings and all other files that are not weights are copied.
///
/// NF4, FP4 and LLM.int8 are written in the layout of bitsandbytes, the others in that of compressed-tensors;
/// transformers and `CausalLm::from_pretrained` can load the folder.
///
/// `out` may not be a folder that is read, or one with files of a model that something else has written
/// ([`OutputFolder`]). The files get their places in it when all are complete; after an error it has none of them.
///
/// # Errors
/// [`Error::BadCheckpoint`] for a folder that is already quantized, has no weights or is damaged; [`Error::Tensor`] with the name of a tensor that does not fit the scheme;
/// [`Error::Common`] for files that cannot be read or written, and for an `out` that is not free.
pub fn quantize_checkpoint(
    dir: impl AsRef<Path>,
    out: impl AsRef<Path>,
    scheme: Scheme,
    options: &CheckpointOptions,
) -> Result<CheckpointReport> {
    let (dir, out) = (dir.as_ref(), out.as_ref());
    // All checks come before the first tensor is quantized.
    let source = SourceFolder::open(dir)?;
    let output = OutputFolder::check("quantize", "out", out, &[("dir", dir)])?;
    let job = Job::new(&source, scheme, options)?;
    job.check_shapes()?;
    let work = output.begin()?;
    let mut writer = ShardWriter::new(work.path(), options.max_shard_bytes)?;
    let stored = source.tensors();
    let total: u64 = stored.iter().map(|stored| stored.data().len() as u64).sum();
    let mut done = 0;
    let mut report = |bytes: u64| {
        done += bytes;
        if let Some(progress) = &options.progress {
            progress.report(done, total);
        }
    };
    report(0);
    let mut tensors = Vec::with_capacity(stored.len());
    let mut kept = Vec::new();
    for stored in &stored {
        let of_tensor = |error| of_tensor(stored, error);
        let (chosen, quantized) = job.tensor(stored).map_err(of_tensor)?;
        let bytes = writer.add(&quantized.tensors).map_err(of_tensor)?;
        if chosen.is_none() && !matches!(job.role(stored), Role::Other | Role::Embedding) {
            let module = stored.name().strip_suffix(".weight");
            kept.push(module.unwrap_or(stored.name()).to_owned());
        }
        tensors.push(TensorReport {
            name: stored.name().to_owned(),
            shape: stored.shape().to_vec(),
            scheme: chosen,
            fp32_bytes: 4 * stored
                .shape()
                .iter()
                .map(|n| n.unsigned_abs())
                .product::<u64>(),
            bytes,
            relative_error: relative(quantized.squared_error, quantized.squares),
            squared_error: quantized.squared_error,
            squares: quantized.squares,
        });
        report(stored.data().len() as u64);
    }
    let file_bytes = writer.finish()?;
    source.copy_rest(work.path())?;
    write_json(&work.path().join("config.json"), &job.config(kept)?)?;
    work.finish()?;
    Ok(CheckpointReport {
        scheme,
        tensors,
        file_bytes,
    })
}

/// Checks that [`quantize_checkpoint`] can quantize the weights in `dir` with `scheme` and `options`, from their shapes
/// alone, so that a program can do it before it collects statistics.
///
/// # Errors
/// As [`quantize_checkpoint`], for everything but the values of the weights, the statistics and the output folder.
pub fn check_checkpoint(
    dir: impl AsRef<Path>,
    scheme: Scheme,
    options: &CheckpointOptions,
) -> Result<()> {
    let source = SourceFolder::open(dir.as_ref())?;
    // It needs the statistics, which are collected later.
    let options = CheckpointOptions {
        migration: None,
        ..options.clone()
    };
    Job::new(&source, scheme, &options)?.check_shapes()
}

fn of_tensor(stored: &StoredTensor<'_>, error: Error) -> Error {
    Error::Tensor {
        name: stored.name().to_owned(),
        source: Box::new(error),
    }
}

/// The quantization of a folder.
struct Job<'a> {
    source: &'a SourceFolder,
    scheme: Scheme,
    options: &'a CheckpointOptions,
    migrations: Migrations,
    layout: QuantizationConfig,
}

/// The tensors that are written for a tensor of the source, and their error.
struct Quantized {
    tensors: Vec<(String, Tensor)>,
    squared_error: f64,
    squares: f64,
}

impl<'a> Job<'a> {
    fn new(
        source: &'a SourceFolder,
        scheme: Scheme,
        options: &'a CheckpointOptions,
    ) -> Result<Self> {
        check_compatible("head", options.head, scheme)?;
        check_compatible("embedding", options.embedding, scheme)?;
        let migrations = match (options.migration, &options.statistics) {
            (None, _) => Migrations::default(),
            (Some(migration), Some(statistics)) => {
                let includes = |layer: &str| options.includes(layer);
                Migrations::find(source, statistics, migration, scheme, includes)?
            }
            (Some(_), None) => {
                let found = "enabled without statistics";
                let expected = "given statistics of the inputs over a calibration set";
                return Err(Error::option("migration", found, expected));
            }
        };
        Ok(Job {
            source,
            scheme,
            options,
            migrations,
            layout: QuantizationConfig::for_scheme(scheme, Vec::new()),
        })
    }

    fn role(&self, stored: &StoredTensor<'_>) -> Role {
        role(stored, self.source.model_type())
    }

    /// Returns the scheme of a tensor, or `None` if it stays dense.
    fn scheme_of(&self, stored: &StoredTensor<'_>) -> Result<Option<Scheme>> {
        let Some(module) = stored.name().strip_suffix(".weight") else {
            return Ok(None);
        };
        let options = self.options;
        let role = self.role(stored);
        if matches!(role, Role::Other) || !options.includes(module)? {
            return Ok(None);
        }
        Ok(match role {
            Role::Other => None,
            Role::Linear { .. } => Some(self.scheme),
            Role::Head => options.head,
            Role::Embedding if self.source.is_tied() => options.embedding.or(options.head),
            Role::Embedding => options.embedding,
        })
    }

    /// Checks the shape of each tensor that gets a scheme.
    fn check_shapes(&self) -> Result<()> {
        for stored in &self.source.tensors() {
            let Some(scheme) = self.scheme_of(stored)? else {
                continue;
            };
            let inputs = match self.role(stored) {
                Role::Linear { transposed: true } => stored.shape().first(),
                _ => stored.shape().last(),
            };
            let inputs = inputs.copied().unwrap_or(0);
            scheme
                .validate(inputs)
                .map_err(|error| of_tensor(stored, error))?;
        }
        Ok(())
    }

    /// Quantizes a tensor, or copies it.
    fn tensor(&self, stored: &StoredTensor<'_>) -> Result<(Option<Scheme>, Quantized)> {
        let name = stored.name();
        let changed = |tensor: Tensor| match self.migrations.change(name) {
            Some(change) => change.apply(&tensor),
            None => Ok(tensor),
        };
        let Some(scheme) = self.scheme_of(stored)? else {
            let tensor = changed(stored.copy_to_tensor(None, Device::Cpu)?)?;
            let quantized = Quantized {
                tensors: vec![(name.to_owned(), tensor)],
                squared_error: 0.0,
                squares: 0.0,
            };
            return Ok((None, quantized));
        };
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let mut weight = changed(stored.copy_to_tensor(Some(Kind::Float), Device::Cpu)?)?;
        if self.role(stored) == (Role::Linear { transposed: true }) {
            // GPT-2 stores `(I, O)`; the quantized layouts have `(O, I)` only.
            weight = weight.f_tr()?.f_contiguous()?;
        }
        let collected = self.options.statistics.as_ref();
        // A tied embedding is multiplied with the inputs of the head.
        let observed_as = match self.role(stored) {
            Role::Embedding => "lm_head",
            _ => module,
        };
        let statistics = self
            .migrations
            .statistics(module)
            .or_else(|| collected?.get(observed_as));
        // Models do not report the inputs of embeddings, so GPTQ has no statistics for them.
        let mut calibration = self.options.calibration;
        if statistics.is_none() && matches!(self.role(stored), Role::Embedding | Role::Head) {
            calibration.gptq = None;
        }
        let packed = quantize_calibrated(&weight, scheme, statistics, &calibration)?;
        let (squared_error, squares) = errors(&weight, &packed)?;
        // Freed before the tensors of the file are made, which lowers the peak by a dense weight.
        drop(weight);
        let tensors = self.layout.write_weight(&packed, module)?;
        let quantized = Quantized {
            tensors,
            squared_error,
            squares,
        };
        Ok((Some(scheme), quantized))
    }

    /// Returns the `config.json` of the quantized folder; the layers `kept` are dense.
    fn config(&self, mut kept: Vec<String>) -> Result<serde_json::Value> {
        let mut config = self.source.config.clone();
        let head = self.options.head.or(self.options.embedding);
        if self.source.is_tied() && head.is_none() {
            // A tied head is a layer of the model, although the file has no tensor of it.
            kept.push("lm_head".to_owned());
        }
        if self.source.is_tied_by_config() && !self.source.is_tied() {
            tracing::warn!(
                "`tie_word_embeddings` is true, but lm_head.weight differs from the embedding: the head is treated as \
                 untied, and `tie_word_embeddings` is false in the quantized folder"
            );
            config.insert("tie_word_embeddings".to_owned(), false.into());
        }
        let layout = QuantizationConfig::for_scheme(self.scheme, kept);
        config.insert("quantization_config".to_owned(), layout.to_json()?);
        Ok(serde_json::Value::Object(config))
    }
}

/// Checks that one layout has both schemes.
fn check_compatible(option: &'static str, other: Option<Scheme>, scheme: Scheme) -> Result<()> {
    let by_bitsandbytes = |scheme| {
        matches!(
            scheme,
            Scheme::Nf4(_) | Scheme::Fp4(_) | Scheme::LlmInt8 { .. }
        )
    };
    match other {
        Some(other) if other != scheme && !(by_bitsandbytes(other) && by_bitsandbytes(scheme)) => {
            let expected = format!(
                "{scheme}, as for the other layers, or both must be among nf4, fp4 and llm-int8, since \
                 one quantization_config describes all layers"
            );
            Err(Error::option(option, other, expected))
        }
        _ => Ok(()),
    }
}

/// Returns the sums of the squared errors and of the squares of a weight.
fn errors(weight: &Tensor, packed: &QuantizedWeight) -> Result<(f64, f64)> {
    let squared_error = packed.error(weight)?.rms.powi(2) * weight.numel() as f64;
    let norm = weight.f_norm_scalaropt_dim(2.0, [0i64, 1].as_slice(), false)?;
    Ok((squared_error, norm.f_double_value(&[])?.powi(2)))
}
