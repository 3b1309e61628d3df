use std::path::PathBuf;

use overdrive_datasets::OnBadRecord;
use overdrive_distributed::ProcessGroup;
use overdrive_lora::{BiasMode, LoraConfig, TargetModules};
use overdrive_precision::Precision;
use overdrive_quantization::{BlockOptions, Scheme};
use overdrive_transformer::QuantizeOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::diagnosis::as_value;
use crate::keys::{Program, Source, check_ranges, refuse_unread};
use crate::run_folder::on_main;
use crate::validate::invalid;
use crate::{Error, Result, RunFolder, TrainingArguments};

/// The configuration of a fine-tuning, under the keys of TRL's `SFTConfig` and `ModelConfig`, PEFT's
/// `LoraConfig` and transformers' `BitsAndBytesConfig`, and those of [`TrainingArguments`] for the
/// training itself. Files have all keys side by side.
///
/// | key | default | TRL's, PEFT's or transformers' |
/// |---|---|---|
/// | `lora_r`, `lora_alpha`, `lora_dropout` | 16, 32, 0.05 | TRL's |
/// | `learning_rate` | 2e-4 | 2e-5 in TRL; ten times that is its advice for LoRA |
/// | `max_seq_length` (`max_length`) | 1024, or the model's context where that is less | 1024 |
/// | `bnb_4bit_quant_type` | `fp4` | transformers' |
/// | `assistant_only_loss` | true | false |
/// | `logging_steps` | 10 | TRL's |
/// | `dataloader_num_workers` | 1 | 0: what is a process in PyTorch is a thread here |
///
/// `packing`, `padding_free`, `group_by_length`, `remove_duplicates` and the keys of the loader are
/// those of [`TrainingArguments`]; a document is an example here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FinetuneArguments {
    /// The folder of the model (also `model`, `base_model`). Must be given.
    pub model_name_or_path: PathBuf,
    /// Trains adapters beside the model's weights, which stay as they are; false trains all weights.
    /// Default true.
    pub use_peft: bool,
    /// The rank of the adapters (also `r`). Default 16.
    pub lora_r: i64,
    /// The adapter's output is scaled by `lora_alpha / lora_r`. Default 32.
    pub lora_alpha: f64,
    /// The probability that an input of an adapter is dropped. Default 0.05.
    pub lora_dropout: f64,
    /// The linear layers that get one (also `lora_target_modules`): names, a regular expression, or
    /// `all-linear`. Default: PEFT's choice for the architecture, `q_proj` and `v_proj`, or `c_attn`.
    pub target_modules: Option<TargetModulesArgument>,
    /// Which biases are trained too: `none`, `all`, `lora_only`. Default `none`.
    pub bias: BiasMode,
    /// Scales by `lora_alpha / √lora_r` instead. Default false.
    pub use_rslora: bool,
    /// Trains the norms of the weights' rows as well (DoRA). Default false.
    pub use_dora: bool,
    /// Linear layers that are trained as full copies and saved with the adapter (also
    /// `lora_modules_to_save`).
    pub modules_to_save: Option<Vec<String>>,

    /// Keeps the weights of the blocks in 4 bits while they are loaded: QLoRA. Default false.
    pub load_in_4bit: bool,
    /// Keeps them in 8 bits. Default false.
    pub load_in_8bit: bool,
    /// The 4-bit type: `fp4` or `nf4`. Default `fp4`, as in transformers; QLoRA's is `nf4`.
    pub bnb_4bit_quant_type: Quant4Type,
    /// Quantizes the scales of the blocks as well (also `use_bnb_nested_quant`). Default false.
    pub bnb_4bit_use_double_quant: bool,
    /// The type of matrix products with 4-bit weights: `float32`, `bfloat16` or `float16`. The half
    /// kinds turn autocast on for the whole run, unless `bf16` or `fp16` says otherwise. Default
    /// `float32`.
    pub bnb_4bit_compute_dtype: ComputeDtype,
    /// From which magnitude on a column of activations is multiplied in full precision, with
    /// `load_in_8bit`. Default 6.
    pub llm_int8_threshold: f64,
    /// Linear layers that are not quantized. Default: the head.
    pub llm_int8_skip_modules: Option<Vec<String>>,

    /// Of a prompt and its answer, learns the answer alone. Default true.
    pub completion_only_loss: bool,
    /// Of a conversation, learns what the assistant says alone. Default true; false in TRL.
    pub assistant_only_loss: bool,
    /// A chat template to use instead of the model's: a `.jinja` file, or a model's folder.
    pub chat_template_path: Option<PathBuf>,
    /// Uses the model's chat template where it has one. Default true.
    pub apply_chat_template: bool,
    /// How a prompt is written without a chat template. Default `{prompt}`.
    pub prompt_template: String,
    /// The way to treat a broken record: `stop` or `skip`. Default `stop`.
    pub on_bad_record: OnBadRecord,
    /// The number of records that are read at most. Default: all.
    pub max_train_samples: Option<usize>,

    /// Writes the model with the adapter merged into it as well, into `merged/`. Default false.
    pub merge: bool,
    /// The arguments of the training itself. `preset`, `model`, `tokenizer` and `vocab_size` are not used.
    #[serde(skip)]
    pub training: TrainingArguments,
}

impl Default for FinetuneArguments {
    fn default() -> Self {
        Self {
            model_name_or_path: PathBuf::new(),
            use_peft: true,
            lora_r: 16,
            lora_alpha: 32.0,
            lora_dropout: 0.05,
            target_modules: None,
            bias: BiasMode::None,
            use_rslora: false,
            use_dora: false,
            modules_to_save: None,
            load_in_4bit: false,
            load_in_8bit: false,
            bnb_4bit_quant_type: Quant4Type::default(),
            bnb_4bit_use_double_quant: false,
            bnb_4bit_compute_dtype: ComputeDtype::default(),
            llm_int8_threshold: 6.0,
            llm_int8_skip_modules: None,
            completion_only_loss: true,
            assistant_only_loss: true,
            chat_template_path: None,
            apply_chat_template: true,
            prompt_template: "{prompt}".to_owned(),
            on_bad_record: OnBadRecord::default(),
            max_train_samples: None,
            merge: false,
            training: TrainingArguments {
                context_length: 1024,
                learning_rate: 2e-4,
                logging_steps: 10.0,
                dataloader_num_workers: 1,
                ..TrainingArguments::default()
            },
        }
    }
}

/// The 4-bit numbers of bitsandbytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Quant4Type {
    /// 4-bit floats.
    #[default]
    Fp4,
    /// Quantiles of a normal distribution.
    Nf4,
}

/// The type that matrix products with 4-bit weights are computed in.
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

/// A choice of linear layers, as PEFT's files have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a text or a list of texts")]
pub enum TargetModulesArgument {
    /// `all-linear`, or a regular expression.
    Text(String),
    /// Names, or their ends.
    Names(Vec<String>),
}

impl FinetuneArguments {
    /// Checks the values, alone and together. Nothing is read from the disk.
    ///
    /// # Errors
    /// [`Error::Invalid`] and [`Error::Unsupported`](crate::Error::Unsupported), and those of
    /// [`TrainingArguments::validate`] and [`LoraConfig::validate`].
    pub fn validate(&self) -> Result<()> {
        self.training.validate()?;
        check_ranges(&as_value(self)?, &as_value(&Self::default())?)?;
        if self.model_name_or_path.as_os_str().is_empty() {
            return invalid(
                "model_name_or_path",
                "not set",
                "there is no model to fine-tune",
                "give its folder, with `--model DIR`",
            );
        }
        if self.training.data.is_empty() {
            return invalid(
                "data",
                "not set",
                "there are no records to learn from",
                "give a file of records, with `--data FILE`",
            );
        }
        if self.load_in_4bit && self.load_in_8bit {
            return invalid(
                "load_in_4bit",
                true,
                "`load_in_8bit` is true as well, and weights are kept in one way",
                "drop one of them",
            );
        }
        if !self.use_peft && (self.load_in_4bit || self.load_in_8bit) {
            return invalid(
                "use_peft",
                false,
                "quantized weights cannot be trained themselves",
                "train adapters, or leave out `load_in_4bit` and `load_in_8bit`",
            );
        }
        if self.merge && !self.use_peft {
            return invalid(
                "merge",
                true,
                "there is no adapter without `use_peft`",
                "drop it: the whole model is saved",
            );
        }
        if !self.prompt_template.contains("{prompt}") {
            return invalid(
                "prompt_template",
                format!("{:?}", self.prompt_template),
                "it has no place for the prompt",
                "write {prompt} at its place",
            );
        }
        self.refuse_unread()?;
        self.lora_config().validate()?;
        Ok(())
    }

    /// Refuses keys of training from scratch that would change nothing here.
    fn refuse_unread(&self) -> Result<()> {
        let defaults = TrainingArguments::default();
        let source = Source {
            origin: "the configuration",
            file: None,
            program: Program::Finetune,
        };
        let mut unread = Map::new();
        if let Value::Object(values) = as_value(&self.training)? {
            let defaults = as_value(&defaults)?;
            // The shape and the tokenizer are those of the model, whatever a preset of training says.
            let of_model = ["preset", "model", "tokenizer", "vocab_size"];
            unread.extend(values.into_iter().filter(|(key, value)| {
                defaults[key.as_str()] != *value && !of_model.contains(&key.as_str())
            }));
        }
        refuse_unread(&mut unread, source)
    }

    /// Returns all keys side by side, as a file has them.
    ///
    /// # Errors
    /// [`Error::Unwritable`].
    pub fn to_values(&self) -> Result<Value> {
        let mut values = as_value(self)?;
        if let (Value::Object(values), Value::Object(training)) =
            (&mut values, as_value(&self.training)?)
        {
            let read = training.into_iter();
            values.extend(read.filter(|(key, _)| Program::Finetune.reads(key)));
        }
        Ok(values)
    }

    /// Makes the folder of the run, `output_dir` or a new one under `runs/`, and writes the
    /// configuration into it.
    ///
    /// # Errors
    /// As [`RunFolder::create`].
    pub fn create_folder(&self) -> Result<RunFolder> {
        self.write_into(RunFolder::make(&self.training, "finetune")?)
    }

    /// As [`RunFolder::open_or_create`], with the configuration of a fine-tuning.
    ///
    /// # Errors
    /// As [`RunFolder::open_or_create`].
    pub fn open_or_create_folder(&self, group: &ProcessGroup) -> Result<RunFolder> {
        on_main(group, || match RunFolder::to_resume(&self.training)? {
            Some(run) => self.write_into(run),
            None => self.create_folder(),
        })
    }

    fn write_into(&self, run: RunFolder) -> Result<RunFolder> {
        let mut stored = self.clone();
        stored.training.output_dir = Some(run.root().to_owned());
        let text = format!("{:#}\n", stored.to_values()?);
        let path = run.arguments();
        std::fs::write(&path, text).map_err(Error::io("write", path))?;
        Ok(run)
    }

    /// Returns the configuration of the adapters.
    pub fn lora_config(&self) -> LoraConfig {
        LoraConfig {
            r: self.lora_r,
            lora_alpha: self.lora_alpha,
            lora_dropout: self.lora_dropout,
            target_modules: self.target_modules.as_ref().map(|targets| match targets {
                TargetModulesArgument::Text(text) => TargetModules::from(text.as_str()),
                // A flag gives a list.
                TargetModulesArgument::Names(names) => match names.as_slice() {
                    [all] if all.eq_ignore_ascii_case("all-linear") => {
                        TargetModules::from(all.as_str())
                    }
                    names => TargetModules::Names(names.to_vec()),
                },
            }),
            bias: self.bias,
            use_rslora: self.use_rslora,
            use_dora: self.use_dora,
            modules_to_save: self.modules_to_save.clone(),
            base_model_name_or_path: Some(self.model_name_or_path.display().to_string()),
            task_type: Some("CAUSAL_LM".to_owned()),
            ..LoraConfig::default()
        }
    }

    /// Returns how the weights are quantized while they are loaded, if they are.
    pub fn quantization(&self) -> Option<QuantizeOptions> {
        let scheme = if self.load_in_4bit {
            let options = BlockOptions {
                double_quant: self.bnb_4bit_use_double_quant,
                ..BlockOptions::default()
            };
            match self.bnb_4bit_quant_type {
                Quant4Type::Nf4 => Scheme::Nf4(options),
                Quant4Type::Fp4 => Scheme::Fp4(options),
            }
        } else if self.load_in_8bit {
            Scheme::LlmInt8 {
                threshold: self.llm_int8_threshold,
            }
        } else {
            return None;
        };
        let skipped = self.llm_int8_skip_modules.clone().unwrap_or_default();
        let mut options = QuantizeOptions::new(scheme);
        options.skip_modules = skipped;
        Some(options)
    }

    /// Returns the precision of the forward pass: that of `bf16`, `fp16` and `tf32`, and where they are not
    /// set the compute type of 4-bit weights.
    pub fn precision(&self) -> Precision {
        let training = &self.training;
        match self.bnb_4bit_compute_dtype {
            _ if !self.load_in_4bit || training.bf16 || training.fp16 => training.precision(),
            ComputeDtype::Float32 => training.precision(),
            ComputeDtype::Bfloat16 => Precision::Bf16,
            ComputeDtype::Float16 => Precision::Fp16,
        }
    }
}
