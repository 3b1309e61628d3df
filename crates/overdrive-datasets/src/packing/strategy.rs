use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How sequences are packed: TRL's `packing_strategy`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PackingStrategy {
    /// Best fit, the longest first: sequences stay whole, and what is longer than a row loses its end.
    /// The default.
    #[default]
    Bfd,
    /// The same, but what is longer than a row is cut into pieces, which are packed as sequences of their
    /// own.
    BfdSplit,
    /// One behind the other in the order given, cut wherever a row is full: all rows but the last are
    /// full, and sequences lose their beginnings.
    Wrapped,
}

impl PackingStrategy {
    /// Every strategy.
    pub const ALL: [Self; 3] = [Self::Bfd, Self::BfdSplit, Self::Wrapped];

    /// The name in TRL.
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
            .ok_or_else(|| format!("{name:?} is no packing strategy: bfd, bfd_split or wrapped"))
    }
}
