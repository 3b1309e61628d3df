//! Tensors as a pickle describes them: a storage, an offset, a shape and strides.

use tch::Kind;

use crate::error::{Checked, bad};
use crate::globals::{Dtype, Global};
use crate::machine::{Id, Machine, Value};

/// The largest number of dimensions, which is libtorch's.
pub(crate) const MAX_RANK: usize = 64;

/// The longest name of a storage in bytes; each of its tensors copies the name. PyTorch's names are decimal numbers.
const MAX_KEY: usize = 64;

/// A storage: a block of elements, which several tensors may share.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StorageRef {
    /// The name of the block in the file.
    pub(crate) key: String,
    /// The type of the elements; `None` for bytes.
    pub(crate) dtype: Option<&'static Dtype>,
    /// The number of elements.
    pub(crate) elements: usize,
}

/// A tensor in a storage.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TensorRef {
    pub(crate) storage: StorageRef,
    pub(crate) kind: Kind,
    /// The index of the first element.
    pub(crate) offset: usize,
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<usize>,
}

/// Returns the storage that a persistent id describes: `("storage", class, key, location, elements)`, and in older
/// files also a view, which is always `None`.
pub(crate) fn storage(machine: &Machine, id: Id) -> Checked<StorageRef> {
    let Value::Tuple(items) = machine.value(id) else {
        return bad("a storage is not a tuple");
    };
    let values: Vec<&Value> = items.iter().take(6).map(|&id| machine.value(id)).collect();
    match values[..] {
        [
            Value::Text(word),
            Value::Global(Global::Storage(dtype)),
            Value::Text(key),
            _,
            Value::Int(elements),
            ref view @ ..,
        ] if word == "storage" && matches!(view, [] | [Value::None]) => {
            if key.len() > MAX_KEY {
                return bad(format!("a storage has a name of {} bytes", key.len()));
            }
            Ok(StorageRef {
                key: key.clone(),
                dtype: *dtype,
                elements: size(*elements)?,
            })
        }
        _ => bad("a storage is not described by its class, key and length"),
    }
}

/// Returns the tensor that the arguments of `_rebuild_tensor_v2` (storage, offset, size, stride, …) or `_v3` (with a
/// dtype as the seventh) describe, checked against its storage; a value to skip for a dtype that is not read.
pub(crate) fn rebuild(machine: &Machine, arguments: &[Id], typed: bool) -> Checked<Value> {
    let values: Vec<&Value> = arguments
        .iter()
        .take(8)
        .map(|&id| machine.value(id))
        .collect();
    let [
        Value::Storage(storage),
        Value::Int(offset),
        Value::Tuple(shape),
        Value::Tuple(strides),
        ref rest @ ..,
    ] = values[..]
    else {
        return bad("a tensor is not described by its storage, offset, shape and strides");
    };
    let dtype = match (typed, rest.get(2)) {
        (true, Some(Value::Global(Global::Dtype(dtype)))) => Some(*dtype),
        (true, _) => None,
        (false, _) => storage.dtype,
    };
    let Some(dtype) = dtype else {
        return bad("a tensor has no dtype");
    };
    let Some(kind) = dtype.kind else {
        return Ok(Value::Unread);
    };
    // The last argument names the values that are conjugated or negated when they are read.
    let metadata = rest.get(if typed { 3 } else { 2 });
    if matches!(metadata, Some(Value::Dict(bits)) if !bits.is_empty()) {
        return Ok(Value::Unread);
    }
    let tensor = TensorRef {
        storage: storage.as_ref().clone(),
        kind,
        offset: size(*offset)?,
        shape: sizes(machine, shape)?,
        strides: sizes(machine, strides)?,
    };
    tensor.check()?;
    Ok(Value::Tensor(Box::new(tensor)))
}

fn sizes(machine: &Machine, ids: &[Id]) -> Checked<Vec<usize>> {
    if ids.len() > MAX_RANK {
        return bad(format!("a tensor has {} dimensions", ids.len()));
    }
    let number = |&id: &Id| match machine.value(id) {
        Value::Int(value) => size(*value),
        _ => bad("a dimension is not an integer"),
    };
    ids.iter().map(number).collect()
}

/// Returns a size that libtorch can hold.
fn size(value: i128) -> Checked<usize> {
    match i64::try_from(value)
        .ok()
        .and_then(|value| usize::try_from(value).ok())
    {
        Some(value) => Ok(value),
        None => bad(format!("a size is {value}")),
    }
}

impl TensorRef {
    /// Checks that the elements lie in the storage.
    fn check(&self) -> Checked<()> {
        let wrong = |what: &str| bad(format!("a tensor of shape {:?} {what}", self.shape));
        if self.shape.len() != self.strides.len() {
            return wrong("has the wrong number of strides");
        }
        // Zeros are left out of the product, because libtorch multiplies in any order.
        let product = self
            .shape
            .iter()
            .try_fold(1_usize, |all, &n| all.checked_mul(n.max(1)));
        if product.is_none_or(|product| i64::try_from(product).is_err()) {
            return wrong("has more elements than memory can hold");
        }
        if self.elements() == 0 {
            return Ok(());
        }
        let dimensions = self.shape.iter().zip(&self.strides);
        let last = dimensions.fold(self.offset as u128, |last, (&n, &stride)| {
            last + (n as u128 - 1) * stride as u128
        });
        let bytes = self.storage.bytes_per_element();
        // An untyped storage counts bytes, and the tensor counts elements.
        let end = (last + 1).saturating_mul(self.kind.elt_size_in_bytes() as u128);
        if end > self.storage.elements as u128 * bytes as u128 {
            return wrong("exceeds its storage");
        }
        Ok(())
    }

    /// Returns the number of elements.
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns `true` if the elements are contiguous.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut expected = 1;
        for (&n, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if n != 1 && stride != expected {
                return false;
            }
            expected *= n;
        }
        true
    }

    /// Copies the elements out of the bytes of the storage into contiguous order.
    pub(crate) fn gather(&self, storage: &[u8]) -> Vec<u8> {
        let bytes = self.kind.elt_size_in_bytes();
        let mut copied = Vec::with_capacity(self.elements() * bytes);
        let mut index = vec![0; self.shape.len()];
        let mut at = self.offset;
        for _ in 0..self.elements() {
            copied.extend_from_slice(&storage[at * bytes..(at + 1) * bytes]);
            for dimension in (0..index.len()).rev() {
                index[dimension] += 1;
                at += self.strides[dimension];
                if index[dimension] < self.shape[dimension] {
                    break;
                }
                at -= self.strides[dimension] * self.shape[dimension];
                index[dimension] = 0;
            }
        }
        copied
    }
}

impl StorageRef {
    fn bytes_per_element(&self) -> usize {
        self.dtype.map_or(1, |dtype| dtype.bytes)
    }

    /// Returns the number of bytes; `None` on overflow.
    pub(crate) fn bytes(&self) -> Option<usize> {
        self.elements.checked_mul(self.bytes_per_element())
    }
}
