use overdrive_core::random::Generator;
use tch::Tensor;

use crate::{ParameterSpec, Result};

/// The initial value of a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// Random values of the normal distribution with mean 0.
    Normal {
        /// The standard deviation.
        std: f64,
    },
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
}

/// The number of values that are drawn at a time: a large embedding is not held twice.
const CHUNK: i64 = 1 << 20;

/// Sets `parameter`, which is that of `spec`, to its initial value.
///
/// Random values depend on the seed and the parameter's name alone: they are the same on every device, and
/// neither use nor disturb libtorch's global generator.
pub(crate) fn initialise(parameter: &Tensor, spec: &ParameterSpec, seed: u64) -> Result<()> {
    // Detached: libtorch forbids writes in place to a leaf that requires a gradient.
    let mut flat = parameter.f_detach()?.f_view([-1])?;
    let std = match spec.init {
        Init::Zeros | Init::Ones => {
            let _same = flat.f_fill_(i64::from(spec.init == Init::Ones))?;
            return Ok(());
        }
        Init::Normal { std } => std,
    };
    let mut generator = Generator::named(seed, &spec.name);
    let mut start = 0;
    while start < spec.numel() {
        let count = (spec.numel() - start).min(CHUNK);
        let values: Vec<f32> = (0..count)
            .map(|_| (std * generator.normal()) as f32)
            .collect();
        let mut chunk = flat.f_narrow(0, start, count)?;
        chunk.f_copy_(&Tensor::f_from_slice(&values)?)?;
        start += count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use tch::{Device, Kind};

    use super::*;
    use crate::ParameterRole;

    #[test]
    fn initial_values_have_mean_0_and_the_given_deviation_and_differ_by_name_and_seed() {
        let draw = |seed, name: &str| {
            let init = Init::Normal { std: 0.02 };
            let spec = ParameterSpec::new(name.to_owned(), &[200_000], init, ParameterRole::Other);
            let parameter = Tensor::zeros([200_000], (Kind::Float, Device::Cpu));
            initialise(&parameter, &spec, seed).unwrap();
            Vec::<f64>::try_from(parameter.to_kind(Kind::Double)).unwrap()
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
