//! Keys as training guides and projects spell them: each is the one of Hugging Face's that it means, and
//! that is told.

use serde_json::{Map, Value, json};

use crate::{Error, Result};

/// Sections whose keys count as if they stood outside.
const SECTIONS: [&str; 6] = [
    "training",
    "dataloader",
    "optimization",
    "performance",
    "memory",
    "logging",
];

/// Another spelling, and what it means. Keys of bitsandbytes and PEFT among the meanings are those of the
/// example `finetune`; `train` answers them as it answers their own names.
const SPELLINGS: &[(&str, &str)] = &[
    ("batch_size", "per_device_train_batch_size"),
    ("train_batch_size", "per_device_train_batch_size"),
    ("micro_batch_size", "per_device_train_batch_size"),
    ("eval_batch_size", "per_device_eval_batch_size"),
    ("val_batch_size", "per_device_eval_batch_size"),
    ("ctx_len", "context_length"),
    ("ctx_length", "context_length"),
    ("context_len", "context_length"),
    ("seq_len", "context_length"),
    ("max_seq_len", "context_length"),
    ("sequence_length", "context_length"),
    ("num_workers", "dataloader_num_workers"),
    ("prefetch_factor", "dataloader_prefetch_factor"),
    ("pin_memory", "dataloader_pin_memory"),
    ("drop_last", "dataloader_drop_last"),
    ("persistent_workers", "dataloader_persistent_workers"),
    ("grad_accum_steps", "gradient_accumulation_steps"),
    ("grad_accumulation_steps", "gradient_accumulation_steps"),
    ("gradient_accumulation", "gradient_accumulation_steps"),
    ("accumulation_steps", "gradient_accumulation_steps"),
    ("use_gradient_checkpointing", "gradient_checkpointing"),
    ("activation_checkpointing", "gradient_checkpointing"),
    ("checkpoint_activations", "gradient_checkpointing"),
    ("lr", "learning_rate"),
    ("epochs", "num_train_epochs"),
    ("num_epochs", "num_train_epochs"),
    ("steps", "max_steps"),
    ("max_iters", "max_steps"),
    ("grad_clip", "max_grad_norm"),
    ("gradient_clip", "max_grad_norm"),
    ("gradient_clipping", "max_grad_norm"),
    ("clip_grad_norm", "max_grad_norm"),
    ("scheduler", "lr_scheduler_type"),
    ("lr_scheduler", "lr_scheduler_type"),
    ("scheduler_type", "lr_scheduler_type"),
    ("optimizer", "optim"),
    ("use_bf16", "bf16"),
    ("use_fp16", "fp16"),
    ("use_tf32", "tf32"),
    ("allow_tf32", "tf32"),
    ("out_dir", "output_dir"),
    ("checkpoint_dir", "output_dir"),
    ("log_interval", "logging_steps"),
    ("log_every", "logging_steps"),
    ("eval_interval", "eval_steps"),
    ("eval_every", "eval_steps"),
    ("save_interval", "save_steps"),
    ("save_every", "save_steps"),
    ("checkpoint_interval", "save_steps"),
    ("checkpoint_every", "save_steps"),
    ("keep_last", "save_total_limit"),
    ("max_checkpoints", "save_total_limit"),
    ("resume", "resume_from_checkpoint"),
    ("auto_resume", "resume_from_checkpoint"),
    ("patience", "early_stopping_patience"),
    ("early_stop_patience", "early_stopping_patience"),
    ("early_stopping_min_delta", "early_stopping_threshold"),
    ("early_stopping_delta", "early_stopping_threshold"),
    ("min_delta", "early_stopping_threshold"),
    ("use_4bit", "load_in_4bit"),
    ("use_8bit", "load_in_8bit"),
    ("quant_type", "bnb_4bit_quant_type"),
    ("compute_dtype", "bnb_4bit_compute_dtype"),
    ("use_double_quant", "bnb_4bit_use_double_quant"),
    ("use_nested_quant", "bnb_4bit_use_double_quant"),
];

/// Libraries that `provider` (or `backend`) can name, and what takes their place.
const PROVIDERS: &[(&str, &str)] = &[
    (
        "unsloth",
        "its fused kernels and its checkpointing are `fused_kernels` and `gradient_checkpointing`, and QLoRA is \
         `load_in_4bit`",
    ),
    (
        "liger",
        "its fused kernels are `fused_kernels`, on by default",
    ),
    (
        "deepspeed",
        "several processes are started by `--nproc N` or torchrun; states shared out between them are \
         overdrive-distributed's `ZeroRedundancyOptimizer`",
    ),
    (
        "axolotl",
        "its keys are read where they are PEFT's and TRL's",
    ),
];

/// Libraries whose part Overdrive plays.
const EQUALS: [&str; 8] = [
    "huggingface",
    "hf",
    "transformers",
    "trl",
    "peft",
    "pytorch",
    "torch",
    "accelerate",
];

/// What the flag of early stopping comes to where no patience is given.
const PATIENCE: u64 = 3;

/// Puts each key under its name here. What was meant is told in `notes`, a line a key.
///
/// # Errors
/// [`Error::GivenTwice`] for two spellings that contradict each other, [`Error::UnknownChoice`].
pub(crate) fn translate(
    mut values: Map<String, Value>,
    origin: &str,
    notes: &mut Vec<String>,
) -> Result<Map<String, Value>> {
    open_sections(&mut values, origin, notes)?;
    early_stopping(&mut values, origin, notes)?;
    for (spelling, key) in SPELLINGS {
        if let Some(value) = values.shift_remove(*spelling) {
            notes.push(format!("`{spelling}` is `{key}`"));
            put(&mut values, spelling, key, value, origin)?;
        }
    }
    if values.contains_key("eval_steps") && !values.contains_key("eval_strategy") {
        let known = values.contains_key("evaluation_strategy");
        if !known && notes.iter().any(|note| note.ends_with("`eval_steps`")) {
            values.insert("eval_strategy".to_owned(), json!("steps"));
        }
    }
    precision(&mut values, origin, notes)?;
    attention(&mut values, origin, notes)?;
    device(&mut values, origin, notes)?;
    provider(&mut values, origin, notes)?;
    // Unsloth's own way of it.
    if let Some(value) = values.get_mut("gradient_checkpointing")
        && value.as_str() == Some("unsloth")
    {
        notes.push("`gradient_checkpointing: unsloth` is `true`".to_owned());
        *value = true.into();
    }
    Ok(values)
}

/// All other spellings, for the nearest known key.
pub(crate) fn spellings() -> impl Iterator<Item = &'static str> {
    SPELLINGS.iter().map(|(spelling, _)| *spelling)
}

fn open_sections(
    values: &mut Map<String, Value>,
    origin: &str,
    notes: &mut Vec<String>,
) -> Result<()> {
    for section in SECTIONS {
        if !values.get(section).is_some_and(Value::is_object) {
            continue;
        }
        if let Some(Value::Object(inner)) = values.shift_remove(section) {
            notes.push(format!(
                "the keys of `{section}` are read as if they stood outside"
            ));
            for (key, value) in inner {
                put(values, &format!("{section}.{key}"), &key, value, origin)?;
            }
        }
    }
    Ok(())
}

/// `early_stopping: true`, or `{patience, min_delta}`.
fn early_stopping(
    values: &mut Map<String, Value>,
    origin: &str,
    notes: &mut Vec<String>,
) -> Result<()> {
    for key in ["early_stopping", "use_early_stopping"] {
        match values.shift_remove(key) {
            None | Some(Value::Null | Value::Bool(false)) => {}
            Some(Value::Object(inner)) => {
                notes.push(format!(
                    "`{key}` is `early_stopping_patience` and `early_stopping_threshold`"
                ));
                for (name, value) in inner {
                    let outside = match name.as_str() {
                        "enabled" => continue,
                        "patience" => "early_stopping_patience",
                        "min_delta" | "delta" | "threshold" => "early_stopping_threshold",
                        "metric" | "monitor" => "metric_for_best_model",
                        other => other,
                    };
                    put(values, &format!("{key}.{name}"), outside, value, origin)?;
                }
            }
            Some(Value::Bool(true)) => {
                let given = ["early_stopping_patience", "early_stop_patience", "patience"];
                if !given.iter().any(|name| values.contains_key(*name)) {
                    notes.push(format!(
                        "`{key}: true` is `early_stopping_patience: {PATIENCE}`"
                    ));
                    values.insert("early_stopping_patience".to_owned(), json!(PATIENCE));
                }
            }
            Some(number) => put(values, key, "early_stopping_patience", number, origin)?,
        }
    }
    Ok(())
}

/// `dtype`, `mixed_precision` and `use_amp` in `bf16` and `fp16`.
fn precision(values: &mut Map<String, Value>, origin: &str, notes: &mut Vec<String>) -> Result<()> {
    for key in ["dtype", "torch_dtype", "mixed_precision", "precision"] {
        let Some(Value::String(name)) = values.get(key).cloned() else {
            continue;
        };
        let short = name.trim_start_matches("torch.").to_lowercase();
        let set = match short.as_str() {
            "bf16" | "bfloat16" | "bf16-mixed" => Some("bf16"),
            "fp16" | "float16" | "half" | "16-mixed" => Some("fp16"),
            "no" | "fp32" | "float32" | "32" | "32-true" | "auto" => None,
            _ => {
                return Err(Error::UnknownChoice {
                    origin: origin.to_owned(),
                    key: key.to_owned(),
                    given: name,
                    choices: "`bf16`, `fp16`, `fp32`".to_owned(),
                    hint: String::new(),
                });
            }
        };
        values.shift_remove(key);
        match set {
            Some(target) => {
                notes.push(format!("`{key}: {name}` is `{target}: true` (autocast)"));
                put(values, key, target, true.into(), origin)?;
            }
            None => notes.push(format!("`{key}: {name}` is training without autocast")),
        }
    }
    if let Some(Value::Bool(on)) = values.get("use_amp").cloned() {
        values.shift_remove("use_amp");
        let named = ["bf16", "fp16"]
            .iter()
            .any(|key| values.get(*key) == Some(&Value::Bool(true)));
        if on && !named {
            notes.push("`use_amp` is `fp16: true`, torch.amp's own choice".to_owned());
            values.insert("fp16".to_owned(), true.into());
        }
    }
    Ok(())
}

fn attention(values: &mut Map<String, Value>, origin: &str, notes: &mut Vec<String>) -> Result<()> {
    for key in [
        "use_flash_attention",
        "use_flash_attention_2",
        "use_flash_attn",
        "flash_attention",
    ] {
        if let Some(Value::Bool(on)) = values.get(key).cloned() {
            values.shift_remove(key);
            let kernel = if on { "flash_attention_2" } else { "sdpa" };
            notes.push(format!("`{key}: {on}` is `attn_implementation: {kernel}`"));
            put(values, key, "attn_implementation", kernel.into(), origin)?;
        }
    }
    Ok(())
}

/// `device: cuda` is what happens anyway where there is one.
fn device(values: &mut Map<String, Value>, origin: &str, notes: &mut Vec<String>) -> Result<()> {
    let Some(Value::String(name)) = values.get("device").cloned() else {
        return Ok(());
    };
    values.shift_remove("device");
    match name.split(':').next().unwrap_or_default() {
        "cpu" => {
            notes.push("`device: cpu` is `use_cpu: true`".to_owned());
            put(values, "device", "use_cpu", true.into(), origin)
        }
        "cuda" | "gpu" | "auto" => {
            notes.push(format!(
                "`device: {name}`: a GPU is used where there is one"
            ));
            Ok(())
        }
        _ => Err(Error::UnknownChoice {
            origin: origin.to_owned(),
            key: "device".to_owned(),
            given: name,
            choices: "`cuda`, `cpu`, `auto`".to_owned(),
            hint: String::new(),
        }),
    }
}

fn provider(values: &mut Map<String, Value>, origin: &str, notes: &mut Vec<String>) -> Result<()> {
    let Some(Value::String(name)) = values.get("provider").cloned() else {
        return Ok(());
    };
    values.shift_remove("provider");
    let short = name.to_lowercase();
    if let Some((_, instead)) = PROVIDERS.iter().find(|(provider, _)| *provider == short) {
        notes.push(format!("`provider: {name}` is not had here: {instead}"));
    } else if !EQUALS.contains(&short.as_str()) {
        let all = PROVIDERS.iter().map(|(name, _)| *name).chain(EQUALS);
        return Err(Error::UnknownChoice {
            origin: origin.to_owned(),
            key: "provider".to_owned(),
            given: name,
            choices: all
                .map(|name| format!("`{name}`"))
                .collect::<Vec<_>>()
                .join(", "),
            hint: String::new(),
        });
    }
    Ok(())
}

/// Under `key`, unless something else is there already.
pub(crate) fn put(
    values: &mut Map<String, Value>,
    from: &str,
    key: &str,
    value: Value,
    origin: &str,
) -> Result<()> {
    match values.get(key) {
        Some(other) if *other != value => Err(Error::GivenTwice {
            origin: origin.to_owned(),
            first: from.to_owned(),
            second: key.to_owned(),
        }),
        _ => {
            values.insert(key.to_owned(), value);
            Ok(())
        }
    }
}
