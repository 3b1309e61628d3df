//! Checks of a configuration before anything is loaded. The ranges of single keys are in the table of keys;
//! this module checks keys against each other.

use std::path::PathBuf;

use super::choices::IntervalStrategy;
use super::data::is_token_file;
use super::finetune::FinetuneArguments;
use super::key::Program;
use super::keys::{Source, check_ranges, refuse_unread};
use super::read::as_value;
use super::training::TrainingArguments;
use crate::Result;
use crate::error::invalid;
use serde_json::{Map, Value};

/// The number of steps before the trace: by then caches are warm and kernels compiled.
pub(crate) const STEPS_BEFORE_TRACE: u64 = 5;

impl TrainingArguments {
    /// Checks the values by themselves and against each other. It does not access the disk.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the key, its value and the allowed values.
    pub fn validate(&self) -> Result<()> {
        check_ranges(&as_value(self)?, &as_value(&Self::default())?)?;
        // JSON has `null` both for NaN and for an optional key that is not set.
        let optional = [
            ("eval_steps", self.eval_steps),
            ("ddp_bucket_cap_mb", self.ddp_bucket_cap_mb),
            ("ema_decay", self.ema_decay),
        ];
        for (key, number) in optional {
            if number.is_some_and(|number| !number.is_finite()) {
                let expected = "a finite number; leave the key out for the default";
                return invalid(key, "not a finite number", expected);
            }
        }
        if self.max_steps == 0 {
            let expected = "at least 1, or -1 to train for `num_train_epochs`";
            return invalid("max_steps", 0, expected);
        }
        let epochs = self.num_train_epochs;
        if self.max_steps < 0 && !(epochs.is_finite() && epochs > 0.0) {
            let expected = "positive if `max_steps` is not set";
            return invalid("num_train_epochs", epochs, expected);
        }
        let last_without_trace = STEPS_BEFORE_TRACE.cast_signed();
        if self.trace.is_some() && (1..=last_without_trace).contains(&self.max_steps) {
            let expected = format!(
                "at least {0} with `trace`, which records from step {0} on; give more steps, or leave \
                 `trace` out",
                STEPS_BEFORE_TRACE + 1
            );
            return invalid("max_steps", self.max_steps, expected);
        }
        if self.emit_nvtx && self.trace.is_some() {
            let expected = "left out with `trace`: libtorch has one profiler; give one of the two";
            return invalid("emit_nvtx", true, expected);
        }
        // A tokenizer is trained on text only. A folder may hold tokens too; the training of the tokenizer checks
        // that case.
        let is_named = |path: PathBuf| path.extension().is_some() && !is_token_file(&path);
        let is_text = self.data.is_empty() || self.data_paths().any(is_named);
        if self.tokenizer.is_none() && is_text && self.vocab_size < 257 {
            let expected = "at least 257, because a byte-level tokenizer has a token for each of the 256 bytes \
                            and one for the end of a document; give 257 or more, or a `tokenizer`";
            return invalid("vocab_size", self.vocab_size, expected);
        }
        // A layer that sets one resets the other, so both come from the same file or from code.
        if self.bf16 && self.fp16 {
            let expected = "false if `fp16` is true; drop one, or add `--no-fp16` or `--no-bf16`";
            return invalid("bf16", true, expected);
        }
        if let Some(missing) = self.report_to.iter().find(|one| !one.is_built()) {
            let name = missing.name();
            let expected = format!(
                "a destination that this program was built with; build it with `--features {name}`, or leave it out"
            );
            return invalid("report_to", name, expected);
        }
        self.validate_loading()?;
        self.validate_mixture()?;
        self.validate_saving()?;
        self.model.validate(self.vocab_size, self.context_length)
    }
}

impl FinetuneArguments {
    /// Checks the values by themselves and against each other. It does not access the disk.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) and [`Error::Unsupported`](crate::Error::Unsupported), and those
    /// of [`TrainingArguments::validate`] and [`LoraConfig::validate`](overdrive_lora::LoraConfig::validate).
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
        if let Some((path, weight)) = self.training.mixture_sources()?.first() {
            let expected = "a path without a weight: a mixture is for training from scratch; repeat or select records in \
                            the files instead";
            return invalid("data", format!("{}:{weight}", path.display()), expected);
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
        // The tokens of a conversation include those of the template, so bytes of text cannot be counted.
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
            // Shape and tokenizer come from the model, regardless of a preset of training.
            let of_model = ["preset", "model", "tokenizer", "vocab_size"];
            unread.extend(values.into_iter().filter(|(key, value)| {
                defaults[key.as_str()] != *value && !of_model.contains(&key.as_str())
            }));
        }
        refuse_unread(&mut unread, source)
    }
}
