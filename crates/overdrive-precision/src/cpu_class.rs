//! The dtypes that each class of CPUs multiplies fast: the table behind
//! [`Precision::recommend`](crate::Precision::recommend). The table of GPUs is [`overdrive_core::gpu_peaks`].
//!
//! Source: the instructions that oneDNN has kernels for.

use overdrive_build::cpu::CpuFeatures;

use crate::Precision;

/// A class of CPUs by their instructions for half precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuClass {
    /// The name of the instructions that set it apart.
    pub name: &'static str,
    /// The precision to train in, where no measurement says otherwise.
    pub precision: Precision,
    /// The reason, as the end of a sentence that begins with the CPU.
    pub why: &'static str,
    /// A warning about the cost of emulated bf16; `None` if the CPU has instructions for it.
    pub bf16_cost: Option<&'static str>,
}

type HasFeatures = fn(&CpuFeatures) -> bool;

// Best first: the class of a CPU is the first whose test holds, so a class need not exclude those above it.
const CPU_CLASSES: [(CpuClass, HasFeatures); 5] = [
    (
        CpuClass {
            name: "AMX",
            precision: Precision::Bf16,
            why: "multiplies tiles of bf16 in hardware (AMX), several times faster than fp32, with half \
                  the memory traffic",
            bf16_cost: None,
        },
        |cpu| cpu.amx_bf16,
    ),
    (
        CpuClass {
            name: "AVX-512-BF16",
            precision: Precision::Bf16,
            why: "multiplies bf16 in hardware (AVX-512-BF16), up to twice as fast as fp32 where memory \
                  keeps up, with half the memory traffic",
            bf16_cost: None,
        },
        |cpu| cpu.avx512_bf16,
    ),
    (
        CpuClass {
            name: "ARM with bf16",
            precision: Precision::Bf16,
            why: "multiplies bf16 in hardware (BFMMLA), with half the memory traffic of fp32",
            bf16_cost: None,
        },
        |cpu| cpu.bf16,
    ),
    (
        CpuClass {
            name: "AVX-512 without bf16",
            precision: Precision::Fp32,
            why: "has no bf16 instructions: the layers of Overdrive multiply bf16 in fp32, and libtorch emulates \
                  its own bf16 matmuls with AVX-512, about three times slower than fp32",
            bf16_cost: Some(
                "this CPU has no bf16 instructions: the layers of Overdrive multiply bf16 in fp32, and libtorch \
                 emulates its own bf16 matmuls, about three times slower; use fp32",
            ),
        },
        |cpu| cpu.avx512,
    ),
    (
        CpuClass {
            name: "no bf16 instructions",
            precision: Precision::Fp32,
            why: "has no bf16 instructions: the layers of Overdrive multiply bf16 in fp32, and libtorch emulates \
                  its own bf16 matmuls, tens to thousands of times slower than fp32",
            bf16_cost: Some(
                "this CPU has no bf16 instructions: the layers of Overdrive multiply bf16 in fp32, and libtorch \
                 emulates its own bf16 matmuls, tens to thousands of times slower; use fp32",
            ),
        },
        |_| true,
    ),
];

impl CpuClass {
    /// Returns the class of a CPU with these instructions.
    pub fn of(features: &CpuFeatures) -> Self {
        let fits = CPU_CLASSES.iter().find(|(_, fits)| fits(features));
        // The test of the last class holds for every CPU.
        fits.unwrap_or(&CPU_CLASSES[CPU_CLASSES.len() - 1]).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_of_cpus_is_reached_by_its_flags() {
        for (flags, name, precision) in [
            ("avx2 avx512f avx512_bf16 amx_bf16", "AMX", Precision::Bf16),
            ("avx2 avx512f avx512_bf16", "AVX-512-BF16", Precision::Bf16),
            ("asimd bf16", "ARM with bf16", Precision::Bf16),
            ("avx2 avx512f", "AVX-512 without bf16", Precision::Fp32),
            ("avx2 fma", "no bf16 instructions", Precision::Fp32),
            ("asimd", "no bf16 instructions", Precision::Fp32),
            ("", "no bf16 instructions", Precision::Fp32),
        ] {
            let class = CpuClass::of(&CpuFeatures::from_flags(flags));
            assert_eq!(
                (class.name, class.precision),
                (name, precision),
                "{flags:?}"
            );
            assert_eq!(class.bf16_cost.is_none(), precision == Precision::Bf16);
        }
    }

    #[test]
    fn a_plain_avx2_cpu_is_warned_that_bf16_saves_no_time() {
        let class = CpuClass::of(&CpuFeatures::from_flags("avx2 fma"));
        assert!(class.why.contains("multiply bf16 in fp32"), "{}", class.why);
        assert!(
            class
                .bf16_cost
                .is_some_and(|cost| cost.ends_with("use fp32"))
        );
    }
}
