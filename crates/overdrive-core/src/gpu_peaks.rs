//! The table of NVIDIA's GPUs: the dtypes that each generation multiplies fast, and the peak of each model.
//!
//! A new GPU is one row among the [`models`](GpuGeneration::models) of its generation.
//!
//! Sources: NVIDIA's CUDA programming guide ("Compute Capabilities", arithmetic instructions per clock cycle),
//! the data sheets of the models and the white papers of the generations.

/// A generation of NVIDIA GPUs.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct GpuGeneration {
    /// NVIDIA's name of the generation.
    pub name: &'static str,
    /// The first compute capability of the generation, which extends up to that of the next row.
    pub from: (u32, u32),
    /// Well-known GPUs of the generation.
    pub examples: &'static str,
    /// If `true`, its tensor cores multiply fp16.
    pub fp16_tensor_cores: bool,
    /// If `true`, its tensor cores multiply bf16.
    pub bf16_tensor_cores: bool,
    /// If `true`, its tensor cores multiply FP8 (E4M3 and E5M2).
    pub fp8_tensor_cores: bool,
    /// If `true`, it multiplies fp32 matrices in TF32.
    pub tf32: bool,
    /// The reason for the recommended training dtype, as the end of a sentence that begins with the GPU's name.
    pub why: &'static str,
    /// The models whose peaks are known.
    pub models: &'static [GpuModel],
}

/// The peak matmul throughput of one GPU, in TFLOP/s.
///
/// The figures are for dense matmuls (no structured sparsity) at boost clock. On consumer and workstation cards the
/// half-precision figures are those with fp32 accumulation, which training uses. Where a data sheet gives only the
/// sparse figure, the value here is half of it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct GpuModel {
    /// Words that the driver's name of the GPU must all contain, in lower case.
    pub words: &'static [&'static str],
    /// The peak in fp32.
    pub fp32_tflops: f64,
    /// The peak in fp32 with TF32 allowed; the plain fp32 peak if the generation has no TF32.
    pub tf32_tflops: f64,
    /// The peak in fp16, and in bf16 if the generation supports it: no GPU is faster in one than in the other.
    pub half_tflops: f64,
}

const fn model(
    words: &'static [&'static str],
    fp32_tflops: f64,
    tf32_tflops: f64,
    half_tflops: f64,
) -> GpuModel {
    GpuModel {
        words,
        fp32_tflops,
        tf32_tflops,
        half_tflops,
    }
}

const NO_TENSOR_CORES: GpuGeneration = GpuGeneration {
    name: "Maxwell or older",
    from: (0, 0),
    examples: "GTX 980, M40, K80",
    fp16_tensor_cores: false,
    bf16_tensor_cores: false,
    fp8_tensor_cores: false,
    tf32: false,
    why: "has no tensor cores and no fast fp16 arithmetic: half precision would save memory but no time",
    models: &[],
};

const AMPERE: GpuGeneration = GpuGeneration {
    name: "Ampere",
    from: (8, 0),
    examples: "A100, A10, RTX 3090",
    fp16_tensor_cores: true,
    bf16_tensor_cores: true,
    fp8_tensor_cores: false,
    tf32: true,
    why: "has bf16 tensor cores, and bf16 needs no loss scaling; TF32 speeds up what stays in fp32",
    models: &[
        model(&["a100"], 19.5, 156.0, 312.0),
        model(&["a800"], 19.5, 156.0, 312.0),
        model(&["a30"], 10.3, 82.0, 165.0),
        model(&["a40"], 37.4, 74.8, 149.7),
        model(&["a10"], 31.2, 62.5, 125.0),
        model(&["a10g"], 31.5, 35.0, 70.0),
        model(&["a2"], 4.5, 9.0, 18.0),
        model(&["a6000"], 38.7, 77.4, 154.8),
        model(&["a5000"], 27.8, 55.6, 111.1),
        model(&["a4000"], 19.2, 38.3, 76.7),
        model(&["3090"], 35.6, 35.6, 71.2),
        model(&["3090", "ti"], 40.0, 40.0, 80.0),
        model(&["3080"], 29.8, 29.8, 59.5),
        model(&["3080", "ti"], 34.1, 34.1, 68.2),
        model(&["3070"], 20.3, 20.3, 40.6),
        model(&["3060"], 12.7, 12.7, 25.5),
        model(&["3060", "ti"], 16.2, 16.2, 32.4),
    ],
};

/// Every generation, oldest first.
pub const GPU_GENERATIONS: [GpuGeneration; 10] = [
    NO_TENSOR_CORES,
    GpuGeneration {
        name: "Pascal",
        from: (6, 0),
        examples: "P100",
        why: "has no tensor cores: its fp16 is at best twice as fast as fp32, without fp32 accumulation, and \
              needs loss scaling",
        models: &[
            model(&["p100"], 9.3, 9.3, 18.7),
            model(&["p100", "sxm2"], 10.6, 10.6, 21.2),
        ],
        ..NO_TENSOR_CORES
    },
    // Of all Pascal chips only the P100's (6.0) has fast fp16, so the generation has two rows.
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
        why: "has tensor cores for fp16 but not for bf16; losses must be scaled (GradScaler)",
        models: &[
            model(&["v100", "sxm2"], 15.7, 15.7, 125.0),
            model(&["v100", "sxm3"], 15.7, 15.7, 125.0),
            model(&["v100"], 14.0, 14.0, 112.0),
            model(&["v100s"], 16.4, 16.4, 130.0),
        ],
        ..NO_TENSOR_CORES
    },
    GpuGeneration {
        name: "Turing",
        from: (7, 5),
        examples: "T4, RTX 2080 Ti",
        fp16_tensor_cores: true,
        why: "has fp16 tensor cores (the GTX 16 cards only fast fp16 arithmetic) and no bf16 in \
              hardware; losses must be scaled (GradScaler)",
        models: &[
            model(&["t4"], 8.1, 8.1, 65.0),
            model(&["titan", "rtx"], 16.3, 16.3, 130.5),
            model(&["quadro", "6000"], 16.3, 16.3, 130.5),
            model(&["quadro", "8000"], 16.3, 16.3, 130.5),
            model(&["2080", "ti"], 13.4, 13.4, 53.8),
        ],
        ..NO_TENSOR_CORES
    },
    AMPERE,
    GpuGeneration {
        name: "Ada",
        from: (8, 9),
        examples: "L4, L40S, RTX 4090",
        fp8_tensor_cores: true,
        models: &[
            model(&["l4"], 30.3, 60.5, 121.0),
            model(&["l40"], 90.5, 90.5, 181.0),
            model(&["l40s"], 91.6, 183.0, 362.0),
            model(&["6000", "ada"], 91.1, 182.1, 364.2),
            model(&["4090"], 82.6, 82.6, 165.2),
            model(&["4080"], 48.7, 48.7, 97.5),
            model(&["4080", "super"], 52.2, 52.2, 104.4),
            model(&["4070"], 29.1, 29.1, 58.3),
            model(&["4070", "ti"], 40.1, 40.1, 80.2),
            model(&["4070", "ti", "super"], 44.1, 44.1, 88.2),
            model(&["4060"], 15.1, 15.1, 30.2),
            model(&["4060", "ti"], 22.1, 22.1, 44.1),
        ],
        ..AMPERE
    },
    GpuGeneration {
        name: "Hopper",
        from: (9, 0),
        examples: "H100, H200, GH200",
        fp8_tensor_cores: true,
        models: &[
            model(&["h100"], 67.0, 494.7, 989.4),
            model(&["h100", "pcie"], 51.0, 378.0, 756.0),
            model(&["h100", "nvl"], 60.0, 417.5, 835.5),
            model(&["h800"], 67.0, 494.7, 989.4),
            model(&["h200"], 67.0, 494.7, 989.4),
            model(&["h200", "nvl"], 60.0, 417.5, 835.5),
            model(&["gh200"], 67.0, 494.7, 989.4),
            model(&["h20"], 44.0, 74.0, 148.0),
        ],
        ..AMPERE
    },
    GpuGeneration {
        name: "Blackwell",
        from: (10, 0),
        examples: "B200, B300, RTX 5090, Thor",
        fp8_tensor_cores: true,
        models: &[
            model(&["b200"], 75.0, 1125.0, 2250.0),
            model(&["gb200"], 80.0, 1250.0, 2500.0),
            model(&["5090"], 104.8, 104.8, 209.5),
            model(&["5080"], 56.3, 56.3, 112.6),
            model(&["5070"], 30.9, 30.9, 61.7),
            model(&["5070", "ti"], 43.9, 43.9, 87.9),
        ],
        ..AMPERE
    },
    GpuGeneration {
        name: "a generation after Blackwell",
        from: (13, 0),
        examples: "",
        fp8_tensor_cores: true,
        why: "is newer than this table; every GPU since Ampere multiplies bf16 in its tensor cores",
        models: &[],
        ..AMPERE
    },
];

// These words mark a slower chip with the same number, or a slice of a chip (MIG), whose peak no data sheet gives.
const SLOWER_VARIANTS: [&str; 4] = ["laptop", "mobile", "mig", "max"];
// These words mark a different chip with the same number, so a row without them describes another GPU.
const CHIP_VARIANTS: [&str; 3] = ["ti", "super", "d"];
// These words mark different clocks and memory in the generations that have rows with them; elsewhere (A100) all form
// factors have the same peak.
const FORMS: [&str; 2] = ["pcie", "nvl"];

impl GpuGeneration {
    /// Returns the generation of a compute capability, such as `(9, 0)`.
    ///
    /// ```
    /// use overdrive_core::gpu_peaks::GpuGeneration;
    ///
    /// let turing = GpuGeneration::of((7, 5));
    /// assert!(turing.name == "Turing" && turing.fp16_tensor_cores && !turing.bf16_tensor_cores);
    /// ```
    pub fn of(capability: (u32, u32)) -> Self {
        let reached = GPU_GENERATIONS
            .iter()
            .rev()
            .find(|row| row.from <= capability);
        // The first row begins at (0, 0), so there is always one.
        *reached.unwrap_or(&NO_TENSOR_CORES)
    }
}

impl GpuModel {
    /// Returns the GPU whose driver reports `name`, with its generation; `None` if its peaks are not known.
    ///
    /// ```
    /// use overdrive_core::gpu_peaks::GpuModel;
    ///
    /// let (generation, model) = GpuModel::find("NVIDIA H100 PCIe").unwrap();
    /// assert_eq!((generation.name, model.half_tflops), ("Hopper", 756.0));
    /// ```
    pub fn find(name: &str) -> Option<(GpuGeneration, Self)> {
        let name = name.to_ascii_lowercase();
        let words: Vec<&str> = name
            .split(|letter: char| !letter.is_ascii_alphanumeric())
            .collect();
        if SLOWER_VARIANTS.iter().any(|other| words.contains(other)) {
            return None;
        }
        let (generation, model) = GPU_GENERATIONS
            .iter()
            .flat_map(|generation| {
                generation
                    .models
                    .iter()
                    .map(move |model| (*generation, *model))
            })
            .filter(|(_, model)| model.words.iter().all(|word| words.contains(word)))
            // "3090 Ti" contains "3090": the row with the most words is the exact one.
            .max_by_key(|(_, model)| model.words.len())?;
        let is_in_a_row = |word| generation.models.iter().any(|row| row.words.contains(word));
        let is_another = words
            .iter()
            .filter(|word| !model.words.contains(word))
            .any(|word| CHIP_VARIANTS.contains(word) || FORMS.contains(word) && is_in_a_row(word));
        (!is_another).then_some((generation, model))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_known_by_the_names_that_they_give_themselves() {
        for (name, tera) in [
            ("Tesla P100-PCIE-16GB", 18.7),
            ("Tesla V100-SXM2-32GB", 125.0),
            ("Tesla V100-PCIE-16GB", 112.0),
            ("Tesla T4", 65.0),
            ("Quadro RTX 6000", 130.5),
            ("NVIDIA A100-SXM4-80GB", 312.0),
            ("NVIDIA A100 80GB PCIe", 312.0),
            ("NVIDIA A30", 165.0),
            ("NVIDIA A800 80GB PCIe", 312.0),
            ("NVIDIA GeForce RTX 2080 Ti", 53.8),
            ("NVIDIA GeForce RTX 4080 SUPER", 104.4),
            ("NVIDIA H100 NVL", 835.5),
            ("NVIDIA A10G", 70.0),
            ("NVIDIA A10", 125.0),
            ("NVIDIA RTX A6000", 154.8),
            ("NVIDIA GeForce RTX 3090", 71.2),
            ("NVIDIA GeForce RTX 3090 Ti", 80.0),
            ("NVIDIA L4", 121.0),
            ("NVIDIA L40S", 362.0),
            ("NVIDIA RTX 6000 Ada Generation", 364.2),
            ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2),
            ("NVIDIA GeForce RTX 4090", 165.2),
            ("NVIDIA H100 80GB HBM3", 989.4),
            ("NVIDIA H100 PCIe", 756.0),
            ("NVIDIA H200", 989.4),
            ("NVIDIA GH200 480GB", 989.4),
            ("NVIDIA B200", 2250.0),
            ("NVIDIA GeForce RTX 5090", 209.5),
        ] {
            let known = GpuModel::find(name).map(|(_, model)| model.half_tflops);
            assert_eq!(known, Some(tera), "{name}");
        }
    }

    #[test]
    fn slower_variants_and_unknown_gpus_have_no_row() {
        for name in [
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "Quadro RTX 6000 with Max-Q Design",
            "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "NVIDIA GeForce RTX 4070 SUPER",
            "NVIDIA GeForce RTX 3070 Ti",
            "NVIDIA GeForce RTX 4090 D",
            "NVIDIA GeForce RTX 5090 D",
            "NVIDIA H800 PCIe",
            "NVIDIA GeForce GTX 1650",
            "AMD Instinct MI300X",
            "",
        ] {
            assert_eq!(GpuModel::find(name), None, "{name}");
        }
    }

    #[test]
    fn a_model_lies_in_its_generation() {
        for (name, generation) in [
            ("Tesla P100-PCIE-16GB", "Pascal"),
            ("Tesla V100-SXM2-32GB", "Volta"),
            ("Quadro RTX 6000", "Turing"),
            ("NVIDIA RTX A6000", "Ampere"),
            ("NVIDIA RTX 6000 Ada Generation", "Ada"),
            ("NVIDIA GH200 480GB", "Hopper"),
            ("NVIDIA GB200", "Blackwell"),
        ] {
            let found = GpuModel::find(name).map(|(generation, _)| generation.name);
            assert_eq!(found, Some(generation), "{name}");
        }
    }

    #[test]
    fn no_model_is_slower_in_less_precision() {
        for generation in GPU_GENERATIONS {
            for model in generation.models {
                let GpuModel {
                    words,
                    fp32_tflops,
                    tf32_tflops,
                    half_tflops,
                } = *model;
                assert!(half_tflops >= tf32_tflops, "{words:?}");
                assert!(tf32_tflops >= fp32_tflops, "{words:?}");
                assert!(generation.tf32 || tf32_tflops == fp32_tflops, "{words:?}");
                let lower = |word: &&str| **word == word.to_ascii_lowercase();
                assert!(words.iter().all(lower), "{words:?}");
            }
        }
    }

    #[test]
    fn every_row_is_found_by_its_own_capability_and_the_rows_ascend() {
        for (index, row) in GPU_GENERATIONS.iter().enumerate() {
            assert_eq!(GpuGeneration::of(row.from), *row);
            assert!(index == 0 || GPU_GENERATIONS[index - 1].from < row.from);
            assert_eq!(row.tf32, row.from >= (8, 0), "{}", row.name);
        }
    }
}
