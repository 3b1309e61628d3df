//! The configuration of a model that sees images: `vision_config`, and the keys beside it.

mod json;
mod validate;

pub(super) use json::{read, write};

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

impl VisionConfig {
    /// Returns the number of learned positions along each side of their square.
    pub(crate) fn position_side(&self) -> i64 {
        self.num_position_embeddings.isqrt()
    }

    /// Returns the number of values of a patch.
    pub fn patch_width(&self) -> i64 {
        self.in_channels * self.temporal_patch_size * self.patch_size.pow(2)
    }
}
