//! The configuration of a fine-tuning run.

use std::path::PathBuf;

use indexmap::IndexMap;
use overdrive_datasets::OnBadRecord;
use overdrive_lora::{BiasMode, InitLoraWeights, LayerIndices, LoraConfig, Names, TargetModules};
use overdrive_precision::Precision;
use overdrive_quantization::{BlockOptions, Scheme};
use overdrive_transformer::QuantizeOptions;
use serde::{Deserialize, Serialize};

use super::choices::{ComputeDtype, Quant4Type};
use super::key::Harmless::{Any, Only};
use super::key::List;
use super::key::Range::{AtLeast, NotNegative};
use super::key::options;
use super::training::TrainingArguments;

/// The remedy for quantized weights in training from scratch.
const TRAINED: &str =
    "trainable weights cannot be quantized; fine-tuning trains adapters beside quantized weights";

options! {
    /// The configuration of a fine-tuning run, under the keys of TRL's `SFTConfig` and `ModelConfig`, PEFT's
    /// `LoraConfig` and transformers' `BitsAndBytesConfig`, and those of [`TrainingArguments`] for the training
    /// itself. Files have all keys at the top level.
    ///
    /// | key | default | default of TRL, PEFT or transformers |
    /// |---|---|---|
    /// | `lora_r`, `lora_alpha`, `lora_dropout` | 16, 32, 0.05 | the same in TRL |
    /// | `learning_rate` | 2e-4 | 2e-5 in TRL, which recommends ten times that for LoRA |
    /// | `max_seq_length` (`max_length`) | 1024, at most the model's context | 1024 |
    /// | `bnb_4bit_quant_type` | `fp4` | the same in transformers, `nf4` in TRL |
    /// | `use_peft` | true | false in TRL |
    /// | `bf16` | false | true in TRL unless `fp16` is set |
    /// | `gradient_checkpointing` | false | true in TRL |
    /// | load-balancing loss of experts | if `output_router_logits` is true in the model's config.json, times its `router_aux_loss_coef` | on, times 0.001 in TRL |
    /// | `packing_strategy: wrapped` | a token attends only to its own example | to the whole row in TRL |
    /// | `assistant_only_loss` | true | false |
    /// | `logging_steps` | 10 | the same in TRL |
    /// | `dataloader_num_workers` | 1 | 0: a worker is a process in PyTorch, but a thread here |
    ///
    /// `packing`, `padding_free`, `group_by_length`, `remove_duplicates` and the keys of the loader are those of
    /// [`TrainingArguments`]; an example takes the role of a document. Records of plain `prompt` and `completion` are
    /// formatted with the model's chat template if it has one; TRL concatenates them, with the end-of-text token
    /// behind.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    #[serde(default, deny_unknown_fields)]
    pub struct FinetuneArguments, keys FINETUNE in "" {
        "Configuration" => {
            /// The model to fine-tune: GGUF file, folder with config.json, weights, tokenizer.json, or name on the
            /// Hugging Face hub.
            model_name_or_path: PathBuf = PathBuf::new() =>
                FINETUNE("PATH", flag: Some("model"), spellings: &["model", "base_model", "model_name", "base_model_name_or_path"],
                    instead: "`train` creates a model from scratch, see `model`");
        }
        "Data" => {
            /// The maximum number of records. Default: all.
            max_train_samples: Option<usize> = None => FINETUNE("N", range: AtLeast(1));
            /// What to do with an invalid record. Default `stop`.
            on_bad_record: OnBadRecord = OnBadRecord::default() => FINETUNE("NAME", harmless: Only(&["\"stop\""]));
        }
        "Records" => {
            /// If `true`, compute the loss on the response only, not on the prompt. Default `true`.
            completion_only_loss: bool = true => FINETUNE("", harmless: Only(&["false"]));
            /// If `true`, compute the loss on the assistant's messages of a conversation only. Default `true`; `false`
            /// in TRL.
            assistant_only_loss: bool = true => FINETUNE("", harmless: Only(&["false"]));
            /// The chat template instead of the model's: a .jinja file, or the folder of a model. Default: the model's.
            chat_template_path: Option<PathBuf> = None => FINETUNE("PATH");
            /// If `true`, use the model's chat template if it has one. Default `true`.
            apply_chat_template: bool = true => FINETUNE("", harmless: Only(&["false"]));
            /// The format of a prompt without a chat template. Default `{prompt}`.
            prompt_template: String = "{prompt}".to_owned() => FINETUNE("TEXT");
        }
        "Evaluation and snapshots" => {
            /// If `true`, also write the model with the adapter merged into it, to `merged/`. Default `false`.
            merge: bool = false => FINETUNE("", harmless: Only(&["false"]));
        }
        "Adapters" => {
            /// If `true`, train adapters and freeze the model's weights; if `false`, train all weights. Default `true`.
            use_peft: bool = true => FINETUNE("", spellings: &["use_lora"], harmless: Only(&["false"]));
            /// The rank of the adapters. Default 16.
            lora_r: i64 = 16 => FINETUNE("N", range: AtLeast(1), spellings: &["r", "lora_rank"], harmless: Only(&["0"]));
            /// The scale of the adapters, which is divided by the rank. Default 32.
            lora_alpha: f64 = 32.0 => FINETUNE("X", harmless: Any);
            /// The dropout probability of the adapters' inputs. Default 0.05.
            lora_dropout: f64 = 0.05 => FINETUNE("P", harmless: Any);
            /// The linear layers that get adapters: names, a regular expression, or all-linear. Default: PEFT's for the
            /// architecture.
            target_modules: Option<Names> = None =>
                FINETUNE("NAME", list: List::Names, spellings: &["lora_target_modules"], harmless: Any);
            /// The parameters without a layer of their own that get adapters, such as mlp.experts.down_proj of all experts;
            /// they need `lora_dropout` 0. Default: none.
            target_parameters: Option<Vec<String>> = None =>
                FINETUNE("NAME", list: List::Names, spellings: &["lora_target_parameters"], harmless: Any);
            /// The linear layers of `target_modules` that get no adapters: names, or a regular expression. Default: none.
            exclude_modules: Option<Names> = None => FINETUNE("NAME", list: List::Names, harmless: Any);
            /// The indices of the blocks whose layers get adapters, a number or a list. Default: all.
            layers_to_transform: Option<LayerIndices> = None => FINETUNE("JSON", harmless: Any);
            /// The name of the model's list of blocks, for `layers_to_transform`. Default: that before the first number.
            layers_pattern: Option<Names> = None => FINETUNE("NAME", list: List::Names, harmless: Any);
            /// The ranks of single layers, by name or regular expression, such as {"q_proj": 4}. Default: none.
            rank_pattern: IndexMap<String, i64> = IndexMap::new() => FINETUNE("JSON", harmless: Any);
            /// The alphas of single layers, by name or regular expression. Default: none.
            alpha_pattern: IndexMap<String, f64> = IndexMap::new() => FINETUNE("JSON", harmless: Any);
            /// The initial values of the adapters: true (they change nothing), gaussian, orthogonal, olora, pissa,
            /// pissa_niter_N or loftq. Default `true`.
            init_lora_weights: InitLoraWeights = InitLoraWeights::Default => FINETUNE("NAME", harmless: Any);
            /// If `true`, add biases to the second factors of the adapters. Default `false`.
            lora_bias: bool = false => FINETUNE("", harmless: Any);
            /// The biases that are trained as well. Default `none`.
            bias: BiasMode = BiasMode::None => FINETUNE("NAME", harmless: Any);
            /// If `true`, scale the adapters by alpha / sqrt(rank). Default `false`.
            use_rslora: bool = false => FINETUNE("", harmless: Any);
            /// If `true`, also train the norms of the weights' rows (DoRA). Default `false`.
            use_dora: bool = false => FINETUNE("", harmless: Any);
            /// The linear layers that are trained as full copies and saved with the adapter. Default: none.
            modules_to_save: Option<Vec<String>> = None =>
                FINETUNE("NAME", list: List::Names, spellings: &["lora_modules_to_save"], harmless: Any);
        }
        "Quantization" => {
            /// If `true`, quantize the weights of the blocks to 4 bits while loading them (QLoRA). Default `false`.
            load_in_4bit: bool = false =>
                FINETUNE("", spellings: &["use_4bit"], excludes: &["load_in_8bit"], harmless: Only(&["false"]),
                    instead: TRAINED);
            /// If `true`, quantize the weights of the blocks to 8 bits while loading them (LLM.int8). Default `false`.
            load_in_8bit: bool = false =>
                FINETUNE("", excludes: &["load_in_4bit"], harmless: Only(&["false"]), instead: TRAINED);
            /// The type of 4-bit weights; QLoRA uses NF4. Default `fp4`, as in transformers.
            bnb_4bit_quant_type: Quant4Type = Quant4Type::default() =>
                FINETUNE("NAME", harmless: Any, needs: "load_in_4bit");
            /// If `true`, quantize the scales of the blocks as well. Default `false`.
            bnb_4bit_use_double_quant: bool = false =>
                FINETUNE("", spellings: &["use_bnb_nested_quant"], harmless: Any, needs: "load_in_4bit");
            /// The dtype of matmuls with 4-bit weights; the half types enable autocast for the whole run, unless `bf16`
            /// or `fp16` overrides it. Default `float32`.
            bnb_4bit_compute_dtype: ComputeDtype = ComputeDtype::default() =>
                FINETUNE("NAME", harmless: Any, needs: "load_in_4bit");
            /// The magnitude from which a column of activations is computed in full precision, with
            /// `load_in_8bit`. Default 6.
            llm_int8_threshold: f64 = 6.0 =>
                FINETUNE("X", range: NotNegative, harmless: Any, needs: "load_in_8bit");
            /// The linear layers that are not quantized besides the head, which never is: beginnings of names up to
            /// a dot, ends of names, or regular expressions, as in transformers. Default: none.
            llm_int8_skip_modules: Option<Vec<String>> = None => FINETUNE("NAME", list: List::Names, harmless: Any);
        }
        hidden {
            /// The arguments of the training itself. `preset`, `model`, `tokenizer` and `vocab_size` are not used.
            #[serde(skip)]
            training: TrainingArguments = TrainingArguments {
                context_length: 1024,
                learning_rate: 2e-4,
                logging_steps: 10.0,
                dataloader_num_workers: 1,
                ..TrainingArguments::default()
            };
        }
    }
}

impl FinetuneArguments {
    /// Returns the configuration of the adapters.
    pub fn lora_config(&self) -> LoraConfig {
        LoraConfig {
            r: self.lora_r,
            lora_alpha: self.lora_alpha,
            lora_dropout: self.lora_dropout,
            target_modules: self.target_modules.as_ref().map(|targets| match targets {
                Names::One(text) => TargetModules::from(text.as_str()),
                // A flag is always a list, also for `all-linear`.
                Names::Many(names) => match names.as_slice() {
                    [all] if all.eq_ignore_ascii_case("all-linear") => {
                        TargetModules::from(all.as_str())
                    }
                    names => TargetModules::Names(names.to_vec()),
                },
            }),
            target_parameters: self.target_parameters.clone(),
            exclude_modules: self.exclude_modules.clone(),
            layers_to_transform: self.layers_to_transform.clone(),
            layers_pattern: self.layers_pattern.clone(),
            rank_pattern: self.rank_pattern.clone().into_iter().collect(),
            alpha_pattern: self.alpha_pattern.clone().into_iter().collect(),
            init_lora_weights: self.init_lora_weights,
            lora_bias: self.lora_bias,
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

    /// Returns the precision of the run: that of `bf16`, `fp16`, `fp8` and `tf32`, or if they are not set, the compute
    /// dtype of 4-bit weights.
    pub fn precision(&self) -> Precision {
        // As in bitsandbytes: half precision of 4-bit matmuls implies autocast for the rest.
        let training = &self.training;
        match self.bnb_4bit_compute_dtype {
            _ if !self.load_in_4bit || training.bf16 || training.fp16 || training.fp8 => {
                training.precision()
            }
            ComputeDtype::Float32 => training.precision(),
            ComputeDtype::Bfloat16 => Precision::Bf16,
            ComputeDtype::Float16 => Precision::Fp16,
        }
    }
}
