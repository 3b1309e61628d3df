//! The sequences of a pack: rows of tokens one sequence after another, and the state of each in a pool.

use std::collections::BTreeMap;

use tch::{Device, Tensor};

use crate::kernel::{Sequence, chunks_of};
use crate::{Error, Result, StateSlot};

/// Returns the numbers of tokens of the sequences, for cumulative offsets (flash-attn's `cu_seqlens`) from 0 to `rows`.
pub(crate) fn lengths(offsets: &[i64], rows: i64) -> Result<Vec<i64>> {
    let error = |problem: String| {
        Err(Error::Sequences {
            argument: "offsets",
            problem,
        })
    };
    let (Some(first), Some(last)) = (offsets.first(), offsets.last()) else {
        return error("it is empty; pass 0, then the end of each sequence".to_owned());
    };
    if *first != 0 {
        return error(format!(
            "it begins with {first}; it must begin with 0, the first row"
        ));
    }
    if let Some(at) = offsets.windows(2).position(|pair| pair[1] < pair[0]) {
        let (from, to) = (offsets[at], offsets[at + 1]);
        return error(format!(
            "it falls from {from} to {to} at index {}; offsets are cumulative",
            at + 1
        ));
    }
    if *last != rows {
        return error(format!(
            "it ends with {last}; it must end with {rows}, the number of rows"
        ));
    }
    Ok(offsets.windows(2).map(|pair| pair[1] - pair[0]).collect())
}

/// Sequences of the same length, which can be computed as one batch.
pub(crate) struct Group {
    /// The indices of their rows.
    pub(crate) rows: Tensor,
    /// The indices of the states that they replace.
    pub(crate) slots: Tensor,
    size: [i64; 2],
}

impl Group {
    /// Returns the rows of packed tokens `x (N, …)` as a batch `(B, T, …)`.
    pub(crate) fn tokens(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_index_select(0, &self.rows)?.f_unflatten(0, self.size)?)
    }
}

/// Calls `compute` with each group of sequences of the same length, without empty ones; its indices are on `device`.
pub(crate) fn each_group(
    offsets: &[i64],
    lengths: &[i64],
    slots: &[StateSlot],
    device: Device,
    mut compute: impl FnMut(&Group) -> Result<()>,
) -> Result<()> {
    let mut groups: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    for (index, &length) in lengths
        .iter()
        .enumerate()
        .filter(|(_, length)| **length > 0)
    {
        groups.entry(length).or_default().push(index);
    }
    for (length, group) in groups {
        let rows = group
            .iter()
            .flat_map(|&sequence| offsets[sequence]..offsets[sequence] + length);
        let to = group.iter().map(|&sequence| slots[sequence].to);
        let indices = |indices: Vec<i64>| Tensor::f_from_slice(&indices)?.f_to_device(device);
        compute(&Group {
            rows: indices(rows.collect())?,
            slots: indices(to.collect())?,
            size: [group.len() as i64, length],
        })?;
    }
    Ok(())
}

/// Converts a size or an index, which is not negative.
pub(crate) fn size(value: i64) -> usize {
    usize::try_from(value).unwrap_or(0)
}

/// Returns the sequences of a batch, with the states of as many rows.
pub(crate) fn batch_sequences(batch: i64, tokens: i64) -> Vec<Sequence> {
    let [batch, tokens] = [batch, tokens].map(size);
    let sequence = |batch| Sequence {
        batch,
        start: 0,
        output: batch * tokens,
        tokens,
        from: Some(batch),
        slot: Some(batch),
        first_chunk: batch * chunks_of(tokens),
    };
    (0..batch).map(sequence).collect()
}

/// Returns packed sequences, of which each has a slot or none has.
pub(crate) fn packed_sequences(
    offsets: &[i64],
    lengths: &[i64],
    slots: Option<&[StateSlot]>,
) -> Vec<Sequence> {
    let mut first_chunk = 0;
    let mut sequences = Vec::with_capacity(lengths.len());
    for (index, &length) in lengths.iter().enumerate() {
        let (start, tokens) = (size(offsets[index]), size(length));
        sequences.push(Sequence {
            batch: 0,
            start,
            output: start,
            tokens,
            from: slots.and_then(|slots| slots[index].from).map(size),
            slot: slots.map(|slots| size(slots[index].to)),
            first_chunk,
        });
        first_chunk += chunks_of(tokens);
    }
    sequences
}
