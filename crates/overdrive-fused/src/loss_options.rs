//! The options, labels and output that both cross-entropies share.

use overdrive_core::{IGNORE_INDEX, check_non_negative, check_option};
use tch::{Device, Kind, Tensor};

use crate::error::{wrong_dtype, wrong_shape};
use crate::kernel::cross_entropy::Terms;
use crate::tensors::elements;
use crate::{Error, Result};

/// The reduction of the losses of rows to one scalar.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over the rows that are not ignored; NaN if all are, as in PyTorch.
    #[default]
    Mean,
    /// The sum.
    Sum,
}

/// The loss of a row of logits `x` under the label `y`:
/// `lse - (1-ε)·x[y] - ε·mean(x) + z·lse²`, with `lse = ln Σ exp(x)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyOptions {
    /// The label of rows that have no loss and no gradient (default: -100).
    pub ignore_index: i64,
    /// Sum or mean over the rows that are not ignored (default: mean).
    pub reduction: Reduction,
    /// ε, the share of the target that is spread evenly over all classes, in `0..=1` (default: 0;
    /// Szegedy et al. 2015, arXiv:1512.00567).
    pub label_smoothing: f64,
    /// z, the weight of the squared `lse`, which keeps logits from drifting; PaLM has 1e-4
    /// (default: 0; Chowdhery et al. 2022, arXiv:2204.02311).
    pub z_loss: f64,
    /// The cap `c` of the logits, which become `c·tanh(x/c)` first, as in Gemma 2 with 30 (default: none).
    pub softcap: Option<f64>,
    /// If `true`, the backward pass of [`cross_entropy`](crate::cross_entropy) overwrites the logits with the
    /// gradient instead of allocating a second tensor of their size. For logits that nobody reads after
    /// backward; a second backward pass is refused (default: false).
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
    /// Checks the ranges of the options.
    ///
    /// # Errors
    /// [`Error::Common`] names the field.
    pub fn validate(&self) -> Result<()> {
        let Self {
            label_smoothing,
            z_loss,
            softcap,
            ..
        } = *self;
        let valid = (0.0..=1.0).contains(&label_smoothing);
        check_option(valid, "label_smoothing", label_smoothing, "between 0 and 1")?;
        check_non_negative("z_loss", z_loss)?;
        if let Some(cap) = softcap {
            let valid = cap > 0.0 && cap.is_finite();
            check_option(valid, "softcap", cap, "positive and finite, or none")?;
        }
        Ok(())
    }

    pub(crate) fn terms(&self) -> Terms {
        Terms {
            ignore_index: self.ignore_index,
            label_smoothing: self.label_smoothing as f32,
            z_loss: self.z_loss as f32,
            softcap: self.softcap.map(|cap| cap as f32),
        }
    }

    /// Returns the factor of the sum over `tokens` rows.
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
    /// The number of rows whose label is not the ignored one.
    pub tokens: i64,
}

/// Checked labels: one dimension, contiguous, each a class or the ignored one.
#[derive(Debug)]
pub(crate) struct Labels {
    pub(crate) flat: Tensor,
    /// The number of labels that are not ignored.
    pub(crate) tokens: i64,
}

impl Labels {
    /// Checks labels for logits of the `leading` dimensions and `classes` classes.
    pub(crate) fn new(
        function: &'static str,
        labels: &Tensor,
        leading: &[i64],
        classes: i64,
        ignore_index: i64,
    ) -> Result<Self> {
        if labels.kind() != Kind::Int64 {
            return Err(wrong_dtype(function, "labels", labels.kind(), "Int64"));
        }
        if labels.size() != leading {
            return Err(wrong_shape(
                function,
                "labels",
                labels,
                format!("{leading:?}, one label for each row"),
            ));
        }
        // Checked before any kernel runs, because a kernel indexes its row with the label.
        let flat = labels.f_reshape([-1])?.f_contiguous()?;
        let unfit = |row: usize, label| Error::Label {
            function,
            row,
            label,
            classes,
            ignore_index,
        };
        let is_unfit = |label: i64| label != ignore_index && !(0..classes).contains(&label);
        // Labels on a device are copied to be checked: one device sync, eight bytes a row.
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
