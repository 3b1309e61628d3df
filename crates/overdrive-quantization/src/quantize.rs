//! Quantization of dense weights.

use tch::{Device, Kind, Tensor};

use crate::codec::code_book::Book;
use crate::codec::floats::Float;
use crate::codec::grouped::{HALF_SCALES, Levels, RangeOf, RowMut};
use crate::codec::not_finite::{FirstNotFinite, NotFinite};
use crate::codec::{blocks, dynamic, fp8, grouped, int8, run_jobs, units_of_job};
use crate::weight::{Magnitudes, Storage};
use crate::{
    BlockOptions, Error, GroupOptions, GroupScales, QuantizedWeight, Result, Scheme, composed,
};
use overdrive_kernels::tensors::{Fresh, elements};
use overdrive_kernels::with_element;

impl QuantizedWeight {
    /// Quantizes `weight (O, I)` of any floating-point dtype, on its device. The weight is not changed, and gets no
    /// gradient.
    ///
    /// The codes are bit for bit those of the original libraries: bitsandbytes' `quantize_4bit` on the CPU (NF4, FP4)
    /// and `int8_vectorwise_quant` (8 bits by row), compressed-tensors (FP8). Groups have f16 scales as in GPTQ, AWQ
    /// and GGUF; for compressed-tensors' codes of an fp32 model, use
    /// [`quantize_groups`](QuantizedWeight::quantize_groups) with [`GroupScales::Float`].
    ///
    /// # Errors
    /// [`Error::Common`] for other shapes and dtypes, for elements that are not finite, for groups that do not
    /// divide the inputs, and for block sizes that bitsandbytes does not support.
    pub fn quantize(weight: &Tensor, scheme: Scheme) -> Result<QuantizedWeight> {
        quantize(weight, scheme, None, GroupScales::default())?.laid_out()
    }

    /// Quantizes `weight` in groups as [`quantize`](QuantizedWeight::quantize) does, with scales in the dtype
    /// that `scales` selects.
    ///
    /// ```
    /// use overdrive_quantization::{GroupOptions, GroupScales, QuantizedWeight};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::randn([8, 64], (Kind::Float, Device::Cpu));
    /// let options = GroupOptions { group_size: 32, ..GroupOptions::default() };
    /// let bits = |scales| -> Result<f64, overdrive_quantization::Error> {
    ///     Ok(QuantizedWeight::quantize_groups(&weight, options, scales)?.bits_per_weight())
    /// };
    /// assert_eq!((bits(GroupScales::Half)?, bits(GroupScales::Float)?), (4.5, 5.0));
    /// # Ok::<(), overdrive_quantization::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`quantize`](QuantizedWeight::quantize).
    pub fn quantize_groups(
        weight: &Tensor,
        options: GroupOptions,
        scales: GroupScales,
    ) -> Result<QuantizedWeight> {
        quantize(weight, Scheme::Grouped(options), None, scales)?.laid_out()
    }

    /// Quantizes `weight` as [`quantize`](QuantizedWeight::quantize) does, but with codes that cover a chosen range
    /// instead of the range from the smallest to the largest element. `range_of` returns the range for the elements of
    /// a group, or of a row if the scheme has one scale for each row. Elements outside are clamped. A symmetric
    /// scheme covers the larger magnitude of the two ends on both sides of zero.
    ///
    /// A weight on another device is quantized on the CPU and moved back.
    ///
    /// ```
    /// use overdrive_quantization::{QuantizedWeight, Scheme};
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let weight = Tensor::randn([8, 64], (Kind::Float, Device::Cpu));
    /// let clipped = QuantizedWeight::quantize_with(&weight, "int4-g32".parse()?, &|group| {
    ///     let most = group.iter().fold(0f32, |most, x| most.max(x.abs()));
    ///     [-0.9 * most, 0.9 * most]
    /// })?;
    /// assert_eq!(clipped.size(), [8, 64]);
    /// # Ok::<(), overdrive_quantization::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`quantize`](QuantizedWeight::quantize); [`Error::Common`] for NF4, FP4, MXFP4 and NVFP4, whose blocks are
    /// scaled by their largest magnitude.
    pub fn quantize_with(
        weight: &Tensor,
        scheme: Scheme,
        range_of: &(dyn Fn(&[f32]) -> [f32; 2] + Sync),
    ) -> Result<QuantizedWeight> {
        if scheme.blocks().is_ok() {
            let expected = "a scheme whose scales can be chosen: 8 bits by row, groups, or fp8";
            return Err(Error::option("scheme", scheme, expected));
        }
        quantize(weight, scheme, Some(range_of), GroupScales::default())?.laid_out()
    }
}

pub(crate) fn quantize(
    weight: &Tensor,
    scheme: Scheme,
    range_of: Option<RangeOf<'_>>,
    scales: GroupScales,
) -> Result<QuantizedWeight> {
    let (outputs, inputs) = match weight.size()[..] {
        [outputs, inputs] if outputs > 0 && inputs > 0 => (outputs, inputs),
        _ => {
            let expected = "(O, I) with at least one element";
            return Err(Error::shape("weight", weight.size(), expected));
        }
    };
    let weight = weight.f_detach()?;
    let weight = match weight.f_kind()? {
        Kind::Float | Kind::BFloat16 | Kind::Half => weight.f_contiguous()?,
        Kind::Double => weight.f_to_kind(Kind::Float)?.f_contiguous()?,
        kind => {
            let expected = "Float, Double, BFloat16 or Half";
            return Err(overdrive_core::Error::dtype("weight", kind, expected).into());
        }
    };
    scheme.validate(inputs)?;
    let device = weight.device();
    let storage = match (device, range_of) {
        (Device::Cpu, _) => on_cpu(&weight, [outputs, inputs], scheme, range_of, scales)?,
        (_, None) => composed::quantize(&weight, scheme, scales)?,
        (_, Some(_)) => {
            let there = weight.f_to_device(Device::Cpu)?;
            on_cpu(&there, [outputs, inputs], scheme, range_of, scales)?.to_device(device)?
        }
    };
    Ok(QuantizedWeight::of(scheme, [outputs, inputs], storage))
}

fn on_cpu(
    weight: &Tensor,
    shape: [i64; 2],
    scheme: Scheme,
    range_of: Option<RangeOf<'_>>,
    scales: GroupScales,
) -> Result<Storage> {
    with_element!(weight.kind(), T => {
        let numbers = elements::<T>(weight)?;
        let source = DenseWeight { numbers, outputs: shape[0], inputs: shape[1], range_of };
        match scheme {
            Scheme::Int8Dynamic | Scheme::Int8WeightOnly | Scheme::LlmInt8 { .. } => source.int8(),
            Scheme::Grouped(options) => source.grouped(options, scales),
            Scheme::Nf4(options) => source.blocks(Book::Nf4, options),
            Scheme::Fp4(options) => source.blocks(Book::Fp4, options),
            Scheme::Fp8 => source.fp8(),
            Scheme::Fp8Blocks => Err(scheme.is_only_read()),
            Scheme::Mxfp4 | Scheme::Nvfp4 => composed::quantize(weight, scheme, scales),
        }
    })
}

/// A weight to be quantized.
struct DenseWeight<'a, T> {
    numbers: &'a [T],
    outputs: i64,
    inputs: i64,
    range_of: Option<RangeOf<'a>>,
}

impl<T: Float> DenseWeight<'_, T> {
    fn width(&self) -> usize {
        // A slice has as many elements: it fits.
        self.inputs.unsigned_abs() as usize
    }

    /// Returns the magnitude to which a row is clamped, if the caller chooses ranges.
    fn limit(&self, row: &[f32]) -> Option<f32> {
        let [low, high] = self.range_of?(row);
        Some(low.abs().max(high.abs()))
    }

    /// Adds to the error the row and column of the element that is not finite.
    fn found(&self, found: std::result::Result<(), NotFinite>) -> Result<()> {
        found.map_err(|NotFinite { index }| {
            let mut scratch = Vec::new();
            let number = T::read(&self.numbers[index..=index], &mut scratch)[0];
            let (row, column) = (index / self.width(), index % self.width());
            not_finite(number, row, column)
        })
    }

    /// Returns codes of one byte each and one scale for each row.
    fn by_row<C: overdrive_sys::raw::Element>(
        &self,
        quantize: impl Fn(&[f32], Option<f32>, &mut [C]) -> std::result::Result<f32, NotFinite> + Sync,
    ) -> Result<(Tensor, Tensor)> {
        let mut codes = Fresh::<C>::new(&[self.outputs, self.inputs])?;
        let mut scales = Fresh::<f32>::new(&[self.outputs])?;
        let (width, rows) = (self.width(), units_of_job(self.width()));
        let bad = FirstNotFinite::none();
        let jobs = self
            .numbers
            .chunks(rows * width)
            .zip(codes.elements_mut()?.chunks_mut(rows * width))
            .zip(scales.elements_mut()?.chunks_mut(rows))
            .enumerate();
        run_jobs(jobs, |(job, ((numbers, codes), scales))| {
            let mut scratch = Vec::new();
            let each = numbers.chunks(width).zip(codes.chunks_mut(width));
            for (row, ((numbers, codes), scale)) in each.zip(scales).enumerate() {
                let numbers = T::read(numbers, &mut scratch);
                match quantize(numbers, self.limit(numbers), codes) {
                    Ok(found) => *scale = found,
                    Err(at) => return bad.record((job * rows + row) * width + at.index),
                }
            }
        });
        self.found(bad.into_result())?;
        Ok((codes.into_tensor(), scales.into_tensor()))
    }

    fn int8(&self) -> Result<Storage> {
        let (codes, scales) = self.by_row(int8::quantize_row)?;
        Ok(Storage::Int8 { codes, scales })
    }

    fn fp8(&self) -> Result<Storage> {
        let (codes, scales) = self.by_row(fp8::quantize_row)?;
        Ok(Storage::Fp8 { codes, scales })
    }

    fn grouped(&self, options: GroupOptions, scales: GroupScales) -> Result<Storage> {
        in_half(options, scales, |half| self.groups(options, half))
    }

    /// Returns groups with scales and offsets in f32; with `half` their values are rounded to f16 if they fit.
    fn groups(&self, options: GroupOptions, half: bool) -> Result<Storage> {
        let levels = Levels {
            bits: options.bits,
            symmetric: options.symmetric,
            half,
        };
        let (width, group) = (self.width(), options.group_size);
        let bytes = width * usize::from(options.bits) / 8;
        let groups = width / group;
        let shape = [self.outputs, groups as i64];
        let mut codes = Fresh::<u8>::new(&[self.outputs, bytes as i64])?;
        let mut scales = Fresh::<f32>::new(&shape)?;
        let mut offsets = Fresh::<f32>::new(if options.symmetric { &[0, 0] } else { &shape })?;
        let rows = units_of_job(width);
        let bad = FirstNotFinite::none();
        let mut offsets_of_jobs = offsets.elements_mut()?.chunks_mut(rows * groups);
        let jobs = self
            .numbers
            .chunks(rows * width)
            .zip(codes.elements_mut()?.chunks_mut(rows * bytes))
            .zip(scales.elements_mut()?.chunks_mut(rows * groups))
            .map(|(pair, scales)| (pair, scales, offsets_of_jobs.next().unwrap_or_default()))
            .enumerate();
        run_jobs(jobs, |(job, ((numbers, codes), scales, offsets))| {
            let mut scratch = Vec::new();
            let mut offsets = offsets.chunks_mut(groups);
            let each = numbers.chunks(width).zip(codes.chunks_mut(bytes));
            for (row, ((numbers, codes), scales)) in each.zip(scales.chunks_mut(groups)).enumerate()
            {
                let numbers = T::read(numbers, &mut scratch);
                let offsets = offsets.next().unwrap_or_default();
                let to = RowMut {
                    codes,
                    scales,
                    offsets,
                };
                if let Err(at) = grouped::quantize_row(numbers, group, levels, self.range_of, to) {
                    return bad.record((job * rows + row) * width + at.index);
                }
            }
        });
        self.found(bad.into_result())?;
        let codes = codes.into_tensor();
        let codes = match (options.bits, options.symmetric) {
            (8, true) => codes.f_view_dtype(Kind::Int8)?,
            _ => codes,
        };
        let offsets = (!options.symmetric).then(|| offsets.into_tensor());
        Ok(Storage::grouped(codes, scales.into_tensor(), offsets, None))
    }

    fn blocks(&self, book: Book, options: BlockOptions) -> Result<Storage> {
        let (len, block) = (self.numbers.len(), options.block_size);
        let count = len.div_ceil(block);
        let mut codes = Fresh::<u8>::new(&[len.div_ceil(2) as i64])?;
        let mut magnitudes = Fresh::<f32>::new(&[count as i64])?;
        let of_job = units_of_job(block);
        let bad = FirstNotFinite::none();
        let jobs = self
            .numbers
            .chunks(of_job * block)
            .zip(codes.elements_mut()?.chunks_mut(of_job * block / 2))
            .zip(magnitudes.elements_mut()?.chunks_mut(of_job))
            .enumerate();
        run_jobs(jobs, |(job, ((numbers, codes), magnitudes))| {
            let mut scratch = Vec::new();
            let numbers = T::read(numbers, &mut scratch);
            if let Err(at) = blocks::quantize(numbers, block, book, codes, magnitudes) {
                bad.record(job * of_job * block + at.index);
            }
        });
        self.found(bad.into_result())?;
        let magnitudes = magnitudes.into_tensor();
        Ok(Storage::Blocks {
            codes: codes.into_tensor(),
            magnitudes: match options.double_quant {
                false => Magnitudes::Full(magnitudes),
                true => double_quantized(&magnitudes)?,
            },
        })
    }
}

/// Returns the groups of `make`, whose argument is `true` if scales are to have values of f16; those are then
/// stored in f16 if they fit.
pub(crate) fn in_half(
    options: GroupOptions,
    wanted: GroupScales,
    make: impl Fn(bool) -> Result<Storage>,
) -> Result<Storage> {
    if wanted == GroupScales::Float {
        return make(false);
    }
    let mut made = make(true)?;
    let Storage::Grouped {
        scales, offsets, ..
    } = &mut made
    else {
        return Ok(made);
    };
    let largest = scales.f_max()?.f_double_value(&[])? as f32;
    if !HALF_SCALES.contains(&largest) {
        return make(false);
    }
    *scales = scales.f_to_kind(Kind::Half)?.into();
    // Multiples of scales by up to 15 are values of f16 as well, those by up to 255 are not.
    if let Some(offsets) = offsets.as_mut().filter(|_| options.bits == 4) {
        *offsets = offsets.f_to_kind(Kind::Half)?.into();
    }
    Ok(made)
}

/// Returns the magnitudes of blocks (f32, on any device) quantized to 8 bits.
pub(crate) fn double_quantized(magnitudes: &Tensor) -> Result<Magnitudes> {
    let device = magnitudes.device();
    // libtorch's own mean, because bitsandbytes sums in the same order.
    let offset = magnitudes.f_mean(Kind::Float)?.f_double_value(&[])? as f32;
    let magnitudes = magnitudes.f_to_device(Device::Cpu)?;
    let numbers = elements::<f32>(&magnitudes)?;
    let mut codes = Fresh::<u8>::new(&[numbers.len() as i64])?;
    let mut scales = Fresh::<f32>::new(&[numbers.len().div_ceil(dynamic::BLOCK) as i64])?;
    dynamic::quantize(
        numbers,
        offset,
        codes.elements_mut()?,
        scales.elements_mut()?,
    )
    .map_err(|NotFinite { index }| {
        let found =
            format!("values in block {index} at which the mean of the magnitudes overflows");
        let expected = "smaller values; or quantize it without double quantization";
        Error::values("weight", found, expected)
    })?;
    let code_book = Tensor::f_from_slice(dynamic::code_book())?;
    Ok(Magnitudes::Quantized {
        codes: codes.into_tensor().f_to_device(device)?,
        code_book: code_book.f_to_device(device)?,
        scales: scales.into_tensor().f_to_device(device)?,
        offset,
    })
}

pub(crate) fn not_finite(number: f32, row: usize, column: usize) -> Error {
    let expected = "finite values; a weight that has diverged cannot be quantized";
    Error::values("weight", format!("{number} at [{row}, {column}]"), expected)
}
