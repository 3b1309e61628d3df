//! Calls of libtorch's operators by their schema names.
//!
//! The call is boxed: arguments are checked against the operator's schema (an error names the wrong one),
//! trailing arguments that have a default may be left out, and autograd, autocast and every other dispatch
//! key work as they do from Python. It costs about a microsecond more than a call that tch generates, so it
//! suits operators that do much work per call (`_foreach_*`, `_fused_adamw_`).
//!
//! Names and schemas are those of PyTorch's `native_functions.yaml`; [`schema`] returns one.

use std::ffi::CString;
use std::ptr;

use tch::{Device, Kind, Tensor};

use crate::error::{Error, Result, check, take_string};
use crate::{device, ffi};

/// An argument of an operator.
#[derive(Debug, Clone, Copy)]
pub enum Value<'a> {
    /// An optional argument that is absent.
    None,
    /// One tensor. Operators whose names end in `_` write to it.
    Tensor(&'a Tensor),
    /// A list of tensors. Where the schema has optional elements, an undefined tensor is an absent element.
    Tensors(&'a [Tensor]),
    /// An integer; it becomes a float where the schema has a float.
    Int(i64),
    /// A float.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A list of integers.
    Ints(&'a [i64]),
    /// A list of floats.
    Floats(&'a [f64]),
    /// A string.
    Str(&'a str),
    /// A list of truth values, such as the `output_mask` of a backward operator.
    Bools(&'a [bool]),
    /// A dtype (`ScalarType` in schemas).
    Kind(Kind),
    /// A device.
    Device(Device),
}

/// A result of an operator.
#[derive(Debug)]
#[non_exhaustive]
pub enum Output {
    /// An optional result that is absent.
    None,
    /// One tensor.
    Tensor(Tensor),
    /// A list of tensors.
    Tensors(Vec<Tensor>),
    /// An integer.
    Int(i64),
    /// A float.
    Float(f64),
    /// A truth value.
    Bool(bool),
}

impl Output {
    /// Returns the tensor.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if the result is not a tensor.
    pub fn into_tensor(self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor),
            other => Err(other.not("a tensor")),
        }
    }

    /// Returns the list of tensors.
    ///
    /// # Errors
    /// [`Error::BadArgument`] if the result is not a list of tensors.
    pub fn into_tensors(self) -> Result<Vec<Tensor>> {
        match self {
            Self::Tensors(tensors) => Ok(tensors),
            other => Err(other.not("a list of tensors")),
        }
    }

    fn not(&self, expected: &str) -> Error {
        let got = match self {
            Self::None => "nothing",
            Self::Tensor(_) => "a tensor",
            Self::Tensors(_) => "a list of tensors",
            Self::Int(_) => "an integer",
            Self::Float(_) => "a float",
            Self::Bool(_) => "a bool",
        };
        Error::BadArgument {
            operation: "reading the result of an operator".to_owned(),
            message: format!("it is {got}, not {expected}"),
        }
    }
}

/// The operators beside `aten::_foreach_*` that check shapes, dtypes and indices before their kernels run, so that
/// any arguments that fit their schemas are safe. An operator joins the list only after a look at its checks in
/// libtorch's source.
const CHECKED: [&str; 19] = [
    "aten::_amp_foreach_non_finite_check_and_unscale_",
    "aten::_amp_update_scale_",
    "aten::add",
    "aten::addcdiv_",
    "aten::addcmul_",
    "aten::addmm",
    "aten::clone",
    "aten::copy_",
    "aten::empty",
    "aten::index",
    "aten::is_pinned",
    "aten::linalg_vector_norm",
    "aten::max",
    "aten::mm",
    "aten::mul",
    "aten::neg",
    "aten::pin_memory",
    "aten::silu",
    "aten::split",
];

/// The fused optimizers. Their kernels check neither shapes nor strides, so the shim does.
const FUSED: [&str; 3] = [
    "aten::_fused_adam_",
    "aten::_fused_adamw_",
    "aten::_fused_sgd_",
];

/// Calls the operator `name` (such as `aten::_foreach_norm`) in its overload (such as `Scalar`, or empty)
/// with the leading arguments of its schema; the others take their defaults.
///
/// The operator must be one whose arguments are checked: `aten::_foreach_*`, the fused optimizers, and some that tch
/// binds too. A schema contains only types. Many operators read beyond a tensor if a size or an index is wrong
/// (`aten::native_group_norm`), and some reinterpret an address (`inductor::_reinterpret_tensor`), so every other
/// operator needs [`call_unchecked`].
///
/// # Errors
/// [`Error::NotFound`] if there is no such operator, [`Error::BadArgument`] if it is not one of these, if an argument
/// does not fit the schema or if one without a default is missing, [`Error::OutOfMemory`] and [`Error::Torch`] from
/// the operator.
pub fn call(name: &str, overload: &str, args: &[Value<'_>]) -> Result<Vec<Output>> {
    let fused = FUSED.contains(&name);
    if !fused && !name.starts_with("aten::_foreach_") && CHECKED.binary_search(&name).is_err() {
        // An unknown operator is the more helpful error.
        schema(name, overload)?;
        return Err(Error::BadArgument {
            operation: name.to_owned(),
            message: "libtorch may not check the arguments of this operator, so `op::call` does not \
                      call it; use tch's method of that name, or `op::call_unchecked`, which is unsafe"
                .to_owned(),
        });
    }
    // SAFETY: the operator is one of those that check their arguments, or a fused one, which the shim checks.
    unsafe { call_any(name, overload, args, fused) }
}

/// As [`call()`], for any operator of libtorch. Only the types of the arguments are checked, against the schema.
///
/// # Errors
/// As [`call()`], but for any operator.
///
/// # Safety
/// The operator reads and writes no memory outside of its tensors with these arguments, whose shapes, dtypes,
/// devices, strides and values it may not check, and its results refer to no memory that is freed before them.
pub unsafe fn call_unchecked(
    name: &str,
    overload: &str,
    args: &[Value<'_>],
) -> Result<Vec<Output>> {
    // SAFETY: the caller's promise.
    unsafe { call_any(name, overload, args, false) }
}

/// # Safety
/// As [`call_unchecked`], unless `fused`.
unsafe fn call_any(
    name: &str,
    overload: &str,
    args: &[Value<'_>],
    fused: bool,
) -> Result<Vec<Output>> {
    let (c_name, c_overload) = names(name, overload)?;
    // `raw` points into these vectors, so they must live until the call returns.
    let handles: Vec<Vec<*const std::ffi::c_void>> = args
        .iter()
        .map(|arg| match arg {
            Value::Tensors(tensors) => tensors.iter().map(|t| t.as_ptr().cast()).collect(),
            _ => Vec::new(),
        })
        .collect();
    let raw: Vec<ffi::RawValue> = args
        .iter()
        .zip(&handles)
        .map(|(arg, handles)| raw_value(arg, handles))
        .collect();
    let mut outputs = ptr::null_mut();
    // SAFETY: the names are C strings and the arguments borrow from `args` and `handles`, all alive
    // until the call returns; `outputs` is written only on success. The caller vouches for the operator.
    let status = unsafe {
        ffi::od_op_call(
            c_name.as_ptr(),
            c_overload.as_ptr(),
            raw.as_ptr(),
            raw.len(),
            i32::from(fused),
            &raw mut outputs,
        )
    };
    check(status, name)?;
    // Owned before reading, so that an error while reading frees the outputs too.
    Outputs {
        raw: outputs,
        operation: name,
    }
    .read()
}

/// Returns the schema of an operator in PyTorch's notation.
///
/// # Errors
/// [`Error::NotFound`] if there is no such operator.
///
/// ```
/// let schema = overdrive_sys::op::schema("aten::silu", "")?;
/// assert_eq!(schema, "aten::silu(Tensor self) -> Tensor");
/// # Ok::<(), overdrive_sys::Error>(())
/// ```
pub fn schema(name: &str, overload: &str) -> Result<String> {
    let (c_name, c_overload) = names(name, overload)?;
    let mut text = ptr::null_mut();
    // SAFETY: both names are C strings; `text` is written only on success, and then taken once.
    unsafe {
        check(
            ffi::od_op_schema(c_name.as_ptr(), c_overload.as_ptr(), &raw mut text),
            name,
        )?;
        Ok(take_string(text))
    }
}

fn names(name: &str, overload: &str) -> Result<(CString, CString)> {
    let c_string = |text: &str| {
        CString::new(text).map_err(|_| Error::BadArgument {
            operation: "calling an operator".to_owned(),
            message: format!("the name {text:?} holds a zero byte"),
        })
    };
    Ok((c_string(name)?, c_string(overload)?))
}

fn raw_value(arg: &Value<'_>, handles: &[*const std::ffi::c_void]) -> ffi::RawValue {
    let empty = ffi::RawValue {
        tag: ffi::NONE,
        i: 0,
        f: 0.0,
        ptr: ptr::null(),
        len: 0,
    };
    match *arg {
        Value::None => empty,
        Value::Tensor(tensor) => ffi::RawValue {
            tag: ffi::TENSOR,
            ptr: tensor.as_ptr().cast(),
            ..empty
        },
        Value::Tensors(_) => ffi::RawValue {
            tag: ffi::TENSORS,
            ptr: handles.as_ptr().cast(),
            len: handles.len(),
            ..empty
        },
        Value::Int(i) => ffi::RawValue {
            tag: ffi::INT,
            i,
            ..empty
        },
        Value::Float(f) => ffi::RawValue {
            tag: ffi::FLOAT,
            f,
            ..empty
        },
        Value::Bool(b) => ffi::RawValue {
            tag: ffi::BOOL,
            i: i64::from(b),
            ..empty
        },
        Value::Ints(items) => ffi::RawValue {
            tag: ffi::INTS,
            ptr: items.as_ptr().cast(),
            len: items.len(),
            ..empty
        },
        Value::Floats(items) => ffi::RawValue {
            tag: ffi::FLOATS,
            ptr: items.as_ptr().cast(),
            len: items.len(),
            ..empty
        },
        Value::Bools(items) => ffi::RawValue {
            tag: ffi::BOOLS,
            ptr: items.as_ptr().cast(),
            len: items.len(),
            ..empty
        },
        // In schemas `ScalarType` is an int.
        Value::Kind(kind) => ffi::RawValue {
            tag: ffi::INT,
            i: device::scalar_code(kind),
            ..empty
        },
        Value::Device(on) => ffi::RawValue {
            tag: ffi::DEVICE,
            i: device::device_type(on).into(),
            len: usize::try_from(device::device_index(on)).unwrap_or(0),
            ..empty
        },
        Value::Str(text) => ffi::RawValue {
            tag: ffi::STR,
            ptr: text.as_ptr().cast(),
            len: text.len(),
            ..empty
        },
    }
}

/// The results of one call. They are freed when this is dropped.
struct Outputs<'a> {
    raw: *mut ffi::Outputs,
    operation: &'a str,
}

impl Outputs<'_> {
    fn read(self) -> Result<Vec<Output>> {
        // SAFETY: `raw` came from a call that succeeded and lives until `self` is dropped.
        let len = unsafe { ffi::od_outputs_len(self.raw) };
        (0..len).map(|index| self.get(index)).collect()
    }

    fn get(&self, index: usize) -> Result<Output> {
        let mut value = ffi::RawValue {
            tag: ffi::NONE,
            i: 0,
            f: 0.0,
            ptr: ptr::null(),
            len: 0,
        };
        // SAFETY: as above; the shim checks `index` and writes `value` only on success.
        let status = unsafe { ffi::od_outputs_get(self.raw, index, &raw mut value) };
        check(status, self.operation)?;
        Ok(match value.tag {
            ffi::TENSOR => Output::Tensor(self.tensor(index, 0)?),
            ffi::TENSORS => Output::Tensors(
                (0..value.len)
                    .map(|element| self.tensor(index, element))
                    .collect::<Result<_>>()?,
            ),
            ffi::INT => Output::Int(value.i),
            ffi::FLOAT => Output::Float(value.f),
            ffi::BOOL => Output::Bool(value.i != 0),
            _ => Output::None,
        })
    }

    fn tensor(&self, index: usize, element: usize) -> Result<Tensor> {
        let mut handle = ptr::null_mut();
        // SAFETY: as above; on success `handle` is a new at::Tensor, which the tch tensor owns.
        unsafe {
            let status = ffi::od_outputs_tensor(self.raw, index, element, &raw mut handle);
            check(status, self.operation)?;
            Ok(Tensor::from_ptr(handle.cast()))
        }
    }
}

impl Drop for Outputs<'_> {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_outputs_free(self.raw) }
    }
}
