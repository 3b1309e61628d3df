//! The flags that constrain a generated text.

use std::fs::read_to_string;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use overdrive::constraints::{GrammarConstraint, GrammarVocabulary};
use overdrive::generation::{ChoiceConstraint, Constraint, GenerationConfig, Tokenizer};
use overdrive::transformer::CausalLm;

/// What an answer may be; at most one of them is given.
#[derive(Debug, Clone, Args)]
pub struct ConstraintFlags {
    /// The answer is one of these texts; give it for each
    #[arg(long, group = "constraint")]
    pub choice: Vec<String>,
    /// The answer matches this regular expression
    #[arg(long, group = "constraint")]
    pub regex: Option<String>,
    /// The answer is JSON that fits the schema in this file
    #[arg(long, group = "constraint")]
    pub json_schema: Option<PathBuf>,
}

impl ConstraintFlags {
    /// Builds the constraint of one answer; `None` where no flag is given. Answers of several prompts
    /// take a [`fork`](Constraint::fork) each.
    pub fn build(
        &self,
        tokenizer: &Tokenizer,
        model: &CausalLm,
        config: &GenerationConfig,
    ) -> Result<Option<Box<dyn Constraint>>> {
        let ends = &config.eos_token_id;
        let vocabulary = || {
            let size = usize::try_from(model.config().vocab_size())?;
            anyhow::Ok(GrammarVocabulary::new(tokenizer, size, ends)?)
        };
        Ok(if !self.choice.is_empty() {
            let choices = ChoiceConstraint::from_texts(tokenizer, &self.choice, ends)?;
            Some(Box::new(choices))
        } else if let Some(pattern) = &self.regex {
            Some(Box::new(GrammarConstraint::regex(&vocabulary()?, pattern)?))
        } else if let Some(path) = &self.json_schema {
            let text = read_to_string(path).with_context(|| path.display().to_string())?;
            let schema = serde_json::from_str(&text)?;
            let grammar = GrammarConstraint::json_schema(&vocabulary()?, &schema)?;
            Some(Box::new(grammar))
        } else {
            None
        })
    }
}
