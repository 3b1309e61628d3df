//! Files of PEFT over a model with other modules than this one: a multimodal model, of which this model is the text, and
//! experts, which are parameters since transformers 5.

use std::collections::HashMap;

use overdrive_nn::{AdapterHost, multimodal};
use overdrive_safetensors::StoredTensor;

use crate::config::{LayerParameter, TokenIndices};
use crate::host::visit_linears;
use crate::{LoraConfig, Names, Result, TargetModules};

/// Renames the tensors of an adapter over a multimodal model as in its text model, and drops those of towers.
pub(super) fn keep_text<H: AdapterHost + ?Sized>(
    host: &mut H,
    stored: &mut HashMap<String, StoredTensor<'_>>,
    config: LoraConfig,
) -> Result<LoraConfig> {
    let mut is_text = true;
    visit_linears(host, |name, _| {
        is_text &= multimodal::text_name(name).is_none();
        Ok(())
    })?;
    let is_multimodal = |key: &str| multimodal::text_name(key).is_some();
    if !is_text || !stored.keys().any(|key| is_multimodal(key)) {
        return Ok(config);
    }
    let mut towers = Vec::new();
    for (key, tensor) in std::mem::take(stored) {
        if is_multimodal(&key) || key.starts_with("lm_head.") {
            stored.insert(text_name(&key), tensor);
        } else {
            towers.push(key);
        }
    }
    if let Some(first) = towers.iter().min() {
        tracing::warn!(
            "{} tensors of the adapter belong to images or audio ({first}, ...) and are not read: this model supports only text",
            towers.len()
        );
    }
    let mut config = config;
    let rename = |names: &mut Vec<String>| {
        for name in names {
            *name = text_name(name);
        }
    };
    // A pattern may name the modules of the multimodal model, which have no counterpart here.
    if let Some(TargetModules::Pattern(_)) = config.target_modules {
        let mut layers: Vec<String> = stored
            .keys()
            .filter_map(|key| Some(key.strip_suffix(".lora_A.weight")?.to_owned()))
            .filter(|layer| !layer.ends_with(".base_layer") && !layer.ends_with(".experts"))
            .collect();
        layers.sort_unstable();
        config.target_modules = Some(TargetModules::Names(layers));
        config.exclude_modules = None;
    }
    if let Some(TargetModules::Names(names)) = &mut config.target_modules {
        rename(names);
    }
    config.modules_to_save.iter_mut().for_each(rename);
    config.target_parameters.iter_mut().for_each(rename);
    match &mut config.exclude_modules {
        Some(Names::Many(names)) => rename(names),
        Some(Names::One(pattern)) => *pattern = text_pattern(pattern),
        None => {}
    }
    for (pattern, _) in &mut config.rank_pattern {
        *pattern = text_pattern(pattern);
    }
    for (pattern, _) in &mut config.alpha_pattern {
        *pattern = text_pattern(pattern);
    }
    if let Some(TokenIndices::OfModules(modules)) = &mut config.trainable_token_indices {
        let own = std::mem::take(modules).into_iter();
        *modules = own
            .map(|(name, tokens)| (text_name(&name), tokens))
            .collect();
    }
    Ok(config)
}

/// Returns the name in the text model.
fn text_name(name: &str) -> String {
    multimodal::text_name(name).unwrap_or_else(|| name.to_owned())
}

/// Returns the pattern with the names of the text model.
fn text_pattern(pattern: &str) -> String {
    let mut text = pattern.to_owned();
    // With the dots of a name, or those of a regular expression.
    for dot in [".", r"\."] {
        let old = format!("language_model{dot}model{dot}");
        text = text.replace(&old, &format!("model{dot}"));
        text = text.replace(&format!("language_model{dot}"), "");
    }
    text
}

/// Returns the configuration without the experts that it selects by the names of other layers (`up_proj` of a shared expert)
/// and that have nothing in the file: they are no modules in transformers 5, so that PEFT gave them no adapter.
pub(super) fn without_experts(
    stored: &HashMap<String, StoredTensor<'_>>,
    config: &LoraConfig,
    layers: &[String],
) -> Option<LoraConfig> {
    let is_expert = |layer: &&String| {
        LayerParameter::of(layer).expert.is_some() && config.target_parameter(layer).is_none()
    };
    let is_stored = |layer: &String| stored.contains_key(&format!("{layer}.lora_A.weight"));
    let mut experts = layers.iter().filter(is_expert).peekable();
    experts.peek()?;
    if experts.any(is_stored) {
        return None;
    }
    let others = layers.iter().filter(|layer| !is_expert(layer));
    let others = others.filter(|layer| config.target_parameter(layer).is_none());
    Some(LoraConfig {
        target_modules: Some(TargetModules::Names(others.cloned().collect())),
        ..config.clone()
    })
}
