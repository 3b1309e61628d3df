use std::fmt;
use std::str::FromStr;

use overdrive_quantization::GgufType;

/// The type of the matrices in a GGUF file that is written, under the names of llama.cpp's `llama-quantize`
/// (`q4_k_m`, in either case).
///
/// As there, norms, biases, routers and tables of positions stay in f32, the head (or a table that the head shares) has
/// 6 or 8 bits in a quantized file, [`Q4_K_M`](GgufFileType::Q4_K_M) gives some matrices more bits than others, and a matrix
/// whose rows are no multiple of the blocks gets a type that fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the format's")]
#[allow(non_camel_case_types, reason = "the names are the format's")]
pub enum GgufFileType {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q6_K,
    /// `Q4_K`, with `Q6_K` for half of the value and down projections.
    Q4_K_M,
    /// `MXFP4` for experts and `Q8_0` for all other matrices. The elements of experts in MXFP4 do not change.
    MXFP4_MOE,
}

/// Every type, its name, its number in `general.file_type`, and that of most of its matrices.
const TYPES: [(GgufFileType, &str, u32, GgufType); 11] = [
    (GgufFileType::F32, "f32", 0, GgufType::F32),
    (GgufFileType::F16, "f16", 1, GgufType::F16),
    (GgufFileType::Q4_0, "q4_0", 2, GgufType::Q4_0),
    (GgufFileType::Q4_1, "q4_1", 3, GgufType::Q4_1),
    (GgufFileType::Q8_0, "q8_0", 7, GgufType::Q8_0),
    (GgufFileType::Q5_0, "q5_0", 8, GgufType::Q5_0),
    (GgufFileType::Q5_1, "q5_1", 9, GgufType::Q5_1),
    (GgufFileType::Q4_K_M, "q4_k_m", 15, GgufType::Q4_K),
    (GgufFileType::Q6_K, "q6_k", 18, GgufType::Q6_K),
    (GgufFileType::BF16, "bf16", 32, GgufType::BF16),
    (GgufFileType::MXFP4_MOE, "mxfp4_moe", 38, GgufType::Q8_0),
];

/// The properties of a model on which the types of its matrices depend.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mixture {
    pub(super) layers: usize,
    pub(super) experts: i64,
    /// If `true`, the head is the table of token embeddings.
    pub(super) tied: bool,
}

impl GgufFileType {
    fn row(self) -> (&'static str, u32, GgufType) {
        let found = TYPES.iter().find(|(kind, ..)| *kind == self);
        // A test checks that every type is in the table.
        found.map_or(("", 0, GgufType::F32), |&(_, name, id, base)| {
            (name, id, base)
        })
    }

    /// Returns the number in `general.file_type`.
    pub(super) fn id(self) -> u32 {
        self.row().1
    }

    /// Returns the type of a tensor: `llama_tensor_get_type` of llama.cpp without an importance matrix.
    pub(super) fn type_of(self, name: &str, shape: &[i64], mixture: Mixture) -> GgufType {
        let base = self.row().2;
        let (&[_, _] | &[_, _, _]) = shape else {
            return GgufType::F32;
        };
        let in_f32 = [
            "_norm.weight",
            "ffn_gate_inp.weight",
            "position_embd.weight",
        ];
        if !name.ends_with(".weight") || in_f32.iter().any(|end| name.ends_with(end)) {
            return GgufType::F32;
        }
        if base.groups().is_none() {
            return base;
        }
        let fits = |kind: GgufType| {
            let width = shape
                .last()
                .map_or(0, |width| width.unsigned_abs() as usize);
            width.is_multiple_of(kind.block_size())
        };
        let is_head = name == "output.weight" || mixture.tied && name == "token_embd.weight";
        let kind = match self {
            _ if is_head && (base == GgufType::Q8_0 || !fits(base)) => GgufType::Q8_0,
            _ if is_head => GgufType::Q6_K,
            GgufFileType::Q4_K_M => in_mixture(name, mixture),
            GgufFileType::MXFP4_MOE if shape.len() == 3 => GgufType::MXFP4,
            _ => base,
        };
        let fallback = match kind {
            GgufType::MXFP4 => GgufType::Q8_0,
            GgufType::Q4_K => GgufType::Q5_0,
            GgufType::Q5_K => GgufType::Q5_1,
            GgufType::Q6_K => GgufType::Q8_0,
            other => other,
        };
        let all = [kind, fallback];
        all.into_iter()
            .find(|&kind| fits(kind))
            .unwrap_or(GgufType::F16)
    }
}

/// Returns the type of a matrix in a file of `Q4_K_M`.
fn in_mixture(name: &str, mixture: Mixture) -> GgufType {
    let layer = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'));
    let Some((layer, part)) = layer else {
        return GgufType::Q4_K;
    };
    let (layer, layers) = (layer.parse().unwrap_or(0usize), mixture.layers);
    let more = layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
    let eight_experts = mixture.experts == 8;
    match part.trim_end_matches(".weight") {
        "attn_v" | "attn_k" if eight_experts => GgufType::Q8_0,
        "attn_qkv" if eight_experts => GgufType::Q8_0,
        "attn_output" if eight_experts => GgufType::Q5_K,
        "attn_v" | "attn_qkv" | "ffn_down" | "ffn_down_exps" if more => GgufType::Q6_K,
        _ => GgufType::Q4_K,
    }
}

impl fmt::Display for GgufFileType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().0)
    }
}

impl FromStr for GgufFileType {
    type Err = overdrive_core::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let found = TYPES
            .iter()
            .find(|(_, own, ..)| own.eq_ignore_ascii_case(name));
        found.map(|(kind, ..)| *kind).ok_or_else(|| {
            let names: Vec<&str> = TYPES.iter().map(|(_, name, ..)| *name).collect();
            overdrive_core::Error::option("type", name, format!("one of {}", names.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for (kind, ..) in TYPES {
            assert_eq!(kind.to_string().parse::<GgufFileType>().unwrap(), kind);
            assert_eq!(
                kind.to_string()
                    .to_uppercase()
                    .parse::<GgufFileType>()
                    .unwrap(),
                kind
            );
        }
        let error = "q4_k_s".parse::<GgufFileType>().unwrap_err().to_string();
        assert!(
            error.starts_with("`type` is q4_k_s; it must be one of f32, f16"),
            "{error}"
        );
    }

    #[test]
    fn matrices_get_the_types_of_llama_cpp() {
        let mixture = Mixture {
            layers: 16,
            experts: 0,
            tied: false,
        };
        let of = |kind: GgufFileType, name: &str, shape: &[i64]| kind.type_of(name, shape, mixture);
        use {GgufFileType as F, GgufType as T};
        assert_eq!(of(F::Q4_0, "blk.0.attn_norm.weight", &[256]), T::F32);
        assert_eq!(of(F::Q4_0, "blk.0.ffn_gate_inp.weight", &[4, 256]), T::F32);
        assert_eq!(of(F::F16, "blk.0.attn_q.weight", &[256, 256]), T::F16);
        assert_eq!(of(F::Q4_0, "output.weight", &[512, 256]), T::Q6_K);
        assert_eq!(of(F::Q4_0, "output.weight", &[512, 96]), T::Q8_0);
        assert_eq!(of(F::Q8_0, "output.weight", &[512, 256]), T::Q8_0);
        assert_eq!(of(F::Q4_0, "token_embd.weight", &[512, 256]), T::Q4_0);
        let tied = Mixture {
            tied: true,
            ..mixture
        };
        assert_eq!(
            F::Q4_0.type_of("token_embd.weight", &[512, 256], tied),
            T::Q6_K
        );
        assert_eq!(of(F::Q6_K, "blk.3.attn_q.weight", &[96, 96]), T::Q8_0);
        assert_eq!(of(F::Q4_K_M, "blk.3.attn_q.weight", &[96, 96]), T::Q5_0);
        assert_eq!(of(F::Q4_0, "blk.3.attn_q.weight", &[96, 80]), T::F16);
        let more: Vec<usize> = (0..16)
            .filter(|layer| {
                of(
                    F::Q4_K_M,
                    &format!("blk.{layer}.ffn_down.weight"),
                    &[256, 256],
                ) == T::Q6_K
            })
            .collect();
        assert_eq!(more, [0, 1, 4, 7, 10, 13, 14, 15]);
        let eight = Mixture {
            experts: 8,
            ..mixture
        };
        assert_eq!(
            F::Q4_K_M.type_of("blk.5.attn_k.weight", &[256, 256], eight),
            T::Q8_0
        );
        assert_eq!(
            F::Q4_K_M.type_of("blk.5.attn_output.weight", &[256, 256], eight),
            T::Q5_K
        );
    }
}
