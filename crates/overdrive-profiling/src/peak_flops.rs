//! The peak FLOP/s of a device: the denominator of MFU.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use overdrive_core::gpu_peaks::GpuModel;
use overdrive_sys::threads;
use serde::{Deserialize, Serialize};
use tch::{Cuda, Device, Kind, Tensor};

use crate::{Error, Result};

/// The peak of a device in matrix products, and its source.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeakFlops {
    /// The floating-point operations per second.
    pub flops_per_second: f64,
    /// The source of the number.
    pub source: PeakSource,
}

/// The source of a peak.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PeakSource {
    /// NVIDIA's data sheet of the GPU with this name: dense matrix products at boost clock.
    DataSheet(String),
    /// The fastest of some matrix products that were measured on this machine. It is the peak of libtorch, somewhat
    /// below that of the hardware.
    Measured {
        /// The rows and columns of the matrices.
        width: i64,
    },
    /// A value given by the caller.
    Given,
}

/// The device, the dtype, TF32 and the number of threads.
type Conditions = (Device, Kind, bool, usize);

/// The peaks that this process has measured.
static MEASURED: Mutex<Vec<(Conditions, PeakFlops)>> = Mutex::new(Vec::new());

impl PeakFlops {
    /// Returns a peak that the caller knows, in floating-point operations per second.
    pub fn given(flops_per_second: f64) -> Self {
        Self {
            flops_per_second,
            source: PeakSource::Given,
        }
    }

    /// Returns the peak of `device` in matrix products of `dtype`: from the data sheet of a known GPU, else
    /// measured ([`PeakFlops::measure`]) once in a process. For fp32 on a GPU it follows the process's TF32 switch.
    ///
    /// # Errors
    /// [`Error::UnknownPeak`] if it can neither be looked up nor measured.
    pub fn of(device: Device, dtype: Kind) -> Result<Self> {
        let tf32 = overdrive_sys::matmul::tf32()?.matmul;
        if let Device::Cuda(index) = device
            && let Ok(identity) = overdrive_sys::profiler::cuda_identity(index)
            && let Some(flops_per_second) = data_sheet(&identity.name, dtype, tf32)
        {
            return Ok(Self {
                flops_per_second,
                source: PeakSource::DataSheet(identity.name),
            });
        }
        let conditions = (device, dtype, tf32, threads::intra_op());
        let mut measured = MEASURED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, peak)) = measured.iter().find(|(of, _)| *of == conditions) {
            return Ok(peak.clone());
        }
        let peak = Self::measure(device, dtype)?;
        measured.push((conditions, peak.clone()));
        Ok(peak)
    }

    /// Measures products of square matrices of increasing size for about a third of a second, and
    /// returns the best. Other work on the machine makes it too low; a [`StepRecorder`](crate::StepRecorder)
    /// raises it to the rate that the model reaches.
    ///
    /// # Errors
    /// [`Error::UnknownPeak`] if the device cannot multiply `dtype`.
    pub fn measure(device: Device, dtype: Kind) -> Result<Self> {
        measure(device, dtype).map_err(|error| Error::UnknownPeak {
            device: format!("{device:?}"),
            dtype: format!("{dtype:?}"),
            message: error.to_string(),
        })
    }
}

/// Returns the peak of the GPU whose driver reports `name` in matrix products of `dtype` (fp32 ones in TF32 if
/// `tf32`), in floating-point operations per second; `None` if the table of GPUs does not have it.
fn data_sheet(name: &str, dtype: Kind, tf32: bool) -> Option<f64> {
    let (generation, model) = GpuModel::find(name)?;
    let tflops = match dtype {
        Kind::Float if tf32 => model.tf32_tflops,
        Kind::Float => model.fp32_tflops,
        Kind::BFloat16 if !generation.bf16_tensor_cores => return None,
        Kind::Half | Kind::BFloat16 => model.half_tflops,
        _ => return None,
    };
    Some(tflops * 1e12)
}

// Long enough for the clock to rise from idle, short enough not to delay the start of a run.
const BUDGET: Duration = Duration::from_millis(300);
// A product that takes this long is large enough to reach the peak.
const LONG: Duration = Duration::from_millis(20);
const WIDTHS: [i64; 6] = [128, 256, 512, 1024, 2048, 4096];

fn measure(device: Device, dtype: Kind) -> Result<PeakFlops> {
    let mut shortest_of = Vec::with_capacity(WIDTHS.len());
    let mut spent = Duration::ZERO;
    for width in WIDTHS {
        let (a, b) = (matrix(width, device, dtype)?, matrix(width, device, dtype)?);
        // The first product pays for starting threads and choosing kernels.
        timed(device, &a, &b)?;
        let mut shortest = timed(device, &a, &b)?;
        // The minimum: other work on the machine only makes a product slower.
        let rounds = if shortest > LONG { 3 } else { 8 };
        for _ in 0..rounds {
            shortest = shortest.min(timed(device, &a, &b)?);
        }
        shortest_of.push((width, shortest));
        // Not by the clock: on a busy machine the small widths alone would take this long.
        spent += shortest * rounds;
        // The next width takes eight times as long.
        if shortest > LONG || spent > BUDGET {
            break;
        }
    }
    Ok(best(&shortest_of))
}

/// Returns the highest rate of widths and the times of their products.
fn best(shortest_of: &[(i64, Duration)]) -> PeakFlops {
    let rate = |&(width, shortest): &(i64, Duration)| {
        let flops_per_second = 2.0 * (width as f64).powi(3) / shortest.as_secs_f64().max(1e-9);
        (flops_per_second, width)
    };
    let rates = shortest_of.iter().map(rate);
    let (flops_per_second, width) = rates.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or_default();
    PeakFlops {
        flops_per_second,
        source: PeakSource::Measured { width },
    }
}

fn matrix(width: i64, device: Device, dtype: Kind) -> Result<Tensor> {
    // Not zeros: switching fewer bits takes less power, and GPUs multiply zeros at a higher clock. Not by `f_full`, which
    // panics if the device cannot allocate: tch frees its scalar before it reads the error.
    let ones = Tensor::f_ones([width, width], (Kind::Float, device));
    let ones = overdrive_sys::cuda::on_device(device, ones.map_err(Error::from))?;
    Ok(ones.f_mul_scalar(0.37)?.f_to_kind(dtype)?)
}

fn timed(device: Device, a: &Tensor, b: &Tensor) -> Result<Duration> {
    let began = Instant::now();
    let _guard = tch::no_grad_guard();
    let product = a.f_matmul(b)?;
    match device {
        Device::Cuda(index) => Cuda::synchronize(i64::try_from(index).unwrap_or(0)),
        Device::Cpu => {}
        // Reading an element waits for the device.
        _ => drop(product.f_double_value(&[0, 0])?),
    }
    Ok(began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_is_measured_and_named_as_measured() {
        let peak = PeakFlops::of(Device::Cpu, Kind::Float).expect("a CPU multiplies fp32");
        assert!(
            matches!(peak.source, PeakSource::Measured { width } if WIDTHS.contains(&width)),
            "{peak:?}"
        );
        let again = PeakFlops::of(Device::Cpu, Kind::Float).expect("it was measured");
        assert_eq!(again, peak);
        // From a slow emulator to a large server.
        assert!((1e8..1e15).contains(&peak.flops_per_second), "{peak:?}");
    }

    #[test]
    fn the_width_of_the_highest_rate_is_taken() {
        let took = |milliseconds: &[u64]| {
            let durations = milliseconds.iter().map(|&ms| Duration::from_millis(ms));
            best(&WIDTHS.into_iter().zip(durations).collect::<Vec<_>>())
        };
        // Each eight times the work of the one before it.
        for (milliseconds, width) in [
            (&[1, 4, 16][..], 512),
            (&[1, 4, 33], 256),
            (&[1, 9, 80], 128),
            (&[1], 128),
        ] {
            let peak = took(milliseconds);
            assert_eq!(peak.source, PeakSource::Measured { width });
            let index = WIDTHS.iter().position(|other| *other == width).unwrap();
            let seconds = milliseconds[index] as f64 / 1e3;
            let rate = 2.0 * (width as f64).powi(3) / seconds;
            assert!((peak.flops_per_second / rate - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn a_dtype_that_is_slow_here_is_measured_in_bounded_time() {
        let began = Instant::now();
        let peak = PeakFlops::measure(Device::Cpu, Kind::Half).expect("slow, but it multiplies");
        assert!(peak.flops_per_second > 0.0);
        assert!(
            began.elapsed() < Duration::from_secs(60),
            "{:?}",
            began.elapsed()
        );
    }

    #[test]
    fn what_the_device_cannot_multiply_is_an_error_that_names_the_way_out() {
        let error = PeakFlops::measure(Device::Cpu, Kind::Bool).expect_err("no products of bool");
        let text = error.to_string();
        assert!(
            text.contains("Bool") && text.contains("PeakFlops::given"),
            "{text}"
        );
    }

    #[test]
    fn a_data_sheet_has_the_dtypes_that_the_tensor_cores_multiply() {
        assert_eq!(data_sheet("Tesla T4", Kind::Half, false), Some(65e12));
        assert_eq!(data_sheet("Tesla T4", Kind::BFloat16, false), None);
        assert_eq!(
            data_sheet("NVIDIA H200", Kind::BFloat16, false),
            Some(989.4e12)
        );
        assert_eq!(data_sheet("NVIDIA H200", Kind::Int8, false), None);
    }

    #[test]
    fn products_of_fp32_are_faster_in_tf32_where_there_is_one() {
        for (name, tf32, peak) in [
            ("NVIDIA A100-SXM4-80GB", false, 19.5e12),
            ("NVIDIA A100-SXM4-80GB", true, 156e12),
            ("Tesla V100-SXM2-16GB", true, 15.7e12),
        ] {
            assert_eq!(data_sheet(name, Kind::Float, tf32), Some(peak), "{name}");
        }
    }

    #[test]
    fn a_device_that_this_process_does_not_have_is_an_error() {
        let error = PeakFlops::measure(Device::Cuda(1000), Kind::Float).unwrap_err();
        assert!(matches!(error, Error::UnknownPeak { .. }), "{error}");
    }

    #[test]
    fn a_given_peak_is_taken_as_it_is() {
        let peak = PeakFlops::given(312e12);
        assert_eq!(
            (peak.flops_per_second, peak.source),
            (312e12, PeakSource::Given)
        );
    }
}
