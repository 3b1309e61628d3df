use overdrive_attention::PackedLengths;
use overdrive_kv_cache::KvCache;
use tch::{Kind, Tensor};

use crate::{Error, Result};

/// For which positions logits are computed.
#[derive(Debug, Clone, Copy, Default)]
#[non_exhaustive]
pub enum Logits<'a> {
    /// For all: `(B, T, V)`.
    #[default]
    All,
    /// For the last one only: `(B, 1, V)`, all that generation needs.
    Last,
    /// For these places among the `T` new tokens, i64 `(N,)`: `(B, N, V)`. The ends of texts that were
    /// packed into one row.
    At(&'a Tensor),
}

impl Logits<'_> {
    /// The wanted ones of hidden states `(B, T, C)`.
    pub(crate) fn select(self, hidden: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Logits::All => hidden.shallow_clone(),
            Logits::Last => hidden.f_narrow(1, hidden.size()[1] - 1, 1)?,
            Logits::At(places) => hidden.f_index_select(1, places)?,
        })
    }
}

/// What a forward pass takes. `B` rows, `T` new tokens, `S` tokens in all (past and new).
#[derive(Debug)]
#[non_exhaustive]
pub struct ForwardInput<'a> {
    /// Token ids `(B, T)`, i64.
    pub input_ids: &'a Tensor,
    /// Position of each token `(B, T)` or `(1, T)`, i64; default: `past..past + T` for every row.
    /// With padding on the left give the positions that `transformers.generate` uses: the running
    /// count of unmasked tokens, less one.
    pub position_ids: Option<&'a Tensor>,
    /// 1 for a token and 0 for padding, `(B, S)` (past tokens included), any kind; default: no
    /// padding.
    pub attention_mask: Option<&'a Tensor>,
    /// Sequences that lie one behind the other in the one row of `input_ids (1, T)`, `T` tokens in all:
    /// none attends to another, and positions count from 0 in each unless `position_ids` says otherwise.
    /// Not together with a mask or a cache; default: the row is one sequence.
    pub sequences: Option<&'a PackedLengths>,
    /// Earlier keys and values; the new ones are appended.
    pub cache: Option<&'a mut dyn KvCache>,
    /// For which positions logits are wanted.
    pub logits: Logits<'a>,
}

impl<'a> ForwardInput<'a> {
    /// All tokens at their places, no padding, no cache, all logits.
    pub fn new(input_ids: &'a Tensor) -> Self {
        ForwardInput {
            input_ids,
            position_ids: None,
            attention_mask: None,
            sequences: None,
            cache: None,
            logits: Logits::All,
        }
    }

    /// Reads and extends `cache`.
    pub fn with_cache(mut self, cache: &'a mut dyn KvCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Masks padding; see [`ForwardInput::attention_mask`].
    pub fn with_attention_mask(mut self, mask: &'a Tensor) -> Self {
        self.attention_mask = Some(mask);
        self
    }

    /// Sets positions; see [`ForwardInput::position_ids`].
    pub fn with_position_ids(mut self, positions: &'a Tensor) -> Self {
        self.position_ids = Some(positions);
        self
    }

    /// Says where sequences begin and end in the row; see [`ForwardInput::sequences`].
    pub fn with_sequences(mut self, sequences: &'a PackedLengths) -> Self {
        self.sequences = Some(sequences);
        self
    }

    /// Computes the logits that `logits` says.
    pub fn with_logits(mut self, logits: Logits<'a>) -> Self {
        self.logits = logits;
        self
    }

    /// The number of new and of past tokens, after a check of all shapes.
    pub(crate) fn shape(&self) -> Result<Shape> {
        let &[batch, tokens] = self.input_ids.size().as_slice() else {
            return Err(bad("input_ids", self.input_ids, "shape (B, T)"));
        };
        if self.input_ids.kind() != Kind::Int64 {
            return Err(bad("input_ids", self.input_ids, "kind Int64"));
        }
        if batch == 0 || tokens == 0 {
            return Err(bad(
                "input_ids",
                self.input_ids,
                "at least one row and one token",
            ));
        }
        let past = self.cache.as_ref().map_or(0, |cache| cache.len());
        if let Some(positions) = self.position_ids {
            let size = positions.size();
            let fits = size.len() == 2 && (size[0] == batch || size[0] == 1) && size[1] == tokens;
            if !fits || positions.kind() != Kind::Int64 {
                let expected = format!("Int64 of shape ({batch}, {tokens})");
                return Err(bad("position_ids", positions, &expected));
            }
        }
        if let Some(mask) = self.attention_mask
            && mask.size() != [batch, past + tokens]
        {
            let expected = format!("shape ({batch}, {}), past tokens included", past + tokens);
            return Err(bad("attention_mask", mask, &expected));
        }
        if let Some(sequences) = self.sequences {
            self.check_sequences(sequences, batch, tokens)?;
        }
        Ok(Shape { tokens, past })
    }

    fn check_sequences(&self, sequences: &PackedLengths, batch: i64, tokens: i64) -> Result<()> {
        let wrong = |found: String, expected: &str| {
            Err(Error::BadInput {
                name: "sequences",
                found,
                expected: expected.to_owned(),
            })
        };
        if batch != 1 {
            return wrong(
                format!("with input_ids of {batch} rows"),
                "one row that holds them all",
            );
        }
        if sequences.total_queries() != tokens || !sequences.is_square() {
            let (queries, keys) = (sequences.total_queries(), sequences.total_keys());
            return wrong(
                format!("of {queries} queries and {keys} keys, with {tokens} tokens"),
                "as many of each as tokens, sequence by sequence",
            );
        }
        if self.cache.is_some() || self.attention_mask.is_some() {
            return wrong(
                "together with a cache or an attention_mask".to_owned(),
                "neither: sequences are told apart by their lengths",
            );
        }
        Ok(())
    }

    /// Positions that count from 0 in each sequence, `(1, T)`, where none are given.
    pub(crate) fn restarting_positions(&self) -> Result<Option<Tensor>> {
        let (Some(sequences), None) = (self.sequences, self.position_ids) else {
            return Ok(None);
        };
        let positions: Vec<i64> = sequences.query_lengths().flat_map(|len| 0..len).collect();
        let positions = Tensor::f_from_slice(&positions)?.f_unsqueeze(0)?;
        Ok(Some(positions.f_to_device(self.input_ids.device())?))
    }
}

/// `T` and the tokens before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) tokens: i64,
    pub(crate) past: i64,
}

fn bad(name: &'static str, tensor: &Tensor, expected: &str) -> Error {
    Error::BadInput {
        name,
        found: format!("{:?} of shape {:?}", tensor.kind(), tensor.size()),
        expected: expected.to_owned(),
    }
}
