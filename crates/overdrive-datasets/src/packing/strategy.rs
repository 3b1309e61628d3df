//! The names of the strategies of packing; `plan` has how each packs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The strategy of packing: TRL's `packing_strategy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PackingStrategy {
    /// Best fit decreasing: sequences stay whole, and those longer than a row are truncated. The default.
    #[default]
    Bfd,
    /// Best fit decreasing, but sequences longer than a row are split into segments, which are packed
    /// independently.
    BfdSplit,
    /// Concatenation in the given order, split where a row is full: all rows but the last are full, and the
    /// segment after a split does not see the beginning of its sequence.
    Wrapped,
}

impl PackingStrategy {
    /// All strategies.
    pub const ALL: [Self; 3] = [Self::Bfd, Self::BfdSplit, Self::Wrapped];

    /// Returns the name in TRL.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bfd => "bfd",
            Self::BfdSplit => "bfd_split",
            Self::Wrapped => "wrapped",
        }
    }
}

impl fmt::Display for PackingStrategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PackingStrategy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|strategy| strategy.name() == name)
            .ok_or_else(|| {
                format!("the packing strategy is {name:?}; it must be bfd, bfd_split or wrapped")
            })
    }
}
