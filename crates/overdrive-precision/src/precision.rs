//! The precision to train in, and its recommendation for a device.

use std::fmt;
use std::str::FromStr;

use overdrive_build::MatmulSpeed;
use overdrive_build::cpu::CpuFeatures;
use overdrive_core::gpu_peaks::GpuGeneration;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::{
    Autocast, AutocastGuard, CpuClass, GradScaler, GradScalerConfig, Result, cpu_speed, tf32,
};

/// The precision of matrix products, with parameters in fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in fp32.
    #[default]
    Fp32,
    /// fp32 with matrix products in TF32: the range of fp32, 10 bits of mantissa.
    Tf32,
    /// Autocast to fp16: 5 bits of exponent, so losses must be scaled ([`crate::GradScaler`]).
    Fp16,
    /// Autocast to bf16: the range of fp32, 7 bits of mantissa; no scaling.
    Bf16,
    /// Autocast to bf16, in which overdrive-fused multiplies linear layers in FP8 ([`Autocast::fp8`]). The losses are not
    /// scaled. It needs a GPU with FP8 tensor cores ([`Precision::check`]).
    Fp8,
}

/// A precision and the reason for it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recommendation {
    /// The precision.
    pub precision: Precision,
    /// The GPU's generation (`Hopper`) or the CPU's class (`AMX`).
    pub hardware: String,
    /// The reason, in one sentence for a user.
    pub reason: String,
}

impl Precision {
    /// All precisions.
    pub const ALL: [Self; 5] = [Self::Fp32, Self::Tf32, Self::Fp16, Self::Bf16, Self::Fp8];

    /// Returns the best precision for training on `device`, by the dtypes that it multiplies fast:
    /// [`GPU_GENERATIONS`](crate::GPU_GENERATIONS) by compute capability, a measurement on a CPU.
    ///
    /// A GPU gets bf16 from Ampere (8.0) on, fp16 with loss scaling on Volta and Turing (7.x), whose
    /// tensor cores have no bf16, and fp32 on Pascal and before. A CPU gets bf16 only if it has
    /// instructions for it ([`CpuClass`]): without them libtorch emulates each product, and a 2048 × 2048 one
    /// takes seconds. With them bf16 can still be slower than fp32, so matmuls of the sizes of training are
    /// measured in both ([`MatmulSpeed`]). That takes about 0.1 seconds, once for a processor, libtorch's
    /// version and the number of threads: the figures are kept in the user's cache, in `overdrive/measured`.
    pub fn recommend(device: Device) -> Recommendation {
        match device {
            Device::Cpu => {
                let features = CpuFeatures::detect();
                recommend_for_cpu(features, measured_speed(features))
            }
            Device::Cuda(index) => match overdrive_sys::cuda::compute_capability(index) {
                Ok(capability) => recommend_for_cuda(capability),
                Err(error) => Recommendation {
                    precision: Self::Fp32,
                    hardware: "an unknown GPU".to_owned(),
                    reason: format!(
                        "the compute capability of the GPU could not be read ({error})"
                    ),
                },
            },
            // No machine of the tests has one.
            Device::Mps | Device::Vulkan => Recommendation {
                precision: Self::Fp32,
                hardware: format!("{device:?}"),
                reason: format!("mixed precision is not tested on {device:?} yet"),
            },
        }
    }

    /// Returns the best precision for training on GPUs of a generation: the half precision that its tensor
    /// cores multiply, else fp32.
    ///
    /// ```
    /// use overdrive_precision::{GpuGeneration, Precision};
    ///
    /// assert_eq!(Precision::of_generation(&GpuGeneration::of((7, 5))), Precision::Fp16); // Turing
    /// ```
    pub fn of_generation(generation: &GpuGeneration) -> Self {
        match (generation.bf16_tensor_cores, generation.fp16_tensor_cores) {
            // bf16 before fp16: as fast, and its range needs no loss scaling.
            (true, _) => Self::Bf16,
            (false, true) => Self::Fp16,
            (false, false) => Self::Fp32,
        }
    }

    /// Returns the dtype that autocast casts to; `None` for fp32 and TF32, which need no autocast.
    pub fn autocast_dtype(self) -> Option<Kind> {
        match self {
            Self::Fp32 | Self::Tf32 => None,
            Self::Fp16 => Some(Kind::Half),
            Self::Bf16 | Self::Fp8 => Some(Kind::BFloat16),
        }
    }

    /// Creates the gradient scaler that training in this precision needs, with the defaults of
    /// `torch.amp.GradScaler`; `None` where it needs none.
    ///
    /// # Errors
    /// Does not fail with these defaults.
    pub fn new_scaler(self) -> Result<Option<GradScaler>> {
        self.needs_grad_scaler()
            .then(|| GradScaler::new(GradScalerConfig::default()))
            .transpose()
    }

    /// Returns `true` if losses must be scaled.
    pub fn needs_grad_scaler(self) -> bool {
        self == Self::Fp16
    }

    /// Enters this precision's autocast region, until the guard is dropped ([`autocast`](crate::autocast())). For fp32
    /// and TF32 it switches autocast off.
    ///
    /// # Errors
    /// Returns an error if the device type has no autocast.
    pub fn autocast(self, device: Device) -> Result<AutocastGuard> {
        match self.autocast_dtype() {
            Some(dtype) => Autocast::new(device).dtype(dtype).fp8(self == Self::Fp8),
            None => Autocast::new(device).enabled(false),
        }
        .enter()
    }

    /// Returns an error if `device` cannot train in this precision: [`Precision::Fp8`] on anything but a GPU with FP8 tensor
    /// cores, which compute capability 8.9 and later have. [`Precision::autocast`] does not check it, so that a CPU, which
    /// multiplies FP8 without gain, can show the numbers.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common).
    pub fn check(self, device: Device) -> Result<()> {
        if self != Self::Fp8 {
            return Ok(());
        }
        let capability = match device {
            Device::Cuda(index) => overdrive_sys::cuda::compute_capability(index).ok(),
            _ => None,
        };
        self.check_capability(device, capability)
    }

    fn check_capability(self, device: Device, capability: Option<(u32, u32)>) -> Result<()> {
        let generation = capability.map(GpuGeneration::of);
        if generation.is_some_and(|generation| generation.fp8_tensor_cores) {
            return Ok(());
        }
        let name = generation.map_or_else(
            || format!("{device:?}"),
            |generation| generation.name.to_owned(),
        );
        let expected = format!(
            "bf16, fp16, tf32 or fp32 on this device ({name}): fp8 needs a GPU of compute capability 8.9 or later \
             (Ada, Hopper, Blackwell)"
        );
        Err(overdrive_core::Error::option("precision", self, expected).into())
    }

    /// Allows TF32 in the whole process for [`Precision::Tf32`] and the precisions below (whose remaining fp32
    /// matrix products gain too), and forbids it for [`Precision::Fp32`].
    ///
    /// # Errors
    /// Errors of libtorch.
    pub fn apply(self) -> Result<()> {
        tf32::allow(self != Self::Fp32)
    }

    /// Returns a warning if this precision is slow or unsafe on `device`, with the one to use instead.
    pub fn warning(self, device: Device) -> Option<String> {
        match device {
            Device::Cpu => {
                let features = CpuFeatures::detect();
                // Only the warning of bf16 needs figures.
                let speed = (self == Self::Bf16).then(|| measured_speed(features));
                self.warning_on_cpu(features, speed.flatten())
            }
            Device::Cuda(index) => overdrive_sys::cuda::compute_capability(index)
                .ok()
                .and_then(|capability| self.warning_on_cuda(capability)),
            Device::Mps | Device::Vulkan => None,
        }
    }

    fn warning_on_cpu(self, features: CpuFeatures, speed: Option<MatmulSpeed>) -> Option<String> {
        match self {
            Self::Fp32 => None,
            Self::Bf16 => match (CpuClass::of(&features).bf16_cost, speed) {
                (Some(cost), _) => Some(cost.to_owned()),
                (None, Some(speed)) if !speed.favours_bf16() => Some(format!(
                    "bf16 saves memory on this CPU, but no time (matmuls: {speed}); use fp32"
                )),
                (None, _) => None,
            },
            Self::Fp16 => Some(
                "fp16 on a CPU is for testing loss scaling, not for speed; use fp32".to_owned(),
            ),
            Self::Fp8 => {
                Some("fp8 on a CPU is for testing its numbers, not for speed; use fp32".to_owned())
            }
            Self::Tf32 => Some("a CPU has no TF32: matrix products run in fp32".to_owned()),
        }
    }

    fn warning_on_cuda(self, (major, minor): (u32, u32)) -> Option<String> {
        let row = GpuGeneration::of((major, minor));
        let lacks = match self {
            Self::Bf16 if !row.bf16_tensor_cores => "no bf16 tensor cores",
            Self::Fp16 if !row.fp16_tensor_cores => "no fp16 tensor cores",
            Self::Tf32 if !row.tf32 => "no TF32",
            Self::Fp8 if !row.fp8_tensor_cores => "no FP8 tensor cores",
            _ => return None,
        };
        Some(format!(
            "this GPU ({}, compute capability {major}.{minor}) has {lacks}; use {}",
            row.name,
            Self::of_generation(&row)
        ))
    }
}

/// Returns the speed of matmuls on this CPU if it has instructions for bf16. Without them it is not measured,
/// because emulated products can take seconds.
fn measured_speed(features: CpuFeatures) -> Option<MatmulSpeed> {
    let in_hardware = features.multiplies_bf16();
    in_hardware.then(cpu_speed::of_this_processor).flatten()
}

/// Returns the recommendation for a CPU with these instructions and, if it was measured, this speed.
fn recommend_for_cpu(features: CpuFeatures, speed: Option<MatmulSpeed>) -> Recommendation {
    let class = CpuClass::of(&features);
    let (precision, reason) = match speed.filter(|_| class.precision == Precision::Bf16) {
        None => (class.precision, format!("this CPU {}", class.why)),
        Some(speed) if speed.favours_bf16() => (
            Precision::Bf16,
            format!("matmuls in bf16 are faster on this CPU: {speed}"),
        ),
        Some(speed) => (
            Precision::Fp32,
            format!("matmuls in bf16 are not faster on this CPU: {speed}"),
        ),
    };
    Recommendation {
        precision,
        hardware: class.name.to_owned(),
        reason,
    }
}

fn recommend_for_cuda((major, minor): (u32, u32)) -> Recommendation {
    let row = GpuGeneration::of((major, minor));
    Recommendation {
        precision: Precision::of_generation(&row),
        hardware: row.name.to_owned(),
        reason: format!(
            "this GPU ({}, compute capability {major}.{minor}) {}",
            row.name, row.why
        ),
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fp32 => "fp32",
            Self::Tf32 => "tf32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
        })
    }
}

/// The error of a name that is not a precision.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a precision; use fp32, tf32, fp16, bf16 or fp8")]
pub struct ParsePrecisionError {
    name: String,
}

impl FromStr for Precision {
    type Err = ParsePrecisionError;

    fn from_str(name: &str) -> std::result::Result<Self, Self::Err> {
        let lower = name.to_ascii_lowercase();
        Self::ALL
            .into_iter()
            .find(|precision| precision.to_string() == lower)
            .ok_or_else(|| ParsePrecisionError {
                name: name.to_owned(),
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_get_bf16_only_if_they_multiply_it() {
        let plain = recommend_for_cpu(CpuFeatures::from_flags("avx2 fma"), None);
        assert_eq!(plain.precision, Precision::Fp32);
        assert!(
            plain
                .reason
                .starts_with("this CPU has no bf16 instructions")
        );
        assert!(plain.reason.contains("in fp32"), "{}", plain.reason);
        let amx = recommend_for_cpu(CpuFeatures::from_flags("avx2 amx_bf16"), None);
        assert_eq!(
            (amx.precision, amx.hardware.as_str()),
            (Precision::Bf16, "AMX")
        );
    }

    #[test]
    fn a_cpu_with_bf16_instructions_gets_the_dtype_that_was_measured_to_be_faster() {
        let features = CpuFeatures::from_flags("avx2 avx512f avx512_bf16");
        let of = |fp32, bf16| recommend_for_cpu(features, Some(MatmulSpeed { fp32, bf16 }));
        // Sapphire Rapids without AMX, and Zen 4.
        let (intel, amd) = (of(320.0, 170.0), of(210.0, 420.0));
        assert_eq!(intel.precision, Precision::Fp32);
        assert_eq!(
            intel.reason,
            "matmuls in bf16 are not faster on this CPU: fp32 320 GFLOP/s, bf16 170"
        );
        assert_eq!(amd.precision, Precision::Bf16);
        assert!(amd.reason.ends_with("fp32 210 GFLOP/s, bf16 420"));
        let speed = Some(MatmulSpeed {
            fp32: 320.0,
            bf16: 170.0,
        });
        let warning = Precision::Bf16.warning_on_cpu(features, speed).unwrap();
        assert!(warning.ends_with("bf16 170); use fp32"), "{warning}");
        // Without the instructions no figure is asked.
        let emulated = CpuFeatures::from_flags("avx2 fma avx512f");
        let fast = Some(MatmulSpeed {
            fp32: 1.0,
            bf16: 9.0,
        });
        assert_eq!(recommend_for_cpu(emulated, fast).precision, Precision::Fp32);
        assert_eq!(measured_speed(emulated), None);
    }

    #[test]
    fn gpus_belong_to_the_generation_that_nvidia_names() {
        for (capability, name, precision) in [
            ((3, 7), "Maxwell or older", Precision::Fp32), // K80
            ((5, 2), "Maxwell or older", Precision::Fp32), // GTX 980
            ((6, 0), "Pascal", Precision::Fp32),           // P100
            ((6, 1), "Pascal", Precision::Fp32),           // GTX 1080 Ti
            ((6, 2), "Pascal", Precision::Fp32),           // TX2
            ((7, 0), "Volta", Precision::Fp16),            // V100
            ((7, 2), "Volta", Precision::Fp16),            // Xavier
            ((7, 5), "Turing", Precision::Fp16),           // T4
            ((8, 0), "Ampere", Precision::Bf16),           // A100
            ((8, 6), "Ampere", Precision::Bf16),           // RTX 3090
            ((8, 7), "Ampere", Precision::Bf16),           // Orin
            ((8, 9), "Ada", Precision::Bf16),              // RTX 4090
            ((9, 0), "Hopper", Precision::Bf16),           // H100
            ((10, 0), "Blackwell", Precision::Bf16),       // B200
            ((10, 3), "Blackwell", Precision::Bf16),       // B300
            ((11, 0), "Blackwell", Precision::Bf16),       // Thor
            ((12, 0), "Blackwell", Precision::Bf16),       // RTX 5090
            ((12, 1), "Blackwell", Precision::Bf16),       // GB10
            ((13, 0), "a generation after Blackwell", Precision::Bf16),
        ] {
            let choice = recommend_for_cuda(capability);
            assert_eq!(
                (choice.hardware.as_str(), choice.precision),
                (name, precision),
                "{capability:?}"
            );
        }
    }

    #[test]
    fn a_gpus_recommendation_names_its_generation_and_capability() {
        for (capability, precision, generation) in [
            ((9, 0), Precision::Bf16, "Hopper"),
            ((8, 6), Precision::Bf16, "Ampere"),
            ((7, 5), Precision::Fp16, "Turing"),
            ((6, 1), Precision::Fp32, "Pascal"),
        ] {
            let choice = recommend_for_cuda(capability);
            assert_eq!(choice.precision, precision);
            let named = format!(
                "this GPU ({generation}, compute capability {}.{}) has ",
                capability.0, capability.1
            );
            assert!(choice.reason.starts_with(&named), "{}", choice.reason);
        }
    }

    #[test]
    fn no_recommendation_is_warned_about_and_what_a_device_lacks_is() {
        for major in 3..14 {
            let choice = recommend_for_cuda((major, 0)).precision;
            assert_eq!(choice.warning_on_cuda((major, 0)), None, "{major}.0");
        }
        assert_eq!(
            Precision::Bf16.warning_on_cuda((7, 5)).as_deref(),
            Some("this GPU (Turing, compute capability 7.5) has no bf16 tensor cores; use fp16")
        );
        assert_eq!(
            Precision::Fp16.warning_on_cuda((6, 1)).as_deref(),
            Some("this GPU (Pascal, compute capability 6.1) has no fp16 tensor cores; use fp32")
        );
        assert_eq!(
            Precision::Tf32.warning_on_cuda((7, 0)).as_deref(),
            Some("this GPU (Volta, compute capability 7.0) has no TF32; use fp16")
        );
        for flags in ["avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd bf16"] {
            let features = CpuFeatures::from_flags(flags);
            let slow_bf16 = Some(MatmulSpeed {
                fp32: 320.0,
                bf16: 170.0,
            });
            for speed in [None, slow_bf16] {
                let choice = recommend_for_cpu(features, speed).precision;
                assert_eq!(choice.warning_on_cpu(features, speed), None, "{flags}");
            }
        }
        let avx2 = Precision::Bf16.warning_on_cpu(CpuFeatures::from_flags("avx2"), None);
        assert!(avx2.is_some_and(|text| text.ends_with("use fp32")));
    }

    #[test]
    fn only_fp16_needs_a_scaler() {
        let needing = Precision::ALL.into_iter().filter(|p| p.needs_grad_scaler());
        assert_eq!(needing.collect::<Vec<_>>(), [Precision::Fp16]);
    }

    #[test]
    fn names_are_read_back_as_they_are_written() {
        for precision in Precision::ALL {
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
        assert_eq!("BF16".parse(), Ok(Precision::Bf16));
        let error = "int8".parse::<Precision>().unwrap_err().to_string();
        assert!(
            error.contains("int8") && error.contains("use fp32, tf32"),
            "{error}"
        );
    }

    #[test]
    fn fp8_is_refused_where_no_tensor_core_multiplies_it() {
        for capability in [(8, 9), (9, 0), (10, 0), (12, 0), (13, 0)] {
            let gpu = Device::Cuda(0);
            assert!(
                Precision::Fp8
                    .check_capability(gpu, Some(capability))
                    .is_ok()
            );
            assert_eq!(Precision::Fp8.warning_on_cuda(capability), None);
        }
        let ampere = Precision::Fp8.check_capability(Device::Cuda(0), Some((8, 0)));
        let message = ampere.unwrap_err().to_string();
        assert!(
            message.contains("(Ampere)") && message.contains("8.9"),
            "{message}"
        );
        let message = Precision::Fp8.check(Device::Cpu).unwrap_err().to_string();
        assert!(
            message.contains("bf16") && message.contains("(Cpu)"),
            "{message}"
        );
        assert!(Precision::Bf16.check(Device::Cpu).is_ok());
    }

    #[test]
    fn the_device_at_hand_gets_a_reason() {
        let here = Precision::recommend(Device::Cpu);
        assert!(!here.reason.is_empty());
        assert_eq!(here, Precision::recommend(Device::Cpu));
        assert!(Precision::Fp16.warning(Device::Cpu).is_some());
        assert!(Precision::Fp32.warning(Device::Cpu).is_none());
        let gpu = Precision::recommend(Device::Cuda(4096));
        assert_eq!(gpu.precision, Precision::Fp32);
        assert!(gpu.reason.contains("could not be read"), "{}", gpu.reason);
    }
}
