//! The tensors of the text model in the folder of a multimodal model.

use std::collections::BTreeSet;

use overdrive_nn::multimodal::text_name;

use super::quantized::Views;
use crate::LlamaFamily;

/// The modules of a multimodal model that do not belong to its text model.
const OF_IMAGES: [&str; 3] = ["vision_tower.", "multi_modal_projector.", "visual."];
/// Those of Gemma 3n and 4.
const OF_IMAGES_AND_AUDIO: [&str; 4] = [
    "vision_tower.",
    "embed_vision.",
    "audio_tower.",
    "embed_audio.",
];

/// Renames the tensors of the text model of a multimodal model as in a text-only model, and drops the others.
pub(super) fn text<'a>(views: Views<'a>, family: LlamaFamily) -> Views<'a> {
    let others: &[&str] = match family.is_newest_gemma() {
        true => &OF_IMAGES_AND_AUDIO,
        false => &OF_IMAGES,
    };
    let mut dropped = Vec::new();
    let mut kept = Views::new();
    for (name, view) in views {
        match own_name(&name, others) {
            Some(own) => drop(kept.insert(own, view)),
            None => dropped.push(name),
        }
    }
    if let Some(first) = dropped.iter().min() {
        tracing::warn!(
            "{} tensors of images or audio ({first}, ...) are not read: this model supports only text",
            dropped.len()
        );
    }
    kept
}

/// Returns the names of all modules in the lists of a configuration, each with the name in this model: none unless a file is
/// of a multimodal model. Lists have the names of transformers' modules, or of the tensors in a file, which may be older.
pub(super) fn names_of(views: &Views<'_>) -> Vec<(String, String)> {
    let mut names = BTreeSet::new();
    let mut is_multimodal = false;
    for (own, view) in views {
        let module = |name: &str| Some(name.rsplit_once('.')?.0.to_owned());
        let (Some(own), Some(stored)) = (module(own), module(view.name())) else {
            continue;
        };
        let part = stored.strip_prefix("model.").unwrap_or(&stored);
        // Qwen3-VL has these names itself.
        let is_renamed = stored != own && part.starts_with("language_model.");
        if let (true, Some(text)) = (is_renamed, own.strip_prefix("model.")) {
            names.insert((format!("model.language_model.{text}"), own.clone()));
            is_multimodal = true;
        }
        names.insert((stored, own));
    }
    match is_multimodal {
        true => names.into_iter().collect(),
        false => Vec::new(),
    }
}

/// Returns the name in a text-only model, or `None` for a tensor outside the text model.
fn own_name(name: &str, others: &[&str]) -> Option<String> {
    // The head is beside the parts of the model.
    let part = name.strip_prefix("model.").unwrap_or(name);
    let is_other = others.iter().any(|prefix| part.starts_with(prefix));
    (!is_other).then(|| text_name(name).unwrap_or_else(|| name.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_the_text_have_the_names_of_a_model_without_images() {
        for (name, expected) in [
            (
                "model.language_model.norm.weight",
                Some("model.norm.weight"),
            ),
            ("lm_head.weight", Some("lm_head.weight")),
            ("model.norm.weight", Some("model.norm.weight")),
            ("vision_tower.vision_model.head.weight", None),
            ("model.vision_tower.vision_model.head.weight", None),
            ("model.multi_modal_projector.mm_soft_emb_norm.weight", None),
            ("audio_tower.weight", Some("audio_tower.weight")),
        ] {
            let found = own_name(name, &OF_IMAGES);
            assert_eq!(found.as_deref(), expected, "{name}");
        }
        for name in [
            "model.audio_tower.weight",
            "model.embed_vision.embedding.weight",
        ] {
            assert_eq!(own_name(name, &OF_IMAGES_AND_AUDIO), None, "{name}");
        }
    }
}
