use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use overdrive::generation::{ChatTemplate, ModelFiles};

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
        Ok(match &self.chat_template {
            Some(path) => files.chat_template_from(path)?,
            None => files.chat_template()?,
        })
    }
}
