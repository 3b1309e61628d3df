use std::convert::Infallible;

use overdrive_sys::cuda::on_device;
use overdrive_sys::raw::LocatedTensor;
use tch::{Device, Kind, Tensor};

use crate::tiles::{self, Tiled};
use crate::{Activations, Error, Result, Scheme, gpu};

/// The quantized weight `(O, I)` of a linear layer.
#[derive(Debug)]
pub struct QuantizedWeight {
    pub(crate) scheme: Scheme,
    pub(crate) outputs: i64,
    pub(crate) inputs: i64,
    pub(crate) storage: Storage,
    pub(crate) activations: Activations,
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
        codes: LocatedTensor,
        /// f32 or f16 `(O, I/group)`.
        scales: LocatedTensor,
        /// f32 or f16, of the same shape.
        offsets: Option<LocatedTensor>,
        /// i32 `(I,)`: the input of each column of the codes, if they were reordered (GPTQ's `desc_act`).
        order: Option<LocatedTensor>,
    },
    /// 4-bit groups with the codes in the order of a GPU's tensor cores; only on GPUs.
    Tiled(Tiled),
    /// Codes of a code book of 16 values, with a magnitude for each block of the flattened weight: [`Scheme::Nf4`],
    /// [`Scheme::Fp4`], [`Scheme::Mxfp4`], [`Scheme::Nvfp4`].
    Blocks {
        /// u8 `(⌈O·I/2⌉,)`, weight `2j` in the high half of byte `j`, as in bitsandbytes.
        codes: Tensor,
        magnitudes: Magnitudes,
    },
    /// `w = codes · scale` by row: [`Scheme::Fp8`], or by group of 128 inputs: [`Scheme::Fp8Blocks`].
    Fp8 {
        /// e4m3 in u8 `(O, I)`.
        codes: Tensor,
        /// f32 `(O,)`, or for blocks `(O, ⌈I/128⌉)`: each row has the scales of its blocks, so that rows can be
        /// selected.
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
    /// Creates a weight from a storage whose tensors fit the scheme and the shape.
    pub(crate) fn of(scheme: Scheme, [outputs, inputs]: [i64; 2], storage: Storage) -> Self {
        QuantizedWeight {
            scheme,
            outputs,
            inputs,
            storage,
            activations: Activations::Auto,
        }
    }

    /// Returns another handle to the same memory.
    pub fn shallow_clone(&self) -> QuantizedWeight {
        QuantizedWeight {
            storage: self.storage.shallow_clone(),
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
        match &self.storage {
            Storage::Grouped { codes, .. } => codes.device(),
            storage => storage.codes().device(),
        }
    }

    /// Returns the weight on `device`: a copy, or another handle if it is there already.
    ///
    /// A 4-bit weight in groups stays in rows on a GPU on which the kernels of overdrive-gpu are on. On other GPUs from
    /// Ampere on, it is converted to the order of libtorch's operator, and converted back when it leaves the GPU.
    ///
    /// # Errors
    /// An error of libtorch if memory runs out or there is no such device.
    pub fn to_device(&self, device: Device) -> Result<QuantizedWeight> {
        if device == self.device() {
            return self.shallow_clone().laid_out();
        }
        let rows = self.in_rows()?;
        QuantizedWeight {
            storage: rows.storage.to_device(device)?,
            ..rows
        }
        .laid_out()
    }

    /// Returns the weight in the order that is fastest on its device. The codes in their old order are freed with their
    /// last handle.
    pub(crate) fn laid_out(self) -> Result<QuantizedWeight> {
        let Device::Cuda(index) = self.device() else {
            return Ok(self);
        };
        let capability = overdrive_sys::cuda::compute_capability(index).ok();
        if !tiles::apply(capability, self.scheme, self.size()) || gpu::takes_rows(&self)? {
            return Ok(self);
        }
        let convert = |codes: &Tensor, adjacent| -> Result<Tensor> {
            Ok(codes.f_internal_convert_weight_to_int4pack(adjacent)?)
        };
        Ok(match Tiled::new(&self, convert)? {
            Some(tiled) => QuantizedWeight {
                storage: Storage::Tiled(tiled),
                ..self
            },
            None => self,
        })
    }

    /// Returns the weight with its codes in rows, as files and codecs have them.
    pub(crate) fn in_rows(&self) -> Result<QuantizedWeight> {
        Ok(match &self.storage {
            Storage::Tiled(tiled) => QuantizedWeight {
                storage: tiled.rows(self.inputs)?,
                ..*self
            },
            _ => self.shallow_clone(),
        })
    }

    /// Returns the average number of bits of an element, including its share of scales and offsets.
    pub fn bits_per_weight(&self) -> f64 {
        self.bytes() as f64 * 8.0 / (self.outputs * self.inputs) as f64
    }

    /// Returns the number of bytes of all tensors of the weight. On a GPU without the kernels of overdrive-gpu, a 4-bit
    /// weight in groups also stores its scales in bf16, for libtorch's operator.
    pub fn bytes(&self) -> usize {
        let bytes = |tensor: &&Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        self.storage.tensors().iter().map(bytes).sum()
    }
}

impl Storage {
    pub(crate) fn grouped(
        codes: Tensor,
        scales: Tensor,
        offsets: Option<Tensor>,
        order: Option<Tensor>,
    ) -> Storage {
        Storage::Grouped {
            codes: codes.into(),
            scales: scales.into(),
            offsets: offsets.map(LocatedTensor::from),
            order: order.map(LocatedTensor::from),
        }
    }

    fn shallow_clone(&self) -> Storage {
        // `Infallible` makes the match complete without a panic.
        match self.map(|tensor| Ok::<_, Infallible>(tensor.shallow_clone())) {
            Ok(storage) => storage,
        }
    }

    pub(crate) fn to_device(&self, device: Device) -> Result<Storage> {
        self.map(|tensor| on_device(device, tensor.f_to_device(device).map_err(Error::from)))
    }

    /// Returns views of `count` outputs from `first` on. Not for blocks of codes and tiles, which may span outputs.
    pub(crate) fn narrowed(&self, first: i64, count: i64) -> Result<Storage> {
        self.by_row(|tensor| tensor.f_narrow(0, first, count))
    }

    /// Returns a storage with the rows that `of` selects from each tensor.
    pub(crate) fn by_row(
        &self,
        of: impl Fn(&Tensor) -> std::result::Result<Tensor, tch::TchError>,
    ) -> Result<Storage> {
        self.map(|tensor| match tensor.kind() {
            // The order belongs to the inputs; all other tensors have one row for each output.
            Kind::Int => Ok(tensor.shallow_clone()),
            _ => Ok(of(tensor)?),
        })
    }

    /// Returns a storage of the same form, with `of` applied to each tensor.
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
            } => Storage::grouped(
                of(codes)?,
                of(scales)?,
                offsets.as_deref().map(&of).transpose()?,
                order.as_deref().map(&of).transpose()?,
            ),
            Storage::Tiled(tiled) => Storage::Tiled(Tiled {
                codes: of(&tiled.codes)?,
                scales_and_zeros: of(&tiled.scales_and_zeros)?,
                scales: of(&tiled.scales)?,
                offsets: tiled.offsets.as_ref().map(&of).transpose()?,
                order: tiled.order.as_ref().map(&of).transpose()?,
            }),
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

    /// Returns the codes.
    pub(crate) fn codes(&self) -> &Tensor {
        match self {
            Storage::Int8 { codes, .. }
            | Storage::Fp8 { codes, .. }
            | Storage::Blocks { codes, .. } => codes,
            Storage::Grouped { codes, .. } => codes,
            Storage::Tiled(tiled) => &tiled.codes,
        }
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
                .map(|tensor| &**tensor)
                .collect(),
            Storage::Tiled(tiled) => [
                Some(&tiled.codes),
                Some(&tiled.scales_and_zeros),
                Some(&tiled.scales),
                tiled.offsets.as_ref(),
                tiled.order.as_ref(),
            ]
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
