use overdrive_attention::PackedLengths;
use overdrive_kv_cache::KvCache;
use overdrive_sys::transfer::to_device;
use tch::{Device, Kind, Tensor};

use overdrive_core::Error;

use crate::{ImageTokens, Result};

/// The positions whose logits are computed.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub enum Logits<'a> {
    /// All positions: `(B, T, V)`.
    #[default]
    All,
    /// The last position only: `(B, 1, V)`, which is all that generation needs.
    Last,
    /// These indices among the `T` new tokens, i64 `(N,)`: `(B, N, V)`. Packed rows need the last token of each
    /// sequence.
    At(&'a Tensor),
}

impl Logits<'_> {
    /// Selects those positions of hidden states `(B, T, C)`.
    pub(crate) fn select(self, hidden: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Logits::All => hidden.shallow_clone(),
            Logits::Last => hidden.f_narrow(1, hidden.size()[1] - 1, 1)?,
            Logits::At(indices) => hidden.f_index_select(1, indices)?,
        })
    }
}

/// The input of a forward pass. `B` rows, `T` new tokens, `S` past and new tokens.
#[derive(Debug)]
#[non_exhaustive]
pub struct ForwardInput<'a> {
    /// Token ids `(B, T)`, i64.
    pub input_ids: &'a Tensor,
    /// The position of each token `(B, T)` or `(1, T)`, i64; default: `past..past + T` for every row. With
    /// padding on the left, pass the positions that `transformers.generate` uses: the running count of unmasked
    /// tokens, minus one. A model that sees images also takes three positions of each token, `(3, B, T)` or
    /// `(3, 1, T)`; see [`ImagePositions`](crate::ImagePositions).
    pub position_ids: Option<&'a Tensor>,
    /// An upper bound that all `position_ids` are below, if the host knows one without reading them; they must then not
    /// be negative. Without a bound, the forward pass reads the smallest and the largest position, which waits for the
    /// device and cannot be captured in a CUDA graph. The model prepares for every position below the bound, and
    /// refuses a bound beyond its context; default: unknown.
    pub position_bound: Option<i64>,
    /// The mask `(B, S)` of any dtype, 1 for a token and 0 for padding, past tokens included; default: no
    /// padding.
    pub attention_mask: Option<&'a Tensor>,
    /// The lengths of sequences that are packed into the one row of `input_ids (1, T)`: none attends to
    /// another, and positions count from 0 in each unless `position_ids` are given. Not with a mask or a cache;
    /// default: the row is one sequence.
    pub sequences: Option<&'a PackedLengths>,
    /// The keys and values of past tokens; those of the new tokens are appended.
    pub cache: Option<&'a mut dyn KvCache>,
    /// The positions whose logits are computed; default: all.
    pub logits: Logits<'a>,
    /// The image tokens in the place of embeddings; default: none. Their tokens have
    /// [positions](crate::ImagePositions) of their own.
    pub images: Option<&'a ImageTokens>,
    /// The number of labels that count in the loss, if it is known, as from a data loader; see
    /// [`CrossEntropyOptions::label_count`](overdrive_fused::CrossEntropyOptions::label_count). Only
    /// [`CausalLm::loss_of`](crate::CausalLm::loss_of) uses it; default: unknown.
    pub label_count: Option<i64>,
}

impl<'a> ForwardInput<'a> {
    /// Makes an input with default positions, no padding and no cache, and the logits of all positions.
    pub fn new(input_ids: &'a Tensor) -> Self {
        ForwardInput {
            input_ids,
            position_ids: None,
            position_bound: None,
            attention_mask: None,
            sequences: None,
            cache: None,
            logits: Logits::All,
            images: None,
            label_count: None,
        }
    }

    /// Sets the cache; see [`ForwardInput::cache`].
    pub fn with_cache(mut self, cache: &'a mut dyn KvCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Sets the mask of padding; see [`ForwardInput::attention_mask`].
    pub fn with_attention_mask(mut self, mask: &'a Tensor) -> Self {
        self.attention_mask = Some(mask);
        self
    }

    /// Sets positions; see [`ForwardInput::position_ids`].
    pub fn with_position_ids(mut self, positions: &'a Tensor) -> Self {
        self.position_ids = Some(positions);
        self
    }

    /// Sets a bound of the positions; see [`ForwardInput::position_bound`].
    pub fn with_position_bound(mut self, bound: i64) -> Self {
        self.position_bound = Some(bound);
        self
    }

    /// Sets the lengths of the packed sequences; see [`ForwardInput::sequences`].
    pub fn with_sequences(mut self, sequences: &'a PackedLengths) -> Self {
        self.sequences = Some(sequences);
        self
    }

    /// Sets the positions whose logits are computed.
    pub fn with_logits(mut self, logits: Logits<'a>) -> Self {
        self.logits = logits;
        self
    }

    /// Sets the image tokens; see [`ForwardInput::images`].
    pub fn with_images(mut self, images: &'a ImageTokens) -> Self {
        self.images = Some(images);
        self
    }

    /// Sets the number of labels that count; see [`ForwardInput::label_count`].
    pub fn with_label_count(mut self, label_count: usize) -> Self {
        self.label_count = i64::try_from(label_count).ok();
        self
    }

    /// Checks all shapes, and returns the numbers of new and past tokens. Reads `position_ids` if they have no bound,
    /// so it is called only once per forward pass.
    pub(crate) fn shape(&self) -> Result<Shape> {
        let &[batch, tokens] = self.input_ids.size().as_slice() else {
            return Err(Error::shape("input_ids", self.input_ids.size(), "(B, T)").into());
        };
        if self.input_ids.kind() != Kind::Int64 {
            return Err(Error::dtype("input_ids", self.input_ids.kind(), "Int64").into());
        }
        if batch == 0 || tokens == 0 {
            let expected = "(B, T) with at least one row and one token";
            return Err(Error::shape("input_ids", [batch, tokens], expected).into());
        }
        let past = self.cache.as_ref().map_or(0, |cache| cache.len());
        if let Some(positions) = self.position_ids {
            let size = positions.size();
            let fits = match *size.as_slice() {
                [rows, columns] => (rows == batch || rows == 1) && columns == tokens,
                [3, rows, columns] => (rows == batch || rows == 1) && columns == tokens,
                _ => false,
            };
            if !fits {
                let expected = format!(
                    "({batch}, {tokens}) or (1, {tokens}), or three of these for a model that sees images"
                );
                return Err(Error::shape("position_ids", size, expected).into());
            }
            if positions.kind() != Kind::Int64 {
                return Err(Error::dtype("position_ids", positions.kind(), "Int64").into());
            }
        }
        if let Some(mask) = self.attention_mask
            && mask.size() != [batch, past + tokens]
        {
            let expected = format!("({batch}, {}), past tokens included", past + tokens);
            return Err(Error::shape("attention_mask", mask.size(), expected).into());
        }
        if let Some(sequences) = self.sequences {
            self.check_sequences(sequences, batch, tokens)?;
        }
        Ok(Shape {
            tokens,
            past,
            end: self.position_end(past, tokens)?,
        })
    }

    fn check_sequences(&self, sequences: &PackedLengths, batch: i64, tokens: i64) -> Result<()> {
        let refused = |value: String, expected: &'static str| {
            Err(Error::option("sequences", value, expected).into())
        };
        if batch != 1 {
            return refused(
                format!("set with {batch} rows of `input_ids`"),
                "used with a single row that holds all sequences",
            );
        }
        if sequences.total_queries() != tokens || !sequences.is_square() {
            let (queries, keys) = (sequences.total_queries(), sequences.total_keys());
            return refused(
                format!("lengths of {queries} queries and {keys} keys for {tokens} tokens"),
                "lengths whose queries and keys equal the tokens, in each sequence",
            );
        }
        if self.cache.is_some() || self.attention_mask.is_some() {
            return refused(
                "set with a cache or an `attention_mask`".to_owned(),
                "used with neither, because the lengths already separate the sequences",
            );
        }
        Ok(())
    }

    /// Returns the largest position plus one, and checks that none is negative. Reads the positions only if the host
    /// knows no bound.
    fn position_end(&self, past: i64, tokens: i64) -> Result<i64> {
        match (self.position_ids, self.position_bound) {
            (None, _) => Ok(past + tokens),
            (Some(_), Some(bound)) => Ok(bound),
            // On a GPU a negative index is a device-side assert, after which CUDA is unusable.
            (Some(positions), None) if positions.f_min()?.f_int64_value(&[])? < 0 => {
                Err(Error::option("position_ids", "negative", "0 or more").into())
            }
            // With padding there are more tokens than positions.
            (Some(positions), None) => Ok(positions.f_max()?.f_int64_value(&[])? + 1),
        }
    }

    /// Returns `true` for image tokens, or three positions of a token.
    pub(crate) fn has_images(&self) -> bool {
        self.images.is_some()
            || self
                .position_ids
                .is_some_and(|positions| positions.dim() == 3)
    }

    /// Returns positions that count from 0 in each packed sequence, `(1, T)`, unless some are given.
    pub(crate) fn restarting_positions(&self) -> Result<Option<Tensor>> {
        let (Some(sequences), None) = (self.sequences, self.position_ids) else {
            return Ok(None);
        };
        Ok(Some(restarting(sequences, self.input_ids.device())?))
    }
}

/// Returns positions that count from 0 in each sequence, `(1, T)`.
fn restarting(sequences: &PackedLengths, device: Device) -> Result<Tensor> {
    // Made on the CPU and copied once, because the lengths are there already. The host does not wait for the copy.
    let positions: Vec<i64> = sequences.query_lengths().flat_map(|len| 0..len).collect();
    let positions = Tensor::f_from_slice(&positions)?.f_unsqueeze(0)?;
    Ok(to_device(positions, device).map_err(overdrive_attention::Error::from)?)
}

/// The numbers of new and past tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) tokens: i64,
    pub(crate) past: i64,
    /// A number that all positions are below.
    pub(crate) end: i64,
}

#[cfg(test)]
mod tests {
    use tch::Cuda;

    use super::*;

    /// Without a GPU it fails at its first step, which names the copy that it makes.
    #[test]
    fn positions_of_packed_sequences_go_to_a_gpu_through_pinned_memory() {
        let sequences = PackedLengths::from_lengths(&[2, 3], Device::Cpu).expect("two sequences");
        let here = restarting(&sequences, Device::Cpu).expect("a CPU");
        assert_eq!(here, Tensor::from_slice(&[0_i64, 1, 0, 1, 2]).view([1, 5]));
        match restarting(&sequences, Device::Cuda(0)) {
            Ok(there) => assert_eq!(there.to_device(Device::Cpu), here),
            Err(error) => {
                assert!(!Cuda::is_available(), "{error}");
                assert!(error.to_string().contains("pin_memory"), "{error}");
            }
        }
    }
}
