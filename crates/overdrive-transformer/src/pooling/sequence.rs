use overdrive_attention::PackedLengths;
use overdrive_core::Error as Common;
use tch::{Device, Tensor};

use crate::{Error, Result};

/// The tokens of one sequence: a text, or a pair of texts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct TokenSequence {
    /// The token ids, special tokens included.
    pub ids: Vec<i64>,
    /// The type of each token, such as 0 for the first text of a pair and 1 for the second; empty: 0 for all. Models
    /// without token types ignore them.
    pub types: Vec<i64>,
}

impl TokenSequence {
    /// Makes a sequence whose tokens all have the type 0.
    pub fn new(ids: Vec<i64>) -> TokenSequence {
        TokenSequence {
            ids,
            types: Vec::new(),
        }
    }

    /// Sets the types of the tokens.
    pub fn with_types(mut self, types: Vec<i64>) -> TokenSequence {
        self.types = types;
        self
    }
}

/// Sequences in one row, one after the other, so that no padding is computed.
pub(super) struct Packed {
    /// The token ids `(1, N)`.
    pub(super) ids: Tensor,
    /// The types of the tokens `(1, N)`; `None` if all are 0.
    pub(super) types: Option<Tensor>,
    pub(super) lengths: PackedLengths,
}

impl Packed {
    /// Packs sequences of at most `limit` tokens, which the setting `key` bounds.
    pub(super) fn new(
        sequences: &[TokenSequence],
        (limit, key): (i64, &'static str),
        device: Device,
    ) -> Result<Packed> {
        if sequences.is_empty() {
            return Err(Common::option("sequences", "empty", "at least one sequence").into());
        }
        for (index, sequence) in sequences.iter().enumerate() {
            let positions = sequence.ids.len() as i64;
            if positions > limit {
                return Err(Error::ContextExceeded {
                    positions,
                    limit,
                    key,
                });
            }
            if sequence.ids.is_empty() {
                let found = format!("without tokens in sequence {index}");
                return Err(
                    Common::option("sequences", found, "at least one token in each").into(),
                );
            }
            if !sequence.types.is_empty() && sequence.types.len() != sequence.ids.len() {
                let (types, ids) = (sequence.types.len(), sequence.ids.len());
                let found = format!("of {types} types and {ids} tokens in sequence {index}");
                return Err(Common::option("sequences", found, "a type for each token").into());
            }
        }
        let row = |values: Vec<i64>| -> Result<Tensor> {
            let row = Tensor::f_from_slice(&values)?.f_unsqueeze(0)?;
            Ok(row.f_to_device(device)?)
        };
        let typed = sequences.iter().any(|sequence| !sequence.types.is_empty());
        let types = typed.then(|| {
            let types = sequences.iter().flat_map(|sequence| {
                let zeros = match sequence.types.is_empty() {
                    true => sequence.ids.len(),
                    false => 0,
                };
                let types = sequence.types.iter().copied();
                types.chain(std::iter::repeat_n(0, zeros))
            });
            row(types.collect())
        });
        let lengths: Vec<i64> = sequences
            .iter()
            .map(|sequence| sequence.ids.len() as i64)
            .collect();
        let ids = sequences.iter().flat_map(|sequence| &sequence.ids);
        Ok(Packed {
            ids: row(ids.copied().collect())?,
            types: types.transpose()?,
            lengths: PackedLengths::from_lengths(&lengths, device)?,
        })
    }
}
