//! What each generation of GPUs and CPUs multiplies fast: the table behind
//! [`Precision::recommend`](crate::Precision::recommend).
//!
//! GPUs: NVIDIA's CUDA programming guide ("Compute Capabilities", arithmetic instructions per clock
//! cycle) and the white papers of the generations. CPUs: which instructions oneDNN has kernels for.

use overdrive_build::cpu::CpuFeatures;

use crate::Precision;

/// A generation of NVIDIA GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuGeneration {
    /// NVIDIA's name for it.
    pub name: &'static str,
    /// The first compute capability of this row; the row reaches to the next one's.
    pub from: (u32, u32),
    /// GPUs of it that a user may know.
    pub examples: &'static str,
    /// Whether its tensor cores multiply fp16.
    pub fp16_tensor_cores: bool,
    /// Whether its tensor cores multiply bf16.
    pub bf16_tensor_cores: bool,
    /// Whether it has TF32 for products of fp32.
    pub tf32: bool,
    /// What to train in.
    pub precision: Precision,
    /// Why, as the end of a sentence that begins with the GPU.
    pub why: &'static str,
}

const NO_TENSOR_CORES: GpuGeneration = GpuGeneration {
    name: "Maxwell or older",
    from: (0, 0),
    examples: "GTX 980, M40, K80",
    fp16_tensor_cores: false,
    bf16_tensor_cores: false,
    tf32: false,
    precision: Precision::Fp32,
    why: "has no tensor cores and no fast fp16 arithmetic: half precision would save memory and no time",
};

const AMPERE: GpuGeneration = GpuGeneration {
    name: "Ampere",
    from: (8, 0),
    examples: "A100, A10, RTX 3090",
    fp16_tensor_cores: true,
    bf16_tensor_cores: true,
    tf32: true,
    precision: Precision::Bf16,
    why: "has bf16 tensor cores, whose range needs no loss scaling; TF32 for what stays in fp32",
};

/// Every generation, oldest first.
pub const GPU_GENERATIONS: [GpuGeneration; 10] = [
    NO_TENSOR_CORES,
    GpuGeneration {
        name: "Pascal",
        from: (6, 0),
        examples: "P100",
        why: "has no tensor cores: its fp16 is at best twice as fast as fp32, without fp32 sums, and \
              needs loss scaling",
        ..NO_TENSOR_CORES
    },
    GpuGeneration {
        name: "Pascal",
        from: (6, 1),
        examples: "GTX 1080 Ti, P40, P4",
        why: "has no tensor cores and computes fp16 at 1/64 of its fp32 rate: half precision is slow",
        ..NO_TENSOR_CORES
    },
    GpuGeneration {
        name: "Volta",
        from: (7, 0),
        examples: "V100, Titan V",
        fp16_tensor_cores: true,
        precision: Precision::Fp16,
        why: "has fp16 tensor cores and none for bf16; losses must be scaled (GradScaler)",
        ..NO_TENSOR_CORES
    },
    GpuGeneration {
        name: "Turing",
        from: (7, 5),
        examples: "T4, RTX 2080 Ti",
        fp16_tensor_cores: true,
        precision: Precision::Fp16,
        why: "has fp16 tensor cores (the GTX 16 cards only fast fp16 arithmetic) and no bf16 in \
              hardware; losses must be scaled (GradScaler)",
        ..NO_TENSOR_CORES
    },
    AMPERE,
    GpuGeneration {
        name: "Ada",
        from: (8, 9),
        examples: "L4, L40S, RTX 4090",
        ..AMPERE
    },
    GpuGeneration {
        name: "Hopper",
        from: (9, 0),
        examples: "H100, H200, GH200",
        ..AMPERE
    },
    GpuGeneration {
        name: "Blackwell",
        from: (10, 0),
        examples: "B200, B300, RTX 5090, Thor",
        ..AMPERE
    },
    GpuGeneration {
        name: "a generation after Blackwell",
        from: (13, 0),
        examples: "",
        why: "is newer than this table; every GPU since Ampere multiplies bf16 in its tensor cores",
        ..AMPERE
    },
];

impl GpuGeneration {
    /// The row of a compute capability, such as `(9, 0)`.
    ///
    /// ```
    /// use overdrive_precision::{GpuGeneration, Precision};
    ///
    /// let turing = GpuGeneration::of((7, 5));
    /// assert_eq!((turing.name, turing.precision), ("Turing", Precision::Fp16));
    /// ```
    pub fn of(capability: (u32, u32)) -> Self {
        let reached = GPU_GENERATIONS
            .iter()
            .rev()
            .find(|row| row.from <= capability);
        // The first row begins at (0, 0).
        *reached.unwrap_or(&NO_TENSOR_CORES)
    }
}

/// What a CPU can do for half precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuClass {
    /// What sets it apart.
    pub name: &'static str,
    /// What to train in.
    pub precision: Precision,
    /// Why, as the end of a sentence that begins with the CPU.
    pub why: &'static str,
    /// What bf16 would cost in spite of it; `None` where it is fast.
    pub bf16_cost: Option<&'static str>,
}

type HasFeatures = fn(&CpuFeatures) -> bool;

/// Every class with the test for it, best first: the first that fits is a CPU's.
const CPU_CLASSES: [(CpuClass, HasFeatures); 5] = [
    (
        CpuClass {
            name: "AMX",
            precision: Precision::Bf16,
            why: "multiplies tiles of bf16 in hardware (AMX), several times faster than fp32, in half \
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
                  keeps up, in half the memory traffic",
            bf16_cost: None,
        },
        |cpu| cpu.avx512_bf16,
    ),
    (
        CpuClass {
            name: "ARM with bf16",
            precision: Precision::Bf16,
            why: "multiplies bf16 in hardware (BFMMLA), in half the memory traffic of fp32",
            bf16_cost: None,
        },
        |cpu| cpu.bf16,
    ),
    (
        CpuClass {
            name: "AVX-512 without bf16",
            precision: Precision::Fp32,
            why: "has wide vectors but no bf16 instructions: bf16 products are emulated, about three \
                  times slower than fp32",
            bf16_cost: Some(
                "this CPU has no bf16 instructions: libtorch emulates them with AVX-512, about three \
                 times slower than fp32; use fp32",
            ),
        },
        |cpu| cpu.avx512,
    ),
    (
        CpuClass {
            name: "no bf16 instructions",
            precision: Precision::Fp32,
            why: "has no bf16 instructions: bf16 products are far slower than fp32, tens to thousands \
                  of times (one of 2048 x 2048 matrices takes seconds)",
            bf16_cost: Some(
                "this CPU has no bf16 instructions: libtorch emulates them, tens to thousands of times \
                 slower than fp32; use fp32",
            ),
        },
        |_| true,
    ),
];

impl CpuClass {
    /// The class of a CPU with these instructions.
    pub fn of(features: &CpuFeatures) -> Self {
        let fits = CPU_CLASSES.iter().find(|(_, fits)| fits(features));
        // The last one fits every CPU.
        fits.unwrap_or(&CPU_CLASSES[CPU_CLASSES.len() - 1]).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_found_by_its_own_capability_and_the_rows_ascend() {
        for (index, row) in GPU_GENERATIONS.iter().enumerate() {
            assert_eq!(GpuGeneration::of(row.from), *row);
            assert!(index == 0 || GPU_GENERATIONS[index - 1].from < row.from);
        }
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
            let row = GpuGeneration::of(capability);
            assert_eq!(
                (row.name, row.precision),
                (name, precision),
                "{capability:?}"
            );
        }
    }

    #[test]
    fn the_recommendation_follows_from_the_tensor_cores() {
        for row in GPU_GENERATIONS {
            let expected = match (row.bf16_tensor_cores, row.fp16_tensor_cores) {
                (true, _) => Precision::Bf16,
                (false, true) => Precision::Fp16,
                (false, false) => Precision::Fp32,
            };
            assert_eq!(row.precision, expected, "{}", row.name);
            assert_eq!(row.tf32, row.from >= (8, 0), "{}", row.name);
        }
    }

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
    fn a_plain_avx2_cpu_is_told_that_bf16_is_far_slower() {
        let class = CpuClass::of(&CpuFeatures::from_flags("avx2 fma"));
        assert!(class.why.contains("far slower than fp32"), "{}", class.why);
        assert!(
            class
                .bf16_cost
                .is_some_and(|cost| cost.ends_with("use fp32"))
        );
    }
}
