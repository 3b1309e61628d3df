//! Lists of module names and patterns.

use fancy_regex::Regex;

use crate::{Error, Result};

/// An entry of compressed-tensors' `targets` or `ignore`: the full name of a module, or after `re:` a regular expression
/// for the beginning of a name.
pub(super) enum NamePattern<'a> {
    Name(&'a str),
    Beginning { regex: Regex, entry: &'a str },
}

impl<'a> NamePattern<'a> {
    pub(super) fn new(entry: &'a str) -> Result<NamePattern<'a>> {
        Ok(match entry.strip_prefix("re:") {
            None => NamePattern::Name(entry),
            Some(pattern) => NamePattern::Beginning {
                regex: parsed(&format!("^(?:{pattern})"), pattern)?,
                entry: pattern,
            },
        })
    }

    /// Returns `true` if the entry matches a module.
    pub(super) fn matches(&self, module: &str) -> Result<bool> {
        match self {
            NamePattern::Name(name) => Ok(*name == module),
            NamePattern::Beginning { regex, entry } => is_match(regex, entry, module),
        }
    }
}

/// Returns `true` if an entry of compressed-tensors' `targets` or `ignore` matches a module.
pub(super) fn names_module(entry: &str, module: &str) -> Result<bool> {
    NamePattern::new(entry)?.matches(module)
}

/// Returns `true` if an entry of `llm_int8_skip_modules`, or of another of transformers' lists of modules that stay
/// dense, matches the module of this name, such as `model.layers.0.mlp.up_proj`.
///
/// As in transformers, an entry matches as a regular expression for the beginning of the name up to a dot or its end
/// (`model.layers.0`, `model.layers.*.mlp`), or literally as the end of the name (`up_proj`).
///
/// # Errors
/// [`Error::Common`] for an entry that is not a regular expression, if it is not the end of the name.
pub fn skips_modules(entries: &[String], module: &str) -> Result<bool> {
    any(entries, module, skips_module)
}

/// Returns `true` if one entry of such a list matches a module.
pub(super) fn skips_module(entry: &str, module: &str) -> Result<bool> {
    if module.ends_with(entry) {
        return Ok(true);
    }
    // Look-behind and look-ahead as in transformers, which is why the crate needs `fancy_regex`.
    let regex = parsed(&format!(r"^(?:{entry})(?:(?<=\.)|(?=\.|$))"), entry)?;
    is_match(&regex, entry, module)
}

/// Returns `true` if an entry of ModelOpt's `ignore` matches a module: its full name, in which `*` stands for any
/// characters.
pub(super) fn covers_module(entry: &str, module: &str) -> Result<bool> {
    let parts: Vec<_> = entry.split('*').map(fancy_regex::escape).collect();
    let regex = parsed(&format!("^(?:{})$", parts.join(".*")), entry)?;
    is_match(&regex, entry, module)
}

fn parsed(pattern: &str, entry: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|error| bad(entry, &error))
}

fn is_match(regex: &Regex, entry: &str, module: &str) -> Result<bool> {
    regex.is_match(module).map_err(|error| bad(entry, &error))
}

fn bad(entry: &str, error: &fancy_regex::Error) -> Error {
    let expected = format!("a regular expression: {error}");
    let option = "quantization_config's pattern";
    Error::option(option, format!("`{entry}`"), expected)
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
        for (entry, module, expected) in [
            ("lm_head", "lm_head", true),
            ("model.layers.0*", "model.layers.0.mlp.up_proj", true),
            ("model.layers.0*", "model.layers.1.mlp.up_proj", false),
            ("model.layers.0.mlp", "model.layers.0.mlp.up_proj", false),
            ("*.k_proj", "model.layers.0.self_attn.k_proj", true),
        ] {
            let found = covers_module(entry, module).expect("a pattern");
            assert_eq!(found, expected, "{entry} {module}");
        }
        let error = names_module("re:(", "a").expect_err("no pattern");
        assert!(error.to_string().contains("`(`"), "{error}");
    }
}
