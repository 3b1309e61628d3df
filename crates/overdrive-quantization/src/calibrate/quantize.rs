use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::clip::{ClipOptions, clip};
use super::gptq::{GptqOptions, gptq};
use super::grid::Grid;
use super::statistics::InputStatistics;
use crate::quantize::quantize;
use crate::{Error, GroupScales, QuantizedWeight, Result, Scheme};

/// How the numbers of a quantized weight are chosen. The default is rounding to the nearest, with scales
/// that cover the largest weight.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CalibrationOptions {
    /// Whether scales are searched; default `None`, not.
    pub clip: Option<ClipOptions>,
    /// Whether codes are chosen together; default `None`, each by itself.
    pub gptq: Option<GptqOptions>,
    /// In what scales of groups are kept; default f16.
    pub scales: GroupScales,
}

/// Quantizes `weight (O, I)` as `options` say.
///
/// `statistics` of its inputs weight the errors; GPTQ cannot do without them. The weight's codes and
/// scales are worked out on the CPU, and come back to its device.
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
/// // Inputs that go together, as those of real layers do.
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
/// Those of [`QuantizedWeight::quantize`]; [`Error::BadInput`] for statistics of another number of
/// inputs, [`Error::BadOption`] for options out of range and GPTQ without full statistics.
pub fn quantize_calibrated(
    weight: &Tensor,
    scheme: Scheme,
    statistics: Option<&InputStatistics>,
    options: &CalibrationOptions,
) -> Result<QuantizedWeight> {
    let mut packed = quantize(weight, scheme, None, options.scales)?;
    if options.clip.is_none() && options.gptq.is_none() {
        return Ok(packed);
    }
    let [_, inputs] = packed.size();
    if let Some(statistics) = statistics.filter(|statistics| statistics.inputs() != inputs) {
        return Err(Error::BadInput {
            name: "statistics",
            found: format!("of {} inputs", statistics.inputs()),
            expected: format!("those of the weight, {inputs}"),
        });
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
            let statistics = statistics.ok_or_else(|| Error::BadOption {
                option: "gptq",
                found: "without statistics".to_owned(),
                expected: "those of the map's inputs over a calibration set".to_owned(),
            })?;
            gptq(&grid, &weight, statistics, options)?
        }
        None => {
            let nearest = |(place, &x): (usize, &f32)| grid.nearest(place / grid.group, x).0;
            numbers.iter().enumerate().map(nearest).collect()
        }
    };
    Grid::set_codes(&codes, &mut packed)?;
    Ok(packed)
}
