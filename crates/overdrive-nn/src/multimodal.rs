//! Names of the text model in a multimodal model of transformers, of which Overdrive loads the text as a model of its own.
//!
//! transformers 5 has `model.language_model.layers` and `lm_head`, older versions `language_model.model.layers` and
//! `language_model.lm_head`.

/// Returns the name that a module or tensor of the language model has in a text-only model, or `None` if it is not inside
/// the language model.
///
/// ```
/// use overdrive_nn::multimodal;
///
/// let text = multimodal::text_name("model.language_model.layers.0.mlp");
/// assert_eq!(text.as_deref(), Some("model.layers.0.mlp"));
/// assert_eq!(multimodal::text_name("model.vision_tower.layers.0"), None);
/// ```
pub fn text_name(name: &str) -> Option<String> {
    let part = name.strip_prefix("model.").unwrap_or(name);
    let text = part.strip_prefix("language_model.")?;
    let is_whole = text.starts_with("model.") || text.starts_with("lm_head");
    Some(match is_whole {
        true => text.to_owned(),
        false => format!("model.{text}"),
    })
}

/// Returns the name that a module or tensor of a text-only model has in a multimodal model of transformers 5.
pub fn original_name(text: &str) -> String {
    match text.strip_prefix("model.") {
        Some(inner) => format!("model.language_model.{inner}"),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_the_language_model_lose_its_prefix() {
        for (name, expected) in [
            (
                "language_model.model.norm.weight",
                Some("model.norm.weight"),
            ),
            (
                "model.language_model.norm.weight",
                Some("model.norm.weight"),
            ),
            ("language_model.norm.weight", Some("model.norm.weight")),
            ("language_model.lm_head.weight", Some("lm_head.weight")),
            ("language_model.lm_head", Some("lm_head")),
            ("lm_head.weight", None),
            ("model.norm.weight", None),
        ] {
            assert_eq!(text_name(name).as_deref(), expected, "{name}");
        }
    }

    #[test]
    fn the_name_in_the_original_leads_back_to_the_name_of_the_text() {
        let name = "model.layers.0.self_attn.q_proj";
        assert_eq!(text_name(&original_name(name)).as_deref(), Some(name));
        assert_eq!(original_name("lm_head"), "lm_head");
    }
}
