//! Parts of other projects' configurations that are more than an alternative name of a key: sections, and keys
//! whose values correspond to other keys. An alternative name is a spelling in the row of its key, in `training.rs`,
//! `model.rs` or `finetune.rs`.

/// Sections whose keys are read as top-level keys.
pub(super) struct Section {
    pub(super) names: &'static [&'static str],
    /// Keys that have another name inside the section.
    pub(super) inside: &'static [(&'static str, &'static str)],
    /// If `true`, training from scratch refuses the section.
    pub(super) of_finetuning: bool,
}

#[rustfmt::skip]
pub(super) static SECTIONS: &[Section] = &[
    Section { of_finetuning: false, inside: &[], names: &[
        "training", "training_args", "dataloader", "optimization", "performance", "memory", "logging",
        "quantization_config", "bnb_config", "quantization",
    ] },
    Section { of_finetuning: true, names: &["peft_config", "lora_config", "lora"], inside: &[
        ("r", "lora_r"), ("rank", "lora_r"), ("alpha", "lora_alpha"), ("dropout", "lora_dropout"),
    ] },
    Section { of_finetuning: false, names: &["early_stopping", "use_early_stopping"], inside: &[
        ("patience", "early_stopping_patience"),
        ("min_delta", "early_stopping_threshold"), ("delta", "early_stopping_threshold"), ("threshold", "early_stopping_threshold"),
        ("metric", "metric_for_best_model"), ("monitor", "metric_for_best_model"),
    ] },
];

/// Options of keys that are objects, which must be unset or false, with the remedy.
#[rustfmt::skip]
pub(super) static REFUSED: &[(&str, &str)] = &[
    ("accelerator_config.split_batches", "leave it out, and set `per_device_train_batch_size` to the batch of one process"),
    ("accelerator_config.gradient_accumulation_kwargs.num_steps", "set `gradient_accumulation_steps`"),
    ("gradient_checkpointing_kwargs.offload", "leave it out: activations are recomputed, not moved to the host"),
];

/// A key whose values correspond to other keys. If its name is also a key of Overdrive, values without a rule
/// are kept; otherwise they are errors.
pub(super) struct Translation {
    pub(super) names: &'static [&'static str],
    pub(super) rules: &'static [Rule],
    /// A key that disables the rules if it is set (and not false).
    pub(super) unless: &'static str,
}

/// The meaning of some values of a key.
pub(super) struct Rule {
    /// The values, in lower case and without `torch.`; `N` is any number.
    pub(super) given: &'static [&'static str],
    /// The key and its value, as JSON; `N` is the given number. `None` sets nothing.
    pub(super) sets: Option<(&'static str, &'static str)>,
    /// The end of the note about the translation.
    pub(super) note: &'static str,
}

const fn sets(
    given: &'static [&'static str],
    key: &'static str,
    json: &'static str,
    note: &'static str,
) -> Rule {
    let sets = Some((key, json));
    Rule { given, sets, note }
}

const fn nothing(given: &'static [&'static str], note: &'static str) -> Rule {
    let sets = None;
    Rule { given, sets, note }
}

// Each rule is on one line, so that the table can be read as a table.
#[rustfmt::skip]
pub(super) static TRANSLATIONS: &[Translation] = &[
    Translation { names: &["dtype", "torch_dtype", "mixed_precision", "precision"], unless: "", rules: &[
        sets(&["bf16", "bfloat16", "bf16-mixed"], "bf16", "true", " (autocast)"),
        sets(&["fp16", "float16", "half", "16-mixed"], "fp16", "true", " (autocast)"),
        sets(&["fp8"], "fp8", "true", " (autocast to bf16, linear layers in FP8)"),
        sets(&["fp32", "float32", "32", "32-true", "no"], "auto_precision", "false", " (training without autocast)"),
        nothing(&["auto"], "names no dtype"),
    ] },
    Translation { names: &["use_amp"], unless: "bf16", rules: &[
        sets(&["true"], "fp16", "true", ", torch.amp's own choice"),
        sets(&["false"], "auto_precision", "false", " (training without autocast)"),
    ] },
    Translation { names: &["use_flash_attention", "use_flash_attention_2", "use_flash_attn", "flash_attention"], unless: "", rules: &[
        sets(&["true"], "attn_implementation", "\"flash_attention_2\"", ""),
        sets(&["false"], "attn_implementation", "\"sdpa\"", ""),
    ] },
    Translation { names: &["gradient_checkpointing"], unless: "", rules: &[
        sets(&["unsloth"], "gradient_checkpointing", "true", ""),
    ] },
    Translation { names: &["train_sampling_strategy"], unless: "", rules: &[
        sets(&["random"], "group_by_length", "false", ""),
        sets(&["group_by_length"], "group_by_length", "true", ""),
    ] },
    Translation { names: &["early_stopping", "use_early_stopping"], unless: "early_stopping_patience", rules: &[
        sets(&["true"], "early_stopping_patience", "3", ""),
        sets(&["N"], "early_stopping_patience", "N", ""),
        nothing(&["false"], "sets nothing"),
    ] },
    Translation { names: &["pad_to_multiple_of"], unless: "", rules: &[nothing(&["auto"], "is the default")] },
    Translation { names: &["device"], unless: "", rules: &[
        nothing(&["cuda", "gpu", "auto"], "is a GPU if there is one"),
        sets(&["cpu"], "use_cpu", "true", ""),
    ] },
    Translation { names: &["provider"], unless: "", rules: &[
        nothing(&["unsloth"], "is not needed: its fused kernels are `fused_kernels`, on by default (H100 and H200 run overdrive-gpu's kernels, other GPUs libtorch's operators), its checkpointing is `gradient_checkpointing`, and QLoRA is `load_in_4bit`"),
        nothing(&["liger"], "is not needed: its fused kernels are `fused_kernels`, on by default; H100 and H200 run overdrive-gpu's kernels, other GPUs libtorch's operators"),
        nothing(&["deepspeed"], "is not needed: several processes are started by `--nproc N` or torchrun, and `zero_stage: 1` shards the optimizer states over them"),
        nothing(&["axolotl"], "is not needed: its keys are read where they are PEFT's and TRL's"),
        nothing(&["huggingface", "hf", "transformers", "trl", "peft", "pytorch", "torch", "accelerate"], "is not needed: Overdrive replaces it"),
    ] },
];
