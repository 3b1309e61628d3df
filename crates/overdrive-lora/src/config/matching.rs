//! The modules that a configuration selects, by the rules of PEFT's `check_target_module_exists` and
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

/// The parameter of a linear layer, in the names of transformers 5: that of all experts for a layer of one expert, otherwise
/// `weight`.
#[derive(Debug)]
pub(crate) struct LayerParameter {
    /// The module, such as `model.layers.7.mlp.experts`.
    pub(crate) module: String,
    pub(crate) parameter: String,
    pub(crate) expert: Option<i64>,
    /// The layer is the gate (0) or the projection up (1), which are one parameter, one below the other.
    pub(crate) half: Option<i64>,
}

impl LayerParameter {
    pub(crate) fn of(layer: &str) -> LayerParameter {
        // Mixtral's names before version 5.
        let layer = layer.replace(".block_sparse_moe.", ".mlp.");
        let expert = || {
            let (block, rest) = layer.rsplit_once(".experts.")?;
            let (expert, name) = rest.split_once('.')?;
            let (parameter, half) = match name {
                "gate_proj" | "w1" => ("gate_up_proj", Some(0)),
                "up_proj" | "w3" => ("gate_up_proj", Some(1)),
                "w2" => ("down_proj", None),
                other => (other, None),
            };
            Some(LayerParameter {
                module: format!("{block}.experts"),
                parameter: parameter.to_owned(),
                expert: Some(expert.parse().ok()?),
                half,
            })
        };
        expert().unwrap_or_else(|| LayerParameter {
            module: layer.clone(),
            parameter: "weight".to_owned(),
            expert: None,
            half: None,
        })
    }

    /// Returns `true` for experts and routers, which are no linear layers.
    pub(crate) fn is_of_mixture(&self) -> bool {
        self.expert.is_some() || self.module.ends_with(".mlp.gate")
    }

    /// Returns the full name, such as `model.layers.7.mlp.experts.gate_up_proj`.
    pub(crate) fn name(&self) -> String {
        format!("{}.{}", self.module, self.parameter)
    }
}

impl LoraConfig {
    pub(crate) fn has_target_parameters(&self) -> bool {
        let targets = self.target_parameters.as_ref();
        targets.is_some_and(|names| !names.is_empty())
    }

    /// Returns the parameter of the linear layer `layer` if `target_parameters` selects it.
    pub(crate) fn target_parameter(&self, layer: &str) -> Option<LayerParameter> {
        let targets = self.target_parameters.as_ref()?;
        let own = LayerParameter::of(layer);
        let name = format!(".{}", own.name());
        let mut targets = targets.iter();
        let is_selected = targets.any(|target| name.ends_with(&format!(".{target}")));
        is_selected.then_some(own)
    }
}

fn pattern_of_key(pattern: &str) -> String {
    // PEFT's `(.*\.)?(key)$` under `re.match`, which anchors at the start.
    format!(r"\A(?:.*\.)?(?:{pattern})\z")
}

/// Returns the value of the first pattern that matches `name` or its last components.
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
    config: &'c LoraConfig,
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
    // Boxed, since a compiled pattern is much larger than a slice.
    Pattern(Box<Regex>),
}

impl Rule<'_> {
    /// Returns whether the rule selects the whole name, and whether it selects the name's last components.
    fn matches(&self, key: &'static str, name: &str) -> Result<(bool, bool)> {
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
    /// Compiles the rules of `config`. `head` is the name of the output layer, which `all-linear` leaves out.
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
            // An empty string is false in Python, so with it PEFT excludes nothing.
            Some(Names::One(pattern)) if pattern.is_empty() => Rule::Names(&[]),
            Some(Names::One(pattern)) => whole("exclude_modules", pattern)?,
        };
        let saved = config.modules_to_save.iter().flatten();
        let saved =
            saved.map(|name| compile("modules_to_save", &format!(r"\A(?:^|.*\.){name}(?:$|\..*)")));
        Ok(Matcher {
            config,
            targets,
            excluded,
            saved: saved.collect::<Result<_>>()?,
            layers: layers(config)?,
        })
    }

    /// Returns `true` if the linear layer `name` gets an adapter.
    pub(crate) fn targets(&self, name: &str) -> Result<bool> {
        if self.config.target_parameter(name).is_some() {
            return Ok(true);
        }
        // To PEFT, experts are no linear layers: the rules for modules do not apply to them.
        if self.config.has_target_parameters() && LayerParameter::of(name).is_of_mixture() {
            return Ok(false);
        }
        // As in PEFT, exclusions take precedence over every rule that selects.
        let (whole, suffix) = self.excluded.matches("exclude_modules", name)?;
        if whole || suffix {
            return Ok(false);
        }
        for saved in &self.saved {
            if matches("modules_to_save", saved, name)? {
                return Ok(false);
            }
        }
        let (whole, suffix) = match &self.targets {
            Targets::AllBut(head) => (*head != Some(name), false),
            Targets::Listed(rule) => rule.matches("target_modules", name)?,
        };
        // As in PEFT, `layers_to_transform` does not restrict a module that is named in full.
        if whole || !suffix {
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
        // PEFT's default: the first number in the name, whatever the name of its list.
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
            .map_err(|source| too_complex("layers_pattern", pattern, &source))?;
        if let Some(index) = captures.as_ref().and_then(|captures| captures.name("idx")) {
            // An index beyond u64 is no layer's.
            return Ok(index.as_str().parse().ok());
        }
    }
    Ok(None)
}

fn whole<'c>(key: &'static str, pattern: &str) -> Result<Rule<'c>> {
    // Python's `re.fullmatch`.
    let pattern = compile(key, &format!(r"\A(?:{pattern})\z"))?;
    Ok(Rule::Pattern(Box::new(pattern)))
}

fn compile(key: &'static str, pattern: &str) -> Result<Regex> {
    Regex::new(pattern).map_err(|source| {
        let expected = format!("a valid regular expression ({source})");
        overdrive_core::Error::option(key, format!("`{pattern}`"), expected).into()
    })
}

fn matches(key: &'static str, pattern: &Regex, name: &str) -> Result<bool> {
    pattern
        .is_match(name)
        .map_err(|source| too_complex(key, pattern, &source))
}

/// Returns the error for a pattern whose match exceeds the backtracking limit.
fn too_complex(key: &'static str, pattern: &Regex, source: &fancy_regex::Error) -> Error {
    let expected = format!("a simpler regular expression ({source})");
    overdrive_core::Error::option(key, format!("`{}`", pattern.as_str()), expected).into()
}
