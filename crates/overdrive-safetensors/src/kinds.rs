//! The dtypes that both libtorch and safetensors have.

use safetensors::Dtype;
use tch::Kind;

const KINDS: [(Kind, Dtype); 13] = [
    (Kind::Double, Dtype::F64),
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Float8e4m3fn, Dtype::F8_E4M3),
    (Kind::Float8e5m2, Dtype::F8_E5M2),
    (Kind::ComplexFloat, Dtype::C64),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    let found = KINDS.iter().find(|(_, d)| *d == dtype);
    found.map(|(kind, _)| *kind)
}

pub(crate) fn dtype_of(kind: Kind) -> Option<Dtype> {
    let found = KINDS.iter().find(|(k, _)| *k == kind);
    found.map(|(_, dtype)| *dtype)
}

/// Returns the name that safetensors files have for a dtype, such as `F32`; `None` if they do not have the dtype.
pub fn dtype_name(kind: Kind) -> Option<String> {
    dtype_of(kind).map(|dtype| dtype.to_string())
}
