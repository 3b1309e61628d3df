//! Which precision to train in, and why.

use std::fmt;
use std::str::FromStr;

use overdrive_build::cpu::CpuFeatures;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind};

use crate::{Autocast, Result, tf32};

/// How matrix products are computed while the parameters stay in fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Everything in fp32.
    #[default]
    Fp32,
    /// fp32 with products in TF32: fp32's range, 10 bits of mantissa.
    Tf32,
    /// Autocast to fp16: 5 bits of exponent, so losses must be scaled ([`crate::GradScaler`]).
    Fp16,
    /// Autocast to bf16: fp32's range, 7 bits of mantissa; no scaling.
    Bf16,
}

/// A precision and the reason for it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recommendation {
    /// What to use.
    pub precision: Precision,
    /// Why, in one sentence for a user.
    pub reason: String,
}

impl Precision {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Fp32, Self::Tf32, Self::Fp16, Self::Bf16];

    /// The best precision for training on `device`, by what the device multiplies fast.
    ///
    /// A CPU gets bf16 only if it has instructions for it: without them libtorch emulates each
    /// product, and a 2048 × 2048 one takes seconds. A GPU gets bf16 from compute capability 8.0
    /// (Ampere) on, and fp16 with loss scaling on 7.x (Volta, Turing), whose tensor cores know no
    /// bf16.
    pub fn recommend(device: Device) -> Recommendation {
        match device {
            Device::Cpu => recommend_for_cpu(CpuFeatures::detect()),
            Device::Cuda(index) => match overdrive_sys::cuda::compute_capability(index) {
                Ok(capability) => recommend_for_cuda(capability),
                Err(error) => Recommendation {
                    precision: Self::Fp32,
                    reason: format!("the GPU could not be asked what it can do ({error})"),
                },
            },
            Device::Mps | Device::Vulkan => Recommendation {
                precision: Self::Fp32,
                reason: format!("mixed precision is not proven on {device:?} yet"),
            },
        }
    }

    /// The dtype that autocast casts to, if it is on.
    pub fn autocast_dtype(self) -> Option<Kind> {
        match self {
            Self::Fp32 | Self::Tf32 => None,
            Self::Fp16 => Some(Kind::Half),
            Self::Bf16 => Some(Kind::BFloat16),
        }
    }

    /// Whether losses must be scaled.
    pub fn needs_grad_scaler(self) -> bool {
        self == Self::Fp16
    }

    /// The autocast region of this precision; switched off for fp32 and TF32.
    pub fn region(self, device: Device) -> Autocast {
        match self.autocast_dtype() {
            Some(dtype) => Autocast::new(device).dtype(dtype),
            None => Autocast::new(device).enabled(false),
        }
    }

    /// Runs `body` in this precision's autocast region.
    ///
    /// # Errors
    /// When the device type has no autocast; `body` is not run then.
    pub fn autocast<T>(self, device: Device, body: impl FnOnce() -> T) -> Result<T> {
        self.region(device).run(body)
    }

    /// Sets the process's switches for it: TF32 on for [`Precision::Tf32`] and the two
    /// half-precisions (their remaining fp32 products gain too), off for [`Precision::Fp32`].
    ///
    /// # Errors
    /// Only if libtorch throws.
    pub fn apply(self) -> Result<()> {
        tf32::allow(self != Self::Fp32)
    }

    /// A warning if this precision is slow or unsafe on `device`, with what to use instead.
    pub fn warning(self, device: Device) -> Option<String> {
        let features = CpuFeatures::detect();
        match (self, device) {
            (Self::Bf16, Device::Cpu) if !features.multiplies_bf16() => Some(
                "this CPU has no bf16 instructions: libtorch emulates them, thousands of times \
                 slower than fp32; use fp32"
                    .to_owned(),
            ),
            (Self::Fp16, Device::Cpu) => Some(
                "fp16 on a CPU is there to try loss scaling, not for speed; use fp32".to_owned(),
            ),
            (Self::Tf32, Device::Cpu) => Some("a CPU has no TF32: products run in fp32".to_owned()),
            (Self::Bf16, Device::Cuda(index)) => {
                match overdrive_sys::cuda::compute_capability(index) {
                    Ok((major, minor)) if major < 8 => Some(format!(
                        "this GPU (compute capability {major}.{minor}) has no bf16 tensor cores; use fp16"
                    )),
                    _ => None,
                }
            }
            _ => None,
        }
    }
}

fn recommend_for_cpu(features: CpuFeatures) -> Recommendation {
    if features.multiplies_bf16() {
        Recommendation {
            precision: Precision::Bf16,
            reason: "this CPU multiplies bf16 in hardware, in half the memory traffic of fp32"
                .to_owned(),
        }
    } else {
        Recommendation {
            precision: Precision::Fp32,
            reason: "this CPU has no bf16 instructions: half precision would be emulated, \
                     thousands of times slower"
                .to_owned(),
        }
    }
}

fn recommend_for_cuda((major, minor): (u32, u32)) -> Recommendation {
    let (precision, why) = match major {
        8.. => (
            Precision::Bf16,
            "has bf16 tensor cores, whose range needs no loss scaling",
        ),
        7 => (
            Precision::Fp16,
            "has fp16 tensor cores but none for bf16; losses must be scaled",
        ),
        _ => (Precision::Fp32, "has no tensor cores"),
    };
    Recommendation {
        precision,
        reason: format!("this GPU (compute capability {major}.{minor}) {why}"),
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fp32 => "fp32",
            Self::Tf32 => "tf32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
        })
    }
}

/// A name that is no precision.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is no precision: use fp32, tf32, fp16 or bf16")]
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
        let plain = recommend_for_cpu(CpuFeatures::from_flags("avx2 fma avx512f"));
        assert_eq!(plain.precision, Precision::Fp32);
        assert!(plain.reason.contains("no bf16 instructions"));
        let amx = recommend_for_cpu(CpuFeatures::from_flags("avx2 amx_bf16"));
        assert_eq!(amx.precision, Precision::Bf16);
    }

    #[test]
    fn gpus_get_what_their_tensor_cores_know() {
        for (capability, precision) in [
            ((9, 0), Precision::Bf16),
            ((8, 6), Precision::Bf16),
            ((7, 5), Precision::Fp16),
            ((6, 1), Precision::Fp32),
        ] {
            let choice = recommend_for_cuda(capability);
            assert_eq!(choice.precision, precision);
            assert!(
                choice
                    .reason
                    .contains(&format!("{}.{}", capability.0, capability.1))
            );
        }
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
        let error = "fp8".parse::<Precision>().unwrap_err().to_string();
        assert!(
            error.contains("fp8") && error.contains("use fp32, tf32"),
            "{error}"
        );
    }

    #[test]
    fn the_device_at_hand_gets_a_reason() {
        assert!(!Precision::recommend(Device::Cpu).reason.is_empty());
        assert!(Precision::Fp16.warning(Device::Cpu).is_some());
        assert!(Precision::Fp32.warning(Device::Cpu).is_none());
        let gpu = Precision::recommend(Device::Cuda(4096));
        assert_eq!(gpu.precision, Precision::Fp32);
        assert!(gpu.reason.contains("could not be asked"), "{}", gpu.reason);
    }
}
