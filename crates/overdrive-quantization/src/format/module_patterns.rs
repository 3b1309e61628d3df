//! Lists of module names and patterns.

use fancy_regex::Regex;

use crate::{Error, Result};

/// Returns `true` if an entry of compressed-tensors' `targets` or `ignore` matches a module: the entry is its
/// full name, or after `re:` a regular expression for the beginning of the name.
pub(super) fn names_module(entry: &str, module: &str) -> Result<bool> {
    match entry.strip_prefix("re:") {
        None => Ok(entry == module),
        Some(pattern) => matches(&format!("^(?:{pattern})"), pattern, module),
    }
}

/// Returns `true` if an entry of transformers' lists of modules to skip matches a module: as a regular
/// expression for the beginning of its name up to a dot or its end, or literally for the end of its name.
pub(super) fn skips_module(entry: &str, module: &str) -> Result<bool> {
    if module.ends_with(entry) {
        return Ok(true);
    }
    // Look-behind and look-ahead as in transformers, which is why the crate needs `fancy_regex`.
    matches(&format!(r"^(?:{entry})(?:(?<=\.)|(?=\.|$))"), entry, module)
}

fn matches(pattern: &str, entry: &str, module: &str) -> Result<bool> {
    let bad = |error: fancy_regex::Error| {
        let expected = format!("a regular expression: {error}");
        Error::option(
            "quantization_config's pattern",
            format!("`{entry}`"),
            expected,
        )
    };
    let regex = Regex::new(pattern).map_err(bad)?;
    regex.is_match(module).map_err(bad)
}

/// Returns `true` if `matches` holds for any entry.
pub(super) fn any(
    entries: &[String],
    module: &str,
    matches: impl Fn(&str, &str) -> Result<bool>,
) -> Result<bool> {
    for entry in entries {
        if matches(entry, module)? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_modules_are_those_of_transformers() {
        for (entry, module, expected) in [
            ("lm_head", "lm_head", true),
            ("lm_head", "model.lm_head", true),
            ("layer.1", "layer.1.attn", true),
            ("layer.1", "layer.11.attn", false),
            ("layer.*", "layer.11.attn", true),
            ("mlp.gate", "mlp.gate_proj", false),
            ("fc1", "model.decoder.layers.23.fc1", true),
            ("q_proj", "model.layers.0.self_attn.k_proj", false),
        ] {
            let found = skips_module(entry, module).expect("a pattern");
            assert_eq!(found, expected, "{entry} {module}");
        }
    }

    #[test]
    fn ignored_modules_are_those_of_compressed_tensors() {
        for (entry, module, expected) in [
            ("lm_head", "lm_head", true),
            ("lm_head", "model.lm_head", false),
            ("re:.*lm_head", "model.lm_head", true),
            ("re:model.layers.0", "model.layers.0.mlp", true),
            ("re:layers", "model.layers.0", false),
        ] {
            let found = names_module(entry, module).expect("a pattern");
            assert_eq!(found, expected, "{entry} {module}");
        }
        let error = names_module("re:(", "a").expect_err("no pattern");
        assert!(error.to_string().contains("`(`"), "{error}");
    }
}
