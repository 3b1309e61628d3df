//! Files that a model's folder may have.

use std::path::Path;

use overdrive_core::{Error as Common, text};
use serde_json::{Map, Value};

use crate::Result;

/// Reads a text; `None` if there is no such file.
pub(crate) fn read(path: &Path) -> Result<Option<String>> {
    Ok(text::read_optional(path)?)
}

/// Reads a JSON object; `None` if there is no such file.
pub(crate) fn read_object(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = read(path)? else {
        return Ok(None);
    };
    Ok(serde_json::from_str(&text).map_err(Common::parse("JSON", path))?)
}
