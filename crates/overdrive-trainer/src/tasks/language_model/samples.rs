use overdrive_datasets::Tokenizer;
use overdrive_generation::{GenerationConfig, generate};
use overdrive_tracking::Sample;
use overdrive_transformer::CausalLm;

use crate::arguments::TrainingArguments;
use crate::data::TextData;
use crate::{Error, Result};

/// The number of generated tokens.
const NEW_TOKENS: usize = 120;

/// Continues the beginnings of `arguments.samples` validation documents at temperature 0.8 and top-p 0.95. The
/// same seed gives the same samples.
pub(super) fn write_samples(
    model: &CausalLm,
    data: &TextData,
    arguments: &TrainingArguments,
) -> Result<Vec<Sample>> {
    // Tokens without a tokenizer have no text.
    let Some(tokenizer) = &data.tokenizer else {
        return Ok(Vec::new());
    };
    let context = model.config().max_position_embeddings();
    let context = usize::try_from(context).unwrap_or(usize::MAX);
    let config = GenerationConfig {
        do_sample: true,
        temperature: 0.8,
        top_k: 0,
        top_p: 0.95,
        seed: Some(arguments.seed),
        eos_token_id: data.end_of_text().map(i64::from).into_iter().collect(),
        ..GenerationConfig::default()
    };
    data.prompts()
        .iter()
        .map(|prompt| {
            let prompt: Vec<i64> = prompt.iter().map(|&id| i64::from(id)).collect();
            let config = GenerationConfig {
                max_new_tokens: Some(NEW_TOKENS.min(context.saturating_sub(prompt.len()))),
                ..config.clone()
            };
            let output = generate(model, std::slice::from_ref(&prompt), &config)?;
            Ok(Sample {
                prompt: text(tokenizer, &prompt)?,
                completion: text(tokenizer, output.new_tokens(0))?,
            })
        })
        .collect()
}

pub(crate) fn text(tokenizer: &Tokenizer, tokens: &[i64]) -> Result<String> {
    let ids: Vec<u32> = tokens
        .iter()
        .filter_map(|&id| u32::try_from(id).ok())
        .collect();
    tokenizer
        .decode(&ids, true)
        .map_err(|error| Error::Generation(overdrive_generation::Error::Tokenizer(error)))
}
