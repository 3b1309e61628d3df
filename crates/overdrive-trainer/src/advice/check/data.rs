//! The check of the data and the tokenizer.

use overdrive_core::units;

use super::Finding;
use super::Severity::{Failure, Warning};
use crate::Error;
use crate::arguments::TrainingArguments;
use crate::data::TextData;

/// The number of passes up to which repeated text is worth about as much as new text (Muennighoff et al., "Scaling
/// Data-Constrained Language Models", 2023).
const WORTHWHILE_PASSES: f64 = 4.0;
/// The number of bytes of text per token below which a tokenizer does not suit the text: a byte-level tokenizer that
/// knows none of its words has 1, GPT-2's has about 4 on English.
const LEAST_BYTES_PER_TOKEN: f64 = 2.0;

/// Returns the findings about the data, prepared as the run does it.
pub(super) fn findings(
    arguments: &TrainingArguments,
    data: std::result::Result<&TextData, &Error>,
) -> Vec<Finding> {
    let data = match data {
        Ok(data) => data,
        // Errors of the data already name their remedy.
        Err(error) => {
            let remedy =
                "change `data` (`--data`) or the named key; the run would end with this error";
            return vec![Finding::fine("data", error.to_string()).or(true, Failure, remedy)];
        }
    };
    let tokens = data.train.len() as u64;
    let mut found = vec![amount(arguments, data, tokens)];
    found.extend(tokenizer(data));
    found
}

fn amount(arguments: &TrainingArguments, data: &TextData, tokens: u64) -> Finding {
    let what = format!(
        "{} tokens to train on, {} for validation",
        units::short_count(tokens),
        units::short_count(data.validation.len() as u64)
    );
    let plan = arguments.plan(data.micro_batches_per_epoch(arguments));
    let passes = plan.map_or(0.0, |plan| {
        plan.total_steps as f64 / plan.steps_per_epoch as f64
    });
    let what = format!("{what}; the run passes over them {passes:.1} times");
    let remedy = format!(
        "give more text or fewer steps (`max_steps`, `num_train_epochs`): beyond {WORTHWHILE_PASSES} passes \
         repeated text teaches a model less and less"
    );
    Finding::fine("data", what).or(passes > WORTHWHILE_PASSES, Warning, remedy)
}

/// Returns the finding about the tokenizer; `None` if the bytes of the text are not known.
fn tokenizer(data: &TextData) -> Option<Finding> {
    let bytes = data.train.text_bytes()? as f64;
    let per_token = bytes / data.train.len().max(1) as f64;
    let what = format!(
        "{per_token:.2} bytes of text a token, {} tokens in the vocabulary",
        data.vocab_size()
    );
    let remedy = "give a tokenizer that was made for this language and kind of text, raise `vocab_size`, or leave \
                  `tokenizer` out, so that one is trained on the data";
    let unsuited = per_token < LEAST_BYTES_PER_TOKEN;
    Some(Finding::fine("tokenizer", what).or(unsuited, Warning, remedy))
}
