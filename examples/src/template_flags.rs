use std::path::PathBuf;

use anyhow::{Result, anyhow};
use clap::Args;
use overdrive::generation::{ChatTemplate, Error, ModelFiles};

/// The chat template.
#[derive(Debug, Clone, Args)]
pub struct TemplateFlags {
    /// Chat template in place of the model's: a file with Jinja's syntax, or the folder of a model
    #[arg(long, value_name = "PATH")]
    pub chat_template: Option<PathBuf>,
}

impl TemplateFlags {
    /// Returns the template of the flag, else that of the model.
    pub fn load(&self, files: &ModelFiles) -> Result<ChatTemplate> {
        match &self.chat_template {
            Some(path) => Ok(files.chat_template_from(path)?),
            None => files.chat_template().map_err(|error| match error {
                Error::ChatTemplate(reason) => anyhow!(
                    "the model's chat template cannot be used: {reason}; --chat-template gives another one"
                ),
                other => other.into(),
            }),
        }
    }
}
