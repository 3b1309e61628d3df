//! The functions and classes that weight files may name.

use tch::Kind;

/// A function or class that a file may name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Global {
    /// `collections.OrderedDict`.
    OrderedDict,
    /// `torch.Size`, a tuple.
    Size,
    /// `torch._utils._rebuild_tensor_v2`, and the function before it, whose arguments it begins with.
    Tensor,
    /// `torch._utils._rebuild_tensor_v3`, for dtypes without a storage class.
    TypedTensor,
    /// `torch._utils._rebuild_parameter`, and `_rebuild_parameter_with_state` for one with attributes.
    Parameter,
    /// `torch._tensor._rebuild_from_type_v2`, for a tensor with attributes.
    FromType,
    /// `torch.Tensor`.
    TensorClass,
    /// A storage class; `None` is `UntypedStorage`, whose elements are bytes.
    Storage(Option<&'static Dtype>),
    /// A dtype.
    Dtype(&'static Dtype),
    /// A function or class whose values are not read as weights: each stands for itself in its place and is skipped.
    Unread,
}

/// The type of elements.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Dtype {
    /// The storage class; empty for the dtypes without one.
    class: &'static str,
    name: &'static str,
    /// The kind; `None` if its tensors are skipped.
    pub(crate) kind: Option<Kind>,
    /// The size of an element.
    pub(crate) bytes: usize,
}

const fn read(class: &'static str, name: &'static str, kind: Kind, bytes: usize) -> Dtype {
    Dtype {
        class,
        name,
        kind: Some(kind),
        bytes,
    }
}

const fn unread(class: &'static str, name: &'static str, bytes: usize) -> Dtype {
    Dtype {
        class,
        name,
        kind: None,
        bytes,
    }
}

static DTYPES: [Dtype; 19] = [
    read("DoubleStorage", "float64", Kind::Double, 8),
    read("FloatStorage", "float32", Kind::Float, 4),
    read("HalfStorage", "float16", Kind::Half, 2),
    read("BFloat16Storage", "bfloat16", Kind::BFloat16, 2),
    read("LongStorage", "int64", Kind::Int64, 8),
    read("IntStorage", "int32", Kind::Int, 4),
    read("ShortStorage", "int16", Kind::Int16, 2),
    read("CharStorage", "int8", Kind::Int8, 1),
    read("ByteStorage", "uint8", Kind::Uint8, 1),
    read("BoolStorage", "bool", Kind::Bool, 1),
    read("", "float8_e4m3fn", Kind::Float8e4m3fn, 1),
    read("", "float8_e5m2", Kind::Float8e5m2, 1),
    read("ComplexFloatStorage", "complex64", Kind::ComplexFloat, 8),
    unread("ComplexDoubleStorage", "complex128", 16),
    unread("QInt8Storage", "qint8", 1),
    unread("QUInt8Storage", "quint8", 1),
    unread("QInt32Storage", "qint32", 4),
    unread("QUInt4x2Storage", "quint4x2", 1),
    unread("QUInt2x4Storage", "quint2x4", 1),
];

/// Of a dtype without a storage class that is not read, the size does not matter: its storages count bytes.
static OTHER_DTYPE: Dtype = unread("", "", 1);

/// Returns `true` for a dtype of torch that is in no file of weights that can be read, such as `uint16`.
fn is_other_dtype(name: &str) -> bool {
    let digits = name.trim_start_matches(|letter: char| letter.is_ascii_lowercase());
    let kind = &name[..name.len() - digits.len()];
    match kind {
        "int" | "uint" | "complex" => digits.parse::<u8>().is_ok(),
        "float" => digits.starts_with("8_") || digits.starts_with("4_"),
        "bits" => digits.starts_with(|first: char| first.is_ascii_digit()),
        _ => false,
    }
}

/// Returns the function or class of this name; `None` for one that neither weights nor the plain values beside them need.
///
/// All but NumPy's are those of `torch.load(weights_only=True)`.
pub(crate) fn global(module: &str, name: &str) -> Option<Global> {
    Some(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch", "Size") => Global::Size,
        ("torch._utils", "_rebuild_tensor" | "_rebuild_tensor_v2") => Global::Tensor,
        ("torch._utils", "_rebuild_tensor_v3") => Global::TypedTensor,
        ("torch._utils", "_rebuild_parameter" | "_rebuild_parameter_with_state") => {
            Global::Parameter
        }
        ("torch._tensor", "_rebuild_from_type_v2") => Global::FromType,
        ("torch" | "torch._tensor", "Tensor") => Global::TensorClass,
        ("torch" | "torch.storage", "UntypedStorage") => Global::Storage(None),
        ("torch", "device")
        | ("torch.serialization", "_get_layout")
        | (
            "torch._utils",
            "_rebuild_qtensor"
            | "_rebuild_sparse_tensor"
            | "_rebuild_meta_tensor_no_storage"
            | "_rebuild_device_tensor_from_numpy"
            | "_rebuild_device_tensor_from_cpu_tensor",
        )
        | ("collections", "Counter")
        | ("_codecs", "encode")
        // Python 2 and protocol 2 say `__builtin__`.
        | ("builtins" | "__builtin__", "set" | "bytearray" | "complex")
        | ("numpy.core.multiarray" | "numpy._core.multiarray", "scalar" | "_reconstruct")
        | ("numpy", "dtype" | "ndarray") => Global::Unread,
        ("torch", scheme) if scheme.starts_with("per_tensor_") || scheme.starts_with("per_channel_") => {
            Global::Unread
        }
        ("torch" | "torch.cuda", _) => {
            let of_class = |dtype: &&Dtype| dtype.class == name && !dtype.class.is_empty();
            let of_name = |dtype: &&Dtype| module == "torch" && dtype.name == name;
            match (DTYPES.iter().find(of_class), DTYPES.iter().find(of_name)) {
                (Some(dtype), _) => Global::Storage(Some(dtype)),
                (None, Some(dtype)) => Global::Dtype(dtype),
                (None, None) if module == "torch" && is_other_dtype(name) => {
                    Global::Dtype(&OTHER_DTYPE)
                }
                (None, None) => return None,
            }
        }
        _ => return None,
    })
}
