use overdrive_datasets::ImagePatches;
use overdrive_transformer::{CausalLm, Error as ModelError, ImageFeatures, ImageTokens};
use tch::Tensor;

use super::{encode, grids_of};
use crate::Result;

/// The images of prompts that are padded on the left to one width.
#[derive(Debug)]
pub(crate) struct PaddedImages {
    /// The image tokens of all prompts.
    features: ImageFeatures,
    /// The column and the index among `features` of each image token, by rows.
    places: Vec<Vec<(i64, i64)>>,
    /// The positions of the prompts, `(3, B, T)`.
    positions: Tensor,
    /// The difference between the position and the index of a token after the prompt of each row, `(B, 1)`.
    deltas: Tensor,
}

impl PaddedImages {
    /// Computes the image tokens of `images`, which are those of each of `prompts`; at least one has any.
    pub(crate) fn new(
        model: &CausalLm,
        prompts: &[Vec<i64>],
        images: &[Vec<ImagePatches>],
    ) -> Result<PaddedImages> {
        let vision = model.config().vision().ok_or(ModelError::NoVision)?;
        let width = prompts.iter().map(Vec::len).max().unwrap_or(0);
        let mut axes = [Vec::new(), Vec::new(), Vec::new()];
        let (mut places, mut deltas, mut seen) = (Vec::new(), Vec::new(), 0);
        let mut features = Vec::new();
        for (prompt, images) in prompts.iter().zip(images) {
            let own = vision.positions(prompt, &grids_of(images, vision)?)?;
            let padding = width - prompt.len();
            for (axis, all) in axes.iter_mut().enumerate() {
                all.extend(std::iter::repeat_n(0, padding));
                all.extend(own.positions.iter().map(|position| position[axis]));
            }
            let columns = own
                .image_tokens
                .iter()
                .map(|index| (padding + index) as i64);
            places.push(columns.zip(seen..).collect());
            seen += own.image_tokens.len() as i64;
            deltas.push(own.delta);
            // Prompt by prompt, so that a prompt has the bits that it has alone.
            if !images.is_empty() {
                let tower =
                    |pixels: &Tensor, grids: &[[i64; 2]]| Ok(model.encode_images(pixels, grids)?);
                features.push(encode(images, tower)?);
            }
        }
        let device = model.device();
        let shape = [3, prompts.len() as i64, width as i64];
        let positions = Tensor::f_from_slice(&axes.concat())?.f_view(shape)?;
        Ok(PaddedImages {
            features: ImageFeatures::cat(&features)?,
            places,
            positions: positions.f_to_device(device)?,
            deltas: Tensor::f_from_slice(&deltas)?
                .f_unsqueeze(1)?
                .f_to_device(device)?,
        })
    }

    /// Returns the positions `(3, B, tokens)` of the columns from `past` on, or `(B, tokens)` after the prompts. `counted`
    /// are the positions `(B, tokens)` of the tokens if all were text.
    pub(crate) fn positions(&self, past: i64, counted: &Tensor) -> Result<Tensor> {
        let (tokens, width) = (counted.size()[1], self.positions.size()[2]);
        let after = counted.f_add(&self.deltas)?;
        let before = (width - past).clamp(0, tokens);
        if before == 0 {
            return Ok(after);
        }
        let given = self.positions.f_narrow(2, past, before)?;
        let rest = after.f_narrow(1, before, tokens - before)?;
        let rest = rest.f_unsqueeze(0)?.f_expand([3, -1, -1], false)?;
        Ok(Tensor::f_cat(&[given, rest], 2)?)
    }

    /// Returns the image tokens in the `tokens` columns from `past` on, if there are any.
    pub(crate) fn tokens(&self, past: i64, tokens: i64) -> Result<Option<ImageTokens>> {
        let (mut indices, mut rows) = (Vec::new(), Vec::new());
        for (row, places) in (0..).zip(&self.places) {
            for (column, token) in places {
                if (past..past + tokens).contains(column) {
                    indices.push(row * tokens + column - past);
                    rows.push(*token);
                }
            }
        }
        if rows.is_empty() {
            return Ok(None);
        }
        let device = self.positions.device();
        let on_device = |numbers: &[i64]| Tensor::f_from_slice(numbers)?.f_to_device(device);
        Ok(Some(ImageTokens {
            features: self.features.select(&on_device(&rows)?)?,
            indices: on_device(&indices)?,
        }))
    }

    /// Reorders the rows: row `i` becomes the old row `rows[i]`.
    pub(crate) fn reorder(&mut self, rows: &[usize]) -> Result<()> {
        self.places = rows.iter().map(|row| self.places[*row].clone()).collect();
        let rows: Vec<i64> = rows.iter().map(|row| *row as i64).collect();
        let rows = Tensor::f_from_slice(&rows)?.f_to_device(self.deltas.device())?;
        self.positions = self.positions.f_index_select(1, &rows)?;
        self.deltas = self.deltas.f_index_select(0, &rows)?;
        Ok(())
    }
}
