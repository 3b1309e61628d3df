use std::fs;
use std::path::{Path, PathBuf};

use overdrive_safetensors::StoredTensor;
use tch::{Device, Kind, Tensor};

use super::migrate::Migrations;
use super::options::CheckpointOptions;
use super::report::{CheckpointReport, TensorReport, relative};
use super::role::{Role, role};
use super::source::{Source, bad, io};
use super::spool::{Spool, write_json};
use crate::calibrate::quantize_calibrated;
use crate::{Error, QuantizationConfig, QuantizedWeight, Result, Scheme};

/// Quantizes the linear maps of the Hugging Face folder `dir` into the new folder `out`.
///
/// The folder is read tensor by tensor through a memory map and written as it is made: memory is that of
/// one tensor in fp32, its packed form and what is dequantized of it for the report, however large the
/// model. Norms, biases and tables of positions are kept as they are, embedding and head unless
/// [`CheckpointOptions`] say otherwise. `config.json` gains a `quantization_config`; tokenizer, generation
/// settings and everything else that is no weight are copied.
///
/// NF4, FP4 and LLM.int8 are written as bitsandbytes writes them, the others as compressed-tensors: the
/// folder loads in transformers and in `CausalLm::from_pretrained`.
///
/// `out` must not be there, or be empty. The folder is written under another name beside it and renamed
/// when it is whole; after an error nothing is left.
///
/// # Errors
/// [`Error::BadCheckpoint`] for a folder that is quantized already, has no weights or is damaged, and for
/// an `out` with something in it; [`Error::Tensor`] naming the tensor that does not fit the scheme;
/// [`Error::Io`].
pub fn quantize_checkpoint(
    dir: impl AsRef<Path>,
    out: impl AsRef<Path>,
    scheme: Scheme,
    options: &CheckpointOptions,
) -> Result<CheckpointReport> {
    let (dir, out) = (dir.as_ref(), out.as_ref());
    let source = Source::open(dir)?;
    let work = WorkFolder::beside(out)?;
    let job = Job::new(&source, scheme, options)?;
    let mut spool = Spool::new(&work.path, options.max_shard_bytes)?;
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
        let of_tensor = |error| Error::Tensor {
            name: stored.name().to_owned(),
            source: Box::new(error),
        };
        let (chosen, made) = job.tensor(stored).map_err(of_tensor)?;
        let bytes = spool.add(&made.tensors).map_err(of_tensor)?;
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
            relative_error: relative(made.squared_error, made.squares),
            squared_error: made.squared_error,
            squares: made.squares,
        });
        report(stored.data().len() as u64);
    }
    let file_bytes = spool.finish()?;
    source.copy_rest(&work.path)?;
    write_json(&work.path.join("config.json"), &job.config(kept)?)?;
    work.rename()?;
    Ok(CheckpointReport {
        scheme,
        tensors,
        file_bytes,
    })
}

/// What is to be done.
struct Job<'a> {
    source: &'a Source,
    scheme: Scheme,
    options: &'a CheckpointOptions,
    migrations: Migrations,
    layout: QuantizationConfig,
}

/// What was made of a tensor.
struct Made {
    tensors: Vec<(String, Tensor)>,
    squared_error: f64,
    squares: f64,
}

impl<'a> Job<'a> {
    fn new(source: &'a Source, scheme: Scheme, options: &'a CheckpointOptions) -> Result<Self> {
        check_beside("head", options.head, scheme)?;
        check_beside("embedding", options.embedding, scheme)?;
        let migrations = match (options.migration, &options.statistics) {
            (None, _) => Migrations::default(),
            (Some(migration), Some(statistics)) => {
                let takes = |map: &str| options.takes(map);
                Migrations::find(source, statistics, migration, scheme, takes)?
            }
            (Some(_), None) => {
                return Err(Error::BadOption {
                    option: "migration",
                    found: "without statistics".to_owned(),
                    expected: "those of the maps' inputs over a calibration set".to_owned(),
                });
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

    /// The scheme of a tensor.
    fn scheme_of(&self, stored: &StoredTensor<'_>) -> Option<Scheme> {
        let module = stored.name().strip_suffix(".weight")?;
        let options = self.options;
        match self.role(stored) {
            Role::Other => None,
            _ if !options.takes(module) => None,
            Role::Linear { .. } => Some(self.scheme),
            Role::Head => options.head,
            Role::Embedding if self.source.is_tied() => options.embedding.or(options.head),
            Role::Embedding => options.embedding,
        }
    }

    fn tensor(&self, stored: &StoredTensor<'_>) -> Result<(Option<Scheme>, Made)> {
        let name = stored.name();
        let changed = |tensor: Tensor| match self.migrations.change(name) {
            Some(change) => change.apply(&tensor),
            None => Ok(tensor),
        };
        let Some(scheme) = self.scheme_of(stored) else {
            let tensor = changed(stored.copy_to_tensor(None, Device::Cpu)?)?;
            let made = Made {
                tensors: vec![(name.to_owned(), tensor)],
                squared_error: 0.0,
                squares: 0.0,
            };
            return Ok((None, made));
        };
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let mut weight = changed(stored.copy_to_tensor(Some(Kind::Float), Device::Cpu)?)?;
        if self.role(stored) == (Role::Linear { transposed: true }) {
            weight = weight.f_tr()?.f_contiguous()?;
        }
        let gathered = self.options.statistics.as_ref();
        // The table of a tied head is a map of the head's inputs.
        let seen_as = match self.role(stored) {
            Role::Embedding => "lm_head",
            _ => module,
        };
        let statistics = self
            .migrations
            .statistics(module)
            .or_else(|| gathered?.get(seen_as));
        let mut calibration = self.options.calibration;
        if statistics.is_none() && matches!(self.role(stored), Role::Embedding | Role::Head) {
            calibration.gptq = None;
        }
        let packed = quantize_calibrated(&weight, scheme, statistics, &calibration)?;
        let (squared_error, squares) = errors(&weight, &packed)?;
        drop(weight);
        let tensors = self.layout.write_weight(&packed, module)?;
        let made = Made {
            tensors,
            squared_error,
            squares,
        };
        Ok((Some(scheme), made))
    }

    /// `config.json` of the quantized folder, whose maps `kept` are dense.
    fn config(&self, mut kept: Vec<String>) -> Result<serde_json::Value> {
        let mut config = self.source.config.clone();
        let head = self.options.head.or(self.options.embedding);
        if self.source.is_tied() && head.is_none() {
            // A map of the model though no tensor of its own.
            kept.push("lm_head".to_owned());
        }
        let layout = QuantizationConfig::for_scheme(self.scheme, kept);
        config.insert("quantization_config".to_owned(), layout.to_json()?);
        Ok(serde_json::Value::Object(config))
    }
}

/// Refuses a scheme beside another that no layout has at once.
fn check_beside(option: &'static str, other: Option<Scheme>, scheme: Scheme) -> Result<()> {
    let by_bitsandbytes = |scheme| {
        matches!(
            scheme,
            Scheme::Nf4(_) | Scheme::Fp4(_) | Scheme::LlmInt8 { .. }
        )
    };
    match other {
        Some(other) if other != scheme && !(by_bitsandbytes(other) && by_bitsandbytes(scheme)) => {
            Err(Error::BadOption {
                option,
                found: other.to_string(),
                expected: format!(
                    "{scheme}, as the other maps, or both of nf4, fp4 and llm-int8: one \
                     quantization_config describes them all"
                ),
            })
        }
        _ => Ok(()),
    }
}

/// The squared error and the squares of a weight, summed.
fn errors(weight: &Tensor, packed: &QuantizedWeight) -> Result<(f64, f64)> {
    let squared_error = packed.error(weight)?.rms.powi(2) * weight.numel() as f64;
    let norm = weight.f_norm_scalaropt_dim(2.0, [0i64, 1].as_slice(), false)?;
    Ok((squared_error, norm.f_double_value(&[])?.powi(2)))
}

/// A folder that is removed again unless it was renamed, on a panic too.
struct WorkFolder {
    path: PathBuf,
    target: PathBuf,
    renamed: bool,
}

impl WorkFolder {
    fn beside(target: &Path) -> Result<WorkFolder> {
        if target.exists() {
            let mut entries = fs::read_dir(target).map_err(io("list", target))?;
            if entries.next().is_some() {
                let reason = "it is to be written and has something in it: name a new folder";
                return Err(bad(target, reason));
            }
        }
        let Some(name) = target.file_name() else {
            return Err(bad(target, "it names no folder"));
        };
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.tmp", std::process::id()));
        let path = target.with_file_name(hidden);
        if path.exists() {
            // Left by a killed process that had the same id.
            fs::remove_dir_all(&path).map_err(io("remove", &path))?;
        }
        fs::create_dir_all(&path).map_err(io("create", &path))?;
        Ok(WorkFolder {
            path,
            target: target.to_path_buf(),
            renamed: false,
        })
    }

    fn rename(mut self) -> Result<()> {
        if self.target.exists() {
            // Empty, or this fails.
            fs::remove_dir(&self.target).map_err(io("replace", &self.target))?;
        }
        fs::rename(&self.path, &self.target).map_err(io("rename", &self.path))?;
        self.renamed = true;
        Ok(())
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        if !self.renamed {
            // The error to tell is the one that came first.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}
