use tch::{Device, Kind, Tensor};

use crate::{Activations, Error, Result, Scheme};

/// The weight `(O, I)` of a linear map, quantized and packed.
#[derive(Debug)]
pub struct QuantizedWeight {
    pub(crate) scheme: Scheme,
    pub(crate) outputs: i64,
    pub(crate) inputs: i64,
    pub(crate) storage: Storage,
    pub(crate) activations: Activations,
}

/// What a quantized weight is kept in. All tensors are contiguous and on one device.
#[derive(Debug)]
pub(crate) enum Storage {
    /// `w = codes · scale` by row: [`Scheme::Int8Dynamic`], [`Scheme::Int8WeightOnly`],
    /// [`Scheme::LlmInt8`].
    Int8 {
        /// i8 `(O, I)`, in `-127..=127`.
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
        /// Of the same shape and kind.
        offsets: Option<Tensor>,
        /// i32 `(I,)`: which input stands at each place of the codes, where they were reordered (GPTQ's
        /// `desc_act`).
        order: Option<Tensor>,
    },
    /// Code books of 16 numbers by block of the flattened weight: [`Scheme::Nf4`], [`Scheme::Fp4`].
    Blocks {
        /// u8 `(O·I/2,)`, weight `2j` in the high half of byte `j`, as in bitsandbytes.
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

/// The largest magnitude of each block.
#[derive(Debug)]
pub(crate) enum Magnitudes {
    /// f32 `(blocks,)`.
    Full(Tensor),
    /// `code_book[codes] · scale + offset`, with one scale for 256 blocks.
    Quantized {
        /// u8 `(blocks,)`.
        codes: Tensor,
        /// f32 `(256,)`.
        code_book: Tensor,
        /// f32 `(⌈blocks/256⌉,)`.
        scales: Tensor,
        offset: f32,
    },
}

impl QuantizedWeight {
    /// Quantizes `weight (O, I)` of any floating kind, on its device.
    ///
    /// # Errors
    /// [`Error::BadInput`] for other shapes and kinds and for numbers that are not finite,
    /// [`Error::BadOption`] for groups that do not divide the inputs.
    pub fn quantize(weight: &Tensor, scheme: Scheme) -> Result<QuantizedWeight> {
        let [outputs, inputs] = weight.size()[..] else {
            return Err(Error::BadInput {
                name: "weight",
                found: format!("of shape {:?}", weight.size()),
                expected: "(O, I)".to_owned(),
            });
        };
        let weight = weight.f_detach()?.f_to_kind(Kind::Float)?;
        let storage = match scheme {
            Scheme::Int8Dynamic | Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. } => {
                let scales = weight.f_abs()?.f_amax([1], true)?.f_div_scalar(127.0)?;
                let safe = scales.f_clamp_min(f64::from(f32::MIN_POSITIVE))?;
                let codes = weight.f_div(&safe)?.f_round()?.f_to_kind(Kind::Int8)?;
                Storage::Int8 {
                    codes: codes.f_contiguous()?,
                    scales: safe.f_flatten(0, 1)?,
                }
            }
            _ => {
                return Err(Error::BadOption {
                    option: "scheme",
                    found: scheme.to_string(),
                    expected: "int8, int8-weight or llm-int8".to_owned(),
                });
            }
        };
        Ok(QuantizedWeight {
            scheme,
            outputs,
            inputs,
            storage,
            activations: Activations::Auto,
        })
    }

    /// The weight `(O, I)` in full, of `kind`.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn dequantize(&self, kind: Kind) -> Result<Tensor> {
        match &self.storage {
            Storage::Int8 { codes, scales } => {
                let scales = scales.f_unsqueeze(1)?;
                Ok(codes
                    .f_to_kind(Kind::Float)?
                    .f_mul(&scales)?
                    .f_to_kind(kind)?)
            }
            _ => Err(Error::BadOption {
                option: "scheme",
                found: self.scheme.to_string(),
                expected: "int8, int8-weight or llm-int8".to_owned(),
            }),
        }
    }

    /// Rows `ids` (i64, any shape `(…)`) of the weight, dequantized to `kind`: `(…, I)`. What an embedding
    /// does.
    ///
    /// # Errors
    /// For ids outside of the rows.
    pub fn rows(&self, ids: &Tensor, kind: Kind) -> Result<Tensor> {
        let table = self.dequantize(kind)?;
        Ok(Tensor::f_embedding(&table, ids, -1, false, false)?)
    }

    /// Another handle to the same memory.
    pub fn shallow_clone(&self) -> QuantizedWeight {
        QuantizedWeight {
            storage: self.storage.shallow_clone(),
            ..*self
        }
    }

    /// How it is kept.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// `[O, I]`.
    pub fn size(&self) -> [i64; 2] {
        [self.outputs, self.inputs]
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        self.storage.tensors()[0].device()
    }

    /// Bytes of codes, scales and all that belongs to them.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &&Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.storage.tensors().iter().map(bytes).sum()
    }
}

impl Storage {
    fn shallow_clone(&self) -> Storage {
        match self {
            Storage::Int8 { codes, scales } => Storage::Int8 {
                codes: codes.shallow_clone(),
                scales: scales.shallow_clone(),
            },
            Storage::Grouped {
                codes,
                scales,
                offsets,
                order,
            } => Storage::Grouped {
                codes: codes.shallow_clone(),
                scales: scales.shallow_clone(),
                offsets: offsets.as_ref().map(Tensor::shallow_clone),
                order: order.as_ref().map(Tensor::shallow_clone),
            },
            Storage::Blocks { codes, magnitudes } => Storage::Blocks {
                codes: codes.shallow_clone(),
                magnitudes: match magnitudes {
                    Magnitudes::Full(full) => Magnitudes::Full(full.shallow_clone()),
                    Magnitudes::Quantized {
                        codes,
                        code_book,
                        scales,
                        offset,
                    } => Magnitudes::Quantized {
                        codes: codes.shallow_clone(),
                        code_book: code_book.shallow_clone(),
                        scales: scales.shallow_clone(),
                        offset: *offset,
                    },
                },
            },
            Storage::Fp8 { codes, scales } => Storage::Fp8 {
                codes: codes.shallow_clone(),
                scales: scales.shallow_clone(),
            },
        }
    }

    /// All tensors, the codes first.
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
