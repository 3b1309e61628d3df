//! Schedules: the blocks of a deep network that are checkpointed, and their groups.

use std::ops::Range;

use overdrive_core::{check_at_least, check_option};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The blocks of a chain that are recomputed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Schedule {
    /// No block.
    Never,
    /// Every block individually. Memory: one input per block, and the activations of one block. The default.
    #[default]
    EveryBlock,
    /// Every n-th block individually, starting with the first; 1 is every block, 2 every other.
    EveryNth(usize),
    /// This number of groups, each recomputed as a whole
    /// (`torch.utils.checkpoint.checkpoint_sequential`). The last group is not checkpointed, because
    /// backward begins with it.
    Segments(usize),
    /// The square root of the number of blocks as the number of segments: memory grows with the square root of
    /// the depth, at the cost of one more forward pass (Chen et al. 2016,
    /// <https://arxiv.org/abs/1604.06174>).
    SqrtSegments,
    /// The blocks marked `true`, each individually, as in a [`Plan`](crate::Plan).
    Chosen(Vec<bool>),
}

/// Consecutive blocks that run as one region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The positions of the blocks in the chain.
    pub blocks: Range<usize>,
    /// If `true`, the blocks are recomputed.
    pub checkpointed: bool,
}

impl Schedule {
    /// Returns the groups of a chain of `blocks` in order; each block is in one group.
    ///
    /// # Errors
    /// [`Error::Common`] for 0 segments, more segments than blocks, or an n of 0; [`Error::Plan`] for a
    /// plan with another number of blocks.
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
            Self::Never => single_blocks(blocks, |_| false),
            Self::EveryBlock => single_blocks(blocks, |_| true),
            Self::EveryNth(n) => {
                check_at_least("every_nth", *n, 1)?;
                single_blocks(blocks, |index| index % n == 0)
            }
            Self::Segments(count) => segments(blocks, *count)?,
            Self::SqrtSegments => segments(blocks, rounded_root(blocks))?,
            Self::Chosen(chosen) if chosen.len() != blocks => {
                return Err(Error::Plan {
                    planned: chosen.len(),
                    given: blocks,
                });
            }
            Self::Chosen(chosen) => single_blocks(blocks, |index| chosen[index]),
        })
    }
}

fn single_blocks(blocks: usize, checkpointed: impl Fn(usize) -> bool) -> Vec<Group> {
    (0..blocks)
        .map(|index| Group {
            blocks: index..index + 1,
            checkpointed: checkpointed(index),
        })
        .collect()
}

/// Returns `count` segments. As in PyTorch, the last one takes the remainder.
fn segments(blocks: usize, count: usize) -> Result<Vec<Group>> {
    if blocks == 0 {
        return Ok(Vec::new());
    }
    let valid = (1..=blocks).contains(&count);
    let expected = "at least 1 and at most the number of blocks";
    check_option(valid, "segments", count, expected)?;
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

/// Returns the square root, rounded to the nearest integer.
fn rounded_root(n: usize) -> usize {
    let floor = n.isqrt();
    // (floor + 1/2)² = floor² + floor + 1/4, so n is above it exactly if n - floor² > floor.
    if n - floor * floor > floor {
        floor + 1
    } else {
        floor
    }
}
