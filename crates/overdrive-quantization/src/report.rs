//! The error of quantization.

use tch::{Device, Kind, Tensor};

use crate::{Error, QuantizedWeight, Result};
use overdrive_kernels::tensors::elements;

/// The difference between a quantized weight and its original.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
#[non_exhaustive]
pub struct WeightError {
    /// The largest absolute difference of an element.
    pub max_abs: f64,
    /// The root mean square of the differences.
    pub rms: f64,
    /// `rms` divided by the root mean square of the original; 0 if there is no difference.
    pub relative_rms: f64,
}

impl WeightError {
    /// Returns the ratio of signal to quantization noise in decibels, `−20 log₁₀ relative_rms`; infinite if
    /// there is no difference.
    pub fn sqnr_db(&self) -> f64 {
        -20.0 * self.relative_rms.log10()
    }
}

impl QuantizedWeight {
    /// Returns the difference between this weight and `original (O, I)`.
    ///
    /// ```
    /// use overdrive_quantization::{QuantizedWeight, Scheme};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let original = Tensor::randn([64, 256], (Kind::Float, Device::Cpu));
    /// let error = QuantizedWeight::quantize(&original, "nf4".parse()?)?.error(&original)?;
    /// assert!(error.relative_rms < 0.1 && error.sqnr_db() > 20.0);
    /// # Ok::<(), overdrive_quantization::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Common`] if `original` has another shape.
    pub fn error(&self, original: &Tensor) -> Result<WeightError> {
        if original.size() != self.size() {
            let expected = format!("{:?}, as the quantized weight is", self.size());
            return Err(Error::shape("original", original.size(), expected));
        }
        // Blocks of rows of about 2^20 elements, so that the dense copy does not double the memory.
        let rows = (1 << 20) / self.inputs.max(1) + 1;
        let (mut most, mut noise, mut signal) = (0f64, 0f64, 0f64);
        for start in (0..self.outputs).step_by(rows as usize) {
            let count = rows.min(self.outputs - start);
            let ids = Tensor::f_arange_start(start, start + count, (Kind::Int64, self.device()))?;
            let ours = self.rows(&ids, Kind::Float)?.f_to_device(Device::Cpu)?;
            let theirs = original.f_narrow(0, start, count)?.f_detach()?;
            let theirs = theirs
                .f_to_device(Device::Cpu)?
                .f_to_kind(Kind::Float)?
                .f_contiguous()?;
            let pairs = elements::<f32>(&ours)?
                .iter()
                .zip(elements::<f32>(&theirs)?);
            for (ours, theirs) in pairs {
                let (ours, theirs) = (f64::from(*ours), f64::from(*theirs));
                let difference = (ours - theirs).abs();
                most = most.max(difference);
                noise += difference * difference;
                signal += theirs * theirs;
            }
        }
        let count = (self.outputs * self.inputs) as f64;
        Ok(WeightError {
            max_abs: most,
            rms: (noise / count).sqrt(),
            relative_rms: if noise == 0.0 {
                0.0
            } else {
                (noise / signal).sqrt()
            },
        })
    }
}
