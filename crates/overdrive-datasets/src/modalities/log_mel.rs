//! Log-mel spectrograms of audio.

use tch::{Kind, Tensor};

use overdrive_core::{check_option, check_positive};

use crate::Result;

/// The options of [`LogMel`]; the defaults are those of Whisper.
#[derive(Debug, Clone, PartialEq)]
pub struct LogMelOptions {
    /// The number of samples per second. Default: 16,000.
    pub sampling_rate: u32,
    /// The number of samples of a window, and of its Fourier transform. Default: 400, which is 25 ms.
    pub n_fft: usize,
    /// The number of samples from one frame to the next. Default: 160, which is 10 ms.
    pub hop_length: usize,
    /// The number of mel filters, whose lowest frequency is 0. Default: 80.
    pub feature_size: usize,
    /// The highest frequency in hertz, at most half of `sampling_rate`. Default: 8,000.
    pub max_frequency: f64,
}

impl Default for LogMelOptions {
    fn default() -> Self {
        Self {
            sampling_rate: 16_000,
            n_fft: 400,
            hop_length: 160,
            feature_size: 80,
            max_frequency: 8_000.0,
        }
    }
}

/// The log-mel spectrogram of Whisper (Radford et al. 2022, arXiv:2212.04356), `WhisperFeatureExtractor` of transformers
/// without its padding to 30 seconds: the power spectrum under a Hann window, Slaney's mel filters, the decimal logarithm
/// from 10⁻¹⁰ on, cut off 8 below the clip's maximum, and scaled by `(x + 4) / 4`.
///
/// ```
/// use overdrive_datasets::{LogMel, LogMelOptions};
///
/// let mel = LogMel::new(LogMelOptions::default())?;
/// let tone: Vec<f32> = (0..16_000).map(|t| (t as f32 * 0.1).sin()).collect();
/// assert_eq!(mel.frames(&tone)?.size(), [100, 80]); // 1 second, a frame every 10 ms
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug)]
pub struct LogMel {
    options: LogMelOptions,
    /// The filters, (n_fft / 2 + 1, feature_size) in row-major order. They are kept as a vector, because a tensor
    /// cannot be shared between threads.
    filters: Vec<f32>,
}

impl LogMel {
    /// Returns the transform with these options.
    ///
    /// # Errors
    /// Returns an error if a number is 0, `n_fft` is below 2 or above 2²⁰, `feature_size` is above `n_fft`, or
    /// `max_frequency` is not above 0 and at most half of `sampling_rate`.
    pub fn new(options: LogMelOptions) -> Result<Self> {
        check_positive("sampling_rate", options.sampling_rate)?;
        check_positive("hop_length", options.hop_length)?;
        check_option(
            (2..=1 << 20).contains(&options.n_fft),
            "n_fft",
            options.n_fft,
            "from 2 to 2^20 samples",
        )?;
        check_option(
            (1..=options.n_fft).contains(&options.feature_size),
            "feature_size",
            options.feature_size,
            "from 1 to n_fft",
        )?;
        let nyquist = f64::from(options.sampling_rate) / 2.0;
        check_option(
            options.max_frequency > 0.0 && options.max_frequency <= nyquist,
            "max_frequency",
            options.max_frequency,
            format!("above 0 and at most half of the sampling rate, {nyquist}"),
        )?;
        Ok(Self {
            filters: filters(&options),
            options,
        })
    }

    /// Returns the options.
    pub fn options(&self) -> &LogMelOptions {
        &self.options
    }

    /// Returns the spectrogram of `samples` (from -1 to 1), (frames, feature_size), Float, on the CPU: a frame for each
    /// `hop_length` samples, at least one. Clips shorter than `n_fft` are filled up with silence.
    ///
    /// # Errors
    /// An error of libtorch if there is no memory for the tensors.
    pub fn frames(&self, samples: &[f32]) -> Result<Tensor> {
        let LogMelOptions {
            n_fft, hop_length, ..
        } = self.options;
        let mut samples = samples.to_vec();
        // The windows of the first and the last frame are completed by reflection, which needs enough samples.
        samples.resize(samples.len().max(n_fft).max(hop_length), 0.0);
        let cpu = (Kind::Float, tch::Device::Cpu);
        let _no_grad = tch::no_grad_guard();
        let window = Tensor::f_hann_window(n_fft as i64, cpu)?;
        let half = n_fft / 2;
        let ends = samples.len() - 1;
        let before = samples[1..=half].iter().rev();
        let after = samples[ends - half..ends].iter().rev();
        // Reflected here and not by `stft_center`, because tch's binding of it always passes an option that
        // libtorch refuses.
        let reflected: Vec<f32> = before.chain(&samples).chain(after).copied().collect();
        let (n_fft, hop) = (n_fft as i64, hop_length as i64);
        let spectrum = Tensor::f_from_slice(&reflected)?.f_stft(
            n_fft,
            hop,
            n_fft,
            Some(window),
            false,
            true,
            true,
            false,
        )?;
        // As in Whisper, the last frame, whose window is half beyond the end, is left out.
        let frames = spectrum.size()[1] - 1;
        let power = spectrum.f_narrow(1, 0, frames)?.f_abs()?.f_square()?;
        let filters = Tensor::f_from_slice(&self.filters)?
            .f_view([n_fft / 2 + 1, self.options.feature_size as i64])?;
        let mel = power.f_transpose(0, 1)?.f_matmul(&filters)?;
        let log = mel.f_clamp_min(1e-10)?.f_log10()?;
        let floor = log.f_max()?.f_sub_scalar(8.0)?;
        Ok(log
            .f_maximum(&floor)?
            .f_add_scalar(4.0)?
            .f_div_scalar(4.0)?)
    }
}

/// Returns Slaney's mel of a frequency in hertz: linear up to 1,000 Hz, logarithmic above.
fn mel(hertz: f64) -> f64 {
    match hertz < 1_000.0 {
        true => 3.0 * hertz / 200.0,
        false => 15.0 + (hertz / 1_000.0).ln() * 27.0 / 6.4_f64.ln(),
    }
}

/// Returns the frequency in hertz of Slaney's mel.
fn hertz(mel: f64) -> f64 {
    match mel < 15.0 {
        true => 200.0 * mel / 3.0,
        false => 1_000.0 * ((mel - 15.0) * 6.4_f64.ln() / 27.0).exp(),
    }
}

/// Returns triangular filters of equal area, equally spaced in mel.
fn filters(options: &LogMelOptions) -> Vec<f32> {
    let bins = options.n_fft / 2 + 1;
    let count = options.feature_size;
    let step = mel(options.max_frequency) / (count + 1) as f64;
    let edges: Vec<f64> = (0..count + 2)
        .map(|edge| hertz(step * edge as f64))
        .collect();
    let nyquist = f64::from(options.sampling_rate / 2);
    let mut filters = Vec::with_capacity(bins * count);
    for bin in 0..bins {
        let frequency = nyquist * bin as f64 / (bins - 1) as f64;
        filters.extend(edges.windows(3).map(|edge| {
            let rising = (frequency - edge[0]) / (edge[1] - edge[0]);
            let falling = (edge[2] - frequency) / (edge[2] - edge[1]);
            let area = 2.0 / (edge[2] - edge[0]);
            (area * rising.min(falling).max(0.0)) as f32
        }));
    }
    filters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mel_and_hertz_are_inverse_and_meet_at_1000_hertz() {
        for frequency in [0.0, 440.0, 999.9, 1_000.0, 4_000.0, 8_000.0] {
            assert!((hertz(mel(frequency)) - frequency).abs() < 1e-9 * (1.0 + frequency));
        }
        assert!((mel(999.999_999) - 15.0).abs() < 1e-6 && mel(1_000.0) == 15.0);
    }

    #[test]
    fn short_clips_have_a_frame_and_odd_options_are_refused() {
        let mel = LogMel::new(LogMelOptions::default()).unwrap();
        assert_eq!(mel.frames(&[]).unwrap().size(), [2, 80]);
        assert_eq!(mel.frames(&[0.5; 401]).unwrap().size(), [2, 80]);
        // Silence is at the floor.
        assert_eq!(mel.frames(&[0.0; 800]).unwrap().double_value(&[3, 7]), -1.5);
        for (options, name) in [
            (
                LogMelOptions {
                    n_fft: 1,
                    ..LogMelOptions::default()
                },
                "n_fft",
            ),
            (
                LogMelOptions {
                    hop_length: 0,
                    ..LogMelOptions::default()
                },
                "hop_length",
            ),
            (
                LogMelOptions {
                    feature_size: 0,
                    ..LogMelOptions::default()
                },
                "feature_size",
            ),
            (
                LogMelOptions {
                    max_frequency: 9e3,
                    ..LogMelOptions::default()
                },
                "max_frequency",
            ),
        ] {
            let error = LogMel::new(options).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
