//! What the two cross-entropies share.

use tch::{Device, Kind, Tensor};

use crate::kernel::cross_entropy::Terms;
use crate::tensors::elements;
use crate::{Error, Result};

/// The label that marks a row as not to be learnt, as in PyTorch and transformers.
pub const IGNORE_INDEX: i64 = -100;

/// How the losses of rows become one number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reduction {
    /// Their sum over the rows that count, divided by the number of these; NaN where none counts, as
    /// in PyTorch.
    #[default]
    Mean,
    /// Their sum.
    Sum,
}

/// The loss of a row of logits `x` under the label `y`:
/// `lse - (1-ε)·x[y] - ε·mean(x) + z·lse²`, with `lse = ln Σ exp(x)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyOptions {
    /// Rows with this label have no loss and no gradient (default: -100).
    pub ignore_index: i64,
    /// Sum or mean over the rows that count (default: mean).
    pub reduction: Reduction,
    /// ε, the share of the target that is spread evenly over all classes, in `0..=1` (default: 0;
    /// Szegedy et al. 2015, arXiv:1512.00567).
    pub label_smoothing: f64,
    /// z, the weight of the squared `lse`, which keeps logits from drifting; PaLM has 1e-4
    /// (default: 0; Chowdhery et al. 2022, arXiv:2204.02311).
    pub z_loss: f64,
    /// `c`: the logits are `c·tanh(x/c)` first, as in Gemma 2 with 30 (default: none).
    pub softcap: Option<f64>,
    /// [`cross_entropy`](crate::cross_entropy) only: backward puts the gradient into the memory of the
    /// logits, which it so destroys, instead of making a second tensor of their size. For logits that
    /// nobody reads after backward; a second backward pass is refused (default: false).
    pub reuse_logits: bool,
}

impl Default for CrossEntropyOptions {
    fn default() -> Self {
        Self {
            ignore_index: IGNORE_INDEX,
            reduction: Reduction::Mean,
            label_smoothing: 0.0,
            z_loss: 0.0,
            softcap: None,
            reuse_logits: false,
        }
    }
}

impl CrossEntropyOptions {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] names the field.
    pub fn validate(&self) -> Result<()> {
        let invalid = |option, value: f64, expected| {
            Err(Error::InvalidOption {
                option,
                value: value.to_string(),
                expected,
            })
        };
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            return invalid("label_smoothing", self.label_smoothing, "0 to 1");
        }
        if !(self.z_loss >= 0.0 && self.z_loss.is_finite()) {
            return invalid("z_loss", self.z_loss, "a finite number from 0 up");
        }
        match self.softcap {
            Some(cap) if !(cap > 0.0 && cap.is_finite()) => {
                invalid("softcap", cap, "a finite number above 0, or none")
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn terms(&self) -> Terms {
        Terms {
            ignore_index: self.ignore_index,
            label_smoothing: self.label_smoothing as f32,
            z_loss: self.z_loss as f32,
            softcap: self.softcap.map(|cap| cap as f32),
        }
    }

    /// What the sum over `tokens` rows is multiplied by.
    pub(crate) fn scale(&self, tokens: i64) -> f64 {
        match self.reduction {
            Reduction::Sum => 1.0,
            Reduction::Mean => 1.0 / tokens as f64,
        }
    }
}

/// A loss and how many rows it is of.
#[derive(Debug)]
#[non_exhaustive]
pub struct CrossEntropyOutput {
    /// The sum or mean in nats: a scalar, f64 for f64 logits and f32 otherwise.
    pub loss: Tensor,
    /// Rows whose label is not the ignored one.
    pub tokens: i64,
}

/// Labels that were found fit: one dimension, contiguous, each a class or the ignored one.
#[derive(Debug)]
pub(crate) struct Labels {
    pub(crate) flat: Tensor,
    /// Those that are not ignored.
    pub(crate) tokens: i64,
}

impl Labels {
    /// For logits of the `leading` dimensions and `classes` classes.
    pub(crate) fn new(
        function: &'static str,
        labels: &Tensor,
        leading: &[i64],
        classes: i64,
        ignore_index: i64,
    ) -> Result<Self> {
        if labels.kind() != Kind::Int64 {
            return Err(Error::Kind {
                function,
                name: "labels",
                found: labels.kind(),
                expected: "Int64",
            });
        }
        if labels.size() != leading {
            return Err(Error::Shape {
                function,
                name: "labels",
                found: labels.size(),
                expected: format!("{leading:?}, one label for each row"),
            });
        }
        let flat = labels.f_reshape([-1])?.f_contiguous()?;
        let unfit = |row: usize, label| Error::Label {
            function,
            row,
            label,
            classes,
            ignore_index,
        };
        let is_unfit = |label: i64| label != ignore_index && !(0..classes).contains(&label);
        // Elsewhere they come over to be looked at: one wait for the device, eight bytes a row.
        let here = match flat.device() {
            Device::Cpu => flat.shallow_clone(),
            _ => flat.f_to_device(Device::Cpu)?,
        };
        let values: &[i64] = elements(&here)?;
        if let Some(row) = values.iter().position(|&label| is_unfit(label)) {
            return Err(unfit(row, values[row]));
        }
        let counted = values.iter().filter(|&&label| label != ignore_index);
        let tokens = counted.count() as i64;
        Ok(Self { flat, tokens })
    }
}
