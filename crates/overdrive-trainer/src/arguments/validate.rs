//! Checks of a configuration before anything is loaded. The ranges of single keys are in the table of keys;
//! this module checks keys against each other.

use std::path::PathBuf;

use super::choices::IntervalStrategy;
use super::data::is_token_file;
use super::finetune::FinetuneArguments;
use super::key::Program;
use super::keys::{Source, check_ranges, refuse_unread};
use super::read::{as_value, keys_of};
use super::training::TrainingArguments;
use crate::Result;
use crate::error::{invalid, refuse};

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
        let from_trace = STEPS_BEFORE_TRACE + 1;
        let too_few = format!(
            "at least {from_trace} with `trace`, which records from step {from_trace} on; give more steps, or leave \
             `trace` out"
        );
        let traced = 1..=STEPS_BEFORE_TRACE.cast_signed();
        // A tokenizer is trained on text only. A folder may hold tokens too; the training of the tokenizer checks
        // that case.
        let is_named = |path: PathBuf| path.extension().is_some() && !is_token_file(&path);
        let is_text = self.data.is_empty() || self.data_paths().any(is_named);
        let missing = self.report_to.iter().find(|one| !one.is_built());
        let missing = missing.map_or("", |one| one.name());
        let not_built = format!(
            "a destination that this program was built with; build it with `--features {missing}`, or leave it out"
        );
        #[rustfmt::skip]
        refuse(&[
            (self.max_steps == 0, "max_steps", &0,
                "at least 1, or -1 to train for `num_train_epochs`"),
            (self.trace.is_some() && traced.contains(&self.max_steps), "max_steps", &self.max_steps, &too_few),
            (self.emit_nvtx && self.trace.is_some(), "emit_nvtx", &true,
                "left out with `trace`: libtorch has one profiler; give one of the two"),
            (self.tokenizer.is_none() && is_text && self.vocab_size < 257, "vocab_size", &self.vocab_size,
                "at least 257, because a byte-level tokenizer has a token for each of the 256 bytes and one for the end of a document; give 257 or more, or a `tokenizer`"),
            // A layer that sets one resets the other, so both come from the same file or from code.
            (self.bf16 && self.fp16, "bf16", &true,
                "false if `fp16` is true; drop one, or add `--no-fp16` or `--no-bf16`"),
            (self.fp8 && (self.bf16 || self.fp16), "fp8", &true,
                "false if `bf16` or `fp16` is true; drop one, or add `--no-fp8`, `--no-fp16` or `--no-bf16`"),
            (!missing.is_empty(), "report_to", &missing, &not_built),
        ])?;
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
        let quantized = self.load_in_4bit || self.load_in_8bit;
        let sources = self.training.mixture_sources()?;
        let source = sources.first();
        let source = source.map(|(path, weight)| format!("{}:{weight}", path.display()));
        let source = source.unwrap_or_default();
        let never_evaluates = self.training.eval_strategy == IntervalStrategy::No;
        let template = format!("{:?}", self.prompt_template);
        #[rustfmt::skip]
        refuse(&[
            (self.model_name_or_path.as_os_str().is_empty(), "model_name_or_path", &"not set",
                "the folder, GGUF file or hub name of the model to fine-tune; give it with `--model MODEL`"),
            (self.training.data.is_empty(), "data", &"not set",
                "a file of records to train on; give it with `--data FILE`"),
            (!source.is_empty(), "data", &source,
                "a path without a weight: a mixture is for training from scratch; repeat or select records in the files instead"),
            (self.load_in_4bit && self.load_in_8bit, "load_in_4bit", &true,
                "false if `load_in_8bit` is true; drop one of them"),
            (!self.use_peft && quantized, "use_peft", &false,
                "true with quantized weights, which cannot be trained; train adapters, or leave out `load_in_4bit` and `load_in_8bit`"),
            (self.merge && !self.use_peft, "merge", &true,
                "false without `use_peft`, because there is no adapter; drop it, the whole model is saved"),
            (!self.prompt_template.contains("{prompt}"), "prompt_template", &template,
                "a text that contains {prompt}"),
            (self.training.eval_on_start && never_evaluates, "eval_on_start", &true,
                "false with `eval_strategy: no`, because no record is held out; set `eval_strategy` (`--eval-steps N`)"),
        ])?;
        self.refuse_unread()?;
        self.lora_config().validate()?;
        Ok(())
    }

    /// Refuses keys of training from scratch that have no effect here.
    fn refuse_unread(&self) -> Result<()> {
        let source = Source {
            origin: "the configuration",
            file: None,
            program: Program::Finetune,
        };
        let defaults = as_value(&TrainingArguments::default())?;
        let mut unread = keys_of(&self.training)?;
        // Shape and tokenizer come from the model, regardless of a preset of training.
        let of_model = ["preset", "model", "tokenizer", "vocab_size"];
        unread.retain(|key, value| {
            defaults[key.as_str()] != *value && !of_model.contains(&key.as_str())
        });
        refuse_unread(&mut unread, source)
    }
}
