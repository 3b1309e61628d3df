use overdrive_core::Error as Common;
use tch::{Device, Tensor};

use crate::Result;
use crate::config::VisionConfig;

/// The rotary positions of a sequence with images. A text token has one position on all three axes; an image token has the
/// time, the row and the column in which it lies, all counted from the end of the text before the image. The text after an
/// image continues after the largest of its positions, so positions grow more slowly than the number of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ImagePositions {
    /// The time, row and column of each token.
    pub positions: Vec<[i64; 3]>,
    /// The first position after the sequence, minus its number of tokens: the token at index `i` after it has the position
    /// `i + delta` on all axes (transformers' `rope_deltas`). It is 0 or negative.
    pub delta: i64,
    /// The indices of the image tokens.
    pub image_tokens: Vec<usize>,
}

impl VisionConfig {
    /// Returns the positions of `tokens`, in which a run of [`image_token_id`](VisionConfig::image_token_id) stands for each
    /// image of `grids`, in patches `[height, width]`.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) if the image tokens of the sequence are not those of the grids.
    pub fn positions(&self, tokens: &[i64], grids: &[[i64; 2]]) -> Result<ImagePositions> {
        let merge = self.spatial_merge_size;
        let (mut positions, mut image_tokens) = (Vec::with_capacity(tokens.len()), Vec::new());
        let (mut index, mut next) = (0, 0);
        let mut grids_left = grids.iter();
        while let Some(token) = tokens.get(index) {
            if *token != self.image_token_id {
                positions.push([next; 3]);
                (index, next) = (index + 1, next + 1);
                continue;
            }
            let given = tokens[index..].iter();
            let given = given
                .take_while(|token| **token == self.image_token_id)
                .count();
            let Some(sides) = grids_left.next().map(|grid| grid.map(|side| side / merge)) else {
                return Err(misfit(tokens, self, grids));
            };
            let needed = (sides[0] * sides[1]).unsigned_abs() as usize;
            if given < needed {
                return Err(misfit(tokens, self, grids));
            }
            image_tokens.extend(index..index + needed);
            for row in 0..sides[0] {
                positions.extend((0..sides[1]).map(|column| [next, next + row, next + column]));
            }
            index += needed;
            next += sides[0].max(sides[1]);
        }
        if grids_left.next().is_some() {
            return Err(misfit(tokens, self, grids));
        }
        Ok(ImagePositions {
            positions,
            delta: next - tokens.len() as i64,
            image_tokens,
        })
    }

    /// Returns `tokens`, in which one [`image_token_id`](VisionConfig::image_token_id) stands for each image, as in the text
    /// of a chat template, with as many of them as each image of `grids` needs.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) if there are more or fewer such tokens than images.
    pub fn expand(&self, tokens: &[i64], grids: &[[i64; 2]]) -> Result<Vec<i64>> {
        let is_image = |token: &&i64| **token == self.image_token_id;
        let given = tokens.iter().filter(is_image).count();
        if given != grids.len() {
            let expected = format!(
                "{}, one at the place of each image; a prompt must not contain the token as text",
                grids.len()
            );
            return Err(
                Common::option("the number of image tokens in a prompt", given, expected).into(),
            );
        }
        let mut counts = grids.iter().map(|grid| self.image_tokens(*grid));
        let repeated = tokens.iter().flat_map(|token| {
            let count = match is_image(&token) {
                true => counts.next().unwrap_or(1).unsigned_abs() as usize,
                false => 1,
            };
            std::iter::repeat_n(*token, count)
        });
        Ok(repeated.collect())
    }

    /// Returns the number of image tokens of a grid of `[height, width]` patches.
    pub fn image_tokens(&self, [height, width]: [i64; 2]) -> i64 {
        (height / self.spatial_merge_size) * (width / self.spatial_merge_size)
    }
}

impl ImagePositions {
    /// Returns the positions as a tensor `(3, 1, T)`, i64, for [`ForwardInput::position_ids`](crate::ForwardInput).
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn to_tensor(&self, device: Device) -> Result<Tensor> {
        let axes = (0..3).flat_map(|axis| self.positions.iter().map(move |place| place[axis]));
        let all: Vec<i64> = axes.collect();
        Ok(Tensor::f_from_slice(&all)?
            .f_view([3, 1, -1])?
            .f_to_device(device)?)
    }
}

fn misfit(tokens: &[i64], config: &VisionConfig, grids: &[[i64; 2]]) -> crate::Error {
    let given = tokens
        .iter()
        .filter(|token| **token == config.image_token_id);
    let needed: i64 = grids.iter().map(|grid| config.image_tokens(*grid)).sum();
    let expected = format!(
        "{needed}, those of its {} images, one run for each",
        grids.len()
    );
    Common::option(
        "the number of image tokens in a prompt",
        given.count(),
        expected,
    )
    .into()
}
