//! The dtypes of a paged cache; overdrive-attention computes with their codes (`kernel/eight_bit.rs`).

use std::fmt;
use std::str::FromStr;

use tch::Kind;

use crate::{Error, Result};

/// The form in which a [`PagedCache`](crate::PagedCache) stores keys and values (vLLM's `kv_cache_dtype`).
///
/// Codes have one scale for each token and head, so that what is stored of a token does not depend on its neighbours
/// (vLLM's `int8_per_token_head` and `fp8_per_token_head`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum KvCacheDtype {
    /// `auto`: in [`PagedCacheConfig::kind`](crate::PagedCacheConfig::kind).
    #[default]
    Auto,
    /// `int8`: codes in -127..=127; the error of an element is at most 1/254 of the largest of its row.
    Int8,
    /// `fp8`, also called `fp8_e4m3`: 8-bit floats; the error of an element is at most 1/16 of it, or 1/458,752 of the
    /// largest of its row if that is more.
    Fp8,
}

impl KvCacheDtype {
    /// All of them.
    pub const ALL: [KvCacheDtype; 3] = [KvCacheDtype::Auto, KvCacheDtype::Int8, KvCacheDtype::Fp8];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            KvCacheDtype::Auto => "auto",
            KvCacheDtype::Int8 => "int8",
            KvCacheDtype::Fp8 => "fp8",
        }
    }

    /// Returns the dtype of the codes; `None` if elements are stored.
    pub(super) fn codes(self) -> Option<Kind> {
        match self {
            KvCacheDtype::Auto => None,
            KvCacheDtype::Int8 => Some(Kind::Int8),
            KvCacheDtype::Fp8 => Some(Kind::Float8e4m3fn),
        }
    }
}

impl fmt::Display for KvCacheDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for KvCacheDtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<KvCacheDtype> {
        Ok(match name {
            "auto" => KvCacheDtype::Auto,
            "int8" | "int8_per_token_head" => KvCacheDtype::Int8,
            "fp8" | "fp8_e4m3" | "fp8_per_token_head" => KvCacheDtype::Fp8,
            _ => {
                let name = format!("{name:?}");
                let known = "one of auto, int8, fp8 (fp8_e4m3)";
                return Err(overdrive_core::Error::option("kv_cache_dtype", name, known).into());
            }
        })
    }
}
