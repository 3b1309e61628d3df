//! The flags that constrain generated text.

use std::path::PathBuf;

use anyhow::{Result, anyhow};
use clap::Args;
use overdrive::constraints::{GrammarConstraint, GrammarVocabulary};
use overdrive::core::{Error, text};
use overdrive::generation::{ChoiceConstraint, Constraint, GenerationConfig, Tokenizer};

/// The constraint of an answer; at most one flag is given.
#[derive(Debug, Clone, Args)]
pub struct ConstraintFlags {
    /// Allowed answer; may be repeated
    #[arg(long, group = "constraint")]
    pub choice: Vec<String>,
    /// Regular expression that the answer must match
    #[arg(long, group = "constraint")]
    pub regex: Option<String>,
    /// File with the JSON schema that the answer must match
    #[arg(long, group = "constraint")]
    pub json_schema: Option<PathBuf>,
}

impl ConstraintFlags {
    /// Returns the constraint for an answer of a model with `num_logits` logits; `None` without a flag. Each of several
    /// answers needs a [`fork`](Constraint::fork).
    pub fn build(
        &self,
        tokenizer: &Tokenizer,
        num_logits: i64,
        config: &GenerationConfig,
    ) -> Result<Option<Box<dyn Constraint>>> {
        let ends = &config.eos_token_id;
        let vocabulary = || {
            let size = usize::try_from(num_logits)?;
            anyhow::Ok(GrammarVocabulary::new(tokenizer, size, ends)?)
        };
        Ok(if !self.choice.is_empty() {
            let choices = ChoiceConstraint::from_texts(tokenizer, &self.choice, ends)?;
            Some(Box::new(choices))
        } else if let Some(pattern) = &self.regex {
            let grammar = GrammarConstraint::regex(&vocabulary()?, pattern);
            Some(Box::new(grammar.map_err(|error| match error {
                overdrive::generation::Error::Constraint(why) => anyhow!("`--regex`: {why}"),
                other => other.into(),
            })?))
        } else if let Some(path) = &self.json_schema {
            let text = text::read(path)?;
            let schema = serde_json::from_str(&text).map_err(Error::parse("JSON", path))?;
            let grammar = GrammarConstraint::json_schema(&vocabulary()?, &schema)?;
            Some(Box::new(grammar))
        } else {
            None
        })
    }
}
