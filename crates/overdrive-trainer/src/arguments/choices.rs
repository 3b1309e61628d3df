//! The values of keys that are names: one type each.

use std::path::PathBuf;

use clap::ValueEnum;
use overdrive_checkpointing::{DeterminismCheck, SavePolicy, Schedule};
use overdrive_lora::Names;
use serde::{Deserialize, Deserializer, Serialize};

/// A ready-made configuration; file and flags override its values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Preset {
    /// A Llama of 5.8M parameters that learns the look of a programming language in a few minutes on two CPU
    /// cores: hidden size 256, 6 layers, 4 heads, context 256, vocabulary 4096, tied embeddings.
    #[default]
    Tiny,
    /// A Llama of 13.8M parameters, the one of the speed measurements: hidden size 384, 6 layers, 6 heads,
    /// context 256, vocabulary 8192, tied embeddings.
    Small,
}

impl Preset {
    /// Returns the name in files and flags.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "small",
        }
    }
}

impl std::fmt::Display for Preset {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The optimizers of the key `optim`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OptimizerName {
    /// AdamW with libtorch's fused kernel. Also `adamw_torch`.
    #[default]
    #[serde(alias = "adamw_torch")]
    AdamwTorchFused,
    /// AdamW with 8-bit blockwise states: a quarter of the memory. Also `adamw_bnb_8bit`.
    #[serde(rename = "adamw_8bit", alias = "adamw_bnb_8bit")]
    Adamw8bit,
    /// AdamW with states in host memory (GPU training) or in a mapped file (CPU training). Also
    /// `paged_adamw`.
    #[serde(rename = "paged_adamw_32bit", alias = "paged_adamw")]
    PagedAdamw32bit,
    /// Paged AdamW with 8-bit states.
    #[serde(rename = "paged_adamw_8bit")]
    PagedAdamw8bit,
    /// Lion, with one state per parameter. Also `lion`.
    #[serde(rename = "lion_32bit", alias = "lion")]
    Lion32bit,
    /// Adafactor with a fixed learning rate (no relative step, no parameter scale), as in Hugging Face's
    /// trainer.
    Adafactor,
    /// Stochastic gradient descent without momentum.
    Sgd,
    /// Muon for the matrices of the blocks, AdamW for embeddings, head, norms and biases.
    Muon,
}

/// The use of CUDA graphs in training.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CudaGraphs {
    /// Every operator is launched by the host.
    #[default]
    Never,
    /// The passes are captured if the host is what limits them, which is measured in the first steps.
    Auto,
    /// The passes are captured without measuring. On a CPU the passes use a graph's fixed tensors but run without a
    /// graph, so that a program can be tested.
    Always,
}

/// The times of a recurring action during a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IntervalStrategy {
    /// Never.
    #[default]
    No,
    /// At a fixed number of steps, and at the end.
    Steps,
    /// At the end of each epoch, and at the end.
    Epoch,
}

/// A destination of metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum ReportTo {
    /// TensorBoard event files in the run folder.
    TensorBoard,
    /// The MLflow server of `MLFLOW_TRACKING_URI`. Needs the feature `mlflow`.
    MlFlow,
    /// An offline run of Weights & Biases in the run folder, for `wandb sync`. Needs the feature `wandb`.
    Wandb,
}

impl ReportTo {
    /// All destinations.
    pub const ALL: [Self; 3] = [Self::TensorBoard, Self::MlFlow, Self::Wandb];

    /// Returns the name in `report_to`.
    pub fn name(self) -> &'static str {
        match self {
            Self::TensorBoard => "tensorboard",
            Self::MlFlow => "mlflow",
            Self::Wandb => "wandb",
        }
    }

    /// Returns `true` if this program was built with the destination.
    pub fn is_built(self) -> bool {
        match self {
            Self::TensorBoard => true,
            Self::MlFlow => cfg!(feature = "mlflow"),
            Self::Wandb => cfg!(feature = "wandb"),
        }
    }

    /// Returns `true` if `report_to: all` includes the destination, as in transformers: it was built, and the address of
    /// its server is set if it has one.
    fn is_available(self) -> bool {
        let is_set = self != Self::MlFlow || std::env::var_os("MLFLOW_TRACKING_URI").is_some();
        self.is_built() && is_set
    }
}

/// The kind of a training sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SequenceMode {
    /// A block of `context_length` tokens of the concatenated documents, as in transformers' `run_clm.py`; no
    /// padding is needed. An epoch has each block once, in a random order; the tokens after the last full block
    /// are left out.
    Windows,
    /// A document, truncated to `context_length`.
    Documents,
}

/// The documents of a text file (`sample_by` of Hugging Face's `datasets`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleBy {
    /// The whole file.
    #[default]
    Document,
    /// Each line that is not empty.
    Line,
}

/// What the weights of the sources of a mixture are shares of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MixtureWeights {
    /// The tokens of the run.
    #[default]
    Tokens,
    /// The rows of the batches: windows, documents or packed rows.
    Samples,
}

impl std::fmt::Display for MixtureWeights {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tokens => "tokens",
            Self::Samples => "samples",
        })
    }
}

/// The times of a snapshot (`SaveStrategy` of transformers).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveStrategy {
    /// Never, also not after a signal. The model is saved at the end nevertheless.
    No,
    /// Every `save_steps` steps, and at the end.
    #[default]
    Steps,
    /// At the end of each epoch, and at the end.
    Epoch,
    /// Whenever `metric_for_best_model` improves.
    Best,
}

/// The snapshot from which a run resumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ResumeFromCheckpoint {
    /// `true`: the newest complete snapshot of the run. `false`: none, it is a new run.
    Latest(bool),
    /// The snapshot in this folder.
    Folder(PathBuf),
}

/// Reads `true`, `false` or a folder, as a flag gives them.
impl From<&str> for ResumeFromCheckpoint {
    fn from(text: &str) -> Self {
        match text.to_lowercase().as_str() {
            "true" => Self::Latest(true),
            "false" => Self::Latest(false),
            _ => Self::Folder(text.into()),
        }
    }
}

impl<'de> Deserialize<'de> for ResumeFromCheckpoint {
    /// Deserializes `true` and `false` also from strings, because flags are strings.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "true, or the folder of a snapshot")]
        enum Given {
            Truth(bool),
            Text(String),
        }
        Ok(match Given::deserialize(deserializer)? {
            Given::Truth(latest) => Self::Latest(latest),
            Given::Text(text) => text.as_str().into(),
        })
    }
}

/// The backend that reduces gradients between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum DdpBackend {
    /// Gloo: TCP, between CPUs.
    Gloo,
    /// NVIDIA's NCCL, between GPUs. Needs the feature `nccl`.
    Nccl,
}

/// The options of `gradient_checkpointing`: the keys of `torch.utils.checkpoint`, and Overdrive's keys for the
/// choice of blocks and operators.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradientCheckpointingArguments {
    /// Accepted and ignored: recomputation uses saved-tensor hooks and is never reentrant.
    pub use_reentrant: Option<bool>,
    /// If `true`, recomputation repeats the random numbers of the first pass, so that dropout drops the same
    /// elements. Default `true`.
    pub preserve_rng_state: bool,
    /// The comparison of the tensors that the two passes save. Default `default`.
    pub determinism_check: DeterminismCheck,
    /// The blocks that are recomputed: `every_block`, `every_nth: N`, `segments: N`, `sqrt_segments`.
    /// Default `every_block`.
    pub schedule: Schedule,
    /// The results that are kept nevertheless: `nothing`, `matmuls`, `attention`, `matmuls_and_attention`.
    /// Default `nothing`.
    pub policy: SavePolicy,
}

impl Default for GradientCheckpointingArguments {
    fn default() -> Self {
        Self {
            use_reentrant: None,
            preserve_rng_state: true,
            determinism_check: DeterminismCheck::default(),
            schedule: Schedule::EveryBlock,
            policy: SavePolicy::default(),
        }
    }
}

/// The 4-bit types of bitsandbytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quant4Type {
    /// 4-bit floating point.
    #[default]
    Fp4,
    /// 4-bit NormalFloat: quantiles of a normal distribution.
    Nf4,
}

/// The dtype of matmuls with 4-bit weights.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeDtype {
    /// fp32. Also `fp32`, `torch.float32`.
    #[default]
    #[serde(alias = "fp32", alias = "torch.float32")]
    Float32,
    /// bf16. Also `bf16`, `torch.bfloat16`.
    #[serde(alias = "bf16", alias = "torch.bfloat16")]
    Bfloat16,
    /// fp16. Also `fp16`, `half`, `torch.float16`.
    #[serde(alias = "fp16", alias = "half", alias = "torch.float16")]
    Float16,
}

/// The loss of a pair, where δ is the difference between the log-ratios of policy and reference for the chosen and for the
/// rejected answer. The names are those of TRL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DpoLossType {
    /// -ln σ(βδ): DPO (Rafailov et al. 2023, arXiv:2305.18290).
    #[default]
    Sigmoid,
    /// max(0, 1 - βδ): SLiC (Zhao et al. 2023, arXiv:2305.10425).
    Hinge,
    /// (δ - 1 / 2β)², with δ of means over the tokens: IPO (Azar et al. 2023, arXiv:2310.12036).
    Ipo,
    /// ((ε - 1) ln σ(βδ) + ε ln σ(-βδ)) / (1 - 2ε): robust DPO (Chowdhury et al. 2024, arXiv:2403.00409).
    Robust,
}

/// Returns one string or a list of strings as a list.
fn names_of(given: Names) -> Vec<String> {
    match given {
        Names::One(only) => vec![only],
        Names::Many(all) => all,
    }
}

pub(super) fn one_or_many<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<PathBuf>, D::Error> {
    let paths = names_of(Names::deserialize(deserializer)?);
    Ok(paths.into_iter().map(PathBuf::from).collect())
}

pub(super) fn report_to<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<ReportTo>, D::Error> {
    let names = Option::<Names>::deserialize(deserializer)?;
    let names = names.map(names_of).unwrap_or_default();
    let is_alone = |name: &String| name == "none" || name == "all";
    if names.len() > 1 && names.iter().any(is_alone) {
        let expected = "destinations, or `all` or `none` alone";
        return Err(serde::de::Error::custom(expected));
    }
    let mut destinations = Vec::new();
    for name in names {
        match name.as_str() {
            "none" => {}
            "all" => {
                destinations.extend(ReportTo::ALL.into_iter().filter(|one| one.is_available()))
            }
            other => match ReportTo::ALL.into_iter().find(|one| one.name() == other) {
                Some(destination) => destinations.push(destination),
                None => {
                    let known = &["tensorboard", "mlflow", "wandb", "all", "none"];
                    return Err(serde::de::Error::unknown_variant(other, known));
                }
            },
        }
    }
    Ok(destinations)
}
