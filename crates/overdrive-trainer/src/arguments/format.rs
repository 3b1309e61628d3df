//! Configuration files in JSON, YAML and TOML.

use std::path::Path;

use jsonc_parser::ParseOptions;
use serde_json::Value;

use overdrive_core::{Error as CommonError, files, text};

use crate::{Error, Layers, Result, TrainingArguments};

/// The syntax of JSON files: that of RFC 8259 with comments and trailing commas, as people write configurations.
const JSON: ParseOptions = ParseOptions {
    allow_comments: true,
    allow_trailing_commas: true,
    allow_loose_object_property_names: false,
    allow_missing_commas: false,
    allow_single_quoted_strings: false,
    allow_hexadecimal_numbers: false,
    allow_unary_plus_numbers: false,
    allow_bare_decimal_point_numbers: false,
    allow_non_finite_numbers: false,
    allow_extended_string_escapes: false,
};

/// The format of a configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfigFormat {
    /// `.json`, which may hold comments and trailing commas
    Json,
    /// `.yaml`, `.yml`
    Yaml,
    /// `.toml`
    Toml,
}

impl ConfigFormat {
    /// Returns the format for the extension of a file.
    ///
    /// # Errors
    /// [`Error::UnknownFormat`].
    pub fn of(path: &Path) -> Result<Self> {
        let extension = path.extension().and_then(|extension| extension.to_str());
        match extension.map(str::to_ascii_lowercase).as_deref() {
            Some("json") => Ok(Self::Json),
            Some("yaml" | "yml") => Ok(Self::Yaml),
            Some("toml") => Ok(Self::Toml),
            _ => Err(Error::UnknownFormat {
                path: path.to_owned(),
            }),
        }
    }

    /// Returns the name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Json => "JSON",
            Self::Yaml => "YAML",
            Self::Toml => "TOML",
        }
    }

    /// Parses text of this format into JSON values.
    fn parse(self, text: &str) -> std::result::Result<Value, String> {
        match self {
            Self::Json => {
                jsonc_parser::parse_to_serde_value(text, &JSON).map_err(|error| error.to_string())
            }
            Self::Yaml => serde_saphyr::from_str(text).map_err(|error| error.to_string()),
            Self::Toml => toml::from_str(text).map_err(|error| error.to_string()),
        }
    }

    /// Writes the arguments as text of this format.
    fn write(self, arguments: &TrainingArguments) -> std::result::Result<String, String> {
        match self {
            Self::Json => serde_json::to_string_pretty(arguments)
                .map(|text| text + "\n")
                .map_err(|error| error.to_string()),
            Self::Yaml => serde_saphyr::to_string(arguments).map_err(|error| error.to_string()),
            Self::Toml => toml::to_string(arguments).map_err(|error| error.to_string()),
        }
    }
}

/// Reads a configuration file in the format of its extension. An empty file is an empty configuration.
pub(crate) fn read(path: &Path) -> Result<Value> {
    let format = ConfigFormat::of(path)?;
    let text = text::read(path)?;
    // The YAML and JSON parsers refuse an empty text.
    if text.trim().is_empty() {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    let parsed = format.parse(&text);
    Ok(parsed.map_err(CommonError::parse(format.name(), path))?)
}

impl TrainingArguments {
    /// Returns the configuration as the text of a file.
    ///
    /// # Errors
    /// [`Error::Unwritable`]: TOML has no integers from 2⁶³ on, and no `null` for a key without a value to
    /// which the preset gives one.
    pub fn to_text(&self, format: ConfigFormat) -> Result<String> {
        let unwritable = |message| Error::Unwritable {
            format: format.name(),
            message,
        };
        let text = format.write(self).map_err(unwritable)?;
        // The other formats write `null`; in TOML the key would be left out and get the preset's value.
        if format == ConfigFormat::Toml {
            let values = format.parse(&text).map_err(unwritable)?;
            let again = Layers::new(self.preset).layer(values, "the written configuration")?;
            if again.arguments() != self {
                return Err(unwritable(format!(
                    "a key has no value here but one in the preset `{}`, and TOML has no `null`; write \
                     JSON or YAML",
                    self.preset
                )));
            }
        }
        Ok(text)
    }

    /// Writes the configuration to a file atomically, in the format of its extension. Reading it with
    /// [`Layers::file`](crate::Layers::file) returns an equal configuration.
    ///
    /// # Errors
    /// [`Error::UnknownFormat`], [`Error::Unwritable`], [`Error::Common`].
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let text = self.to_text(ConfigFormat::of(path)?)?;
        Ok(files::write(path, text.as_bytes())?)
    }
}
