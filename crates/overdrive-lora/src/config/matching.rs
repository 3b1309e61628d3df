//! Which modules a configuration means: the rules of PEFT's `check_target_module_exists` and
//! `get_pattern_key`.

use fancy_regex::Regex;

use super::{LayerIndices, LoraConfig, Names, TargetModules};
use crate::{Error, Result};

/// Compiles every pattern of the configuration.
pub(super) fn check(config: &LoraConfig) -> Result<()> {
    Matcher::new(config, None)?;
    for (pattern, _) in &config.rank_pattern {
        compile("rank_pattern", &pattern_of_key(pattern))?;
    }
    for (pattern, _) in &config.alpha_pattern {
        compile("alpha_pattern", &pattern_of_key(pattern))?;
    }
    Ok(())
}

fn pattern_of_key(pattern: &str) -> String {
    format!(r"\A(?:.*\.)?(?:{pattern})\z")
}

/// The value of the first pattern that `name`, or its last parts, match.
pub(super) fn pattern_value<V: Copy>(
    key: &'static str,
    patterns: &[(String, V)],
    name: &str,
) -> Result<Option<V>> {
    for (pattern, value) in patterns {
        if matches(key, &compile(key, &pattern_of_key(pattern))?, name)? {
            return Ok(Some(*value));
        }
    }
    Ok(None)
}

/// The configuration's rules, compiled once for all modules.
#[derive(Debug)]
pub(crate) struct Matcher<'c> {
    targets: Targets<'c>,
    excluded: Rule<'c>,
    saved: Vec<Regex>,
    layers: Option<(Vec<u64>, Vec<Regex>)>,
}

#[derive(Debug)]
enum Targets<'c> {
    Listed(Rule<'c>),
    AllBut(Option<&'c str>),
}

#[derive(Debug)]
enum Rule<'c> {
    Names(&'c [String]),
    Pattern(Box<Regex>),
}

impl Rule<'_> {
    /// Whether the whole name is listed, whether its last parts are, or the pattern fits.
    fn fits(&self, key: &'static str, name: &str) -> Result<(bool, bool)> {
        Ok(match self {
            Rule::Names(names) => (
                names.iter().any(|own| own == name),
                names.iter().any(|own| {
                    let head = name.strip_suffix(own.as_str());
                    head.is_some_and(|head| head.ends_with('.'))
                }),
            ),
            Rule::Pattern(pattern) => (matches(key, pattern, name)?, false),
        })
    }
}

impl<'c> Matcher<'c> {
    /// `head`: the name of the output layer, which `all-linear` leaves out.
    pub(crate) fn new(config: &'c LoraConfig, head: Option<&'c str>) -> Result<Matcher<'c>> {
        let targets = match &config.target_modules {
            None => Targets::Listed(Rule::Names(&[])),
            Some(TargetModules::AllLinear) => Targets::AllBut(head),
            Some(TargetModules::Names(names)) => Targets::Listed(Rule::Names(names)),
            Some(TargetModules::Pattern(pattern)) => {
                Targets::Listed(whole("target_modules", pattern)?)
            }
        };
        let excluded = match &config.exclude_modules {
            None => Rule::Names(&[]),
            Some(Names::Many(names)) => Rule::Names(names),
            Some(Names::One(pattern)) if pattern.is_empty() => Rule::Names(&[]),
            Some(Names::One(pattern)) => whole("exclude_modules", pattern)?,
        };
        let saved = config.modules_to_save.iter().flatten();
        let saved =
            saved.map(|name| compile("modules_to_save", &format!(r"\A(?:^|.*\.){name}(?:$|\..*)")));
        Ok(Matcher {
            targets,
            excluded,
            saved: saved.collect::<Result<_>>()?,
            layers: layers(config)?,
        })
    }

    /// Whether the linear map `name` gets an adapter.
    pub(crate) fn targets(&self, name: &str) -> Result<bool> {
        let (whole, part) = self.excluded.fits("exclude_modules", name)?;
        if whole || part {
            return Ok(false);
        }
        for saved in &self.saved {
            if matches("modules_to_save", saved, name)? {
                return Ok(false);
            }
        }
        let (whole, part) = match &self.targets {
            Targets::AllBut(head) => (*head != Some(name), false),
            Targets::Listed(rule) => rule.fits("target_modules", name)?,
        };
        // A module that is named in full is not asked for its layer.
        if whole || !part {
            return Ok(whole);
        }
        match &self.layers {
            None => Ok(true),
            Some((layers, patterns)) => {
                let layer = layer_of(patterns, name)?;
                Ok(layer.is_some_and(|layer| layers.contains(&layer)))
            }
        }
    }
}

fn layers(config: &LoraConfig) -> Result<Option<(Vec<u64>, Vec<Regex>)>> {
    let layers = match &config.layers_to_transform {
        None => return Ok(None),
        Some(LayerIndices::Many(layers)) if layers.is_empty() => return Ok(None),
        Some(LayerIndices::Many(layers)) => layers.clone(),
        Some(LayerIndices::One(layer)) => vec![*layer],
    };
    let patterns = match &config.layers_pattern {
        Some(Names::One(name)) if !name.is_empty() => std::slice::from_ref(name),
        Some(Names::Many(names)) => names,
        _ => &[],
    };
    let mut compiled = Vec::new();
    if patterns.is_empty() {
        compiled.push(compile("layers_pattern", r"\A.*?\.[^.]*\.(?P<idx>\d+)\.")?);
    }
    for pattern in patterns {
        let pattern = format!(r"\A(?:^|.*?\.){pattern}\.(?P<idx>\d+)\.");
        compiled.push(compile("layers_pattern", &pattern)?);
    }
    Ok(Some((layers, compiled)))
}

fn layer_of(patterns: &[Regex], name: &str) -> Result<Option<u64>> {
    for pattern in patterns {
        let captures = pattern
            .captures(name)
            .map_err(|source| bad("layers_pattern", pattern, &source))?;
        if let Some(index) = captures.as_ref().and_then(|captures| captures.name("idx")) {
            // A number beyond u64 is no layer.
            return Ok(index.as_str().parse().ok());
        }
    }
    Ok(None)
}

fn whole<'c>(key: &'static str, pattern: &str) -> Result<Rule<'c>> {
    let pattern = compile(key, &format!(r"\A(?:{pattern})\z"))?;
    Ok(Rule::Pattern(Box::new(pattern)))
}

fn compile(key: &'static str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|source| Error::BadConfig {
        key: key.to_owned(),
        found: format!("`{pattern}`"),
        expected: format!("a regular expression ({source})"),
    })
}

fn matches(key: &'static str, pattern: &Regex, name: &str) -> Result<bool> {
    pattern
        .is_match(name)
        .map_err(|source| bad(key, pattern, &source))
}

/// A pattern that goes astray (too much backtracking).
fn bad(key: &'static str, pattern: &Regex, source: &fancy_regex::Error) -> Error {
    Error::BadConfig {
        key: key.to_owned(),
        found: format!("`{}`", pattern.as_str()),
        expected: format!("a regular expression that can be matched ({source})"),
    }
}
