//! The keys of transformers, TRL, PEFT and bitsandbytes that Overdrive does not read.
//!
//! A configuration that was written for these projects either loads as it is, or its error names the key that
//! is not supported. So each of their keys has a row with the value that requests nothing: with that value
//! the key is dropped, with any other it is an error. Nothing that would change the run is ignored silently.

use crate::arguments::key::Harmless::{Any, Null, Only};
use crate::arguments::key::{Key, foreign};

const SAME_PRECISION: &str = "evaluation runs in the precision of training";
const PROCESSES: &str = "start several processes with `--nproc N` or torchrun; `zero_stage: 1` shards the optimizer states over them";

// Each row is on one line, so that the table can be read as a table.
#[rustfmt::skip]
pub(super) static KEYS: &[Key] = &[
    // Memory and speed.
    foreign("activation_checkpointing_kwargs", Any, ""),
    foreign("torch_compile", Only("false"), "leave it out: `fused_kernels` (on by default) has the kernels that it would generate for training, and overdrive-packages runs packages of torch's compiler"),
    foreign("torch_compile_backend", Any, ""),
    foreign("torch_compile_mode", Any, ""),
    // The losses are the same; `fused_kernels`, on by default, does what Liger does, on CPUs.
    foreign("use_liger_kernel", Any, ""),
    foreign("liger_kernel_config", Any, ""),
    foreign("bf16_full_eval", Only("false"), SAME_PRECISION),
    foreign("fp16_full_eval", Only("false"), SAME_PRECISION),
    foreign("torch_empty_cache_steps", Null, ""),
    // Optimization.
    foreign("optim_args", Null, ""),
    foreign("optim_target_modules", Null, ""),
    foreign("label_smoothing_factor", Only("0"), ""),
    foreign("neftune_noise_alpha", Null, ""),
    foreign("average_tokens_across_devices", Any, ""),
    // Data. Worker threads live as long as the loader, and batches are always in order.
    foreign("data_seed", Null, "`seed` determines the order of the data"),
    foreign("dataloader_persistent_workers", Any, "").also(&["persistent_workers"]),
    foreign("dataloader_multiprocessing_context", Any, ""),
    foreign("dataloader_in_order", Any, ""),
    foreign("remove_unused_columns", Any, ""),
    foreign("label_names", Any, ""),
    foreign("ignore_data_skip", Only("false"), ""),
    // Logging and evaluation.
    foreign("logging_dir", Null, "the event files are written to `tensorboard/` in `output_dir`"),
    foreign("logging_strategy", Only("\"steps\""), "set `logging_steps`"),
    foreign("logging_first_step", Any, ""),
    foreign("logging_nan_inf_filter", Any, ""),
    foreign("include_num_input_tokens_seen", Any, ""),
    foreign("log_level", Any, ""),
    foreign("log_level_replica", Any, ""),
    foreign("log_on_each_node", Any, ""),
    foreign("disable_tqdm", Any, ""),
    foreign("run_name", Any, ""),
    foreign("eval_delay", Only("0"), ""),
    foreign("eval_accumulation_steps", Any, ""),
    foreign("prediction_loss_only", Any, ""),
    foreign("eval_do_concat_batches", Any, ""),
    foreign("eval_use_gather_object", Any, ""),
    foreign("batch_eval_metrics", Any, ""),
    foreign("include_for_metrics", Only("[]"), ""),
    foreign("skip_memory_metrics", Any, ""),
    foreign("debug", Only("\"\""), ""),
    // Snapshots.
    foreign("save_only_model", Only("false"), "a snapshot must hold all state to resume a run; the model alone is in `model/` at the end"),
    foreign("save_on_each_node", Any, ""),
    foreign("save_safetensors", Only("true"), "weights are always saved as safetensors"),
    foreign("enable_jit_checkpoint", Only("false"), "Ctrl-C, SIGTERM, SIGHUP and SIGQUIT save a snapshot and end the run"),
    foreign("restore_callback_states_from_checkpoint", Any, ""),
    foreign("full_determinism", Only("false"), "on a CPU the same seed always gives the same losses"),
    // Several devices.
    foreign("fsdp", Only("\"\""), "start several processes with `--nproc N` or torchrun; `zero_stage: 1` shards the optimizer states over them, but weights are not sharded"),
    foreign("fsdp_config", Any, ""),
    foreign("deepspeed", Null, PROCESSES),
    foreign("accelerator_config", Any, ""),
    foreign("parallelism_config", Null, ""),
    foreign("local_rank", Only("-1"), ""),
    // The Hub.
    foreign("push_to_hub", Only("false"), "upload the folder `model/` of the run"),
    foreign("hub_model_id", Any, ""),
    foreign("hub_token", Any, ""),
    foreign("hub_private_repo", Any, ""),
    foreign("hub_strategy", Any, ""),
    foreign("hub_always_push", Any, ""),
    foreign("hub_revision", Any, ""),
    // Metadata in files of PEFT and bitsandbytes.
    foreign("task_type", Any, "").also(&["lora_task_type"]),
    foreign("peft_type", Any, ""),
    foreign("inference_mode", Any, ""),
    foreign("trust_remote_code", Any, ""),
    foreign("quant_method", Any, ""),
    foreign("bnb_4bit_quant_storage", Any, ""),
    // Options of transformers' example scripts.
    foreign("do_train", Any, ""),
    foreign("do_eval", Any, ""),
    foreign("do_predict", Only("false"), ""),
];
