//! The functions and classes that weight files may name.

use tch::Kind;

/// A function or class that a file may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Global {
    /// `collections.OrderedDict`.
    OrderedDict,
    /// `torch.Size`, a tuple.
    Size,
    /// `torch.device`.
    Device,
    /// `torch._utils._rebuild_tensor_v2`.
    Tensor,
    /// `torch._utils._rebuild_tensor_v3`, for dtypes without a storage class.
    TypedTensor,
    /// `torch._utils._rebuild_parameter`.
    Parameter,
    /// A storage class; `None` is `UntypedStorage`, whose elements are bytes.
    Storage(Option<Kind>),
    /// A dtype.
    Kind(Kind),
}

/// The dtypes, with their storage classes.
const KINDS: [(&str, &str, Kind); 12] = [
    ("DoubleStorage", "float64", Kind::Double),
    ("FloatStorage", "float32", Kind::Float),
    ("HalfStorage", "float16", Kind::Half),
    ("BFloat16Storage", "bfloat16", Kind::BFloat16),
    ("LongStorage", "int64", Kind::Int64),
    ("IntStorage", "int32", Kind::Int),
    ("ShortStorage", "int16", Kind::Int16),
    ("CharStorage", "int8", Kind::Int8),
    ("ByteStorage", "uint8", Kind::Uint8),
    ("BoolStorage", "bool", Kind::Bool),
    ("", "float8_e4m3fn", Kind::Float8e4m3fn),
    ("", "float8_e5m2", Kind::Float8e5m2),
];

/// Returns the function or class of this name; `None` for one that weights do not need.
pub(crate) fn global(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch", "Size") => Global::Size,
        ("torch", "device") => Global::Device,
        ("torch._utils", "_rebuild_tensor_v2") => Global::Tensor,
        ("torch._utils", "_rebuild_tensor_v3") => Global::TypedTensor,
        ("torch._utils", "_rebuild_parameter") => Global::Parameter,
        ("torch" | "torch.storage", "UntypedStorage") => Global::Storage(None),
        ("torch" | "torch.cuda", _) => {
            let of_dtype =
                |(_, dtype, _): &&(&str, &str, Kind)| module == "torch" && *dtype == name;
            let of_class = |(class, ..): &&(&str, &str, Kind)| *class == name && !class.is_empty();
            match KINDS.iter().find(of_class) {
                Some((.., kind)) => Global::Storage(Some(*kind)),
                None => Global::Kind(KINDS.iter().find(of_dtype)?.2),
            }
        }
        _ => return None,
    })
}
