//! The constant tensors of a graph: small ones in memory, and weights that are converted when they are
//! written.

use std::fmt;

use tch::{Kind, Tensor};

use crate::Result;
use crate::proto::{StringStringEntryProto, TensorProto, data_type};

/// A named constant.
pub(crate) struct Initializer {
    pub(crate) name: String,
    pub(crate) shape: Vec<i64>,
    pub(crate) element: Element,
    pub(crate) data: Data,
}

/// The source of the elements.
pub(crate) enum Data {
    Bytes(Vec<u8>),
    /// A function that converts the weight when it is written, so that one copy is in memory at a time.
    Made(Box<dyn Fn() -> Result<Tensor>>),
}

/// The dtype of an element.
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
            // Stored as bytes: few operators of libtorch support these floats.
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
    /// Returns the number of bytes of the elements in a file.
    pub(crate) fn bytes(&self) -> u64 {
        let elements: u64 = self.shape.iter().map(|dim| dim.unsigned_abs()).product();
        elements * self.element.bytes()
    }

    /// Returns the message without the elements.
    pub(crate) fn header(&self) -> TensorProto {
        TensorProto {
            dims: self.shape.clone(),
            data_type: Some(self.element.data_type()),
            name: Some(self.name.clone()),
            ..TensorProto::default()
        }
    }

    /// Returns the message of a tensor whose elements are in `file`.
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

    /// Converts the weight; the result is contiguous and on the CPU.
    ///
    /// # Errors
    /// Errors of libtorch, and an internal error if the tensor has another shape or dtype than the planned one.
    pub(crate) fn make(&self, make: &dyn Fn() -> Result<Tensor>) -> Result<Tensor> {
        // A file has elements in row-major order, and transposed weights are views.
        let tensor = make()?
            .f_detach()?
            .f_to_device(tch::Device::Cpu)?
            .f_contiguous()?;
        // The lengths in the file come from the planned shape; another shape would corrupt the file.
        if tensor.kind() == self.element.kind() && tensor.size() == self.shape {
            return Ok(tensor);
        }
        let what = format!(
            "the tensor `{}` is {:?} of shape {:?}, but {:?} of shape {:?} was planned",
            self.name,
            tensor.kind(),
            tensor.size(),
            self.element.kind(),
            self.shape
        );
        Err(overdrive_core::Error::internal(what).into())
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
