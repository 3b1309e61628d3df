//! Which maps and modules of a model a configuration means.

use crate::config::Matcher;
use crate::{AdapterHost, Error, LoraConfig, Result, TargetModules};

/// The configuration with targets, and the maps that they are.
pub(crate) fn resolve<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
) -> Result<(LoraConfig, Vec<String>)> {
    config.validate()?;
    let mut names = Vec::new();
    host.visit_linears(&mut |name, _| {
        names.push(name.to_owned());
        Ok(())
    })?;
    let mut config = config.clone();
    if config.target_modules.is_none() {
        config.target_modules = default_targets(&names);
    }
    let head = host.head().map(str::to_owned);
    let matcher = Matcher::new(&config, head.as_deref())?;
    let mut maps = Vec::new();
    for name in &names {
        if matcher.targets(name)? {
            maps.push(name.clone());
        }
    }
    refuse_other_modules(host, &config, &matcher)?;
    // Naming none on purpose is how only full copies are trained.
    let none_wanted = config.target_modules == Some(TargetModules::Names(Vec::new()));
    if maps.is_empty() && !none_wanted {
        return Err(Error::NoTarget {
            target_modules: describe(&config),
            available: kinds_of(&names),
        });
    }
    Ok((config, maps))
}

/// Embeddings and norms that are named as targets would silently stay without an adapter.
fn refuse_other_modules<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
    matcher: &Matcher<'_>,
) -> Result<()> {
    if config.target_modules == Some(TargetModules::AllLinear) {
        return Ok(());
    }
    host.visit_parameters(&mut |name, _| {
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        if !matcher.targets(module)? {
            return Ok(());
        }
        Err(Error::BadConfig {
            key: "target_modules".to_owned(),
            found: format!("`{module}`, which is no linear map"),
            expected: "linear maps; `modules_to_save` trains a full copy of any other module"
                .to_owned(),
        })
    })
}

/// PEFT's choice for the architectures with these maps.
fn default_targets(names: &[String]) -> Option<TargetModules> {
    let has = |wanted: &&str| {
        let suffix = format!(".{wanted}");
        names.iter().any(|name| name.ends_with(&suffix))
    };
    let choices: [&[&str]; 3] = [&["q_proj", "v_proj"], &["c_attn"], &["query_key_value"]];
    let choice = choices.iter().find(|choice| choice.iter().all(has))?;
    Some(TargetModules::names(choice.iter().copied()))
}

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

/// The names with `*` for numbers, each once.
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

/// What `modules_to_save` means: whole linear maps, and parameters.
#[derive(Debug, Default)]
pub(crate) struct SavedModules {
    pub(crate) maps: Vec<String>,
    pub(crate) parameters: Vec<String>,
}

pub(crate) fn modules_to_save<H: AdapterHost + ?Sized>(
    host: &mut H,
    config: &LoraConfig,
) -> Result<SavedModules> {
    let wanted: Vec<&String> = config.modules_to_save.iter().flatten().collect();
    let mut saved = SavedModules::default();
    if wanted.is_empty() {
        return Ok(saved);
    }
    let mut available = Vec::new();
    let mut used = vec![false; wanted.len()];
    // As in PEFT, a module is meant by how its name ends, and with it all that is in it.
    let mut is_meant = |module: &str| {
        let mut meant = false;
        for (wanted, used) in wanted.iter().zip(&mut used) {
            let ends = module.match_indices('.').map(|(end, _)| end);
            let mut ends = ends.chain([module.len()]);
            if ends.any(|end| module[..end].ends_with(wanted.as_str())) {
                (meant, *used) = (true, true);
            }
        }
        meant
    };
    host.visit_linears(&mut |name, _| {
        available.push(name.to_owned());
        if is_meant(name) {
            saved.maps.push(name.to_owned());
        }
        Ok(())
    })?;
    let has_place = host.module_copies().is_some();
    host.visit_parameters(&mut |name, _| {
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        if has_place {
            available.push(module.to_owned());
            if is_meant(module) {
                saved.parameters.push(name.to_owned());
            }
        }
        Ok(())
    })?;
    match used.iter().position(|used| !used) {
        None => Ok(saved),
        Some(unused) => Err(Error::NoModule {
            name: wanted[unused].clone(),
            available: kinds_of(&available),
        }),
    }
}
