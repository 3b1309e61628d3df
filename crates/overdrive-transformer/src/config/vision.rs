//! The configuration of a model that sees images: `vision_config`, and the keys beside it.

use serde_json::{Map, Value, json};

use super::family::LlamaFamily;
use super::fields::{Fields, bad};
use super::llama::LlamaConfig;
use super::sizes::{check_layers, check_size};
use crate::activation::activation_named;
use crate::{Error, Result};

/// The vision tower of a model, and the tokens that stand for images (Qwen3-VL).
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct VisionConfig {
    /// The number of layers. Default: 27.
    pub depth: i64,
    /// The width of the hidden states. Default: 1152.
    pub hidden_size: i64,
    /// The activation of the feed-forward blocks. Default: `gelu_pytorch_tanh`.
    pub hidden_act: String,
    /// The inner width of the feed-forward blocks. Default: 4304.
    pub intermediate_size: i64,
    /// The number of heads. Default: 16.
    pub num_heads: i64,
    /// The number of colour channels. Default: 3.
    pub in_channels: i64,
    /// The height and width of a patch in pixels. Default: 16.
    pub patch_size: i64,
    /// The number of patches along each side of those that become one token. Default: 2.
    pub spatial_merge_size: i64,
    /// The number of frames of a patch. Default: 2.
    pub temporal_patch_size: i64,
    /// The width of the image tokens: that of the text model. Default: 3584.
    pub out_hidden_size: i64,
    /// The number of learned positions, those of a square. Default: 2304.
    pub num_position_embeddings: i64,
    /// The layers whose outputs are added to the hidden states after the first layers of the text model (DeepStack,
    /// arXiv:2406.04334). Default: 8, 16, 24.
    pub deepstack_visual_indexes: Vec<i64>,
    /// The standard deviation of the initial weights. Default: 0.02.
    pub initializer_range: f64,
    /// The base of the rotary positions. Default: 10000.
    pub rope_theta: f64,
    /// The token that stands for a part of an image. Default: 151655.
    pub image_token_id: i64,
    /// The token that stands for a part of a video. Default: 151656.
    pub video_token_id: i64,
    /// The token before an image. Default: 151652.
    pub vision_start_token_id: i64,
    /// The token after an image. Default: 151653.
    pub vision_end_token_id: i64,
    /// The number of rotary frequencies of the text model for the time, the row and the column of a token
    /// (`rope_scaling.mrope_section`). Default: 24, 20, 20.
    pub mrope_section: [i64; 3],
}

impl Default for VisionConfig {
    fn default() -> Self {
        VisionConfig {
            depth: 27,
            hidden_size: 1152,
            hidden_act: "gelu_pytorch_tanh".to_owned(),
            intermediate_size: 4304,
            num_heads: 16,
            in_channels: 3,
            patch_size: 16,
            spatial_merge_size: 2,
            temporal_patch_size: 2,
            out_hidden_size: 3584,
            num_position_embeddings: 2304,
            deepstack_visual_indexes: vec![8, 16, 24],
            initializer_range: 0.02,
            rope_theta: 10_000.0,
            image_token_id: 151_655,
            video_token_id: 151_656,
            vision_start_token_id: 151_652,
            vision_end_token_id: 151_653,
            mrope_section: [24, 20, 20],
        }
    }
}

/// The keys of `vision_config` that do not change what is computed.
const WITHOUT_EFFECT: [&str; 7] = [
    "architectures",
    "attn_implementation",
    "_attn_implementation_autoset",
    "dtype",
    "model_type",
    "torch_dtype",
    "transformers_version",
];

/// Reads a model with images, whose text model is in `text_config`.
pub(super) fn read(mut fields: Fields) -> Result<LlamaConfig> {
    let mut vision = VisionConfig::default();
    if let Some(own) = fields.object("vision_config")? {
        vision.read_tower(own)?;
    }
    vision.read_tokens(&mut fields)?;
    // transformers' default differs from that of other models with images.
    if fields.peek("tie_word_embeddings").is_none() {
        fields.put("tie_word_embeddings", false.into());
    }
    if let Some(text) = fields.peek("text_config").and_then(Value::as_object) {
        vision.read_sections(text)?;
    }
    let mut config = super::multimodal::text(fields, &[LlamaFamily::Qwen3Vl])?;
    config.vision = Some(vision);
    Ok(config)
}

/// Writes a model with images; `text` is the object of its text model.
pub(super) fn write(
    vision: &VisionConfig,
    mut text: Map<String, Value>,
    architecture: &str,
) -> Map<String, Value> {
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
        "architectures": [architecture],
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision.tower_to_json(),
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
            if kind.as_deref().is_some_and(|kind| kind != "axial") {
                return Err(unsupported("rope_parameters.rope_type", kind, "axial"));
            }
            refuse_rest("vision_config.rope_parameters", rope)?;
        }
        refuse_rest("vision_config", fields)
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
                let found = Some("false".to_owned());
                return Err(unsupported("mrope_interleaved", found, "true"));
            }
        }
        Ok(())
    }

    fn tower_to_json(&self) -> Value {
        json!({
            "model_type": "qwen3_vl_vision",
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

    /// Checks the sizes, for a text model with hidden states of width `hidden_size`, heads of `head_dim` channels, and
    /// `layers` layers.
    pub(super) fn validate(&self, hidden_size: i64, head_dim: i64, layers: i64) -> Result<()> {
        check_layers("vision_config.depth", self.depth)?;
        for (key, value) in [
            ("vision_config.hidden_size", self.hidden_size),
            ("vision_config.intermediate_size", self.intermediate_size),
            ("vision_config.num_heads", self.num_heads),
            ("vision_config.in_channels", self.in_channels),
            ("vision_config.patch_size", self.patch_size),
            ("vision_config.spatial_merge_size", self.spatial_merge_size),
            (
                "vision_config.temporal_patch_size",
                self.temporal_patch_size,
            ),
            (
                "vision_config.num_position_embeddings",
                self.num_position_embeddings,
            ),
        ] {
            check_size(key, value)?;
        }
        activation_named("vision_config.hidden_act", &self.hidden_act)?;
        let refuse = |key: &str, value: Value, expected: String| Err(bad(key, &value, &expected));
        if self.hidden_size % (4 * self.num_heads) != 0 {
            let expected = format!("a multiple of 4 x num_heads ({})", self.num_heads);
            return refuse(
                "vision_config.hidden_size",
                self.hidden_size.into(),
                expected,
            );
        }
        if self.out_hidden_size != hidden_size {
            let expected = format!("the hidden_size of the text model, {hidden_size}");
            let value = self.out_hidden_size.into();
            return refuse("vision_config.out_hidden_size", value, expected);
        }
        if self.position_side().pow(2) != self.num_position_embeddings {
            let value = self.num_position_embeddings.into();
            let expected = "a square number".to_owned();
            return refuse("vision_config.num_position_embeddings", value, expected);
        }
        let deep = &self.deepstack_visual_indexes;
        let rising = deep.windows(2).all(|pair| pair[0] < pair[1]);
        let known = deep.iter().all(|layer| (0..self.depth).contains(layer));
        if !rising || !known || deep.len() as i64 > layers {
            let expected = format!(
                "rising layers below depth ({}), at most as many as the text model has layers ({layers})",
                self.depth
            );
            let value = deep.clone().into();
            return refuse("vision_config.deepstack_visual_indexes", value, expected);
        }
        let sections = &self.mrope_section;
        if sections.iter().any(|n| *n < 0) || sections.iter().sum::<i64>() != head_dim / 2 {
            let expected = format!(
                "three numbers whose sum is {}, half of head_dim",
                head_dim / 2
            );
            return refuse("mrope_section", sections.to_vec().into(), expected);
        }
        Ok(())
    }

    /// Returns the number of learned positions along each side of their square.
    pub(crate) fn position_side(&self) -> i64 {
        self.num_position_embeddings.isqrt()
    }

    /// Returns the number of values of a patch.
    pub fn patch_width(&self) -> i64 {
        self.in_channels * self.temporal_patch_size * self.patch_size.pow(2)
    }
}

fn unsupported(key: &str, found: Option<String>, supported: &str) -> Error {
    Error::Unsupported {
        key: key.to_owned(),
        found: format!("{:?}", found.unwrap_or_default()),
        supported: supported.to_owned(),
    }
}

/// Refuses keys that have not been read: they could change what the tower computes.
fn refuse_rest(object: &str, fields: Fields) -> Result<()> {
    let rest = fields.into_rest();
    let unknown = rest
        .iter()
        .find(|(key, value)| !value.is_null() && !WITHOUT_EFFECT.contains(&key.as_str()));
    match unknown {
        None => Ok(()),
        Some((key, value)) => Err(Error::Unsupported {
            key: format!("{object}.{key}"),
            found: value.to_string(),
            supported: "the keys of Qwen3-VL's vision tower; remove this one if it changes nothing"
                .to_owned(),
        }),
    }
}
