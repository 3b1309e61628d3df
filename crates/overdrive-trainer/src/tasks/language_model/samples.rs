use overdrive_datasets::Tokenizer;
use overdrive_generation::{GenerationConfig, generate};
use overdrive_tracking::Sample;
use overdrive_transformer::CausalLm;

use crate::arguments::TrainingArguments;
use crate::data::TextData;
use crate::{Error, Result};

/// The maximum number of prompt tokens.
const PROMPT_TOKENS: usize = 24;
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
    let prompt_tokens = PROMPT_TOKENS.min(context / 2);
    let config = GenerationConfig {
        max_new_tokens: Some(NEW_TOKENS.min(context - prompt_tokens)),
        do_sample: true,
        temperature: 0.8,
        top_k: 0,
        top_p: 0.95,
        seed: Some(arguments.seed),
        eos_token_id: data.end_of_text().map(i64::from).into_iter().collect(),
        ..GenerationConfig::default()
    };
    let wanted = usize::try_from(arguments.samples).unwrap_or(usize::MAX);
    prompts(data, prompt_tokens, wanted)?
        .into_iter()
        .map(|prompt| {
            let output = generate(model, std::slice::from_ref(&prompt), &config)?;
            Ok(Sample {
                prompt: text(tokenizer, &prompt)?,
                completion: text(tokenizer, output.new_tokens(0))?,
            })
        })
        .collect()
}

/// Returns the first tokens of evenly spaced validation documents.
fn prompts(data: &TextData, tokens: usize, wanted: usize) -> Result<Vec<Vec<i64>>> {
    let store = data.validation.store();
    let long_enough: Vec<_> = data
        .validation
        .document_numbers()
        .filter_map(|number| store.document(number))
        .filter(|document| document.tokens.len() > 2 * tokens)
        .collect();
    let every = (long_enough.len() / wanted.max(1)).max(1);
    long_enough
        .iter()
        .step_by(every)
        .take(wanted)
        .map(|document| {
            let start = document.tokens.start;
            let prompt = store.tokens(start..start + tokens)?;
            Ok(prompt.into_iter().map(i64::from).collect())
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
