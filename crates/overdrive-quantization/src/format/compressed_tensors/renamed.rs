//! The lists of a configuration under other names of the modules.

use std::collections::BTreeSet;

use serde_json::Value;

use super::config::CompressedTensorsConfig;
use crate::Result;
use crate::format::module_patterns::NamePattern;

impl CompressedTensorsConfig {
    /// Returns the configuration with new names in its lists, as
    /// [`QuantizationConfig::renamed`](crate::QuantizationConfig::renamed) does.
    pub(in crate::format) fn renamed(mut self, names: &[(String, String)]) -> Result<Self> {
        for group in self.config_groups.values_mut() {
            if let Some(targets) = group.get_mut("targets").and_then(Value::as_array_mut) {
                let old: Vec<&str> = targets.iter().filter_map(Value::as_str).collect();
                let new = renamed(old, names)?;
                *targets = new.into_iter().map(Value::String).collect();
            }
        }
        if let Some(ignore) = &mut self.ignore {
            *ignore = renamed(ignore.iter().map(String::as_str), names)?;
        }
        Ok(self)
    }
}

fn renamed<'a>(
    entries: impl IntoIterator<Item = &'a str>,
    names: &[(String, String)],
) -> Result<Vec<String>> {
    let mut all = Vec::new();
    for entry in entries {
        let pattern = NamePattern::new(entry)?;
        // A module may have several old names.
        let (mut is_same, mut found) = (true, BTreeSet::new());
        for (old, new) in names {
            let matches = pattern.matches(old)?;
            is_same &= matches == pattern.matches(new)?;
            if matches {
                found.insert(new);
            }
        }
        match is_same {
            true => all.push(entry.to_owned()),
            false => all.extend(found.into_iter().cloned()),
        }
    }
    Ok(all)
}
