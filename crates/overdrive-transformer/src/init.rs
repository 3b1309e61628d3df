use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;

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
    /// Random values of the normal distribution with mean 0, those beyond the bound drawn again
    /// (`torch.nn.init.trunc_normal_`).
    TruncatedNormal {
        /// The standard deviation of the distribution before it is cut off.
        std: f64,
        /// The bound of the absolute values, in standard deviations; positive.
        cutoff: f64,
    },
    /// Random values whose exponentials are uniform: the logarithms of speeds of decay.
    LogUniform {
        /// The smallest exponential; positive.
        low: f64,
        /// The largest exponential.
        high: f64,
    },
    /// Zeros.
    Zeros,
    /// Ones.
    Ones,
}

/// The number of values that are drawn at a time: a large embedding is not held twice.
const CHUNK: i64 = 1 << 20;

/// Sets `parameters`, which are those of `specs`, to their initial values.
///
/// Random values depend on the seed and the parameter's name alone: they are the same on every device, and
/// neither use nor disturb libtorch's global generator. They are drawn on all cores, a parameter on each, because the
/// start of a large model would otherwise wait for one core; only the calling thread calls libtorch.
pub(crate) fn initialize(
    parameters: &[(String, Tensor)],
    specs: &[ParameterSpec],
    seed: u64,
) -> Result<()> {
    let mut random = Vec::new();
    for ((_, parameter), spec) in parameters.iter().zip(specs) {
        // Detached: libtorch forbids writes in place to a leaf that requires a gradient.
        let mut flat = parameter.f_detach()?.f_view([-1])?;
        match spec.init {
            Init::Zeros | Init::Ones => {
                let _same = flat.f_fill_(i64::from(spec.init == Init::Ones))?;
            }
            Init::Normal { .. } | Init::TruncatedNormal { .. } | Init::LogUniform { .. } => {
                random.push((flat, spec));
            }
        }
    }
    // The largest first, so that no core is left alone with it at the end.
    random.sort_by_key(|(_, spec)| Reverse(spec.numel()));
    let jobs: Vec<&ParameterSpec> = random.iter().map(|(_, spec)| *spec).collect();
    let values: i64 = jobs.iter().map(|spec| spec.numel()).sum();
    let workers = match values <= CHUNK {
        // Not worth more threads.
        true => 1,
        false => thread::available_parallelism().map_or(1, Into::into),
    };
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        // Bounded, so that few values wait for their copy.
        let (sender, receiver) = sync_channel(workers);
        for _ in 0..workers.min(jobs.len()) {
            let (sender, jobs, next) = (sender.clone(), &jobs, &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let send = |part: Part| sender.send((index, part)).is_ok();
                    match jobs.get(index) {
                        Some(spec) if draw(spec, seed, send) => {}
                        _ => return,
                    }
                }
            });
        }
        drop(sender);
        for (index, (start, values)) in receiver {
            let (flat, _) = &random[index];
            let count = i64::try_from(values.len()).unwrap_or(i64::MAX);
            let mut chunk = flat.f_narrow(0, start, count)?;
            chunk.f_copy_(&Tensor::f_from_slice(&values)?)?;
        }
        Ok(())
    })
}

/// A part of a parameter: the index of its first value, and the values.
type Part = (i64, Vec<f32>);

/// Sends the values of a parameter in order. Returns `false` once the receiver is gone.
fn draw(spec: &ParameterSpec, seed: u64, send: impl Fn(Part) -> bool) -> bool {
    let mut generator = Generator::named(seed, &spec.name);
    let mut value = || match spec.init {
        Init::Normal { std } => std * generator.normal(),
        Init::TruncatedNormal { std, cutoff } => loop {
            let value = generator.normal();
            if value.abs() <= cutoff {
                return std * value;
            }
        },
        Init::LogUniform { low, high } => (low + (high - low) * generator.uniform()).ln(),
        Init::Zeros => 0.0,
        Init::Ones => 1.0,
    };
    let mut start = 0;
    while start < spec.numel() {
        let count = (spec.numel() - start).min(CHUNK);
        let values = (0..count).map(|_| value() as f32);
        if !send((start, values.collect())) {
            return false;
        }
        start += count;
    }
    true
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
            let named = [(name.to_owned(), parameter.shallow_clone())];
            initialize(&named, &[spec], seed).unwrap();
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
