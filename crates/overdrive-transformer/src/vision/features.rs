use tch::Tensor;

use crate::Result;

/// The image tokens of one or more images, in the order of their patches: what takes the place of the embeddings of
/// placeholder tokens. Made by [`CausalLm::encode_images`](crate::CausalLm::encode_images). `N` tokens of width `C`.
#[derive(Debug)]
pub struct ImageFeatures {
    /// The embeddings `(N, C)`.
    pub embeddings: Tensor,
    /// The values `(N, C)` that are added to the hidden states after the first, second, … layer of the text model.
    pub deepstack: Vec<Tensor>,
}

impl ImageFeatures {
    /// Returns the tokens at `indices`, i64 `(M,)`.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn select(&self, indices: &Tensor) -> Result<ImageFeatures> {
        self.map(|rows| Ok(rows.f_index_select(0, indices)?))
    }

    /// Returns the tokens of several images one after another.
    ///
    /// # Errors
    /// An error of libtorch, such as for no images.
    pub fn cat(all: &[ImageFeatures]) -> Result<ImageFeatures> {
        let joined = |part: &dyn Fn(&ImageFeatures) -> Tensor| {
            Tensor::f_cat(&all.iter().map(part).collect::<Vec<_>>(), 0)
        };
        let layers = all.iter().map(|features| features.deepstack.len()).min();
        let deepstack = (0..layers.unwrap_or(0))
            .map(|layer| joined(&|features| features.deepstack[layer].shallow_clone()));
        Ok(ImageFeatures {
            embeddings: joined(&|features| features.embeddings.shallow_clone())?,
            deepstack: deepstack.collect::<std::result::Result<_, _>>()?,
        })
    }

    /// Returns handles of the same tensors.
    pub(crate) fn share(&self) -> ImageFeatures {
        ImageFeatures {
            embeddings: self.embeddings.shallow_clone(),
            deepstack: self.deepstack.iter().map(Tensor::shallow_clone).collect(),
        }
    }

    fn map(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<ImageFeatures> {
        Ok(ImageFeatures {
            embeddings: change(&self.embeddings)?,
            deepstack: self.deepstack.iter().map(change).collect::<Result<_>>()?,
        })
    }
}

/// The image tokens of a forward pass, and their places among its `B · T` tokens.
#[derive(Debug)]
pub struct ImageTokens {
    /// The index `b · T + t` of each of the `N` tokens, i64 `(N,)`.
    pub indices: Tensor,
    /// The image tokens.
    pub features: ImageFeatures,
}

impl ImageTokens {
    pub(crate) fn share(&self) -> ImageTokens {
        ImageTokens {
            indices: self.indices.shallow_clone(),
            features: self.features.share(),
        }
    }

    /// Returns `true` if values with gradients are added after layer `layer` or later.
    pub(crate) fn learns_at(&self, layer: usize) -> bool {
        let values = self.features.deepstack.get(layer..).unwrap_or_default();
        values.iter().any(Tensor::requires_grad)
    }

    /// Puts the embeddings in the place of those of `x (B, T, C)`.
    pub(crate) fn embed(&self, x: &Tensor) -> Result<Tensor> {
        let size = x.size();
        let new = self.features.embeddings.f_to_kind(x.kind())?;
        let rows = x.f_reshape([-1, size[2]])?;
        Ok(rows
            .f_index_copy(0, &self.indices, &new)?
            .f_view(size.as_slice())?)
    }

    /// Adds the values for the hidden states `x (B, T, C)` after layer `layer`; `None` if there are none.
    pub(crate) fn deepen(&self, layer: usize, x: &Tensor) -> Result<Option<Tensor>> {
        let Some(values) = self.features.deepstack.get(layer) else {
            return Ok(None);
        };
        let size = x.size();
        let rows = x.f_reshape([-1, size[2]])?;
        let sum = rows.f_index_add(0, &self.indices, &values.f_to_kind(x.kind())?)?;
        Ok(Some(sum.f_view(size.as_slice())?))
    }
}
