//! The devices and the models of the guide's tables.

use std::borrow::Cow;

use crate::memory_estimate::DecoderShape;

use super::{DeviceFacts, DeviceKind};

const fn gpu(name: &'static str, memory_mib: u64, capability: (u32, u32)) -> DeviceFacts {
    DeviceFacts {
        name: Cow::Borrowed(name),
        memory_mib,
        kind: DeviceKind::Gpu { capability },
    }
}

const fn cpu(name: &'static str, gib: u64, cores: usize, fast_bf16: bool) -> DeviceFacts {
    DeviceFacts {
        name: Cow::Borrowed(name),
        memory_mib: gib << 10,
        kind: DeviceKind::Cpu { cores, fast_bf16 },
    }
}

/// The devices of the guide's tables, with the memory that their driver reports.
pub static DEVICES: [DeviceFacts; 21] = [
    gpu("GTX 1060 6GB", 6_144, (6, 1)),
    gpu("GTX 1080 Ti", 11_264, (6, 1)),
    gpu("GTX 1660 Ti", 6_144, (7, 5)),
    gpu("RTX 2060", 6_144, (7, 5)),
    gpu("RTX 2080 Ti", 11_264, (7, 5)),
    gpu("RTX 3060", 12_288, (8, 6)),
    gpu("RTX 3090", 24_576, (8, 6)),
    gpu("RTX 4060", 8_188, (8, 9)),
    gpu("RTX 4070", 12_282, (8, 9)),
    gpu("RTX 4090", 24_564, (8, 9)),
    gpu("T4", 15_360, (7, 5)),
    gpu("V100 16GB", 16_384, (7, 0)),
    gpu("V100 32GB", 32_768, (7, 0)),
    gpu("A100 40GB", 40_960, (8, 0)),
    gpu("A100 80GB", 81_920, (8, 0)),
    gpu("H100 80GB", 81_559, (9, 0)),
    gpu("H200", 143_771, (9, 0)),
    cpu("CPU, 4 cores, 8 GiB", 8, 4, false),
    cpu("CPU, 8 cores, 16 GiB", 16, 8, false),
    cpu("CPU, 16 cores, 64 GiB", 64, 16, false),
    cpu("CPU with fast bf16 (AMX), 32 cores, 128 GiB", 128, 32, true),
];

/// A model of the guide's tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ModelSize {
    /// The number of parameters, in short.
    pub name: &'static str,
    /// A model of this shape.
    pub example: &'static str,
    /// The shape.
    pub shape: DecoderShape,
}

/// Returns a model of these layers, hidden size, intermediate size, heads, key and value heads, size of a head, and
/// vocabulary.
const fn model(
    name: &'static str,
    example: &'static str,
    sizes: [u64; 7],
    tied_embeddings: bool,
) -> ModelSize {
    let [
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        head_dim,
        vocabulary,
    ] = sizes;
    let shape = DecoderShape {
        layers,
        hidden,
        intermediate,
        heads,
        kv_heads,
        head_dim,
        vocabulary,
        tied_embeddings,
        experts: None,
    };
    ModelSize {
        name,
        example,
        shape,
    }
}

/// The models of the guide's tables, smallest first.
#[rustfmt::skip]
pub static MODELS: [ModelSize; 4] = [
    model("135M", "SmolLM2-135M", [30, 576, 1536, 9, 3, 64, 49_152], true),
    model("1.1B", "TinyLlama-1.1B", [22, 2048, 5632, 32, 4, 64, 32_000], false),
    model("3.2B", "Llama-3.2-3B", [28, 3072, 8192, 24, 8, 128, 128_256], true),
    model("8.0B", "Llama-3.1-8B", [32, 4096, 14_336, 32, 8, 128, 128_256], false),
];
