//! Dequantization on the CPU: from codes to floats.

use overdrive_kernels::InstructionSet;
use tch::{Device, Kind, Tensor};

use crate::codec::code_book::Book;
use crate::codec::floats::Float;
use crate::codec::{blocks, fp8, grouped, int8, run_jobs, units_of_job};
use crate::kernel::four_bit::{MagnitudeSlices, floats, of_blocks};
use crate::tensors::bytes;
use crate::weight::Storage;
use crate::{Error, QuantizedWeight, Result, Scheme, device_dequantize};
use overdrive_kernels::tensors::{Fresh, elements};
use overdrive_kernels::with_element;

impl QuantizedWeight {
    /// Returns the dense weight `(O, I)` of `kind`, on the device of the codes. Elements are computed in f32
    /// and rounded once.
    ///
    /// # Errors
    /// [`Error::Common`] for a dtype that is not floating-point; an error of libtorch if memory runs out.
    pub fn dequantize(&self, kind: Kind) -> Result<Tensor> {
        check_kind(kind)?;
        if !self.has_codec() {
            return device_dequantize::dequantize(self, kind);
        }
        let decoder = Decoder::new(self)?;
        let (width, rows) = (decoder.width, units_of_job(decoder.width));
        // Double is computed in f32 as well, since the codes are not more precise.
        with_element!(kind, T => {
            let mut target = Fresh::<T>::new(&self.size())?;
            let jobs = target.elements_mut()?.chunks_mut(rows * width).enumerate();
            run_jobs(jobs, |(job, numbers)| {
                let mut scratch = Scratch::default();
                for (row, numbers) in numbers.chunks_mut(width).enumerate() {
                    decoder.row(job * rows + row, numbers, &mut scratch);
                }
            });
            Ok(target.into_tensor().f_to_kind(kind)?)
        })
    }

    /// Returns the rows `ids` (i64, any shape `(…)`) of the weight, dequantized to `kind`, `(…, I)`, like an
    /// embedding. Only these rows are read.
    ///
    /// # Errors
    /// [`Error::Values`] for ids that are out of range; [`Error::Common`] for ids of another dtype or device and
    /// for a dtype `kind` that is not floating-point.
    pub fn rows(&self, ids: &Tensor, kind: Kind) -> Result<Tensor> {
        check_kind(kind)?;
        if ids.f_kind()? != Kind::Int64 {
            return Err(overdrive_core::Error::dtype("ids", ids.kind(), "Int64").into());
        }
        if ids.device() != self.device() {
            let expected = format!("on {:?}, as the weight is", self.device());
            return Err(overdrive_core::Error::device("ids", ids.device(), expected).into());
        }
        let mut shape = ids.size();
        shape.push(self.inputs);
        if !self.has_codec() {
            let rows = device_dequantize::rows(self, &ids.f_flatten(0, -1)?, kind)?;
            return Ok(rows.f_view(&shape[..])?);
        }
        // On a GPU the check would wait for the device; there, libtorch checks the index.
        let ids = ids.f_contiguous()?;
        let ids = elements::<i64>(&ids)?;
        if let Some(id) = ids.iter().find(|id| !(0..self.outputs).contains(id)) {
            let expected = format!("rows from 0 to {}", self.outputs - 1);
            return Err(Error::values("ids", id.to_string(), expected));
        }
        let decoder = Decoder::new(self)?;
        let (width, rows) = (decoder.width, units_of_job(decoder.width));
        with_element!(kind, T => {
            let mut target = Fresh::<T>::new(&shape)?;
            let jobs = target.elements_mut()?.chunks_mut(rows * width).zip(ids.chunks(rows));
            run_jobs(jobs, |(numbers, ids)| {
                let mut scratch = Scratch::default();
                for (numbers, id) in numbers.chunks_mut(width).zip(ids) {
                    decoder.row(id.unsigned_abs() as usize, numbers, &mut scratch);
                }
            });
            Ok(target.into_tensor().f_to_kind(kind)?)
        })
    }
}

impl QuantizedWeight {
    /// Returns `true` if the codecs can read the weight in place.
    fn has_codec(&self) -> bool {
        self.device() == Device::Cpu && !matches!(self.storage, Storage::Tiled(_))
    }
}

fn check_kind(kind: Kind) -> Result<()> {
    match kind {
        Kind::Float | Kind::Double | Kind::BFloat16 | Kind::Half => Ok(()),
        _ => {
            let expected = "Float, Double, BFloat16 or Half";
            Err(Error::option("kind", format!("{kind:?}"), expected))
        }
    }
}

/// The buffers that a thread reuses from row to row.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    floats: Vec<f32>,
    row: RowScratch,
}

#[derive(Debug, Default)]
struct RowScratch {
    /// The elements in the order of the codes.
    reordered: Vec<f32>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
}

/// The slices of a weight on the CPU.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    /// The number of elements of a row.
    pub(crate) width: usize,
    codes: Codes<'a>,
}

#[derive(Debug)]
enum Codes<'a> {
    Int8 {
        codes: &'a [i8],
        scales: &'a [f32],
    },
    Fp8 {
        codes: &'a [u8],
        scales: &'a [f32],
        /// The number of inputs that share a scale.
        group: usize,
    },
    Grouped {
        bits: u8,
        symmetric: bool,
        signed: bool,
        /// The number of groups of a row.
        groups: usize,
        codes: &'a [u8],
        scales: MagnitudeSlices<'a>,
        offsets: Option<MagnitudeSlices<'a>>,
        order: Option<&'a [i32]>,
    },
    Blocks {
        book: Book,
        block: usize,
        codes: &'a [u8],
        magnitudes: MagnitudeSlices<'a>,
    },
}

impl<'a> Decoder<'a> {
    /// Borrows the tensors of a weight on the CPU.
    pub(crate) fn new(weight: &'a QuantizedWeight) -> Result<Decoder<'a>> {
        let codes = match &weight.storage {
            Storage::Int8 { codes, scales } => Codes::Int8 {
                codes: elements(codes)?,
                scales: elements(scales)?,
            },
            Storage::Fp8 { codes, scales } => Codes::Fp8 {
                codes: elements(codes)?,
                scales: elements(scales)?,
                group: fp8::group(scales, weight.inputs.unsigned_abs() as usize),
            },
            Storage::Grouped {
                codes,
                scales,
                offsets,
                order,
            } => Codes::Grouped {
                bits: match weight.scheme {
                    Scheme::Grouped(options) => options.bits,
                    _ => 4,
                },
                symmetric: offsets.is_none(),
                signed: codes.kind() == Kind::Int8,
                groups: scales.numel() / (weight.outputs.unsigned_abs() as usize).max(1),
                codes: bytes(codes)?,
                scales: MagnitudeSlices::Full(floats(scales)?),
                offsets: match offsets {
                    Some(offsets) => Some(MagnitudeSlices::Full(floats(offsets)?)),
                    None => None,
                },
                order: order.as_ref().map(elements).transpose()?,
            },
            Storage::Tiled(_) => {
                let expected = "a weight with its codes in rows";
                return Err(Error::option("weight", weight.scheme, expected));
            }
            Storage::Blocks { codes, magnitudes } => {
                let (book, options) = weight.scheme.blocks()?;
                Codes::Blocks {
                    book,
                    block: options.block_size,
                    codes: elements(codes)?,
                    magnitudes: of_blocks(magnitudes)?,
                }
            }
        };
        // A tensor in memory has as many elements: it fits.
        let width = weight.inputs.unsigned_abs() as usize;
        Ok(Decoder { width, codes })
    }

    /// Dequantizes row `row` to `numbers`.
    pub(crate) fn row<T: Float>(&self, row: usize, numbers: &mut [T], scratch: &mut Scratch) {
        let of_row = &mut scratch.row;
        T::write(numbers, &mut scratch.floats, |to| {
            self.floats(row, to, of_row)
        });
    }

    fn floats(&self, row: usize, to: &mut [f32], scratch: &mut RowScratch) {
        let width = self.width;
        let of_row = row * width..(row + 1) * width;
        match &self.codes {
            Codes::Int8 { codes, scales } => {
                int8::dequantize_row(&codes[of_row], scales[row], to);
            }
            Codes::Fp8 {
                codes,
                scales,
                group,
            } => {
                let groups = width.div_ceil(*group);
                let scales = &scales[row * groups..(row + 1) * groups];
                fp8::dequantize_row(&codes[of_row], *group, scales, to);
            }
            Codes::Blocks {
                book,
                block,
                codes,
                magnitudes,
            } => {
                let of_row_blocks = of_row.start / block..of_row.end.div_ceil(*block);
                let magnitudes = magnitudes.range(of_row_blocks, &mut scratch.scales);
                blocks::dequantize(codes, of_row.start, *block, *book, magnitudes, to);
            }
            Codes::Grouped { order: None, .. } => self.groups(row, to, scratch),
            Codes::Grouped {
                order: Some(order), ..
            } => {
                let mut reordered = std::mem::take(&mut scratch.reordered);
                reordered.resize(width, 0.0);
                self.groups(row, &mut reordered, scratch);
                for (input, number) in order.iter().zip(&reordered) {
                    // Constructors check that the order is a permutation of `0..width`.
                    to[input.unsigned_abs() as usize] = *number;
                }
                scratch.reordered = reordered;
            }
        }
    }

    /// Dequantizes a row of groups, in the order of the codes.
    fn groups(&self, row: usize, to: &mut [f32], scratch: &mut RowScratch) {
        let Codes::Grouped {
            bits,
            symmetric,
            signed,
            groups,
            codes,
            scales,
            offsets,
            ..
        } = &self.codes
        else {
            return;
        };
        let bytes = self.width * usize::from(*bits) / 8;
        let codes = &codes[row * bytes..(row + 1) * bytes];
        let of_row = row * groups..(row + 1) * groups;
        let offsets = offsets.as_ref().map_or(&[][..], |offsets| {
            offsets.range(of_row.clone(), &mut scratch.offsets)
        });
        let scales = scales.range(of_row, &mut scratch.scales);
        let set = InstructionSet::best();
        match bits {
            4 => {
                let zero = if *symmetric { 8.0 } else { 0.0 };
                grouped::dequantize_row_4(set, codes, zero, scales, offsets, to);
            }
            _ => grouped::dequantize_row_8(set, codes, *signed, scales, offsets, to),
        }
    }
}
