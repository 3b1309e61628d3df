//! The options of the W&B tracker.

use overdrive_core::Error as CommonError;
use serde_json::{Map, Value};

use crate::Result;

/// The options of [`Wandb`](crate::Wandb).
#[derive(Debug, Clone, Default)]
pub struct WandbOptions {
    /// The project (`WANDB_PROJECT`). Default: that of `wandb sync`, `uncategorized` unless it is given one.
    pub project: Option<String>,
    /// The user or team that owns the run (`WANDB_ENTITY`). Default: that of the key that `wandb sync` uses.
    pub entity: Option<String>,
    /// The name of the run (`WANDB_NAME`). Default: the server chooses one.
    pub name: Option<String>,
    /// The ID of the run, which is unique in its project: letters, digits, `-` and `_` (`WANDB_RUN_ID`). Default: eight
    /// random characters.
    pub run_id: Option<String>,
    /// The group of the run (`WANDB_RUN_GROUP`). Default: none.
    pub group: Option<String>,
    /// The type of the run, such as `train` (`WANDB_JOB_TYPE`). Default: none.
    pub job_type: Option<String>,
    /// The tags of the run (`WANDB_TAGS`, separated by commas). Default: none.
    pub tags: Vec<String>,
    /// A description of the run (`WANDB_NOTES`). Default: none.
    pub notes: Option<String>,
    /// The configuration of the run. Default: empty.
    pub config: Map<String, Value>,
}

impl WandbOptions {
    /// Returns the options of W&B's environment variables: `WANDB_PROJECT`, `WANDB_ENTITY`, `WANDB_NAME`, `WANDB_RUN_ID`,
    /// `WANDB_RUN_GROUP`, `WANDB_JOB_TYPE`, `WANDB_TAGS` and `WANDB_NOTES`.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Returns the options of the given variables, for [`from_env`](Self::from_env) and its tests.
    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| {
            let value = variable(name)?.trim().to_owned();
            (!value.is_empty()).then_some(value)
        };
        let tags = get("WANDB_TAGS").unwrap_or_default();
        let tags = tags.split(',').map(|tag| tag.trim().to_owned());
        Self {
            project: get("WANDB_PROJECT"),
            entity: get("WANDB_ENTITY"),
            name: get("WANDB_NAME"),
            run_id: get("WANDB_RUN_ID"),
            group: get("WANDB_RUN_GROUP"),
            job_type: get("WANDB_JOB_TYPE"),
            tags: tags.filter(|tag| !tag.is_empty()).collect(),
            notes: get("WANDB_NOTES"),
            config: Map::new(),
        }
    }

    /// Checks the values.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`].
    pub fn validate(&self) -> Result<()> {
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let is_valid = |id: &str| (1..=64).contains(&id.len()) && id.bytes().all(letter);
        // The ID becomes a part of file names.
        if let Some(id) = self.run_id.as_deref().filter(|id| !is_valid(id)) {
            let expected = "1 to 64 letters, digits, `-` and `_`; set WANDB_RUN_ID, or unset it for a random one";
            return Err(CommonError::option("run_id", format!("{id:?}"), expected).into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_are_those_of_wandbs_variables() {
        let variables = [
            ("WANDB_PROJECT", "tiny"),
            ("WANDB_ENTITY", " team "),
            ("WANDB_NAME", ""),
            ("WANDB_RUN_ID", "abc-1"),
            ("WANDB_TAGS", "a, b,,"),
        ];
        let options = WandbOptions::from_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        });
        options.validate().expect("valid");
        assert_eq!(options.project.as_deref(), Some("tiny"));
        assert_eq!(options.entity.as_deref(), Some("team"));
        assert_eq!(options.name, None);
        assert_eq!(options.run_id.as_deref(), Some("abc-1"));
        assert_eq!(options.tags, ["a", "b"]);
    }

    #[test]
    fn an_id_that_is_no_part_of_a_file_name_is_refused() {
        for id in ["", "../x", "a b", "ä", &"x".repeat(65)] {
            let options = WandbOptions {
                run_id: Some(id.to_owned()),
                ..WandbOptions::default()
            };
            let error = options.validate().expect_err(id).to_string();
            assert!(
                error.starts_with(&format!("`run_id` is {id:?}; it must be 1 to 64")),
                "{error}"
            );
        }
    }
}
