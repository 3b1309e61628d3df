//! Configuration files in JSON, YAML and TOML.

use std::path::Path;

use jsonc_parser::ParseOptions;
use serde::Serialize;
use serde_json::Value;

use overdrive_core::{Error as CommonError, text};

use crate::{Error, Result};

/// The syntax of JSON files: RFC 8259 with comments and trailing commas, which are common in configurations.
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
    pub(super) fn parse(self, text: &str) -> std::result::Result<Value, String> {
        match self {
            Self::Json => {
                jsonc_parser::parse_to_serde_value(text, &JSON).map_err(|error| error.to_string())
            }
            Self::Yaml => serde_saphyr::from_str(text).map_err(|error: serde_saphyr::Error| {
                // Its other messages name options of the parser.
                let error = error.without_snippet();
                error.render_with_formatter(&serde_saphyr::UserMessageFormatter)
            }),
            Self::Toml => toml::from_str(text).map_err(|error| error.to_string()),
        }
    }

    /// Writes the arguments as text of this format.
    pub(super) fn write(self, arguments: &impl Serialize) -> std::result::Result<String, String> {
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
pub(crate) fn read_file(path: &Path) -> Result<Value> {
    let format = ConfigFormat::of(path)?;
    let text = text::read(path)?;
    // The YAML and JSON parsers refuse an empty text.
    if text.trim().is_empty() {
        return Ok(Value::Object(serde_json::Map::new()));
    }
    let parsed = format.parse(&text);
    Ok(parsed.map_err(CommonError::parse(format.name(), path))?)
}
