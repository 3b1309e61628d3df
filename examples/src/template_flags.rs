use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use overdrive::generation::{ChatTemplate, Error, ModelFiles};

/// The chat template.
#[derive(Debug, Clone, Args)]
pub struct TemplateFlags {
    /// Chat template: a file with Jinja's syntax, or the folder of a model [default: the adapter's, else the model's]
    #[arg(long, value_name = "PATH")]
    pub chat_template: Option<PathBuf>,
}

impl TemplateFlags {
    /// Returns the template of the flag, else the template beside the adapter, which was trained with it, else the
    /// template of the model.
    pub fn load(&self, files: &ModelFiles, adapter: Option<&Path>) -> Result<ChatTemplate> {
        if let Some(path) = &self.chat_template {
            return Ok(files.chat_template_from(path)?);
        }
        if let Some(adapter) = adapter {
            match files.chat_template_from(adapter) {
                Err(Error::NoChatTemplate { .. }) => {}
                found => return Ok(found?),
            }
        }
        files.chat_template().map_err(|error| match &error {
            Error::NoChatTemplate { .. } => {
                let remedy = format!("{error} with `--chat-template PATH`");
                anyhow::Error::from(error).context(remedy)
            }
            _ => error.into(),
        })
    }
}
