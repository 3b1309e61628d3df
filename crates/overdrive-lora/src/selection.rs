//! The linear layers and modules of a model that a configuration selects.

use overdrive_core::check_option;
use overdrive_nn::AdapterHost;

use crate::config::Matcher;
use crate::host::{module_copies, visit_linears, visit_parameters};
use crate::{Error, LoraConfig, Result, TargetModules};

/// Returns the configuration with its targets filled in, and the layers that they select.
pub(crate) fn resolve<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
) -> Result<(LoraConfig, Vec<String>)> {
    config.validate()?;
    let mut names = Vec::new();
    visit_linears(host, |name, _| {
        names.push(name.to_owned());
        Ok(())
    })?;
    let mut config = config.clone();
    if config.target_modules.is_none() {
        config.target_modules = default_targets(&names);
    }
    let head = host.head().map(str::to_owned);
    let matcher = Matcher::new(&config, head.as_deref())?;
    let is_by_type = config.target_modules == Some(TargetModules::AllLinear);
    let mut layers = Vec::new();
    for name in &names {
        let is_linear = !is_by_type
            || !host.is_unknown_to_peft(name)
            || config.target_parameter(name).is_some();
        if is_linear && matcher.targets(name)? {
            layers.push(name.clone());
        }
    }
    refuse_other_modules(host, &config, &matcher)?;
    // As in PEFT, one of them must select something.
    let is_selected = |name: &String| config.target_parameter(name).is_some();
    if config.has_target_parameters() && !layers.iter().any(is_selected) {
        let found = format!("{:?}", config.target_parameters.unwrap_or_default());
        let expected = format!(
            "a list with a parameter of the model, such as mlp.experts.down_proj; its layers are {}",
            kinds_of(&names).join(", ")
        );
        return Err(overdrive_core::Error::option("target_parameters", found, expected).into());
    }
    // An empty list is how a configuration trains full copies only.
    let has_copies = config.modules_to_save.is_some() || config.trainable_token_indices.is_some();
    let none_wanted = has_copies && config.target_modules == Some(TargetModules::Names(Vec::new()));
    if layers.is_empty() && !none_wanted {
        return Err(Error::NoTarget {
            target_modules: describe(&config),
            available: kinds_of(&names),
        });
    }
    Ok((config, layers))
}

/// Refuses to train adapters over parameters that are two layers of the model: A is one tensor of the parameter, and would be
/// two different ones.
pub(crate) fn refuse_halves<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
) -> Result<()> {
    visit_linears(host, |name, _| match config.target_parameter(name) {
        Some(own) if own.half.is_some() => {
            let value = format!("a list with `{}`", own.name());
            let expected = "without gate_up_proj for this model, whose experts have gate_proj and up_proj: train them through \
                            `target_modules`, without `target_parameters`; an adapter over gate_up_proj can be loaded frozen";
            Err(overdrive_core::Error::option("target_parameters", value, expected).into())
        }
        _ => Ok(()),
    })
}

/// Refuses to train rows of single tokens.
pub(crate) fn refuse_tokens(config: &LoraConfig) -> Result<()> {
    check_option(
        config.trainable_token_indices.is_none(),
        "trainable_token_indices",
        "set",
        "unset for an adapter that is trained; `modules_to_save` trains the whole embedding",
    )?;
    Ok(())
}

/// Refuses embeddings and norms as targets, which would silently get no adapter.
fn refuse_other_modules<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
    matcher: &Matcher<'_>,
) -> Result<()> {
    // `all-linear` selects by type, so it cannot name a module that is not a linear layer.
    if config.target_modules == Some(TargetModules::AllLinear) {
        return Ok(());
    }
    visit_parameters(host, |name, _| {
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        if !matcher.targets(module)? {
            return Ok(());
        }
        let value = format!("`{module}`, which is not a linear layer");
        let expected = "linear layers; `modules_to_save` trains a full copy of any other module";
        Err(overdrive_core::Error::option("target_modules", value, expected).into())
    })
}

/// Returns PEFT's default targets for the architectures with these layers.
fn default_targets(names: &[String]) -> Option<TargetModules> {
    let has = |wanted: &&str| {
        let suffix = format!(".{wanted}");
        names.iter().any(|name| name.ends_with(&suffix))
    };
    // From PEFT's table: Phi-2; Llama, BART and related models; GPT-2; BLOOM, Falcon and GPT-NeoX; T5; BERT and related
    // models. Each entry begins with the layers that identify the architecture, since others share the remaining names.
    let choices: [(&[&str], &[&str]); 6] = [
        (&["v_proj", "mlp.fc1"], &["q_proj", "v_proj", "fc1", "fc2"]),
        (&["q_proj", "v_proj"], &["q_proj", "v_proj"]),
        (&["c_attn"], &["c_attn"]),
        (&["query_key_value"], &["query_key_value"]),
        (&["SelfAttention.q", "SelfAttention.v"], &["q", "v"]),
        (
            &["attention.self.query", "attention.self.value"],
            &["query", "value"],
        ),
    ];
    let choice = choices.iter().find(|(known, _)| known.iter().all(has));
    let (_, targets) = choice?;
    Some(TargetModules::names(targets.iter().copied()))
}

/// Describes the rule for an error message.
fn describe(config: &LoraConfig) -> String {
    let mut text = match &config.target_modules {
        None => "`target_modules`, which is not set and has no default for this model".to_owned(),
        Some(TargetModules::AllLinear) => "`target_modules` \"all-linear\"".to_owned(),
        Some(TargetModules::Pattern(pattern)) => {
            format!("the pattern \"{pattern}\" of `target_modules`")
        }
        Some(TargetModules::Names(names)) => format!("`target_modules` {names:?}"),
    };
    if config.exclude_modules.is_some() || config.layers_to_transform.is_some() {
        text.push_str(" after `exclude_modules` and `layers_to_transform`");
    }
    text
}

/// Returns the distinct names, with `*` in place of numbers.
fn kinds_of(names: &[String]) -> Vec<String> {
    let mut kinds: Vec<String> = Vec::new();
    for name in names {
        let parts = name.split('.').map(|part| match part.parse::<u64>() {
            Ok(_) => "*",
            Err(_) => part,
        });
        let kind = parts.collect::<Vec<_>>().join(".");
        if !kinds.contains(&kind) {
            kinds.push(kind);
        }
    }
    kinds
}

/// The modules of `modules_to_save`: linear layers, and other parameters.
#[derive(Debug, Default)]
pub(crate) struct SavedModules {
    pub(crate) layers: Vec<String>,
    pub(crate) parameters: Vec<String>,
    /// The names that select nothing.
    pub(crate) unmatched: Vec<String>,
    /// All modules of the model.
    available: Vec<String>,
}

impl SavedModules {
    /// Checks that every name selects a module.
    pub(crate) fn refuse_unmatched(&self) -> Result<()> {
        match self.unmatched.first() {
            None => Ok(()),
            Some(unmatched) => Err(Error::NoModule {
                name: unmatched.clone(),
                available: kinds_of(&self.available),
            }),
        }
    }
}

/// Finds the modules of `modules_to_save`.
pub(crate) fn modules_to_save<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
) -> Result<SavedModules> {
    let wanted: Vec<&String> = config.modules_to_save.iter().flatten().collect();
    let mut saved = SavedModules::default();
    if wanted.is_empty() {
        return Ok(saved);
    }
    let mut used = vec![false; wanted.len()];
    // As in PEFT, a name selects the modules that end with it, and everything inside them.
    let mut is_selected = |module: &str| {
        let mut selected = false;
        for (wanted, used) in wanted.iter().zip(&mut used) {
            let ends = module.match_indices('.').map(|(end, _)| end);
            let mut ends = ends.chain([module.len()]);
            if ends.any(|end| module[..end].ends_with(wanted.as_str())) {
                (selected, *used) = (true, true);
            }
        }
        selected
    };
    visit_linears(host, |name, _| {
        saved.available.push(name.to_owned());
        if is_selected(name) {
            saved.layers.push(name.to_owned());
        }
        Ok(())
    })?;
    // A model without adapter state cannot store copies.
    let can_copy = module_copies(host).is_some();
    visit_parameters(host, |name, _| {
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        if can_copy {
            saved.available.push(module.to_owned());
            if is_selected(module) {
                saved.parameters.push(name.to_owned());
            }
        }
        Ok(())
    })?;
    let unmatched = wanted.into_iter().zip(used).filter(|(_, used)| !used);
    saved.unmatched = unmatched.map(|(name, _)| name.clone()).collect();
    Ok(saved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_targets_are_those_of_pefts_table() {
        for (layers, expected) in [
            (
                vec!["layers.0.self_attn.v_proj", "layers.0.mlp.fc1"],
                Some(vec!["q_proj", "v_proj", "fc1", "fc2"]),
            ),
            (
                vec![
                    "model.layers.0.self_attn.q_proj",
                    "model.layers.0.self_attn.v_proj",
                ],
                Some(vec!["q_proj", "v_proj"]),
            ),
            (vec!["h.0.attn.c_attn"], Some(vec!["c_attn"])),
            (
                vec![
                    "encoder.block.0.layer.0.SelfAttention.q",
                    "encoder.block.0.layer.0.SelfAttention.v",
                ],
                Some(vec!["q", "v"]),
            ),
            (
                vec![
                    "bert.encoder.layer.0.attention.self.query",
                    "bert.encoder.layer.0.attention.self.value",
                ],
                Some(vec!["query", "value"]),
            ),
            (vec!["layers.0.attn.Wqkv"], None),
        ] {
            let names: Vec<String> = layers.into_iter().map(str::to_owned).collect();
            let expected = expected.map(TargetModules::names);
            assert_eq!(default_targets(&names), expected, "{names:?}");
        }
    }
}
