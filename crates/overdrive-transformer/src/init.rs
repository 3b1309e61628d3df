use tch::Tensor;

use crate::{ParameterSpec, Result};

/// How a parameter starts.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
}

/// Gives `parameter`, which is that of `spec`, its initial value.
///
/// Random values depend on the seed and the parameter's name alone: they are the same on every
/// device, and neither use nor disturb libtorch's global generator.
pub(crate) fn initialise(parameter: &Tensor, spec: &ParameterSpec, seed: u64) -> Result<()> {
    let mut flat = parameter.f_detach()?.f_view([-1])?;
    let std = match spec.init {
        Init::Zeros | Init::Ones => {
            let _same = flat.f_fill_(i64::from(spec.init == Init::Ones))?;
            return Ok(());
        }
        Init::Normal { std } => std as f32,
    };
    let mut stream = NormalStream::new(seed, &spec.name);
    let mut start = 0;
    // A part at a time: a large embedding is not held twice.
    while start < spec.numel() {
        let count = (spec.numel() - start).min(1 << 20);
        let values: Vec<f32> = (0..count).map(|_| stream.next(std)).collect();
        let mut part = flat.f_narrow(0, start, count)?;
        part.f_copy_(&Tensor::f_from_slice(&values)?)?;
        start += count;
    }
    Ok(())
}

/// Normal numbers by the Box-Muller transform over SplitMix64.
struct NormalStream {
    state: u64,
    spare: Option<f32>,
}

impl NormalStream {
    fn new(seed: u64, name: &str) -> Self {
        // FNV-1a of the name, mixed with the seed: one stream a parameter.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut stream = NormalStream {
            state: hash ^ seed,
            spare: None,
        };
        stream.state = stream.bits() ^ seed.rotate_left(32);
        stream
    }

    fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn next(&mut self, std: f32) -> f32 {
        if let Some(spare) = self.spare.take() {
            return spare * std;
        }
        let bits = self.bits();
        // Two 24-bit uniforms of one draw, the first in (0, 1] so that its logarithm is finite.
        let scale = 1.0 / (1u32 << 24) as f32;
        let u = ((bits >> 40) + 1) as f32 * scale;
        let v = ((bits >> 8) & 0xff_ffff) as f32 * scale;
        let radius = (-2.0 * u.ln()).sqrt();
        let (sin, cos) = (std::f32::consts::TAU * v).sin_cos();
        self.spare = Some(radius * sin);
        radius * cos * std
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_streams_have_mean_0_and_the_given_deviation_and_differ_by_name_and_seed() {
        let draw = |seed, name: &str| {
            let mut stream = NormalStream::new(seed, name);
            (0..200_000)
                .map(|_| f64::from(stream.next(0.02)))
                .collect::<Vec<_>>()
        };
        let values = draw(1, "a");
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        let std = (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n).sqrt();
        let kurtosis = values
            .iter()
            .map(|v| ((v - mean) / std).powi(4))
            .sum::<f64>()
            / n;
        // Five standard errors of each statistic at 200,000 samples.
        assert!(mean.abs() < 5.0 * 0.02 / n.sqrt(), "{mean}");
        assert!((std - 0.02).abs() < 5.0 * 0.02 / (2.0 * n).sqrt(), "{std}");
        assert!(
            (kurtosis - 3.0).abs() < 5.0 * (24.0 / n).sqrt(),
            "{kurtosis}"
        );
        assert_eq!(values, draw(1, "a"));
        assert_ne!(values, draw(2, "a"));
        assert_ne!(values, draw(1, "b"));
        let other = draw(2, "a");
        let correlation = values.iter().zip(&other).map(|(a, b)| a * b).sum::<f64>() / n / 4e-4;
        assert!(correlation.abs() < 5.0 / n.sqrt(), "{correlation}");
    }
}
