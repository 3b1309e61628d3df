use overdrive_core::Error as Common;
use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{I32, I64, Tensor as Elements};
use crate::kernels::{Argument, Kernels, Loaded, Request, dense, dtype, is_aligned};

/// The largest number of rows that are multiplied with codes. For more rows the weight is dequantized, because the
/// decoding of codes takes more time than reading them.
pub const MOST_ROWS: i64 = 8;

/// The rows that share the decoded numbers.
pub(crate) const ROWS_TOGETHER: i64 = 4;

/// A weight `(O, I)` of 4-bit codes. Each group of inputs of an output has a scale; all tensors are contiguous.
#[derive(Debug, Clone, Copy)]
pub struct FourBitWeight<'a> {
    /// The codes, u8 with `O·I/2` elements.
    pub codes: &'a Tensor,
    /// The scales, f32 or f16 with `O·I/group` elements.
    pub scales: &'a Tensor,
    /// The numbers of the codes.
    pub numbers: FourBitNumbers<'a>,
    /// The outputs, `O`.
    pub outputs: i64,
    /// The inputs, `I`: a multiple of the group.
    pub inputs: i64,
    /// The inputs that share a scale.
    pub group: i64,
}

/// The numbers that codes of 4 bits stand for, before the scale.
#[derive(Debug, Clone, Copy)]
pub enum FourBitNumbers<'a> {
    /// The numbers of a book. The first of two codes is in the high half of a byte, and scales are f32.
    Book(&'static [f32; 16]),
    /// The codes minus 8. The first of two codes is in the low half of a byte.
    Centered,
    /// The codes, in the same order; an offset, of the shape and dtype of the scales, is added after the scale.
    Offset(&'a Tensor),
}

/// Products with 4-bit weights, and their dequantization, for one dtype of activations and one layout of weights.
#[derive(Debug)]
pub struct FourBit {
    kernels: &'static Kernels,
    kind: Kind,
    one_row: Loaded,
    rows: Loaded,
    dequantize: Loaded,
    book: Option<Tensor>,
}

impl Kernels {
    /// Returns the kernels for activations of a dtype and weights like this one; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn four_bit(
        &'static self,
        kind: Kind,
        weight: &FourBitWeight<'_>,
    ) -> Result<Option<FourBit>> {
        let tensors = [weight.codes, weight.scales];
        let fits = weight.group > 0
            && weight.inputs % weight.group == 0
            && tensors
                .iter()
                .all(|tensor| tensor.is_contiguous() && is_aligned(tensor));
        let Some(dtype) = dtype(kind).filter(|_| fits) else {
            return Ok(None);
        };
        let half = match weight.scales.kind() {
            Kind::Float => 0,
            Kind::Half => 1,
            _ => return Ok(None),
        };
        let (book, offset) = match weight.numbers {
            FourBitNumbers::Book(_) => (1, 0),
            FourBitNumbers::Centered => (0, 0),
            FourBitNumbers::Offset(_) => (0, 1),
        };
        let find = |kernel, rows: Option<i64>| {
            let mut constants = vec![
                ("BOOK", book),
                ("OFFSET", offset),
                ("HALF_SCALES", half),
                ("GROUP", weight.group),
            ];
            constants.extend(rows.map(|rows| ("ROWS", rows)));
            self.find(&Request {
                kernel,
                dtype,
                constants,
                least: ("GROUPS", 1),
                aligned: true,
            })
        };
        let one_row = find("few_rows_4bit", Some(1))?;
        let rows = find("few_rows_4bit", Some(ROWS_TOGETHER))?;
        let dequantize = find("dequantize_4bit", None)?;
        let book = match weight.numbers {
            FourBitNumbers::Book(numbers) => Some(self.book(numbers)?),
            _ => None,
        };
        Ok(match (one_row, rows, dequantize) {
            (Some(one_row), Some(rows), Some(dequantize)) => Some(FourBit {
                kernels: self,
                kind,
                one_row,
                rows,
                dequantize,
                book,
            }),
            _ => None,
        })
    }
}

impl FourBit {
    /// Returns `x (rows, I) · weightᵀ`, `(rows, O)` in the dtype of `x`, in one launch.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors that do not fit each other,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn product(&self, x: &Tensor, weight: &FourBitWeight<'_>) -> Result<Tensor> {
        check(weight)?;
        let size = x.size();
        if size.len() != 2 || size[1] != weight.inputs {
            return Err(Common::shape("x", size, format!("(rows, {})", weight.inputs)).into());
        }
        let x = dense(x)?;
        let rows = size[0];
        let loaded = match rows {
            1 => &self.one_row,
            _ => &self.rows,
        };
        let y = Tensor::f_empty([rows, weight.outputs], (self.kind, x.device()))?;
        let mut arguments = vec![("x", Elements(&x))];
        arguments.extend(self.arguments(weight));
        arguments.extend([
            ("y", Elements(&y)),
            ("rows", I32(rows)),
            ("outputs", I32(weight.outputs)),
            ("groups", I32(weight.inputs / weight.group)),
        ]);
        let blocks = (rows as usize).div_ceil(loaded.variant.size("ROWS")?)
            * (weight.outputs as usize).div_ceil(loaded.variant.size("OUTPUTS")?);
        self.kernels.launch(loaded, [blocks, 1], &arguments)?;
        Ok(y)
    }

    /// Returns the weight `(O, I)` in the dtype of the activations, in one launch.
    ///
    /// # Errors
    /// As [`FourBit::product`].
    pub fn dequantize(&self, weight: &FourBitWeight<'_>) -> Result<Tensor> {
        check(weight)?;
        let to = (self.kind, weight.codes.device());
        let y = Tensor::f_empty([weight.outputs, weight.inputs], to)?;
        let count = y.numel() as i64 / weight.group;
        let mut arguments = self.arguments(weight);
        arguments.extend([("y", Elements(&y)), ("count", I64(count))]);
        let blocks = (count as usize).div_ceil(self.dequantize.variant.size("GROUPS")?);
        self.kernels
            .launch(&self.dequantize, [blocks, 1], &arguments)?;
        Ok(y)
    }

    fn arguments<'a>(&'a self, weight: &FourBitWeight<'a>) -> Vec<(&'static str, Argument<'a>)> {
        let mut arguments = vec![
            ("codes", Elements(weight.codes)),
            ("scales", Elements(weight.scales)),
        ];
        if let FourBitNumbers::Offset(offsets) = weight.numbers {
            arguments.push(("offsets", Elements(offsets)));
        }
        arguments.extend(self.book.as_ref().map(|book| ("book", Elements(book))));
        arguments
    }
}

/// Checks the sizes of a weight, within which the kernels stay.
fn check(weight: &FourBitWeight<'_>) -> Result<()> {
    let count = weight.outputs * weight.inputs;
    let groups = count / weight.group.max(1);
    let offsets = match weight.numbers {
        FourBitNumbers::Offset(offsets) => offsets,
        _ => weight.scales,
    };
    for (name, tensor, expected) in [
        ("codes", weight.codes, count / 2),
        ("scales", weight.scales, groups),
        ("offsets", offsets, groups),
    ] {
        if tensor.numel() as i64 != expected || !tensor.is_contiguous() {
            let expected = format!("{expected} elements, contiguous");
            return Err(Common::shape(name, tensor.size(), expected).into());
        }
    }
    Ok(())
}
