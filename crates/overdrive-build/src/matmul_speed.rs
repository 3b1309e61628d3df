//! The speed of matmuls in fp32 and bf16, and the precision that follows from it on a CPU.

use std::fmt;

use crate::Environment;
use crate::measured::{Figures, Processor};

/// The measured speed of matmuls of the sizes of training on a CPU, in GFLOP/s.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatmulSpeed {
    /// In fp32.
    pub fp32: f64,
    /// In bf16.
    pub bf16: f64,
}

impl MatmulSpeed {
    /// The name of the stored figures.
    pub const SUBJECT: &str = "precision";

    /// bf16 must be faster than fp32 by this factor to be recommended: a training step in bf16 also casts
    /// weights and activations, which costs a few per cent, and keeps fewer bits.
    pub const BF16_MARGIN: f64 = 1.1;

    /// Returns the speed that these figures hold; `None` if one is missing or not positive.
    #[must_use]
    pub fn from_figures(figures: &Figures) -> Option<Self> {
        let of = |name: &str| {
            let figure = figures.iter().find(|(other, _)| other == name)?;
            (figure.1 > 0.0).then_some(figure.1)
        };
        Some(Self {
            fp32: of("fp32")?,
            bf16: of("bf16")?,
        })
    }

    /// Returns the figures to store.
    #[must_use]
    pub fn to_figures(self) -> Figures {
        vec![("fp32".into(), self.fp32), ("bf16".into(), self.bf16)]
    }

    /// Returns the speed that was stored for `processor`.
    #[must_use]
    pub fn stored(environment: &Environment, processor: &Processor) -> Option<Self> {
        Self::from_figures(&processor.read(environment, Self::SUBJECT)?)
    }

    /// Returns `true` if training in bf16 is faster than in fp32.
    #[must_use]
    pub fn favours_bf16(self) -> bool {
        self.bf16 >= Self::BF16_MARGIN * self.fp32
    }
}

/// `fp32 320 GFLOP/s, bf16 170`.
impl fmt::Display for MatmulSpeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fp32 {:.0} GFLOP/s, bf16 {:.0}", self.fp32, self.bf16)
    }
}
