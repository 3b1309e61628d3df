//! The source of the tensors of a quantized weight, and the checks when they are read.

use overdrive_safetensors::{Error as FileError, MappedFile, StoredTensor};
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// A source of named tensors: a file, or shards.
pub trait TensorSource {
    /// Returns the tensor `name`, or `None` if there is none.
    ///
    /// # Errors
    /// An error of a file that cannot be read.
    fn stored(&self, name: &str) -> Result<Option<StoredTensor<'_>>>;
}

impl TensorSource for MappedFile {
    fn stored(&self, name: &str) -> Result<Option<StoredTensor<'_>>> {
        match self.tensor(name) {
            Ok(tensor) => Ok(Some(tensor)),
            Err(FileError::NoTensor { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Shards; the first file that has the tensor provides it.
impl TensorSource for [MappedFile] {
    fn stored(&self, name: &str) -> Result<Option<StoredTensor<'_>>> {
        for file in self {
            if let Some(tensor) = file.stored(name)? {
                return Ok(Some(tensor));
            }
        }
        Ok(None)
    }
}

impl<T: TensorSource + ?Sized> TensorSource for &T {
    fn stored(&self, name: &str) -> Result<Option<StoredTensor<'_>>> {
        (**self).stored(name)
    }
}

/// A module whose weight is read.
#[derive(Clone, Copy)]
pub(super) struct Module<'a> {
    pub(super) source: &'a dyn TensorSource,
    pub(super) name: &'a str,
}

impl<'a> Module<'a> {
    /// Returns an error about this weight.
    pub(super) fn bad(&self, reason: impl Into<String>) -> Error {
        Error::BadWeight {
            name: format!("{}.weight", self.name),
            reason: reason.into(),
        }
    }

    /// Converts an error of a constructor to one about this weight.
    pub(super) fn built<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Common(_) | Error::Values { .. } => self.bad(error.to_string()),
            other => other,
        })
    }

    /// Returns the tensor `{module}.{part}`, if there is one.
    pub(super) fn optional(&self, part: &str) -> Result<Option<StoredTensor<'a>>> {
        self.source.stored(&format!("{}.{part}", self.name))
    }

    /// Returns the tensor `{module}.{part}`, which must exist.
    pub(super) fn required(&self, part: &str) -> Result<StoredTensor<'a>> {
        self.optional(part)?
            .ok_or_else(|| self.bad(format!("the file has no tensor `{}.{part}`", self.name)))
    }

    /// Reads a tensor of one of `kinds` and of `shape` to the CPU; `None` in the shape is any positive number.
    pub(super) fn tensor(
        &self,
        part: &str,
        kinds: &[Kind],
        shape: &[Option<i64>],
    ) -> Result<Tensor> {
        let stored = self.required(part)?;
        self.check(&stored, part, kinds, shape)?;
        Ok(stored.copy_to_tensor(None, Device::Cpu)?)
    }

    /// Checks the dtype and shape of a stored tensor, as [`tensor`](Self::tensor) does.
    pub(super) fn check(
        &self,
        stored: &StoredTensor<'_>,
        part: &str,
        kinds: &[Kind],
        shape: &[Option<i64>],
    ) -> Result<()> {
        let kind_fits = stored.kind().is_some_and(|kind| kinds.contains(&kind));
        let found = stored.shape();
        let shape_fits = found.len() == shape.len()
            && found
                .iter()
                .zip(shape)
                .all(|(&n, expected)| match expected {
                    Some(expected) => n == *expected,
                    None => n > 0,
                });
        if kind_fits && shape_fits {
            return Ok(());
        }
        let kinds: Vec<String> = kinds.iter().map(|kind| format!("{kind:?}")).collect();
        let shape: Vec<String> = shape
            .iter()
            .map(|n| n.map_or_else(|| "any".to_owned(), |n| n.to_string()))
            .collect();
        Err(self.bad(format!(
            "`{}.{part}` is {found:?} of {}; it must be [{}] of {}",
            self.name,
            stored.format(),
            shape.join(", "),
            kinds.join(" or "),
        )))
    }

    /// Reads the scales of groups: as f16 if the file has f16 or f16 represents them exactly (as it does most
    /// scales of bf16), otherwise as f32.
    pub(super) fn scales(&self, part: &str, shape: &[Option<i64>]) -> Result<Tensor> {
        narrowed(self.tensor(part, FLOATS, shape)?)
    }

    /// Reads scales as f32.
    pub(super) fn scales_f32(&self, part: &str, shape: &[Option<i64>]) -> Result<Tensor> {
        let scales = self.tensor(part, FLOATS, shape)?;
        Ok(scales.f_to_kind(Kind::Float)?)
    }
}

/// Reads `count` scales, one for each row of a weight or one for all of them, as f32 `(outputs,)`.
pub(super) fn row_scales(
    module: Module<'_>,
    part: &str,
    count: i64,
    outputs: i64,
) -> Result<Tensor> {
    let stored = module.required(part)?;
    let fits = match *stored.shape() {
        [] => count == 1,
        [n] => n == count,
        [n, 1] => n == count,
        _ => false,
    };
    if !fits {
        return Err(module.bad(format!(
            "`{part}` is {:?}; it must be [{count}, 1]",
            stored.shape()
        )));
    }
    let shape: Vec<Option<i64>> = stored.shape().iter().map(|&n| Some(n)).collect();
    let scales = module.scales_f32(part, &shape)?.f_reshape([-1])?;
    Ok(scales.f_expand([outputs], false)?.f_contiguous()?)
}

/// Returns the same numbers in f16 if it represents them exactly, otherwise in f32.
pub(super) fn narrowed(numbers: Tensor) -> Result<Tensor> {
    if numbers.kind() == Kind::Half {
        return Ok(numbers);
    }
    let numbers = numbers.f_to_kind(Kind::Float)?;
    // bf16 has fewer bits than f16 but more exponents: most scales fit, tiny ones do not.
    let half = numbers.f_to_kind(Kind::Half)?;
    let same = half.f_to_kind(Kind::Float)?.f_eq_tensor(&numbers)?;
    Ok(match same.f_all()?.f_int64_value(&[])? {
        0 => numbers,
        _ => half,
    })
}

/// The dtypes that scales have in files.
pub(super) const FLOATS: &[Kind] = &[Kind::Float, Kind::Half, Kind::BFloat16, Kind::Double];
