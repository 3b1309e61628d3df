//! GGUF files, the format of llama.cpp: read through a memory map, written tensor by tensor.
//!
//! | type | elements | becomes |
//! |---|---|---|
//! | `F64`, `F32`, `F16`, `BF16` | floats | a dense tensor |
//! | `Q8_0` | 8 bits in groups of 32 | 8 bits, symmetric |
//! | `Q6_K` | 6 bits in groups of 16 | 8 bits, symmetric |
//! | `Q5_0`, `Q5_1`, `Q5_K` | 5 bits in groups of 32 | 8 bits, symmetric or with offsets |
//! | `Q4_0`, `Q4_1`, `Q4_K` | 4 bits in groups of 32 | 4 bits, symmetric or with offsets |
//! | `Q3_K`, `Q2_K` | 3 and 2 bits in groups of 16 | 4 bits, symmetric or with offsets |
//! | `MXFP4` | 4-bit floats in blocks of 32 | the same |
//!
//! [`GgufTensor::dequantize`] returns the elements, bit for bit those of the `gguf` Python package;
//! [`GgufTensor::to_quantized`] packs the same elements as a [`QuantizedWeight`](crate::QuantizedWeight)
//! with [`Scheme::Grouped`](crate::Scheme::Grouped), so that a model runs without being dequantized.
//! The `_K` types store the scale of a group as the product of two numbers. That product is kept in f32,
//! which is exact and takes up to 4 more bits per element than the file.
//!
//! [`GgufWriter`] writes `F32`, `F16`, `BF16`, `Q8_0`, `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`, `Q4_K`, `Q5_K`, `Q6_K` and `MXFP4`, with the bytes of
//! llama.cpp's own quantizers.
//!
//! The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod decode;
mod encode;
mod file;
mod header;
mod split;
mod tensor;
mod tensor_type;
mod value;
mod writer;

pub use file::GgufFile;
pub use tensor::GgufTensor;
pub use tensor_type::GgufType;
pub use value::{GgufArray, GgufValue};
pub use writer::{GgufTensorInfo, GgufWriter};
