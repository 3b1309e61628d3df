use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::clip::{ClipOptions, clip};
use super::gptq::{GptqOptions, gptq};
use super::grid::Grid;
use super::statistics::InputStatistics;
use crate::quantize::quantize;
use crate::{Error, GroupScales, QuantizedWeight, Result, Scheme};

/// The options of calibrated quantization. The default is rounding to the nearest, with scales that cover the
/// largest element.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CalibrationOptions {
    /// The search for the scales; default `None`: no search.
    pub clip: Option<ClipOptions>,
    /// GPTQ; default `None`: each element is rounded to the nearest.
    pub gptq: Option<GptqOptions>,
    /// The dtype of the scales of groups; default f16.
    pub scales: GroupScales,
}

/// Quantizes `weight (O, I)` with calibration.
///
/// The `statistics` of the inputs weight the errors; GPTQ needs them. Codes and scales are computed on the CPU
/// and moved to the device of the weight.
///
/// ```
/// use overdrive_quantization::{
///     CalibrationOptions, GptqOptions, InputStatistics, Moments, QuantizedWeight, Scheme,
///     quantize_calibrated,
/// };
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let scheme: Scheme = "int4-g32".parse()?;
/// let weight = Tensor::randn([48, 64], (Kind::Float, Device::Cpu));
/// // Correlated inputs, as real layers have.
/// let mix = Tensor::randn([16, 64], (Kind::Float, Device::Cpu));
/// let mut statistics = InputStatistics::new(64, Moments::Full, Device::Cpu)?;
/// statistics.add(&Tensor::randn([512, 16], (Kind::Float, Device::Cpu)).matmul(&mix))?;
///
/// let rounded = QuantizedWeight::quantize(&weight, scheme)?.dequantize(Kind::Float)?;
/// let options = CalibrationOptions { gptq: Some(GptqOptions::default()), ..Default::default() };
/// let chosen = quantize_calibrated(&weight, scheme, Some(&statistics), &options)?;
/// let chosen = chosen.dequantize(Kind::Float)?;
/// let error = |approximate| statistics.output_error(&weight, approximate);
/// assert!(error(&chosen)? < 0.5 * error(&rounded)?);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// The errors of [`QuantizedWeight::quantize`]; [`Error::Common`] for statistics of another number of inputs,
/// options out of range, and GPTQ without full statistics.
pub fn quantize_calibrated(
    weight: &Tensor,
    scheme: Scheme,
    statistics: Option<&InputStatistics>,
    options: &CalibrationOptions,
) -> Result<QuantizedWeight> {
    let mut packed = quantize(weight, scheme, None, options.scales)?;
    if options.clip.is_none() && options.gptq.is_none() {
        return packed.laid_out();
    }
    let [_, inputs] = packed.size();
    if let Some(statistics) = statistics.filter(|statistics| statistics.inputs() != inputs) {
        let expected = format!("({inputs},), one value for each input of the weight");
        return Err(Error::shape("statistics", [statistics.inputs()], expected));
    }
    let weight = weight.f_detach()?.f_to_kind(Kind::Float)?;
    let numbers = weight.f_to_device(Device::Cpu)?.f_reshape([-1])?;
    let numbers: Vec<f32> = Vec::try_from(&numbers)?;
    let mut grid = Grid::of(&packed)?;
    if let Some(options) = &options.clip {
        options.validate()?;
        let importance = match statistics {
            Some(statistics) => {
                let squares = statistics.mean_squares()?.f_to_device(Device::Cpu)?;
                Vec::try_from(&squares)?
            }
            None => vec![1f32; inputs.unsigned_abs() as usize],
        };
        clip(&mut grid, &numbers, &importance, options);
        grid.set_steps(&mut packed)?;
    }
    let codes = match &options.gptq {
        Some(options) => {
            options.validate()?;
            let statistics = statistics.ok_or_else(|| {
                let found = "enabled without statistics";
                let expected = "given statistics of the inputs over a calibration set";
                Error::option("gptq", found, expected)
            })?;
            gptq(&grid, &weight, statistics, options)?
        }
        None => {
            let nearest = |(index, &x): (usize, &f32)| grid.nearest(index / grid.group, x).0;
            numbers.iter().enumerate().map(nearest).collect()
        }
    };
    Grid::set_codes(&codes, &mut packed)?;
    packed.laid_out()
}
