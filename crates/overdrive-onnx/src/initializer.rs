//! Constant tensors of a graph: small ones that are there, and weights that are made when they are
//! written.

use std::fmt;

use tch::{Kind, Tensor};

use crate::proto::{StringStringEntryProto, TensorProto, data_type};
use crate::{Error, Result};

/// A named constant.
pub(crate) struct Initializer {
    pub(crate) name: String,
    pub(crate) shape: Vec<i64>,
    pub(crate) element: Element,
    pub(crate) data: Data,
}

/// Where the numbers come from.
pub(crate) enum Data {
    Bytes(Vec<u8>),
    /// Made when it is written, so that one tensor's copy is in memory at a time.
    Made(Box<dyn Fn() -> Result<Tensor>>),
}

/// The format of a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
    F8,
    U8,
    I8,
    I64,
}

impl Element {
    pub(crate) fn data_type(self) -> i32 {
        match self {
            Element::F32 => data_type::FLOAT,
            Element::F16 => data_type::FLOAT16,
            Element::F8 => data_type::FLOAT8E4M3FN,
            Element::U8 => data_type::UINT8,
            Element::I8 => data_type::INT8,
            Element::I64 => data_type::INT64,
        }
    }

    pub(crate) fn kind(self) -> Kind {
        match self {
            Element::F32 => Kind::Float,
            Element::F16 => Kind::Half,
            // As bytes: few operators of libtorch know these floats.
            Element::F8 | Element::U8 => Kind::Uint8,
            Element::I8 => Kind::Int8,
            Element::I64 => Kind::Int64,
        }
    }

    fn bytes(self) -> u64 {
        match self {
            Element::F32 => 4,
            Element::F16 => 2,
            Element::F8 | Element::U8 | Element::I8 => 1,
            Element::I64 => 8,
        }
    }
}

impl Initializer {
    /// How many bytes the numbers take in a file.
    pub(crate) fn bytes(&self) -> u64 {
        let numbers: u64 = self.shape.iter().map(|dim| dim.unsigned_abs()).product();
        numbers * self.element.bytes()
    }

    /// The message without its numbers.
    pub(crate) fn header(&self) -> TensorProto {
        TensorProto {
            dims: self.shape.clone(),
            data_type: Some(self.element.data_type()),
            name: Some(self.name.clone()),
            ..TensorProto::default()
        }
    }

    /// The message of a tensor whose numbers are in `file`.
    pub(crate) fn external(&self, file: &str, offset: u64) -> TensorProto {
        let entry = |key: &str, value: String| StringStringEntryProto {
            key: Some(key.to_owned()),
            value: Some(value),
        };
        TensorProto {
            external_data: vec![
                entry("location", file.to_owned()),
                entry("offset", offset.to_string()),
                entry("length", self.bytes().to_string()),
            ],
            data_location: Some(crate::proto::EXTERNAL),
            ..self.header()
        }
    }

    /// The numbers, contiguous on the CPU.
    ///
    /// # Errors
    /// Those of libtorch; a tensor of another size than was said, which is an error of this crate.
    pub(crate) fn make(&self, make: &dyn Fn() -> Result<Tensor>) -> Result<Tensor> {
        let tensor = make()?
            .f_detach()?
            .f_to_device(tch::Device::Cpu)?
            .f_contiguous()?;
        if tensor.kind() == self.element.kind() && tensor.size() == self.shape {
            return Ok(tensor);
        }
        Err(Error::unsupported(
            format!("the tensor `{}`", self.name),
            format!("{:?} of {:?}", tensor.size(), tensor.kind()),
            format!(
                "{:?} of {:?} was planned (please report this)",
                self.shape,
                self.element.kind()
            ),
        ))
    }
}

impl fmt::Debug for Initializer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initializer")
            .field("name", &self.name)
            .field("shape", &self.shape)
            .field("element", &self.element)
            .finish_non_exhaustive()
    }
}
