use std::convert::Infallible;

use tch::{Device, Tensor};

use crate::linear::Tiles;
use crate::{Activations, Result, Scheme};

/// The quantized weight `(O, I)` of a linear layer.
#[derive(Debug)]
pub struct QuantizedWeight {
    pub(crate) scheme: Scheme,
    pub(crate) outputs: i64,
    pub(crate) inputs: i64,
    pub(crate) storage: Storage,
    pub(crate) activations: Activations,
    /// The codes in the order of a GPU's tensor cores; empty until the first GEMM there makes them.
    pub(crate) tiles: Tiles,
}

/// The tensors of a quantized weight. All are contiguous and on one device.
#[derive(Debug)]
pub(crate) enum Storage {
    /// `w = codes · scale` by row: [`Scheme::Int8Dynamic`], [`Scheme::Int8WeightOnly`],
    /// [`Scheme::LlmInt8`].
    Int8 {
        /// i8 `(O, I)`, in `-127..=127`; -128 only in weights from files of other programs.
        codes: Tensor,
        /// f32 `(O,)`.
        scales: Tensor,
    },
    /// `w = (code − zero) · scale + offset` by group of inputs: [`Scheme::Grouped`]. `zero` is 8 at 4
    /// bits and 0 (codes are signed) at 8 where the scheme is symmetric, and 0 where there are offsets.
    Grouped {
        /// 4 bits: u8 `(O, I/2)`, input `2j` in the low half of byte `j`, codes in `0..16`.
        /// 8 bits: u8 or i8 `(O, I)`.
        codes: Tensor,
        /// f32 or f16 `(O, I/group)`.
        scales: Tensor,
        /// f32 or f16, of the same shape.
        offsets: Option<Tensor>,
        /// i32 `(I,)`: the input of each column of the codes, if they were reordered (GPTQ's `desc_act`).
        order: Option<Tensor>,
    },
    /// Codes of a book of 16 numbers, with a magnitude for each block of the flattened weight: [`Scheme::Nf4`], [`Scheme::Fp4`].
    Blocks {
        /// u8 `(⌈O·I/2⌉,)`, weight `2j` in the high half of byte `j`, as in bitsandbytes.
        codes: Tensor,
        magnitudes: Magnitudes,
    },
    /// `w = codes · scale` by row: [`Scheme::Fp8`].
    Fp8 {
        /// e4m3 in u8 `(O, I)`.
        codes: Tensor,
        /// f32 `(O,)`.
        scales: Tensor,
    },
}

/// The largest magnitude of each block of an NF4 or FP4 weight.
#[derive(Debug)]
pub enum Magnitudes {
    /// The magnitudes, f32 `(⌈O·I/block⌉,)`; the last block may be shorter.
    Full(Tensor),
    /// The magnitudes in 8 bits, `code_book[codes] · scale + offset` (double quantization), with one scale
    /// for each 256 blocks.
    Quantized {
        /// The codes, u8 `(blocks,)`.
        codes: Tensor,
        /// The number of each code, f32 `(256,)`.
        code_book: Tensor,
        /// The scales, f32 `(⌈blocks/256⌉,)`.
        scales: Tensor,
        /// The mean of the magnitudes.
        offset: f32,
    },
}

impl QuantizedWeight {
    /// Returns the weight of a storage whose tensors fit the scheme and the shape.
    pub(crate) fn of(scheme: Scheme, [outputs, inputs]: [i64; 2], storage: Storage) -> Self {
        QuantizedWeight {
            scheme,
            outputs,
            inputs,
            storage,
            activations: Activations::Auto,
            tiles: Tiles::default(),
        }
    }

    /// Returns another handle to the same memory.
    pub fn shallow_clone(&self) -> QuantizedWeight {
        QuantizedWeight {
            storage: self.storage.shallow_clone(),
            tiles: self.tiles.clone(),
            ..*self
        }
    }

    /// Returns `true` if both are handles to the same memory, as a [shallow clone](Self::shallow_clone) is.
    pub fn shares_storage_with(&self, other: &QuantizedWeight) -> bool {
        let (own, others) = (self.storage.tensors(), other.storage.tensors());
        own.len() == others.len()
            && own
                .iter()
                .zip(others)
                .all(|(own, other)| own.data_ptr() == other.data_ptr())
    }

    /// Returns the scheme of the codes and scales.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Returns the shape `[O, I]`.
    pub fn size(&self) -> [i64; 2] {
        [self.outputs, self.inputs]
    }

    /// Returns the device of the codes and scales.
    pub fn device(&self) -> Device {
        self.storage.tensors()[0].device()
    }

    /// Returns the weight on `device`: a copy, or another handle if it is there already.
    ///
    /// # Errors
    /// An error of libtorch if memory runs out or there is no such device.
    pub fn to_device(&self, device: Device) -> Result<QuantizedWeight> {
        Ok(QuantizedWeight {
            storage: self.storage.to_device(device)?,
            // Those of the other device are of no use here.
            tiles: Tiles::default(),
            ..*self
        })
    }

    /// Returns the average number of bits of an element, with its share of scales and offsets.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes() as f64 * 8.0 / (self.outputs * self.inputs) as f64
    }

    /// Returns the number of bytes of all tensors of the weight. On a GPU a weight of 4 bits in groups has
    /// its codes twice from the first bf16 GEMM on: also in the order of the tensor cores.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &&Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.storage.tensors().iter().map(bytes).sum::<usize>() + self.tiles.bytes()
    }
}

impl Storage {
    fn shallow_clone(&self) -> Storage {
        // `Infallible` makes the match complete without a panic.
        match self.map(|tensor| Ok::<_, Infallible>(tensor.shallow_clone())) {
            Ok(storage) => storage,
        }
    }

    pub(crate) fn to_device(&self, device: Device) -> Result<Storage> {
        self.map(|tensor| Ok(tensor.f_to_device(device)?))
    }

    /// Returns a storage of the same form, with each tensor replaced by `of` of it.
    pub(crate) fn map<E>(
        &self,
        of: impl Fn(&Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<Storage, E> {
        Ok(match self {
            Storage::Int8 { codes, scales } => Storage::Int8 {
                codes: of(codes)?,
                scales: of(scales)?,
            },
            Storage::Fp8 { codes, scales } => Storage::Fp8 {
                codes: of(codes)?,
                scales: of(scales)?,
            },
            Storage::Grouped {
                codes,
                scales,
                offsets,
                order,
            } => Storage::Grouped {
                codes: of(codes)?,
                scales: of(scales)?,
                offsets: offsets.as_ref().map(&of).transpose()?,
                order: order.as_ref().map(&of).transpose()?,
            },
            Storage::Blocks { codes, magnitudes } => Storage::Blocks {
                codes: of(codes)?,
                magnitudes: match magnitudes {
                    Magnitudes::Full(full) => Magnitudes::Full(of(full)?),
                    Magnitudes::Quantized {
                        codes,
                        code_book,
                        scales,
                        offset,
                    } => Magnitudes::Quantized {
                        codes: of(codes)?,
                        code_book: of(code_book)?,
                        scales: of(scales)?,
                        offset: *offset,
                    },
                },
            },
        })
    }

    /// Returns all tensors, the codes first.
    pub(crate) fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Storage::Int8 { codes, scales } | Storage::Fp8 { codes, scales } => vec![codes, scales],
            Storage::Grouped {
                codes,
                scales,
                offsets,
                order,
            } => [Some(codes), Some(scales), offsets.as_ref(), order.as_ref()]
                .into_iter()
                .flatten()
                .collect(),
            Storage::Blocks { codes, magnitudes } => match magnitudes {
                Magnitudes::Full(magnitudes) => vec![codes, magnitudes],
                Magnitudes::Quantized {
                    codes: inner,
                    code_book,
                    scales,
                    ..
                } => vec![codes, inner, code_book, scales],
            },
        }
    }
}
