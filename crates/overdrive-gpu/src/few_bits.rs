use overdrive_core::Error as Common;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::counters::Counters;
use crate::kernels::Argument::{Element, F32, I32, Tensor as Elements};
use crate::kernels::{Kernels, Loaded, Request, dense, dtype};

/// The largest number of rows that a kernel is compiled for.
const ROWS: [i64; 3] = [8, 16, 64];

/// The minimum number of steps along the inputs for each program.
const LEAST_STEPS: usize = 4;

/// The largest number of programs that share outputs.
const MOST_SPLITS: usize = 16;

/// The values that codes represent, before the scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Int8 = 0,
    Fp8 = 1,
    Int4 = 2,
    Book = 3,
}

/// The kind of weight of a matmul.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted {
    pub(crate) format: Format,
    pub(crate) has_offsets: bool,
    pub(crate) is_nested: bool,
    pub(crate) has_half_scales: bool,
    /// The number of inputs that share a scale; 0: all.
    pub(crate) group: i64,
    pub(crate) book: Option<&'static [f32; 16]>,
}

/// The tensors of a weight, which match.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operands<'a> {
    pub(crate) codes: &'a Tensor,
    pub(crate) scales: &'a Tensor,
    pub(crate) offsets: Option<&'a Tensor>,
    pub(crate) nested: Option<Nested<'a>>,
    pub(crate) size: [i64; 2],
}

/// The values that the codes of scales represent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Nested<'a> {
    pub(crate) book: &'a Tensor,
    pub(crate) scales: &'a Tensor,
    pub(crate) offsets: &'a [(i64, f64)],
}

/// Matmuls of f16 or bf16 with one kind of weight, on tensor cores.
#[derive(Debug)]
pub(crate) struct FewBits {
    kernels: &'static Kernels,
    /// The kernels by the number of rows.
    buckets: Vec<Loaded>,
    book: Option<Book>,
}

/// The values of a code book in the form that the matmuls take.
#[derive(Debug)]
pub(crate) struct Book {
    /// i32 `(8,)`: the low bytes of the 16 values, then their high bytes.
    words: Tensor,
    /// The factor of the scales.
    ratio: f64,
}

impl Kernels {
    /// Returns the matmuls with weights of this kind; `None` if there are none.
    pub(crate) fn few_bits(&'static self, kind: Kind, wanted: Wanted) -> Result<Option<FewBits>> {
        let Some(dtype) = dtype(kind).filter(|_| kind != Kind::Float) else {
            return Ok(None);
        };
        let mut buckets = Vec::new();
        for rows in ROWS {
            buckets.extend(self.find(&Request {
                kernel: "few_bits",
                dtype,
                constants: vec![
                    ("FORMAT", wanted.format as i64),
                    ("OFFSET", wanted.has_offsets.into()),
                    ("NESTED", wanted.is_nested.into()),
                    ("HALF_SCALES", wanted.has_half_scales.into()),
                    ("GROUP", wanted.group),
                    ("ROWS", rows),
                ],
                least: ("ROWS", rows),
                aligned: true,
            })?);
        }
        if buckets.is_empty() {
            return Ok(None);
        }
        let book = match wanted.book {
            Some(numbers) => match self.rounded_book(numbers, kind)? {
                Some(book) => Some(book),
                None => return Ok(None),
            },
            None => None,
        };
        // Not in a capture, since the kernels were loaded outside of it.
        let mut counters = self.counters.lock();
        if counters.is_none() {
            *counters = Some(Counters::new(self.multiprocessors(), self.device())?);
        }
        Ok(Some(FewBits {
            kernels: self,
            buckets,
            book,
        }))
    }

    /// Returns a code book on the GPU, where it is cached: an upload waits for the device, which would end a capture.
    /// Returns `None` in a capture for a code book that was not used before.
    fn rounded_book(&self, numbers: &'static [f32; 16], kind: Kind) -> Result<Option<Book>> {
        let mut books = self.rounded_books.lock();
        let known = books
            .iter()
            .find(|(of, at, _)| (*of, *at) == (numbers, kind));
        if let Some((_, _, book)) = known {
            return Ok(Some(book.handle()));
        }
        if self.is_capturing()? {
            return Ok(None);
        }
        let book = Book::new(numbers, kind, self.device())?;
        let handle = book.handle();
        books.push((numbers, kind, book));
        Ok(Some(handle))
    }
}

impl FewBits {
    /// Returns `x (rows, I) · weightᵀ`, `(rows, O)` in the dtype of `x`, in one launch, or in two once the counters are
    /// used up; `None` for more rows than a launch supports.
    ///
    /// The order of the sums, and with it the last bit of a result, depends only on the sizes.
    pub(crate) fn product(&self, x: &Tensor, weight: &Operands<'_>) -> Result<Option<Tensor>> {
        let (rows, [outputs, inputs]) = (x.size()[0], weight.size);
        let fitting = self.buckets.iter().find_map(|bucket| {
            let most = bucket.variant.constant("ROWS").ok()?;
            (rows <= most).then_some((bucket, most))
        });
        let Some((bucket, most_rows)) = fitting else {
            return Ok(None);
        };
        let x = dense(x)?;
        let y = Tensor::f_empty([rows, outputs], (x.kind(), x.device()))?;
        let size = |name| bucket.variant.size(name);
        let blocks = (outputs as usize).div_ceil(size("OUTPUTS")?);
        let steps = (inputs as usize).div_ceil(size("BLOCK")? * size("SLICES")?);
        let splits = splits(blocks, steps, self.kernels.multiprocessors());
        let Some((counters, first)) = self.kernels.counters()? else {
            return Ok(None);
        };
        // Captures keep their counters. Once none are left, an additional launch clears temporary counters; not
        // splitting would cost several times as much.
        let (counters, first) = match first {
            Some(first) => (counters, first),
            None if splits == 1 => (counters, 0),
            None => (
                Tensor::f_zeros([blocks as i64], (Kind::Int, x.device()))?,
                0,
            ),
        };
        // If one program computes a block of outputs, it writes neither sums nor counters.
        let partial = match splits {
            1 => counters.f_view_dtype(Kind::Float)?,
            _ => Tensor::f_empty(
                [splits as i64, most_rows, outputs],
                (Kind::Float, x.device()),
            )?,
        };
        let mut arguments = vec![
            ("x", Elements(&x)),
            ("codes", Elements(weight.codes)),
            ("scales", Elements(weight.scales)),
        ];
        arguments.extend(weight.offsets.map(|offsets| ("offsets", Elements(offsets))));
        let book = self.book.as_ref();
        arguments.extend(book.map(|book| ("book", Elements(&book.words))));
        if let Some(nested) = weight.nested {
            arguments.extend([
                ("inner_book", Elements(nested.book)),
                ("inner_scales", Elements(nested.scales)),
            ]);
        }
        arguments.extend([
            ("y", Elements(&y)),
            ("partial", Elements(&partial)),
            ("counters", Element(&counters, first)),
            ("rows", I32(rows)),
            ("outputs", I32(outputs)),
            ("inputs", I32(inputs)),
            ("splits", I32(splits as i64)),
        ]);
        if let Some(nested) = weight.nested {
            // The outputs of weights that are not there begin behind the last one.
            let weight = |place: usize| match nested.offsets.get(place) {
                Some((_, offset)) => (outputs_before(nested.offsets, place), *offset),
                None => (outputs, 0.0),
            };
            let [first, second, third] = [0, 1, 2].map(weight);
            arguments.extend([
                ("inner_offset", F32(first.1)),
                ("second_offset", F32(second.1)),
                ("third_offset", F32(third.1)),
                ("second", I32(second.0)),
                ("third", I32(third.0)),
            ]);
        }
        arguments.extend(book.map(|book| ("ratio", F32(book.ratio))));
        self.kernels.launch(bucket, [blocks, splits], &arguments)?;
        Ok(Some(y))
    }
}

/// Returns the number of outputs of the weights before the one at `place`.
fn outputs_before(offsets: &[(i64, f64)], place: usize) -> i64 {
    offsets[..place].iter().map(|(outputs, _)| outputs).sum()
}

/// Returns the number of programs that share a block of outputs. Two programs for each multiprocessor keep enough loads
/// in flight to saturate the memory; the other constants come from the sweep in kernels/manifest.toml. If several share
/// a block, there are at most as many blocks as multiprocessors, which is the number of counters.
fn splits(blocks: usize, steps: usize, multiprocessors: usize) -> usize {
    let filling = 2 * multiprocessors / blocks.max(1);
    filling.min(steps / LEAST_STEPS).clamp(1, MOST_SPLITS)
}

impl Book {
    /// Rounds the values to a 16-bit dtype, after a multiplication by the factor from 1 to 2 that minimizes the
    /// rounding error.
    fn new(numbers: &[f32; 16], kind: Kind, device: Device) -> Result<Self> {
        let cpu = (Kind::Double, Device::Cpu);
        let numbers = Tensor::f_from_slice(numbers)?.f_to_kind(Kind::Double)?;
        let factors = Tensor::f_arange(1024, cpu)?
            .f_div_scalar(1024)?
            .f_add_scalar(1)?;
        let exact = factors.f_unsqueeze(1)?.f_mul(&numbers)?;
        let rounded = exact.f_to_kind(kind)?;
        // 0 has no relative error.
        let errors = rounded
            .f_to_kind(Kind::Double)?
            .f_div(&exact)?
            .f_sub_scalar(1)?
            .f_nan_to_num(0.0, None, None)?;
        let errors =
            errors
                .f_square()?
                .f_sum_dim_intlist([1i64].as_slice(), false, Kind::Double)?;
        let best = errors.f_argmin(None, false)?.f_int64_value(&[])?;
        let bytes = rounded
            .f_select(0, best)?
            .f_view_dtype(Kind::Uint8)?
            .f_view([16, 2])?;
        let words = bytes.f_tr()?.f_contiguous()?.f_view([32])?;
        Ok(Self {
            words: words.f_view_dtype(Kind::Int)?.f_to_device(device)?,
            ratio: 1.0 / factors.f_double_value(&[best])?,
        })
    }

    fn handle(&self) -> Self {
        Self {
            words: self.words.shallow_clone(),
            ratio: self.ratio,
        }
    }
}

/// Checks the shape of activations and returns their number of rows and inputs.
pub(crate) fn check_rows(x: &Tensor, inputs: i64) -> Result<i64> {
    match *x.size() {
        [rows, width] if width == inputs => Ok(rows),
        _ => Err(Common::shape("x", x.size(), format!("(rows, {inputs})")).into()),
    }
}

impl Kernels {
    /// Returns the table of counters, and the first counter for a launch on the current stream, or `None` in its place
    /// if no counters are left or the capture of the launch is unknown.
    fn counters(&self) -> Result<Option<(Tensor, Option<usize>)>> {
        let sequence = self.sequence()?;
        Ok(self.counters.lock().as_mut().map(|counters| {
            let first = sequence.and_then(|sequence| counters.of(sequence));
            (counters.table.shallow_clone(), first)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the values of words, times the ratio.
    fn numbers(book: &Book, kind: Kind) -> Vec<f64> {
        let bytes = book.words.view_dtype(Kind::Uint8).view([2, 16]);
        let numbers = bytes.tr().contiguous().view([32]).view_dtype(kind);
        let numbers = numbers.to_kind(Kind::Double) * book.ratio;
        Vec::try_from(numbers).unwrap()
    }

    #[test]
    fn a_book_is_rounded_as_little_as_a_factor_allows() {
        // The floats of 4 bits, which are exact times 1.5, and thirds of which no factor makes them exact.
        let fp4 = [
            0.0,
            1.0 / 192.0,
            2.0 / 3.0,
            1.0,
            1.0 / 3.0,
            0.5,
            1.0 / 6.0,
            0.25,
        ];
        let mut book = [0.0f32; 16];
        for (place, number) in fp4.into_iter().enumerate() {
            book[place] = number;
            book[place + 8] = -number;
        }
        for (kind, bound) in [(Kind::Half, 1e-7), (Kind::BFloat16, 1e-7)] {
            let rounded = Book::new(&book, kind, Device::Cpu).unwrap();
            for (found, number) in numbers(&rounded, kind).into_iter().zip(book) {
                assert!(
                    (found - f64::from(number)).abs() <= bound,
                    "{kind:?}: {found}"
                );
            }
        }
        let any: [f32; 16] = std::array::from_fn(|place| (place as f32 - 7.0) * 0.1321);
        let error = |factor_free: bool| {
            let exact = Tensor::from_slice(&any);
            match factor_free {
                true => Vec::<f64>::try_from(exact.to_kind(Kind::BFloat16).to_kind(Kind::Double)),
                false => Ok(numbers(
                    &Book::new(&any, Kind::BFloat16, Device::Cpu).unwrap(),
                    Kind::BFloat16,
                )),
            }
            .unwrap()
            .into_iter()
            .zip(any)
            .filter(|(_, number)| *number != 0.0)
            .map(|(found, number)| (found / f64::from(number) - 1.0).powi(2))
            .sum::<f64>()
        };
        assert!(error(false) <= error(true));
    }

    #[test]
    fn programs_share_outputs_where_too_few_would_run() {
        // As the sweep on a GPU of 132 multiprocessors: blocks of outputs, steps along the inputs.
        for (blocks, steps, expected) in [
            (128, 4, 1),
            (128, 16, 2),
            (256, 28, 1),
            (512, 4, 1),
            (64, 56, 4),
            (32, 64, 8),
            (1, 1000, 16),
            (1, 1, 1),
            (0, 0, 1),
        ] {
            assert_eq!(splits(blocks, steps, 132), expected, "{blocks} {steps}");
        }
        for blocks in 1..1000 {
            assert!(splits(blocks, 1000, 132) == 1 || blocks <= 132);
        }
    }
}
