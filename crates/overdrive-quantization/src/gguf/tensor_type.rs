use std::fmt;

use tch::Kind;

use crate::GroupOptions;

/// The type of the elements of a tensor in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the names are the format's")]
#[allow(non_camel_case_types, reason = "the names are the format's")]
pub enum GgufType {
    F32,
    F16,
    BF16,
    F64,
    I8,
    I16,
    I32,
    I64,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    MXFP4,
}

/// The number of elements of a super-block of the `_K` types.
pub(super) const SUPER: usize = 256;

/// Every type, its number in a file, and the elements and bytes of its blocks.
const TYPES: [(GgufType, u32, usize, usize); 19] = [
    (GgufType::F32, 0, 1, 4),
    (GgufType::F16, 1, 1, 2),
    (GgufType::Q4_0, 2, 32, 18),
    (GgufType::Q4_1, 3, 32, 20),
    (GgufType::Q5_0, 6, 32, 22),
    (GgufType::Q5_1, 7, 32, 24),
    (GgufType::Q8_0, 8, 32, 34),
    (GgufType::Q2_K, 10, SUPER, 84),
    (GgufType::Q3_K, 11, SUPER, 110),
    (GgufType::Q4_K, 12, SUPER, 144),
    (GgufType::Q5_K, 13, SUPER, 176),
    (GgufType::Q6_K, 14, SUPER, 210),
    (GgufType::I8, 24, 1, 1),
    (GgufType::I16, 25, 1, 2),
    (GgufType::I32, 26, 1, 4),
    (GgufType::I64, 27, 1, 8),
    (GgufType::F64, 28, 1, 8),
    (GgufType::BF16, 30, 1, 2),
    (GgufType::MXFP4, 39, 32, 17),
];

/// The types of the format that this crate does not read, for error messages.
const OTHERS: [(u32, &str); 12] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
];

impl GgufType {
    /// Returns the type with the number `id` in a file, or as an error the name of a type that is not read.
    pub(super) fn from_id(id: u32) -> Result<GgufType, String> {
        if let Some((found, ..)) = TYPES.iter().find(|(_, number, ..)| *number == id) {
            return Ok(*found);
        }
        let known = OTHERS.iter().find(|(number, _)| *number == id);
        // The name helps to find a file of another type, the bare number would not.
        Err(known.map_or_else(|| format!("type {id}"), |(_, name)| (*name).to_owned()))
    }

    /// Returns the names of the types that `is_listed` accepts, for error messages.
    pub(super) fn names(is_listed: impl Fn(GgufType) -> bool) -> String {
        let listed = TYPES.iter().filter(|(kind, ..)| is_listed(*kind));
        let names: Vec<String> = listed.map(|(kind, ..)| kind.to_string()).collect();
        names.join(", ")
    }

    /// Returns the number of the type in a file.
    pub(super) fn id(self) -> u32 {
        let found = TYPES.iter().find(|(kind, ..)| *kind == self);
        // A test checks that every type is in the table.
        found.map_or(0, |&(_, id, ..)| id)
    }

    /// Returns the number of elements of a block; 1 for types without blocks.
    pub fn block_size(self) -> usize {
        self.sizes().0
    }

    /// Returns the number of bytes of a block.
    pub fn block_bytes(self) -> usize {
        self.sizes().1
    }

    fn sizes(self) -> (usize, usize) {
        let found = TYPES.iter().find(|(kind, ..)| *kind == self);
        // A test checks that every type is in the table.
        found.map_or((1, 1), |&(_, _, numbers, bytes)| (numbers, bytes))
    }

    /// Returns `true` for a type with blocks of codes.
    pub fn is_quantized(self) -> bool {
        self.block_size() > 1
    }

    /// Returns the dtype of a type without blocks; `None` for quantized types.
    pub fn kind(self) -> Option<Kind> {
        Some(match self {
            GgufType::F32 => Kind::Float,
            GgufType::F16 => Kind::Half,
            GgufType::BF16 => Kind::BFloat16,
            GgufType::F64 => Kind::Double,
            GgufType::I8 => Kind::Int8,
            GgufType::I16 => Kind::Int16,
            GgufType::I32 => Kind::Int,
            GgufType::I64 => Kind::Int64,
            _ => return None,
        })
    }

    /// Returns the groups that represent the blocks of this type exactly; `None` for types without blocks, and for MXFP4,
    /// which is a scheme of its own.
    pub fn groups(self) -> Option<GroupOptions> {
        let (bits, group_size, symmetric) = match self {
            GgufType::Q4_0 => (4, 32, true),
            GgufType::Q4_1 | GgufType::Q4_K => (4, 32, false),
            GgufType::Q5_0 | GgufType::Q8_0 => (8, 32, true),
            GgufType::Q5_1 | GgufType::Q5_K => (8, 32, false),
            GgufType::Q2_K => (4, 16, false),
            GgufType::Q3_K => (4, 16, true),
            GgufType::Q6_K => (8, 16, true),
            _ => return None,
        };
        Some(GroupOptions {
            bits,
            group_size,
            symmetric,
        })
    }

    /// Returns `true` if the file has the scales of the groups in f16, and not as products of two numbers.
    pub(super) fn has_half_scales(self) -> bool {
        matches!(
            self,
            GgufType::Q4_0 | GgufType::Q4_1 | GgufType::Q5_0 | GgufType::Q5_1 | GgufType::Q8_0
        )
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_is_in_the_table_once_and_has_a_kind_or_groups() {
        for (kind, id, numbers, bytes) in TYPES {
            assert_eq!(GgufType::from_id(id), Ok(kind));
            assert_eq!((kind.block_size(), kind.block_bytes()), (numbers, bytes));
            assert_ne!(kind.kind().is_some(), kind.is_quantized(), "{kind}");
            let grouped = kind.is_quantized() && kind != GgufType::MXFP4;
            assert_eq!(kind.groups().is_some(), grouped, "{kind}");
            if let Some(groups) = kind.groups() {
                assert_eq!(numbers % groups.group_size, 0, "{kind}");
            }
        }
        assert_eq!(GgufType::from_id(20), Err("IQ4_NL".to_owned()));
        assert_eq!(GgufType::from_id(99), Err("type 99".to_owned()));
    }
}
