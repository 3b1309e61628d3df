//! Reading the configuration of a model that sees images from config.json, and writing it.

use serde_json::{Map, Value, json};

use super::VisionConfig;
use crate::config::family::LlamaFamily;
use crate::config::fields::{Fields, bad};
use crate::config::llama::LlamaConfig;
use crate::config::multimodal;
use crate::{Error, Result};

/// Reads a model with images, whose text model is a `family` in `text_config`.
pub(in crate::config) fn read(mut fields: Fields, family: LlamaFamily) -> Result<LlamaConfig> {
    let mut vision = VisionConfig::default();
    if let Some(own) = fields.object("vision_config")? {
        vision.read_tower(own)?;
    }
    vision.read_tokens(&mut fields)?;
    if let Some(text) = fields.peek("text_config").and_then(Value::as_object) {
        vision.read_sections(text)?;
    }
    let mut config = multimodal::text(fields, &[family])?;
    config.vision = Some(vision);
    Ok(config)
}

/// Writes a model with images; `text` is the object of its text model.
pub(in crate::config) fn write(
    vision: &VisionConfig,
    mut text: Map<String, Value>,
    family: LlamaFamily,
) -> Map<String, Value> {
    let model_type = match family {
        LlamaFamily::Qwen3VlMoe => "qwen3_vl_moe",
        _ => "qwen3_vl",
    };
    text.remove("architectures");
    let tied = text.get("tie_word_embeddings").cloned();
    let mut scaling = json!({
        "rope_type": "default",
        "mrope_section": vision.mrope_section,
        "mrope_interleaved": true,
    });
    // transformers 5 reads the base here, and 4 beside it.
    scaling["rope_theta"] = text.get("rope_theta").cloned().unwrap_or_default();
    text.insert("rope_scaling".to_owned(), scaling);
    let all = json!({
        "architectures": [family.architecture()],
        "model_type": model_type,
        "text_config": text,
        "vision_config": vision.tower_to_json(model_type),
        "image_token_id": vision.image_token_id,
        "video_token_id": vision.video_token_id,
        "vision_start_token_id": vision.vision_start_token_id,
        "vision_end_token_id": vision.vision_end_token_id,
        "tie_word_embeddings": tied,
    });
    match all {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

impl VisionConfig {
    /// Reads the keys of the tower. Others have no effect: transformers writes many that belong to all models.
    fn read_tower(&mut self, mut fields: Fields) -> Result<()> {
        fields.layers("depth", &mut self.depth)?;
        for (key, slot) in [
            ("hidden_size", &mut self.hidden_size),
            ("intermediate_size", &mut self.intermediate_size),
            ("num_heads", &mut self.num_heads),
            ("in_channels", &mut self.in_channels),
            ("patch_size", &mut self.patch_size),
            ("spatial_merge_size", &mut self.spatial_merge_size),
            ("temporal_patch_size", &mut self.temporal_patch_size),
            ("out_hidden_size", &mut self.out_hidden_size),
            ("num_position_embeddings", &mut self.num_position_embeddings),
        ] {
            fields.positive(key, slot)?;
        }
        if let Some(name) = fields.string("hidden_act")? {
            self.hidden_act = name;
        }
        fields.number("initializer_range", &mut self.initializer_range)?;
        if let Some(value) = fields.take("deepstack_visual_indexes") {
            let layers = value.as_array().map(|all| all.iter().map(Value::as_i64));
            let layers = layers.and_then(Iterator::collect);
            self.deepstack_visual_indexes = layers.ok_or_else(|| {
                bad(
                    "vision_config.deepstack_visual_indexes",
                    &value,
                    "a list of layers",
                )
            })?;
        }
        if let Some(mut rope) = fields.object("rope_parameters")? {
            rope.number("rope_theta", &mut self.rope_theta)?;
            let kind = rope.string("rope_type")?;
            if let Some(kind) = kind.filter(|kind| kind != "axial") {
                let found = format!("{kind:?}");
                return Err(Error::unsupported(
                    "rope_parameters.rope_type",
                    found,
                    "axial",
                ));
            }
            if let Some((key, value)) = rope.into_rest().into_iter().next() {
                let key = format!("vision_config.rope_parameters.{key}");
                let supported = "rope_theta, rope_type";
                return Err(Error::unsupported(key, value, supported));
            }
        }
        Ok(())
    }

    fn read_tokens(&mut self, fields: &mut Fields) -> Result<()> {
        for (key, slot) in [
            ("image_token_id", &mut self.image_token_id),
            ("video_token_id", &mut self.video_token_id),
            ("vision_start_token_id", &mut self.vision_start_token_id),
            ("vision_end_token_id", &mut self.vision_end_token_id),
        ] {
            let mut id = Some(*slot);
            fields.token_id(key, &mut id)?;
            *slot = id.unwrap_or(*slot);
        }
        Ok(())
    }

    /// Reads the sections of the rotary frequencies of the text model.
    fn read_sections(&mut self, text: &Map<String, Value>) -> Result<()> {
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(scaling) = text.get(key) else {
                continue;
            };
            if let Some(value) = scaling.get("mrope_section") {
                let numbers = value.as_array().map(|all| all.iter().map(Value::as_i64));
                let numbers: Option<Vec<i64>> = numbers.and_then(Iterator::collect);
                let section = numbers.and_then(|numbers| numbers.try_into().ok());
                self.mrope_section = section.ok_or_else(|| {
                    let key = format!("text_config.{key}.mrope_section");
                    bad(&key, value, "a list of three integers")
                })?;
            }
            if scaling.get("mrope_interleaved").and_then(Value::as_bool) == Some(false) {
                return Err(Error::unsupported("mrope_interleaved", false, "true"));
            }
        }
        Ok(())
    }

    fn tower_to_json(&self, model_type: &str) -> Value {
        json!({
            "model_type": format!("{model_type}_vision"),
            "depth": self.depth,
            "hidden_size": self.hidden_size,
            "hidden_act": self.hidden_act,
            "intermediate_size": self.intermediate_size,
            "num_heads": self.num_heads,
            "in_channels": self.in_channels,
            "patch_size": self.patch_size,
            "spatial_merge_size": self.spatial_merge_size,
            "temporal_patch_size": self.temporal_patch_size,
            "out_hidden_size": self.out_hidden_size,
            "num_position_embeddings": self.num_position_embeddings,
            "deepstack_visual_indexes": self.deepstack_visual_indexes,
            "initializer_range": self.initializer_range,
            "rope_parameters": {"rope_type": "axial", "rope_theta": self.rope_theta},
        })
    }
}
