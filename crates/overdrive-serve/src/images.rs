//! The images of chats.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use overdrive_generation::ImagePatches;
#[cfg(feature = "image")]
use overdrive_generation::ImageProcessor;
#[cfg(feature = "image")]
use overdrive_transformer::VisionConfig;
use serde_json::{Value, json};

#[cfg(feature = "image")]
use crate::api_error::ApiError;
use crate::api_error::ApiResult;
use crate::fields::shorten;
use crate::shared::{Backend, Shared};

/// Takes the files of the images out of a list of parts, if it has any; each becomes a part of type `image`. The error is
/// its message.
pub(crate) fn take(content: &mut Value, param: &str) -> Result<Vec<Vec<u8>>, String> {
    let mut images = Vec::new();
    for part in content.as_array_mut().into_iter().flatten() {
        // Those of chats and of responses.
        if !matches!(part["type"].as_str(), Some("image_url" | "input_image")) {
            continue;
        }
        let url = match &part["image_url"] {
            Value::Object(image) => image.get("url").and_then(Value::as_str),
            other => other.as_str(),
        };
        let bytes = image_of(url.unwrap_or_default());
        images
            .push(bytes.map_err(|problem| {
                format!("`{param}.content` has an image whose URL {problem}")
            })?);
        *part = json!({"type": "image"});
    }
    if images.is_empty() {
        return Ok(images);
    }
    for part in content.as_array_mut().into_iter().flatten() {
        let text = part.as_str().or_else(|| part["text"].as_str());
        if let Some(text) = text.map(str::to_owned) {
            *part = json!({"type": "text", "text": text});
        } else if part["type"] != "image" {
            let kind = part["type"].as_str().unwrap_or("unknown");
            let problem = match kind {
                _ if kind.ends_with("text") => "its `text` must be a string",
                _ => "this model reads texts and images",
            };
            return Err(format!(
                "`{param}.content` has a part of type {kind:?}; {problem}"
            ));
        }
    }
    Ok(images)
}

/// Returns the file of a data URL. The error continues "an image whose URL".
fn image_of(url: &str) -> Result<Vec<u8>, String> {
    let data = url
        .strip_prefix("data:")
        .and_then(|rest| rest.split_once(";base64,"));
    let Some((_, data)) = data else {
        return Err(format!(
            "is {:?}; this server loads no images from elsewhere: send `data:image/png;base64,` and the file in Base64",
            shorten(url)
        ));
    };
    STANDARD
        .decode(data.trim())
        .map_err(|error| format!("is not valid Base64: {error}"))
}

impl Shared {
    /// Returns `true` if the messages of a chat may have images.
    pub(crate) fn sees_images(&self) -> bool {
        let sees = matches!(&self.backend, Backend::Engine(engine) if engine.vision().is_some());
        cfg!(feature = "image") && sees && self.model.processor.is_some()
    }
}

#[cfg(feature = "image")]
impl Shared {
    /// Returns the rendered chat `prompt` of the field `field`, in which one token stands for each of the files `images`,
    /// with all image tokens. Reads only the headers of the files: their pixels may take much memory, and are decoded once
    /// the prompt is known to fit the context.
    pub(crate) fn expand_images(
        &self,
        field: &str,
        prompt: Vec<i64>,
        images: &[Vec<u8>],
    ) -> ApiResult<Vec<i64>> {
        let Some((processor, vision)) = self.vision(images)? else {
            return Ok(prompt);
        };
        let grid = |file: &Vec<u8>| -> ApiResult<[i64; 2]> {
            let grid = processor.grid(file).map_err(in_field(field))?;
            Ok(grid.map(|side| side as i64))
        };
        let grids = images.iter().map(grid).collect::<ApiResult<Vec<_>>>()?;
        let tokens = grids.iter().map(|grid| vision.image_tokens(*grid));
        let tokens: usize = tokens.map(|tokens| tokens.unsigned_abs() as usize).sum();
        let total = (prompt.len() + tokens).saturating_sub(images.len());
        let longest = self.backend.max_prompt_len();
        // Checked before there is memory for so many tokens.
        if total > longest {
            let found = format_args!(
                "answer included, and `{field}` has {total}, {tokens} of them for images; give fewer or smaller images"
            );
            let context = self.backend.max_model_len();
            return Err(ApiError::context(field, context, found));
        }
        vision.expand(&prompt, &grids).map_err(in_field(field))
    }

    /// Decodes the files of the images of the field `field`.
    pub(crate) fn decode_images(
        &self,
        field: &str,
        images: &[Vec<u8>],
    ) -> ApiResult<Vec<ImagePatches>> {
        let Some((processor, _)) = self.vision(images)? else {
            return Ok(Vec::new());
        };
        let decode = |file: &Vec<u8>| processor.decode(file).map_err(in_field(field));
        images.iter().map(decode).collect()
    }

    /// Returns what reads images; `None` if there are none.
    fn vision(&self, images: &[Vec<u8>]) -> ApiResult<Option<(&ImageProcessor, &VisionConfig)>> {
        if images.is_empty() {
            return Ok(None);
        }
        Ok(self.model.processor.as_ref().zip(self.engine()?.vision()))
    }
}

#[cfg(feature = "image")]
fn in_field<E: std::fmt::Display>(field: &str) -> impl Fn(E) -> ApiError {
    move |error| ApiError::field(field, error.to_string())
}

/// Without the feature `image`, messages with images are refused.
#[cfg(not(feature = "image"))]
impl Shared {
    pub(crate) fn expand_images(
        &self,
        _: &str,
        prompt: Vec<i64>,
        _: &[Vec<u8>],
    ) -> ApiResult<Vec<i64>> {
        Ok(prompt)
    }

    pub(crate) fn decode_images(&self, _: &str, _: &[Vec<u8>]) -> ApiResult<Vec<ImagePatches>> {
        Ok(Vec::new())
    }
}
