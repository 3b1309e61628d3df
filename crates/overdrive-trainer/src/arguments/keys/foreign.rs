//! The keys of transformers, TRL, PEFT and bitsandbytes that Overdrive does not read.
//!
//! A configuration that was written for these projects either loads as it is, or its error names the key that
//! is not supported. So each of their keys has a row with the value that requests nothing: with that value
//! the key is dropped, with any other it is an error. Nothing that would change the run is ignored silently.

use crate::arguments::key::Harmless::{Any, Null, Only};
use crate::arguments::key::{Key, foreign};

const SAME_PRECISION: &str = "evaluation runs in the precision of training";
const PROCESSES: &str = "start several processes with `--nproc N` or torchrun; `zero_stage: 1` shards the optimizer states over them";

/// Declares the rows of keys with the same harmless values.
macro_rules! rows {
    ($harmless:expr; $($name:literal,)*) => { &[$(foreign($name, $harmless, ""),)*] };
}

// Worker threads live as long as the loader. Liger's kernels do not change the losses: `fused_kernels`, on by default, is their equivalent. Batches are always in
// order. Each line holds as many keys as fit, so that the list can be read as a list.
#[rustfmt::skip]
pub(super) static WITHOUT_EFFECT: &[Key] = rows! { Any;
    "dataloader_persistent_workers", "persistent_workers", "torch_compile_backend",
    "torch_compile_mode", "use_liger_kernel", "liger_kernel_config", "average_tokens_across_devices", "dataloader_multiprocessing_context",
    "dataloader_in_order", "remove_unused_columns", "label_names", "logging_first_step", "logging_nan_inf_filter",
    "include_num_input_tokens_seen", "log_level", "log_level_replica", "log_on_each_node", "disable_tqdm", "run_name",
    "eval_accumulation_steps", "prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object",
    "batch_eval_metrics", "skip_memory_metrics", "save_on_each_node", "restore_callback_states_from_checkpoint",
    "fsdp_config", "hub_model_id", "hub_token", "hub_private_repo", "hub_strategy",
    "hub_always_push", "hub_revision", "inference_mode", "trust_remote_code", "quant_method", "bnb_4bit_quant_storage",
    "do_train", "do_eval", "use_cache", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "dataset_num_proc", "peft_version", "auto_mapping", "megatron_core", "qalora_group_size", "fan_in_fan_out",
    "_load_in_4bit", "_load_in_8bit", "runtime_config", "precompute_ref_batch_size", "f_alpha_divergence_coef",
    "discopop_tau", "ref_model_mixup_alpha", "ref_model_sync_steps",
};

/// Keys that Overdrive has no equivalent of, which must be unset.
#[rustfmt::skip]
pub(super) static UNSET: &[Key] = rows! { Null;
    "torch_empty_cache_steps", "optim_args", "optim_target_modules", "neftune_noise_alpha", "parallelism_config",
    "model_init_kwargs", "dataset_kwargs", "revision", "layer_replication", "eva_config",
    "corda_config", "lora_ga_config", "arrow_config", "megatron_config", "alora_invocation_tokens", "use_bdlora",
    "velora_config", "kasa_config", "monteclora_config", "ld_alpha", "loss_weights",
};

/// Switches that Overdrive has no equivalent of, which must be off.
#[rustfmt::skip]
pub(super) static OFF: &[Key] = rows! { Only(&["false"]);
    "ignore_data_skip", "do_predict", "use_qalora", "ensure_weight_tying",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "precompute_ref_log_probs", "use_weighting",
    "sync_ref_model", "ignore_bias_buffers",
};

// Each row is on one line, so that the table can be read as a table.
#[rustfmt::skip]
pub(super) static KEYS: &[Key] = &[
    // Memory and speed.
    foreign("torch_compile", Only(&["false"]), "leave it out: `fused_kernels` (on by default) has the kernels that it would generate for training, and overdrive-packages runs packages of torch's compiler"),
    foreign("bf16_full_eval", Only(&["false"]), SAME_PRECISION),
    foreign("fp16_full_eval", Only(&["false"]), SAME_PRECISION),
    // Optimization.
    foreign("label_smoothing_factor", Only(&["0"]), ""),
    // Data.
    foreign("data_seed", Null, "`seed` determines the order of the data"),
    // Logging and evaluation.
    foreign("logging_dir", Null, "the event files are written to `tensorboard/` in `output_dir`"),
    foreign("logging_strategy", Only(&["\"steps\""]), "set `logging_steps`"),
    foreign("eval_delay", Only(&["0"]), ""),
    foreign("include_for_metrics", Only(&["[]"]), ""),
    foreign("debug", Only(&["\"\"", "[]"]), ""),
    // Snapshots.
    foreign("save_only_model", Only(&["false"]), "a snapshot must hold all state to resume a run; the model alone is in `model/` at the end"),
    foreign("save_safetensors", Only(&["true"]), "weights are always saved as safetensors"),
    foreign("enable_jit_checkpoint", Only(&["false"]), "Ctrl-C, SIGTERM, SIGHUP and SIGQUIT save a snapshot and end the run"),
    foreign("full_determinism", Only(&["false"]), "on a CPU the same seed always gives the same losses"),
    // Several devices.
    foreign("fsdp", Only(&["\"\"", "[]", "false"]), "start several processes with `--nproc N` or torchrun; `zero_stage: 1` shards the optimizer states over them, but weights are not sharded"),
    foreign("deepspeed", Null, PROCESSES),
    foreign("local_rank", Only(&["-1", "0"]), "the launcher sets it"),
    foreign("accelerator_config", Any, "`split_batches: true` and `num_steps` of its `gradient_accumulation_kwargs`, which change the batch, are refused"),
    // The Hub.
    foreign("push_to_hub", Only(&["false"]), "upload the folder `model/` of the run"),
    // Options of transformers' example scripts, and of tutorials.
    foreign("dataset_name", Null, "give the file of records with `data` (`--data FILE`)"),
    foreign("dataset_config", Null, "give the file of records with `data` (`--data FILE`)"),
    foreign("dataset_train_split", Only(&["\"train\""]), "give the file of its records with `data` (`--data FILE`)"),
    foreign("dataset_test_split", Only(&["\"test\""]), "`validation_fraction` holds out a part of `data`"),
    foreign("dataset_streaming", Only(&["false"]), "files are memory-mapped, so memory does not grow with them"),
    foreign("model_revision", Only(&["\"main\""]), "give a folder with this revision as `model_name_or_path`"),
    foreign("device_map", Only(&["\"auto\""]), "the run uses a GPU if there is one; `use_cpu` keeps it on the CPU"),
    foreign("new_model", Null, "set `output_dir` (`--out DIR`)"),
    foreign("chat_template", Null, "give the file of the template with `chat_template_path`"),
    // TRL.
    foreign("activation_offloading", Only(&["false"]), "set `gradient_checkpointing`"),
    foreign("router_aux_loss_coef", Only(&["0.001", "0"]), "set it in the model's config.json, with `output_router_logits: true`"),
    foreign("eos_token", Null, "the tokenizer of the model has it"),
    foreign("pad_token", Null, "the tokenizer of the model has it"),
    foreign("truncation_mode", Only(&["\"keep_start\""]), ""),
    foreign("eval_packing", Null, "leave it out: evaluation packs as training does (`packing`)"),
    foreign("shuffle_dataset", Only(&["false"]), "the loader shuffles in each epoch"),
    foreign("f_divergence_type", Only(&["\"reverse_kl\""]), ""),
    // PEFT.
    foreign("peft_type", Only(&["\"LORA\""]), "adapters are LoRA's"),
    foreign("task_type", Only(&["\"CAUSAL_LM\""]), "`finetune` trains causal language models; the examples `classify` and `seq2seq` train others"),
    foreign("lora_task_type", Only(&["\"CAUSAL_LM\""]), "`finetune` trains causal language models; the examples `classify` and `seq2seq` train others"),
    foreign("loftq_config", Only(&["{}"]), ""),
    foreign("trainable_token_indices", Null, "name the embedding in `modules_to_save`"),
];
