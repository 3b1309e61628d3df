//! The configuration of a fine-tuning run.

use std::path::PathBuf;

use overdrive_core::{OutputFolder, check_not_read};
use overdrive_datasets::OnBadRecord;
use overdrive_distributed::ProcessGroup;
use overdrive_lora::{BiasMode, LoraConfig, TargetModules};
use overdrive_precision::Precision;
use overdrive_quantization::{BlockOptions, Scheme};
use overdrive_transformer::QuantizeOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::config_errors::as_value;
use crate::keys::{Program, Source, check_ranges, refuse_unread};
use crate::run_folder::on_main;
use crate::validate::invalid;
use crate::{IntervalStrategy, Result, RunFolder, TrainingArguments};

/// The configuration of a fine-tuning run, under the keys of TRL's `SFTConfig` and `ModelConfig`, PEFT's
/// `LoraConfig` and transformers' `BitsAndBytesConfig`, and those of [`TrainingArguments`] for the training
/// itself. Files have all keys at the top level.
///
/// | key | default | default of TRL, PEFT or transformers |
/// |---|---|---|
/// | `lora_r`, `lora_alpha`, `lora_dropout` | 16, 32, 0.05 | the same in TRL |
/// | `learning_rate` | 2e-4 | 2e-5 in TRL, which recommends ten times that for LoRA |
/// | `max_seq_length` (`max_length`) | 1024, at most the model's context | 1024 |
/// | `bnb_4bit_quant_type` | `fp4` | the same in transformers |
/// | `assistant_only_loss` | true | false |
/// | `logging_steps` | 10 | the same in TRL |
/// | `dataloader_num_workers` | 1 | 0: a worker is a process in PyTorch, but a thread here |
///
/// `packing`, `padding_free`, `group_by_length`, `remove_duplicates` and the keys of the loader are those of
/// [`TrainingArguments`]; an example takes the role of a document.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FinetuneArguments {
    /// The folder or the GGUF file of the model (also `model`, `base_model`). Required.
    pub model_name_or_path: PathBuf,
    /// If `true`, adapters are trained and the model's weights are frozen; if `false`, all weights are trained.
    /// Default `true`.
    pub use_peft: bool,
    /// The rank of the adapters (also `r`). Default 16.
    pub lora_r: i64,
    /// The numerator of the adapters' scale, `lora_alpha / lora_r`. Default 32.
    pub lora_alpha: f64,
    /// The dropout probability of the adapters' inputs. Default 0.05.
    pub lora_dropout: f64,
    /// The linear layers that get adapters (also `lora_target_modules`): names, a regular expression, or
    /// `all-linear`. Default: PEFT's choice for the architecture, `q_proj` and `v_proj`, or `c_attn`.
    pub target_modules: Option<TargetModulesArgument>,
    /// The biases that are trained as well: `none`, `all`, `lora_only`. Default `none`.
    pub bias: BiasMode,
    /// If `true`, the scale is `lora_alpha / √lora_r`. Default `false`.
    pub use_rslora: bool,
    /// If `true`, the norms of the weights' rows are trained as well (DoRA). Default `false`.
    pub use_dora: bool,
    /// The linear layers that are trained as full copies and saved with the adapter (also
    /// `lora_modules_to_save`). Default: none.
    pub modules_to_save: Option<Vec<String>>,

    /// If `true`, the weights of the blocks are quantized to 4 bits while they are loaded (QLoRA). Default
    /// `false`.
    pub load_in_4bit: bool,
    /// If `true`, the weights of the blocks are quantized to 8 bits while they are loaded. Default `false`.
    pub load_in_8bit: bool,
    /// The 4-bit type: `fp4` or `nf4`. Default `fp4`, as in transformers; QLoRA uses `nf4`.
    pub bnb_4bit_quant_type: Quant4Type,
    /// If `true`, the scales of the blocks are quantized as well (also `use_bnb_nested_quant`). Default
    /// `false`.
    pub bnb_4bit_use_double_quant: bool,
    /// The dtype of matmuls with 4-bit weights: `float32`, `bfloat16` or `float16`. The half types enable
    /// autocast for the whole run, unless `bf16` or `fp16` overrides it. Default `float32`.
    pub bnb_4bit_compute_dtype: ComputeDtype,
    /// The magnitude from which a column of activations is computed in full precision, with
    /// `load_in_8bit`. Default 6.
    pub llm_int8_threshold: f64,
    /// The linear layers that are not quantized. Default: the head.
    pub llm_int8_skip_modules: Option<Vec<String>>,

    /// If `true`, the loss covers the response only, not the prompt. Default `true`.
    pub completion_only_loss: bool,
    /// If `true`, the loss covers the assistant's messages of a conversation only. Default `true`; `false` in
    /// TRL.
    pub assistant_only_loss: bool,
    /// The chat template to use instead of the model's: a `.jinja` file, or a model's folder. Default: the
    /// model's.
    pub chat_template_path: Option<PathBuf>,
    /// If `true`, the model's chat template is used if it has one. Default `true`.
    pub apply_chat_template: bool,
    /// The format of a prompt without a chat template. Default `{prompt}`.
    pub prompt_template: String,
    /// The action on an invalid record: `stop` or `skip`. Default `stop`.
    pub on_bad_record: OnBadRecord,
    /// The maximum number of records. Default: all.
    pub max_train_samples: Option<usize>,

    /// If `true`, the model with the adapter merged into it is also written, to `merged/`. Default `false`.
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

/// A choice of linear layers, in the format of PEFT's files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings")]
pub enum TargetModulesArgument {
    /// `all-linear`, or a regular expression.
    Text(String),
    /// Names, or the ends of names.
    Names(Vec<String>),
}

impl FinetuneArguments {
    /// Checks the values by themselves and against each other. It does not access the disk.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) and [`Error::Unsupported`](crate::Error::Unsupported), and those
    /// of [`TrainingArguments::validate`] and [`LoraConfig::validate`].
    pub fn validate(&self) -> Result<()> {
        self.training.validate()?;
        check_ranges(&as_value(self)?, &as_value(&Self::default())?)?;
        if self.model_name_or_path.as_os_str().is_empty() {
            let expected =
                "the folder or GGUF file of the model to fine-tune; give it with `--model PATH`";
            return invalid("model_name_or_path", "not set", expected);
        }
        if self.training.data.is_empty() {
            let expected = "a file of records to train on; give it with `--data FILE`";
            return invalid("data", "not set", expected);
        }
        if self.load_in_4bit && self.load_in_8bit {
            let expected = "false if `load_in_8bit` is true; drop one of them";
            return invalid("load_in_4bit", true, expected);
        }
        if !self.use_peft && (self.load_in_4bit || self.load_in_8bit) {
            let expected = "true with quantized weights, which cannot be trained; train adapters, or leave \
                            out `load_in_4bit` and `load_in_8bit`";
            return invalid("use_peft", false, expected);
        }
        if self.merge && !self.use_peft {
            let expected = "false without `use_peft`, because there is no adapter; drop it, the whole model is \
                            saved";
            return invalid("merge", true, expected);
        }
        if !self.prompt_template.contains("{prompt}") {
            let value = format!("{:?}", self.prompt_template);
            return invalid("prompt_template", value, "a text that contains {prompt}");
        }
        if self.training.eval_on_start && self.training.eval_strategy == IntervalStrategy::No {
            let expected = "false with `eval_strategy: no`, because no record is held out; set `eval_strategy` \
                            (`--eval-steps N`)";
            return invalid("eval_on_start", true, expected);
        }
        // The tokens of a conversation are not those of a text whose bytes could be counted.
        self.training.check_metric(false)?;
        self.refuse_unread()?;
        self.lora_config().validate()?;
        Ok(())
    }

    /// Refuses keys of training from scratch that have no effect here.
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
            // Shape and tokenizer are those of the model, whatever a preset of training sets.
            let of_model = ["preset", "model", "tokenizer", "vocab_size"];
            unread.extend(values.into_iter().filter(|(key, value)| {
                defaults[key.as_str()] != *value && !of_model.contains(&key.as_str())
            }));
        }
        refuse_unread(&mut unread, source)
    }

    /// Returns all keys at the top level, as in a file.
    ///
    /// # Errors
    /// [`Error::Unwritable`](crate::Error::Unwritable).
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

    /// Creates the folder of the run, `output_dir` or a new one under `runs/`, and writes the configuration
    /// into it.
    ///
    /// # Errors
    /// As [`RunFolder::create`], and [`Error::Common`](crate::Error::Common) for a folder that the run reads, or that has
    /// files of a model or an adapter and is no run.
    pub fn create_folder(&self) -> Result<RunFolder> {
        if let Some(root) = &self.training.output_dir {
            let template = self.chat_template_path.as_deref();
            let template = template.map(|path| ("chat_template_path", path));
            let model = ("model_name_or_path", self.model_name_or_path.as_path());
            let inputs: Vec<_> = [model].into_iter().chain(template).collect();
            // A folder of a run is overwritten only if `overwrite_output_dir` says so.
            match RunFolder::open(root) {
                Ok(_) => check_not_read("output_dir", root, &inputs)?,
                Err(_) => drop(OutputFolder::check(
                    "finetune",
                    "output_dir",
                    root,
                    &inputs,
                )?),
            }
        }
        self.write_into(RunFolder::make(&self.training, "finetune")?)
    }

    /// Opens or creates the folder as [`RunFolder::open_or_create`] does, for a fine-tuning run.
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
        run.lock()?;
        let mut stored = self.clone();
        stored.training.output_dir = Some(run.root().to_owned());
        let text = format!("{:#}\n", stored.to_values()?);
        let path = run.arguments();
        overdrive_core::files::write(&path, text.as_bytes())?;
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
                // A flag is always a list, also for `all-linear`.
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

    /// Returns the options of quantization during loading, if a key selects it.
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

    /// Sets the number of threads, the treatment of subnormal numbers, TF32 and the seed of libtorch, and returns the
    /// precision of the run, which its autocast, its loss scaler, its memory plan and its recorder get.
    ///
    /// # Errors
    /// As [`TrainingArguments::apply`].
    pub fn apply(&self) -> Result<Precision> {
        self.training.apply()?;
        Ok(self.precision())
    }

    /// Returns the precision of the run: that of `bf16`, `fp16` and `tf32`, or if they are not set, the compute
    /// dtype of 4-bit weights.
    pub fn precision(&self) -> Precision {
        // As in bitsandbytes: half precision of 4-bit matmuls implies autocast for the rest.
        let training = &self.training;
        match self.bnb_4bit_compute_dtype {
            _ if !self.load_in_4bit || training.bf16 || training.fp16 => training.precision(),
            ComputeDtype::Float32 => training.precision(),
            ComputeDtype::Bfloat16 => Precision::Bf16,
            ComputeDtype::Float16 => Precision::Fp16,
        }
    }
}
