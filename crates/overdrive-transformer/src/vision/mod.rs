//! Images in a decoder: the tower that turns their patches into image tokens, and the positions of those tokens
//! (Qwen3-VL; Bai et al. 2025, arXiv:2511.21631).

mod block;
mod features;
mod grid;
mod merger;
mod parameters;
mod positions;
mod tower;

pub use features::{ImageFeatures, ImageTokens};
pub(crate) use parameters::parameters;
pub use positions::ImagePositions;
pub(crate) use tower::VisionTower;
