use overdrive_attention::PackedLengths;
use overdrive_core::Error;
use tch::{Kind, Tensor};

use super::config::EncoderConfig;
use crate::Result;

/// The input of an encoder: `B` rows of `T` tokens.
///
/// ```
/// use overdrive_transformer::EncoderInput;
/// use tch::Tensor;
/// let ids = Tensor::from_slice(&[101_i64, 7, 102, 0]).view([1, 4]);
/// let mask = ids.ne(0);
/// let input = EncoderInput::new(&ids).with_attention_mask(&mask);
/// assert!(input.token_type_ids.is_none());
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct EncoderInput<'a> {
    /// Token ids `(B, T)`, i64.
    pub input_ids: &'a Tensor,
    /// The mask `(B, T)` of any dtype, 1 for a token and 0 for padding on either side; default: no padding. The
    /// hidden states of padding are zeros: it is removed before the first layer and costs nothing.
    pub attention_mask: Option<&'a Tensor>,
    /// The type of each token `(B, T)`, i64, such as the first or second of two sentences; default: 0. ModernBERT
    /// has none.
    pub token_type_ids: Option<&'a Tensor>,
    /// The position of each token `(B, T)` or `(1, T)`, i64, not negative; default: as in transformers, by the
    /// column (BERT, ModernBERT) or by the number of tokens before it that are not padding (RoBERTa).
    pub position_ids: Option<&'a Tensor>,
    /// The lengths of sequences that are packed into the one row of `input_ids (1, T)`: none attends to another,
    /// and positions start again in each. Not with a mask; default: the row is one sequence.
    pub sequences: Option<&'a PackedLengths>,
}

impl<'a> EncoderInput<'a> {
    /// Makes an input of token ids without padding.
    pub fn new(input_ids: &'a Tensor) -> Self {
        EncoderInput {
            input_ids,
            attention_mask: None,
            token_type_ids: None,
            position_ids: None,
            sequences: None,
        }
    }

    /// Sets the mask of padding; see [`EncoderInput::attention_mask`].
    pub fn with_attention_mask(mut self, mask: &'a Tensor) -> Self {
        self.attention_mask = Some(mask);
        self
    }

    /// Sets the types of tokens; see [`EncoderInput::token_type_ids`].
    pub fn with_token_type_ids(mut self, types: &'a Tensor) -> Self {
        self.token_type_ids = Some(types);
        self
    }

    /// Sets positions; see [`EncoderInput::position_ids`].
    pub fn with_position_ids(mut self, positions: &'a Tensor) -> Self {
        self.position_ids = Some(positions);
        self
    }

    /// Sets the lengths of the packed sequences; see [`EncoderInput::sequences`].
    pub fn with_sequences(mut self, sequences: &'a PackedLengths) -> Self {
        self.sequences = Some(sequences);
        self
    }

    /// Checks all shapes and returns `[B, T]`.
    fn size(&self) -> Result<[i64; 2]> {
        let &[batch, tokens] = self.input_ids.size().as_slice() else {
            return Err(Error::shape("input_ids", self.input_ids.size(), "(B, T)").into());
        };
        if batch == 0 || tokens == 0 {
            let expected = "(B, T) with at least one row and one token";
            return Err(Error::shape("input_ids", [batch, tokens], expected).into());
        }
        for (name, ids) in [
            ("input_ids", Some(self.input_ids)),
            ("token_type_ids", self.token_type_ids),
            ("position_ids", self.position_ids),
        ] {
            let Some(ids) = ids else { continue };
            if ids.kind() != Kind::Int64 {
                return Err(Error::dtype(name, ids.kind(), "Int64").into());
            }
            let one = name == "position_ids" && ids.size() == [1, tokens];
            if ids.size() != [batch, tokens] && !one {
                let expected = format!("({batch}, {tokens}), as input_ids");
                return Err(Error::shape(name, ids.size(), expected).into());
            }
        }
        if let Some(mask) = self.attention_mask
            && mask.size() != [batch, tokens]
        {
            let expected = format!("({batch}, {tokens}), as input_ids");
            return Err(Error::shape("attention_mask", mask.size(), expected).into());
        }
        if let Some(sequences) = self.sequences
            && (batch != 1
                || sequences.total_queries() != tokens
                || !sequences.is_square()
                || self.attention_mask.is_some())
        {
            let found = format!("{} tokens", sequences.total_queries());
            let expected = format!(
                "{tokens} tokens in one row without an attention_mask; input_ids has {batch} rows"
            );
            return Err(Error::option("sequences", found, expected).into());
        }
        Ok([batch, tokens])
    }

    /// Returns the position of each token `(B, T)` or `(1, T)` and the smallest number above all of them.
    fn positions(&self, config: &EncoderConfig, [_, tokens]: [i64; 2]) -> Result<(Tensor, i64)> {
        let device = self.input_ids.device();
        let first = config.first_position();
        if let Some(given) = self.position_ids {
            let found = given.f_min()?.f_int64_value(&[])?;
            if found < 0 {
                return Err(Error::option("position_ids", found, "0 or more").into());
            }
            return Ok((
                given.shallow_clone(),
                given.f_max()?.f_int64_value(&[])? + 1,
            ));
        }
        if let Some(sequences) = self.sequences {
            let each = sequences.query_lengths().flat_map(|len| first..first + len);
            let positions = Tensor::f_from_slice(&each.collect::<Vec<i64>>())?;
            let positions = positions.f_unsqueeze(0)?.f_to_device(device)?;
            return Ok((positions, first + sequences.longest_queries()));
        }
        if first == 0 {
            let positions = Tensor::f_arange(tokens, (Kind::Int64, device))?;
            return Ok((positions.f_unsqueeze(0)?, tokens));
        }
        // RoBERTa: padding has the position of its id, and tokens count from the next one.
        let pad = first - 1;
        let real = self.input_ids.f_ne(pad)?.f_to_kind(Kind::Int64)?;
        let counted = real.f_cumsum(1, Kind::Int64)?.f_mul(&real)?;
        Ok((counted.f_add_scalar(pad)?, first + tokens))
    }

    /// Prepares the tokens that are computed.
    pub(super) fn rows(&self, config: &EncoderConfig) -> Result<Rows> {
        let size = self.size()?;
        let (positions, end) = self.positions(config, size)?;
        let last = config.first_position() + config.context();
        if end > last {
            return Err(crate::Error::ContextExceeded {
                positions: end - config.first_position(),
                limit: config.context(),
                key: "max_position_embeddings",
            });
        }
        let dense = |arrangement| Rows {
            input_ids: self.input_ids.shallow_clone(),
            token_type_ids: self.token_type_ids.map(Tensor::shallow_clone),
            positions: positions.shallow_clone(),
            position_end: end,
            arrangement,
        };
        if let Some(sequences) = self.sequences {
            return Ok(dense(Arrangement::Packed(sequences.clone())));
        }
        let Some(mask) = self.attention_mask else {
            return Ok(dense(Arrangement::Dense));
        };
        let real = mask.f_to_device(self.input_ids.device())?.f_ne(0)?;
        let lengths = real.f_sum_dim_intlist(1i64, false, Kind::Int64)?;
        let lengths = Vec::<i64>::try_from(&lengths.f_to_device(tch::Device::Cpu)?)?;
        if let Some(row) = lengths.iter().position(|&length| length == 0) {
            let expected = "1 for at least one token of each row";
            return Err(Error::option(
                "attention_mask",
                format!("0 in all of row {row}"),
                expected,
            )
            .into());
        }
        if lengths.iter().all(|&length| length == size[1]) {
            return Ok(dense(Arrangement::Dense));
        }
        let indices = real.f_flatten(0, 1)?.f_nonzero()?.f_squeeze_dim(1)?;
        let kept = |ids: &Tensor| -> Result<Tensor> {
            let all = ids.f_expand(size, false)?.f_reshape([-1])?;
            Ok(all.f_index_select(0, &indices)?.f_unsqueeze(0)?)
        };
        Ok(Rows {
            input_ids: kept(self.input_ids)?,
            token_type_ids: self.token_type_ids.map(kept).transpose()?,
            positions: kept(&positions)?,
            position_end: end,
            arrangement: Arrangement::Unpadded {
                sequences: PackedLengths::from_lengths(&lengths, self.input_ids.device())?,
                indices,
                size,
            },
        })
    }
}

/// The arrangement of the tokens that are computed.
#[derive(Debug)]
pub(super) enum Arrangement {
    /// `(B, T)`, all tokens.
    Dense,
    /// `(1, N)`, the sequences one behind the other.
    Packed(PackedLengths),
    /// `(1, N)`, the tokens of `[B, T]` rows that are not padding, at `indices (N,)` of the flat batch.
    Unpadded {
        sequences: PackedLengths,
        indices: Tensor,
        size: [i64; 2],
    },
}

/// The tokens that are computed: `(B, T)`, or `(1, N)` without padding.
#[derive(Debug)]
pub(super) struct Rows {
    pub(super) input_ids: Tensor,
    pub(super) token_type_ids: Option<Tensor>,
    /// The positions, of the same shape or with one row for all.
    pub(super) positions: Tensor,
    /// A number above all positions.
    pub(super) position_end: i64,
    pub(super) arrangement: Arrangement,
}

impl Rows {
    /// Returns the bounds of the sequences in a packed row.
    pub(super) fn sequences(&self) -> Option<&PackedLengths> {
        match &self.arrangement {
            Arrangement::Dense => None,
            Arrangement::Packed(sequences) | Arrangement::Unpadded { sequences, .. } => {
                Some(sequences)
            }
        }
    }

    /// Returns the hidden states of the computed tokens `(…, C)` at their positions in the input `(B, T, C)`, with
    /// zeros for padding.
    pub(super) fn padded(&self, hidden: Tensor) -> Result<Tensor> {
        let Arrangement::Unpadded { indices, size, .. } = &self.arrangement else {
            return Ok(hidden);
        };
        let width = hidden.size()[2];
        let zeros = Tensor::f_zeros([size[0] * size[1], width], (hidden.kind(), hidden.device()))?;
        let all = zeros.f_index_copy(0, indices, &hidden.f_squeeze_dim(0)?)?;
        Ok(all.f_view([size[0], size[1], width])?)
    }
}
