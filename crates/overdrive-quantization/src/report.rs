//! What quantization has cost.

use tch::{Device, Kind, Tensor};

use crate::tensors::elements;
use crate::{Error, QuantizedWeight, Result};

/// How far a quantized weight is from the original.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct WeightError {
    /// The largest difference of one number.
    pub max_abs: f64,
    /// The root of the mean of squared differences.
    pub rms: f64,
    /// `rms` by the root of the mean of squared numbers; 0 where both are.
    pub relative_rms: f64,
}

impl WeightError {
    /// The ratio of signal to quantization noise in decibels: `−20 log₁₀ relative_rms`; infinite without
    /// differences.
    pub fn sqnr_db(&self) -> f64 {
        -20.0 * self.relative_rms.log10()
    }
}

impl QuantizedWeight {
    /// How far this weight is from `original (O, I)`. Rows are dequantized a few at a time.
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
    /// [`Error::BadInput`] for another shape.
    pub fn error(&self, original: &Tensor) -> Result<WeightError> {
        if original.size() != self.size() {
            return Err(Error::BadInput {
                name: "original",
                found: format!("{:?}", original.size()),
                expected: format!("{:?}", self.size()),
            });
        }
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
