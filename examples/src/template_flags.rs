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
    /// Returns the template of the flag; else the one beside the adapter, which was trained with it; else that of the
    /// model.
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
        Ok(files.chat_template()?)
    }
}

#[cfg(test)]
mod tests {
    use overdrive::generation::Message;

    use super::*;

    #[test]
    fn the_template_is_the_flags_then_the_adapters_then_the_models() {
        let folder = tempfile::tempdir().unwrap();
        let with = |name: &str, template: Option<&str>| {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            if let Some(template) = template {
                std::fs::write(path.join("chat_template.jinja"), template).unwrap();
            }
            path
        };
        let files = ModelFiles::open(with("model", Some("of the model"))).unwrap();
        let (trained, plain) = (with("trained", Some("of the adapter")), with("plain", None));
        let mut flags = TemplateFlags {
            chat_template: None,
        };
        let rendered = |flags: &TemplateFlags, adapter: Option<&Path>| {
            let template = flags.load(&files, adapter).unwrap();
            template
                .render(&[Message::user("hello")], &Default::default())
                .unwrap()
        };
        assert_eq!(rendered(&flags, None), "of the model");
        assert_eq!(rendered(&flags, Some(&plain)), "of the model");
        assert_eq!(rendered(&flags, Some(&trained)), "of the adapter");
        flags.chat_template = Some(with("other", Some("of the flag")));
        assert_eq!(rendered(&flags, Some(&trained)), "of the flag");
    }
}
