//! Checks that all ranks have the same model, and the copy of rank 0's tensors to all.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::{Error, ProcessGroup, Result};

/// The number of differences that an error lists.
pub(crate) const MAX_LISTED: usize = 6;

/// Sorts tensors by name, so that all ranks have the same order: a `VarStore` returns its variables in any.
pub(crate) fn by_name(
    tensors: impl IntoIterator<Item = (String, Tensor)>,
) -> Result<Vec<(String, Tensor)>> {
    let mut sorted: Vec<_> = tensors.into_iter().collect();
    sorted.sort_by(|(a, _), (b, _)| a.cmp(b));
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let expected = "a unique name for every parameter and buffer";
        let name = pair[0].0.clone();
        return Err(overdrive_core::Error::option("parameters", name, expected).into());
    }
    Ok(sorted)
}

/// The description of one tensor that the ranks compare.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TensorDescription {
    role: String,
    shape: Vec<i64>,
    kind: String,
}

type Description = BTreeMap<String, TensorDescription>;

fn describe(tensors: &[(String, Tensor)], role: &str, into: &mut Description) {
    for (name, tensor) in tensors {
        let described = TensorDescription {
            role: role.to_owned(),
            shape: tensor.size(),
            kind: format!("{:?}", tensor.kind()),
        };
        into.insert(format!("{role} {name}"), described);
    }
}

pub(crate) fn check_same_model(
    group: &ProcessGroup,
    trained: &[(String, Tensor)],
    frozen: &[(String, Tensor)],
    buffers: &[(String, Tensor)],
) -> Result<()> {
    let mut own = Description::new();
    describe(trained, "parameter", &mut own);
    describe(frozen, "frozen parameter", &mut own);
    describe(buffers, "buffer", &mut own);
    let bytes = serde_json::to_vec(&own)?;
    let all = group.all_gather_bytes(&bytes)?;
    // Every rank sees every description, so all of them return the same error.
    let Some(rank) = all.iter().position(|other| *other != all[0]) else {
        return Ok(());
    };
    let main: Description = serde_json::from_slice(&all[0])?;
    let other: Description = serde_json::from_slice(&all[rank])?;
    Err(Error::ModelMismatch {
        rank,
        differences: differences(&main, &other, rank),
    })
}

fn differences(main: &Description, other: &Description, rank: usize) -> String {
    let mut found = Vec::new();
    for (name, expected) in main {
        match other.get(name) {
            None => found.push(format!(
                "{name} (shape {:?}) is missing on rank {rank}",
                expected.shape
            )),
            Some(actual) if actual != expected => found.push(format!(
                "{name} has shape {:?} and dtype {} on rank {rank}, {:?} and {} on rank 0",
                actual.shape, actual.kind, expected.shape, expected.kind
            )),
            Some(_) => {}
        }
    }
    for (name, extra) in other {
        if !main.contains_key(name) {
            found.push(format!(
                "{name} (shape {:?}) of rank {rank} is missing on rank 0",
                extra.shape
            ));
        }
    }
    let more = found.len().saturating_sub(MAX_LISTED);
    found.truncate(MAX_LISTED);
    let mut text = found.join("; ");
    if more > 0 {
        text.push_str(&format!("; and {more} more"));
    }
    text
}

/// Broadcasts tensors of rank 0 to all ranks.
pub(crate) fn copy_from_main<'a>(
    group: &ProcessGroup,
    tensors: impl Iterator<Item = &'a (String, Tensor)>,
) -> Result<()> {
    // All broadcasts are started before the first wait: one latency instead of one per tensor.
    let pending = tensors
        .filter(|(_, tensor)| tensor.numel() > 0)
        .map(|(_, tensor)| group.broadcast_async(tensor, 0))
        .collect::<Result<Vec<_>>>()?;
    pending.into_iter().try_for_each(crate::Pending::wait)
}
