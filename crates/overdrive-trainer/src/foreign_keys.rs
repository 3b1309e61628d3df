//! Keys of Hugging Face's that Overdrive's trainer cannot do.
//!
//! A configuration written for transformers, TRL, PEFT or bitsandbytes should load as it stands, or
//! name what it asks for that cannot be done. So each of their keys that we do not have is listed
//! with the value that asks for nothing: with that value it is passed over, with any other it is an
//! error. Nothing is ignored silently that would change the run.

use serde_json::{Map, Value};

use crate::{Error, Result};

/// What a foreign key may be without asking for anything. `null` always may.
enum Harmless {
    /// This value, as JSON.
    Value(&'static str),
    /// Any value: the key only says how, and another key says whether.
    Any,
}

use Harmless::{Any, Value as Only};

const QUANTIZED: &str = "weights that learn are not quantized; adapters over quantized ones are trained by the example `finetune`";

/// The keys, with what to do instead where there is something better than leaving them out.
const FOREIGN: &[(&str, Harmless, &str)] = &[
    // Memory and speed.
    ("activation_checkpointing_kwargs", Any, ""),
    (
        "torch_compile",
        Only("false"),
        "leave it out: the fused kernels (`fused_kernels`, on) are what it would make in training, and \
         overdrive-compiled runs packages of torch's compiler",
    ),
    ("torch_compile_backend", Any, ""),
    ("torch_compile_mode", Any, ""),
    // What Liger does is done anyway, unless `fused_kernels` is false.
    ("use_liger_kernel", Any, ""),
    ("liger_kernel_config", Any, ""),
    (
        "auto_find_batch_size",
        Only("false"),
        "set `per_device_train_batch_size`",
    ),
    (
        "bf16_full_eval",
        Only("false"),
        "evaluation runs in the precision of training",
    ),
    (
        "fp16_full_eval",
        Only("false"),
        "evaluation runs in the precision of training",
    ),
    ("torch_empty_cache_steps", Only("null"), ""),
    // Optimization.
    ("optim_args", Only("null"), ""),
    ("optim_target_modules", Only("null"), ""),
    ("label_smoothing_factor", Only("0"), ""),
    ("neftune_noise_alpha", Only("null"), ""),
    ("average_tokens_across_devices", Any, ""),
    // Data.
    (
        "train_sampling_strategy",
        Only("\"random\""),
        "`random` and `group_by_length` there are",
    ),
    (
        "data_seed",
        Only("null"),
        "`seed` decides the order of the data",
    ),
    // Threads live as long as the loader, and batches come in order.
    ("dataloader_persistent_workers", Any, ""),
    ("dataloader_multiprocessing_context", Any, ""),
    ("dataloader_in_order", Any, ""),
    ("remove_unused_columns", Any, ""),
    ("label_names", Any, ""),
    ("ignore_data_skip", Only("false"), ""),
    // Logging and evaluation.
    (
        "logging_dir",
        Only("null"),
        "the events go to `tensorboard/` in `output_dir`",
    ),
    ("logging_strategy", Only("\"steps\""), "set `logging_steps`"),
    ("logging_first_step", Any, ""),
    ("logging_nan_inf_filter", Any, ""),
    ("include_num_input_tokens_seen", Any, ""),
    ("log_level", Any, ""),
    ("log_level_replica", Any, ""),
    ("log_on_each_node", Any, ""),
    ("disable_tqdm", Any, ""),
    ("run_name", Any, ""),
    ("eval_delay", Only("0"), ""),
    ("eval_accumulation_steps", Any, ""),
    ("prediction_loss_only", Any, ""),
    ("eval_do_concat_batches", Any, ""),
    ("eval_use_gather_object", Any, ""),
    ("batch_eval_metrics", Any, ""),
    ("include_for_metrics", Only("[]"), ""),
    ("skip_memory_metrics", Any, ""),
    ("debug", Only("\"\""), ""),
    // Saving and going on.
    (
        "save_only_model",
        Only("false"),
        "a snapshot is what a run goes on from; the model alone is in `model/` at the end",
    ),
    ("save_on_each_node", Any, ""),
    (
        "save_safetensors",
        Only("true"),
        "weights are always saved as safetensors",
    ),
    (
        "enable_jit_checkpoint",
        Only("false"),
        "Ctrl-C and SIGTERM save a snapshot and the model as it is",
    ),
    ("restore_callback_states_from_checkpoint", Any, ""),
    (
        "full_determinism",
        Only("false"),
        "on a CPU the same seed gives the same losses already",
    ),
    // Several devices.
    ("ddp_static_graph", Any, ""),
    (
        "fsdp",
        Only("\"\""),
        "start several processes with `--nproc N` or torchrun; weights are not shared out between them",
    ),
    ("fsdp_config", Any, ""),
    (
        "deepspeed",
        Only("null"),
        "start several processes with `--nproc N` or torchrun",
    ),
    ("accelerator_config", Any, ""),
    ("parallelism_config", Only("null"), ""),
    ("local_rank", Only("-1"), ""),
    // The Hub.
    (
        "push_to_hub",
        Only("false"),
        "upload the folder `model/` of the run",
    ),
    ("hub_model_id", Any, ""),
    ("hub_token", Any, ""),
    ("hub_private_repo", Any, ""),
    ("hub_strategy", Any, ""),
    ("hub_always_push", Any, ""),
    ("hub_revision", Any, ""),
    // Fine-tuning with PEFT and bitsandbytes.
    (
        "model_name_or_path",
        Only("null"),
        "a model is trained from scratch, see `model`; to go on with one use the example `finetune`",
    ),
    ("use_peft", Only("false"), ""),
    ("use_lora", Only("false"), ""),
    ("lora_r", Only("0"), ""),
    ("lora_alpha", Any, ""),
    ("lora_dropout", Any, ""),
    ("lora_target_modules", Any, ""),
    ("load_in_8bit", Only("false"), QUANTIZED),
    ("load_in_4bit", Only("false"), QUANTIZED),
    ("bnb_4bit_quant_type", Any, ""),
    ("bnb_4bit_compute_dtype", Any, ""),
    ("bnb_4bit_use_double_quant", Any, ""),
    ("bnb_4bit_quant_storage", Any, ""),
    // What a script does at all.
    ("do_train", Any, ""),
    ("do_eval", Any, ""),
    ("do_predict", Only("false"), ""),
];

/// Optimizers of Hugging Face's that `optim` cannot name.
const FOREIGN_OPTIMIZERS: &[&str] = &[
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adamw_torch_4bit",
    "adamw_torch_8bit",
    "adamw_apex_fused",
    "adamw_anyprecision",
    "adamw_hf",
    "ademamix",
    "ademamix_8bit",
    "adagrad",
    "adalomo",
    "apollo_adamw",
    "galore_adamw",
    "galore_adamw_8bit",
    "grokadamw",
    "lion_8bit",
    "lomo",
    "muon",
    "paged_ademamix_32bit",
    "paged_ademamix_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
    "rmsprop",
    "rmsprop_bnb",
    "schedule_free_adamw",
    "schedule_free_radam",
    "schedule_free_sgd",
    "stable_adamw",
];

/// Whether it is a key of Hugging Face's that Overdrive's trainer has not.
pub(crate) fn is_foreign(key: &str) -> bool {
    FOREIGN.iter().any(|(foreign, ..)| *foreign == key)
}

/// Removes the foreign keys that ask for nothing.
///
/// # Errors
/// [`Error::Unsupported`] for one that asks for something.
pub(crate) fn refuse_or_drop(values: &mut Map<String, Value>, origin: &str) -> Result<()> {
    let unsupported = |key: &str, given: &Value, way_out: &str| {
        let key = key.to_owned();
        let given = given
            .as_str()
            .map_or_else(|| given.to_string(), str::to_owned);
        Error::Unsupported {
            origin: origin.to_owned(),
            key,
            given,
            way_out: way_out.to_owned(),
        }
    };
    for (key, harmless, instead) in FOREIGN {
        let Some(value) = values.shift_remove(*key) else {
            continue;
        };
        if value.is_null() || harmless.allows(&value) {
            continue;
        }
        let way_out = if instead.is_empty() {
            "leave it out"
        } else {
            instead
        };
        return Err(unsupported(key, &value, way_out));
    }
    if let Some(name) = values.get("optim")
        && name
            .as_str()
            .is_some_and(|name| FOREIGN_OPTIMIZERS.contains(&name))
    {
        return Err(unsupported(
            "optim",
            name,
            "the optimizers there are: adamw_torch_fused, adamw_8bit, paged_adamw_32bit, paged_adamw_8bit, lion_32bit, adafactor, sgd",
        ));
    }
    Ok(())
}

impl Harmless {
    fn allows(&self, value: &Value) -> bool {
        match self {
            Self::Any => true,
            Self::Value(harmless) => match serde_json::from_str::<Value>(harmless) {
                // 0 and 0.0 are one value to whoever writes a file.
                Ok(Value::Number(number)) => value.as_f64() == number.as_f64(),
                Ok(harmless) => *value == harmless,
                Err(_) => false,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_harmless_value_is_json_and_no_key_is_listed_twice_or_is_ours() {
        let ours = serde_json::to_value(crate::TrainingArguments::default()).expect("JSON");
        for (index, (key, harmless, _)) in FOREIGN.iter().enumerate() {
            if let Only(json) = harmless {
                serde_json::from_str::<Value>(json).expect(key);
            }
            assert!(ours.get(key).is_none(), "{key} is ours");
            assert!(
                FOREIGN[..index].iter().all(|(other, ..)| other != key),
                "{key} twice"
            );
        }
    }
}
