//! Whether all ranks have the same model, and how they get the same values.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::{Error, ProcessGroup, Result};

/// Differences listed in an error before it says how many more there are.
pub(crate) const MAX_LISTED: usize = 6;

/// The same order on every rank: stores hand their variables out in any.
pub(crate) fn by_name(
    tensors: impl IntoIterator<Item = (String, Tensor)>,
) -> Result<Vec<(String, Tensor)>> {
    let mut sorted: Vec<_> = tensors.into_iter().collect();
    sorted.sort_by(|(a, _), (b, _)| a.cmp(b));
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(Error::InvalidArgument {
            argument: "parameters",
            value: pair[0].0.clone(),
            expected: "a name of its own for every parameter and buffer".to_owned(),
        });
    }
    Ok(sorted)
}

/// What a rank says about one of its tensors.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Described {
    role: String,
    shape: Vec<i64>,
    kind: String,
}

type Description = BTreeMap<String, Described>;

fn describe(tensors: &[(String, Tensor)], role: &str, into: &mut Description) {
    for (name, tensor) in tensors {
        let described = Described {
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
    // Every rank sees every description, so all of them end with the same error.
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
    for (name, there) in main {
        match other.get(name) {
            None => found.push(format!(
                "{name} (shape {:?}) is missing on rank {rank}",
                there.shape
            )),
            Some(here) if here != there => found.push(format!(
                "{name} has shape {:?} and dtype {} on rank {rank}, {:?} and {} on rank 0",
                here.shape, here.kind, there.shape, there.kind
            )),
            Some(_) => {}
        }
    }
    for (name, here) in other {
        if !main.contains_key(name) {
            found.push(format!(
                "{name} (shape {:?}) of rank {rank} is missing on rank 0",
                here.shape
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

/// Copies tensors of rank 0 to all, many at a time.
pub(crate) fn copy_from_main<'a>(
    group: &ProcessGroup,
    tensors: impl Iterator<Item = &'a (String, Tensor)>,
) -> Result<()> {
    let pending = tensors
        .filter(|(_, tensor)| tensor.numel() > 0)
        .map(|(_, tensor)| group.broadcast_async(tensor, 0))
        .collect::<Result<Vec<_>>>()?;
    pending.into_iter().try_for_each(crate::Pending::wait)
}
