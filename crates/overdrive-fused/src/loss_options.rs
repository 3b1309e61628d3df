//! The options, labels and output that both cross-entropies share.

use overdrive_core::{IGNORE_INDEX, check_non_negative, check_option};
use overdrive_gpu::LossTerms;
use tch::{Device, Kind, Tensor};

use crate::error::{wrong_dtype, wrong_shape};
use crate::{Error, Result};
use overdrive_kernels::tensors::elements;

/// The reduction of the losses of rows to one scalar.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean over the rows that are not ignored; NaN if all are ignored, as in PyTorch.
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
    /// z, the weight of the squared `lse`, which keeps logits from drifting; PaLM uses 1e-4
    /// (default: 0; Chowdhery et al. 2022, arXiv:2204.02311).
    pub z_loss: f64,
    /// The cap `c` of the logits, which first become `c·tanh(x/c)`; Gemma 2 uses 30 (default: none).
    pub softcap: Option<f64>,
    /// The number of labels that are not ignored, if known, such as from a data loader (default: unknown). On a
    /// CPU it is checked. On a GPU it is not: there, [`linear_cross_entropy`](crate::linear_cross_entropy) leaves
    /// ignored rows out of its matmuls only if the number is given, because counting them would wait for the
    /// device.
    pub label_count: Option<i64>,
    /// If `true`, the backward pass of [`cross_entropy`](crate::cross_entropy) overwrites the logits with the
    /// gradient instead of allocating a second tensor of their size. The logits must not be used after
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
            label_count: None,
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

    pub(crate) fn terms(&self) -> LossTerms {
        LossTerms {
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

/// A loss and the number of rows that it covers.
#[derive(Debug)]
#[non_exhaustive]
pub struct CrossEntropyOutput {
    /// The sum or mean in nats: a scalar, f64 for f64 logits and f32 otherwise.
    pub loss: Tensor,
    /// The number of rows whose label is not the ignored one: an i64 scalar on the device of the labels.
    pub count: Tensor,
}

impl CrossEntropyOutput {
    /// Returns the number of rows whose label is not the ignored one. Synchronizes with the device.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn tokens(&self) -> Result<i64> {
        Ok(self.count.f_int64_value(&[])?)
    }
}

/// Labels of one dimension, contiguous. On a CPU each is checked to be a class or the ignored label. On a device
/// the caller must ensure this; otherwise a kernel of libtorch fails there, as in PyTorch.
#[derive(Debug)]
pub(crate) struct Labels {
    pub(crate) flat: Tensor,
    /// The number of labels that are not ignored, if the host knows it.
    pub(crate) known: Option<i64>,
    /// The same number as a scalar on the device of the labels.
    pub(crate) count: Tensor,
}

impl Labels {
    /// Checks labels for logits of the `leading` dimensions and `classes` classes, without reading from a device.
    pub(crate) fn new(
        function: &'static str,
        labels: &Tensor,
        leading: &[i64],
        classes: i64,
        options: &CrossEntropyOptions,
    ) -> Result<Self> {
        let ignore_index = options.ignore_index;
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
        let flat = labels.f_reshape([-1])?.f_contiguous()?;
        if flat.device() != Device::Cpu {
            return Ok(Self {
                count: flat.f_ne(ignore_index)?.f_sum(Kind::Int64)?,
                known: options.label_count,
                flat,
            });
        }
        // Checked before any kernel runs, because a kernel indexes its row with the label.
        let is_unfit = |label: i64| label != ignore_index && !(0..classes).contains(&label);
        let values: &[i64] = elements(&flat)?;
        if let Some(row) = values.iter().position(|&label| is_unfit(label)) {
            return Err(Error::Label {
                function,
                row,
                label: values[row],
                classes,
                ignore_index,
            });
        }
        let counted = values.iter().filter(|&&label| label != ignore_index);
        let tokens = counted.count() as i64;
        if let Some(given) = options.label_count {
            let expected = format!("{tokens}, the number of labels other than {ignore_index}");
            check_option(given == tokens, "label_count", given, expected)?;
        }
        Ok(Self {
            count: Tensor::f_scalar_tensor(tokens, (Kind::Int64, Device::Cpu))?,
            known: Some(tokens),
            flat,
        })
    }

    pub(crate) fn shallow_clone(&self) -> Self {
        Self {
            flat: self.flat.shallow_clone(),
            known: self.known,
            count: self.count.shallow_clone(),
        }
    }

    /// Returns the mean of a sum over the rows that are not ignored; NaN with a gradient of 0 if all are ignored.
    pub(crate) fn mean_of(&self, sum: &Tensor) -> Result<Tensor> {
        let count = self.count.f_to_kind(sum.kind())?;
        // 0, or NaN for 0 / 0: dividing the sum itself would make its gradient NaN as well.
        let nothing = count.f_zeros_like()?.f_div(&count)?;
        Ok(sum.f_div(&count.f_clamp_min(1.0)?)?.f_add(&nothing)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_over_a_number_on_the_device_is_that_over_a_known_one() {
        for (count, loss, gradient) in [(4_i64, 2.5, 0.25), (0, f64::NAN, 1.0)] {
            let labels = Labels {
                flat: Tensor::from_slice(&[0_i64]),
                known: None,
                count: Tensor::from(count),
            };
            let sum = Tensor::from(10.0_f32).set_requires_grad(true);
            let mean = labels.mean_of(&sum).expect("two scalars");
            mean.backward();
            let found = mean.double_value(&[]);
            assert!(
                found == loss || (found.is_nan() && loss.is_nan()),
                "{found}"
            );
            // Without a row the mean is NaN, and its gradient is finite: ignored rows multiply it by 0.
            assert_eq!(sum.grad().double_value(&[]), gradient);
        }
    }
}
