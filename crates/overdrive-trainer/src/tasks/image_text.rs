//! Images with a prompt and a text that a model learns to answer.

use overdrive_core::{Error as Common, IGNORE_INDEX};
use overdrive_datasets::prelude::*;
use overdrive_datasets::{
    CaptionedPatches, Error as DataError, OnDevice, PatchCaptionDataset, Result as DataResult,
    Tokenizer,
};
use overdrive_generation::{ChatTemplateOptions, GenerationConfig, Message, ModelFiles};
use overdrive_transformer::{
    CausalLm, ForwardInput, ImageTokens, LabelShift, LossOutput, VisionConfig,
};
use serde_json::json;
use tch::{Device, Tensor};

use crate::arguments::plain;
use crate::error::invalid;
use crate::{MicroBatch, Result};

/// The form of an example: the tokens of a prompt with one image token, then those of the caption.
#[derive(Debug, Clone)]
pub struct ImageTextFormat {
    /// The prompt.
    pub prompt: Vec<i64>,
    /// The tokenizer of captions.
    pub tokenizer: Tokenizer,
    /// The token after a caption.
    pub end: i64,
    /// The tokens of images, of the model.
    pub vision: VisionConfig,
}

/// An image with its prompt and caption, as tokens.
struct ImageText {
    row: CaptionedPatches,
    tokens: Vec<i64>,
    positions: Vec<[i64; 3]>,
    image_tokens: Vec<usize>,
    /// The number of tokens before the caption.
    prompt: usize,
}

/// Rows of an image, a prompt and a caption. B rows of width T.
#[derive(Debug)]
pub struct ImageTextBatch {
    /// The tokens (B, T), Int64, padded on the right.
    pub input_ids: Tensor,
    /// The labels (B, T), Int64: those of captions.
    pub labels: Tensor,
    /// The three positions of each token, (3, B, T), Int64.
    pub position_ids: Tensor,
    /// The patches of all images, Float.
    pub pixels: Tensor,
    /// The indices of the image tokens among all B · T, Int64.
    pub image_tokens: Tensor,
    /// The heights and widths of the images in patches.
    pub grids: Vec<[i64; 2]>,
    /// The number of labels.
    pub label_count: usize,
    /// The number of tokens without padding.
    pub tokens: usize,
}

impl ImageTextFormat {
    /// Returns the form of a conversation: a message with the image and a question, and the caption as its answer.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a model that sees no images or has no end-of-text token,
    /// [`Error::Generation`](crate::Error::Generation) if it has no chat template.
    pub fn new(model: &CausalLm, files: &ModelFiles, question: &str) -> Result<ImageTextFormat> {
        let Some(vision) = model.config().vision() else {
            let config = model.config().to_json();
            let family = config.get("model_type").map_or_else(String::new, plain);
            return invalid(
                "model",
                family,
                "a model that sees images, such as Qwen3-VL",
            );
        };
        let (template, tokenizer) = (files.chat_template()?, files.tokenizer()?);
        let parts = json!([{"type": "image"}, {"type": "text", "text": question}]);
        let message = Message::user("").with("content", parts);
        let prompt = template.encode(&tokenizer, &[message], &ChatTemplateOptions::default())?;
        let config = GenerationConfig::from_map(&files.generation_config()?)?;
        let config = config.or_end_of_text(&template, &tokenizer);
        let Some(&end) = config.eos_token_id.first() else {
            let expected = "set in the model's generation_config.json or tokenizer";
            return invalid("eos_token_id", "missing", expected);
        };
        Ok(ImageTextFormat {
            prompt,
            tokenizer,
            end,
            vision: vision.clone(),
        })
    }

    fn example(&self, row: CaptionedPatches) -> DataResult<ImageText> {
        let grid = row.image.grid.map(|side| side as i64);
        let unfit = |error| Common::option("an image", error, "one that fits the prompt");
        let mut tokens = self.vision.expand(&self.prompt, &[grid]).map_err(unfit)?;
        let prompt = tokens.len();
        let caption = self.tokenizer.encode(row.caption.as_str(), false);
        let caption = caption.map_err(|source| DataError::Tokenizer {
            action: format!("encode {:?}", row.caption),
            source,
        })?;
        tokens.extend(caption.get_ids().iter().map(|&id| i64::from(id)));
        tokens.push(self.end);
        let positions = self.vision.positions(&tokens, &[grid]);
        let positions = positions.map_err(unfit)?;
        Ok(ImageText {
            row,
            tokens,
            positions: positions.positions,
            image_tokens: positions.image_tokens,
            prompt,
        })
    }
}

/// Returns a loader of the images of `data` in that form.
///
/// # Errors
/// [`Error::Data`](crate::Error::Data) for an invalid option.
pub fn load_image_texts(
    data: PatchCaptionDataset,
    format: ImageTextFormat,
    options: DataLoaderOptions,
    device: Device,
) -> Result<DeviceLoader<ImageTextBatch>> {
    let examples = data.map(move |row: CaptionedPatches| format.example(row));
    let loader = DataLoader::with_collate(examples, collate, options)?;
    Ok(DeviceLoader::new(loader, device))
}

fn collate(rows: Vec<ImageText>) -> DataResult<ImageTextBatch> {
    let width = rows.iter().map(|row| row.tokens.len()).max().unwrap_or(0);
    let (mut ids, mut labels, mut axes) = (Vec::new(), Vec::new(), [vec![], vec![], vec![]]);
    let (mut pixels, mut image_tokens, mut grids) = (Vec::new(), Vec::new(), Vec::new());
    for (number, row) in rows.iter().enumerate() {
        let padding = width - row.tokens.len();
        ids.extend(
            row.tokens
                .iter()
                .copied()
                .chain(std::iter::repeat_n(0, padding)),
        );
        let text = &row.tokens[row.prompt..];
        labels.extend(std::iter::repeat_n(IGNORE_INDEX, row.prompt).chain(text.iter().copied()));
        labels.extend(std::iter::repeat_n(IGNORE_INDEX, padding));
        for (axis, all) in axes.iter_mut().enumerate() {
            all.extend(row.positions.iter().map(|position| position[axis]));
            all.extend(std::iter::repeat_n(0, padding));
        }
        pixels.extend_from_slice(&row.row.image.values());
        image_tokens.extend(
            row.image_tokens
                .iter()
                .map(|index| (number * width + index) as i64),
        );
        grids.push(row.row.image.grid.map(|side| side as i64));
    }
    let values = rows.first().map_or(1, |row| row.row.image.patch_width) as i64;
    let shape = [rows.len() as i64, width as i64];
    Ok(ImageTextBatch {
        input_ids: Tensor::f_from_slice(&ids)?.f_view(shape)?,
        label_count: labels
            .iter()
            .filter(|label| **label != IGNORE_INDEX)
            .count(),
        labels: Tensor::f_from_slice(&labels)?.f_view(shape)?,
        position_ids: Tensor::f_from_slice(&axes.concat())?.f_view([3, shape[0], shape[1]])?,
        pixels: Tensor::f_from_slice(&pixels)?.f_view([-1, values])?,
        image_tokens: Tensor::f_from_slice(&image_tokens)?,
        grids,
        tokens: rows.iter().map(|row| row.tokens.len()).sum(),
    })
}

impl ImageTextBatch {
    /// Computes the loss of the captions. The vision tower does not learn.
    ///
    /// # Errors
    /// [`Error::Model`](crate::Error::Model).
    pub fn loss(&self, model: &CausalLm) -> Result<LossOutput> {
        let features = tch::no_grad(|| model.encode_images(&self.pixels, &self.grids))?;
        let images = ImageTokens {
            indices: self.image_tokens.shallow_clone(),
            features,
        };
        let input = ForwardInput::new(&self.input_ids)
            .with_position_ids(&self.position_ids)
            .with_position_bound(self.input_ids.size()[1])
            .with_images(&images)
            .with_label_count(self.label_count);
        Ok(model.loss_of(input, &self.labels, LabelShift::HuggingFace)?)
    }

    fn map_tensors(self, change: impl Fn(Tensor) -> DataResult<Tensor>) -> DataResult<Self> {
        Ok(Self {
            input_ids: change(self.input_ids)?,
            labels: change(self.labels)?,
            position_ids: change(self.position_ids)?,
            pixels: change(self.pixels)?,
            image_tokens: change(self.image_tokens)?,
            ..self
        })
    }
}

impl OnDevice for ImageTextBatch {
    fn pinned(self) -> DataResult<Self> {
        self.map_tensors(Tensor::pinned)
    }

    fn on_device(self, device: Device, non_blocking: bool) -> DataResult<Self> {
        self.map_tensors(|tensor| tensor.on_device(device, non_blocking))
    }
}

impl MicroBatch for ImageTextBatch {
    fn examples(&self) -> usize {
        self.grids.len()
    }

    fn label_count(&self) -> Option<usize> {
        Some(self.label_count)
    }

    fn tokens(&self) -> usize {
        self.tokens
    }

    fn padded_tokens(&self) -> usize {
        self.input_ids.numel()
    }
}
