//! Which blocks of a deep network are checkpointed, and in what groups.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Which blocks of a chain are recomputed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Schedule {
    /// None.
    Never,
    /// Each alone: memory for one input a block and for one block's activations.
    #[default]
    EveryBlock,
    /// Each n-th alone, from the first on; 1 is every block, 2 every other.
    EveryNth(usize),
    /// Groups of blocks, each recomputed as one (`torch.utils.checkpoint.checkpoint_sequential`). The
    /// last group is not checkpointed: backward begins with it.
    Segments(usize),
    /// As many segments as the square root of the number of blocks: memory grows with the root of depth
    /// at the price of one more forward pass (Chen et al. 2016, <https://arxiv.org/abs/1604.06174>).
    SqrtSegments,
    /// Those marked `true`, each alone: a [`Plan`](crate::Plan).
    Chosen(Vec<bool>),
}

/// Blocks that run as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Their positions in the chain.
    pub blocks: Range<usize>,
    /// Whether they are recomputed.
    pub checkpointed: bool,
}

impl Schedule {
    /// The groups of a chain of `blocks`, in order, each block in one.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for 0 segments, more segments than blocks, or an n of 0; [`Error::Plan`]
    /// for a plan of another chain.
    ///
    /// ```
    /// use overdrive_checkpointing::Schedule;
    ///
    /// let groups = Schedule::SqrtSegments.groups(9)?;
    /// let of = |i: usize| (groups[i].blocks.clone(), groups[i].checkpointed);
    /// assert_eq!([of(0), of(1), of(2)], [(0..3, true), (3..6, true), (6..9, false)]);
    /// # Ok::<(), overdrive_checkpointing::Error>(())
    /// ```
    pub fn groups(&self, blocks: usize) -> Result<Vec<Group>> {
        Ok(match self {
            Self::Never => alone(blocks, |_| false),
            Self::EveryBlock => alone(blocks, |_| true),
            Self::EveryNth(0) => {
                return Err(Error::InvalidOption {
                    option: "every_nth",
                    value: "0".to_owned(),
                    expected: "1 (every block) or more",
                });
            }
            Self::EveryNth(n) => alone(blocks, |index| index % n == 0),
            Self::Segments(count) => segments(blocks, *count)?,
            Self::SqrtSegments => segments(blocks, rounded_root(blocks))?,
            Self::Chosen(chosen) if chosen.len() != blocks => {
                return Err(Error::Plan {
                    planned: chosen.len(),
                    given: blocks,
                });
            }
            Self::Chosen(chosen) => alone(blocks, |index| chosen[index]),
        })
    }
}

fn alone(blocks: usize, checkpointed: impl Fn(usize) -> bool) -> Vec<Group> {
    (0..blocks)
        .map(|index| Group {
            blocks: index..index + 1,
            checkpointed: checkpointed(index),
        })
        .collect()
}

/// The first `count - 1` of equal size, the last with what is left.
fn segments(blocks: usize, count: usize) -> Result<Vec<Group>> {
    if blocks == 0 {
        return Ok(Vec::new());
    }
    if count == 0 || count > blocks {
        return Err(Error::InvalidOption {
            option: "segments",
            value: count.to_string(),
            expected: "at least 1 and at most the number of blocks",
        });
    }
    let size = blocks / count;
    Ok((0..count)
        .map(|index| {
            let last = index + 1 == count;
            let end = if last { blocks } else { (index + 1) * size };
            Group {
                blocks: index * size..end,
                checkpointed: !last,
            }
        })
        .collect())
}

/// The square root, to the nearest.
fn rounded_root(n: usize) -> usize {
    let floor = n.isqrt();
    if n - floor * floor > floor {
        floor + 1
    } else {
        floor
    }
}
