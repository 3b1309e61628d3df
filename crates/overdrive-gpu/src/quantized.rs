use overdrive_core::Error as Common;
use tch::{Kind, Tensor};

use crate::Result;
use crate::few_bits::{FewBits, Format, Nested, Operands, Wanted, check_rows};
use crate::kernels::Argument::{I32, I64, Tensor as Elements};
use crate::kernels::{Argument, Kernels, Loaded, Request, dense, dtype, is_aligned};

/// The largest number of rows that a kernel multiplies with codes; it is smaller for many weights and dtypes.
pub const MOST_ROWS: i64 = 64;

/// The group sizes that the 4-bit kernels support.
pub const FOUR_BIT_GROUPS: [i64; 3] = [32, 64, 128];

/// The largest number of weights with double quantization that are multiplied as one.
pub const MOST_OFFSETS: usize = 3;

/// The largest number of f32 rows that are multiplied with codes. For more rows the weight is dequantized, because
/// decoding codes takes longer than reading them.
pub(crate) const MOST_FLOAT_ROWS: i64 = 8;

/// The number of f32 rows that share the decoded values.
pub(crate) const ROWS_TOGETHER: i64 = 4;

/// A weight `(O, I)` of 4-bit codes with one scale for each group of inputs of an output; all tensors are contiguous.
#[derive(Debug, Clone, Copy)]
pub struct FourBitWeight<'a> {
    /// The codes, u8 with `O·I/2` elements.
    pub codes: &'a Tensor,
    /// The scales of the groups.
    pub scales: FourBitScales<'a>,
    /// The format of the codes.
    pub numbers: FourBitNumbers<'a>,
    /// The number of outputs, `O`.
    pub outputs: i64,
    /// The number of inputs, `I`: a multiple of the group.
    pub inputs: i64,
    /// The number of inputs that share a scale.
    pub group: i64,
}

/// The scales of the groups of a weight, `O·I/group` in the order of the codes.
#[derive(Debug, Clone, Copy)]
pub enum FourBitScales<'a> {
    /// f32 or f16.
    Full(&'a Tensor),
    /// Codes of 8 bits, `book[codes] · scale + offset` with a scale for each 256 groups (double quantization); for
    /// [`FourBitNumbers::Book`]. Up to [`MOST_OFFSETS`] weights that lie one after another, each with an offset, are
    /// multiplied as one weight.
    Nested {
        /// The codes, u8.
        codes: &'a Tensor,
        /// The value of each code, f32 `(256,)`.
        book: &'a Tensor,
        /// The scales, f32 `(⌈O·I/group/256⌉,)`.
        scales: &'a Tensor,
        /// The number of outputs and the offset of each weight.
        offsets: &'a [(i64, f64)],
    },
}

impl<'a> FourBitScales<'a> {
    /// Returns the tensor with one element for each group.
    fn tensor(self) -> &'a Tensor {
        match self {
            Self::Full(scales) => scales,
            Self::Nested { codes, .. } => codes,
        }
    }
}

/// The values that 4-bit codes represent, before the scale.
#[derive(Debug, Clone, Copy)]
pub enum FourBitNumbers<'a> {
    /// The values of a code book. The first of two codes is in the high half of a byte, and full scales are f32.
    Book(&'static [f32; 16]),
    /// The codes minus 8. The first of two codes is in the low half of a byte.
    Centered,
    /// The codes, in the same order; an offset, of the shape and dtype of the scales, is added after the scale.
    Offset(&'a Tensor),
}

/// Matmuls with 4-bit weights, and their dequantization, for one dtype of activations and one layout of weights.
#[derive(Debug)]
pub struct FourBit {
    kernels: &'static Kernels,
    kind: Kind,
    product: Option<Product>,
    dequantize: Option<Loaded>,
    /// The values of a code book in the form that f32 matmuls and the dequantization take.
    book: Option<Tensor>,
}

/// The kernels of a matmul.
#[derive(Debug)]
pub(crate) enum Product {
    /// f32: one thread for each sum, with kernels for one row and for more.
    Float(Loaded, Loaded),
    /// f16 and bf16: tensor cores.
    Half(FewBits),
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
        let scales = weight.scales.tensor();
        let mut tensors = vec![weight.codes, scales];
        if let FourBitScales::Nested { book, scales, .. } = weight.scales {
            tensors.extend([book, scales]);
        }
        if let FourBitNumbers::Offset(offsets) = weight.numbers {
            tensors.push(offsets);
        }
        let fits = weight.group > 0
            && weight.inputs % weight.group == 0
            && tensors
                .iter()
                .all(|tensor| tensor.is_contiguous() && is_aligned(tensor));
        let Some(dtype) = dtype(kind).filter(|_| fits) else {
            return Ok(None);
        };
        let is_nested = matches!(weight.scales, FourBitScales::Nested { .. });
        let half = match scales.kind() {
            Kind::Half => true,
            Kind::Float => false,
            Kind::Uint8 if is_nested => false,
            _ => return Ok(None),
        };
        let (numbers, has_offsets) = match weight.numbers {
            FourBitNumbers::Book(numbers) => (Some(numbers), false),
            FourBitNumbers::Centered => (None, false),
            FourBitNumbers::Offset(_) => (None, true),
        };
        let find = |kernel, rows: Option<i64>| {
            let mut constants = vec![
                ("BOOK", numbers.is_some().into()),
                ("OFFSET", has_offsets.into()),
                ("HALF_SCALES", half.into()),
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
        let product = match kind {
            Kind::Float if is_nested => None,
            Kind::Float => {
                let (one, more) = (Some(1), Some(ROWS_TOGETHER));
                let both = find("few_rows_4bit", one)?.zip(find("few_rows_4bit", more)?);
                both.map(|(one_row, rows)| Product::Float(one_row, rows))
            }
            _ => {
                let wanted = Wanted {
                    format: numbers.map_or(Format::Int4, |_| Format::Book),
                    has_offsets,
                    is_nested,
                    has_half_scales: half,
                    group: weight.group,
                    book: numbers,
                };
                self.few_bits(kind, wanted)?.map(Product::Half)
            }
        };
        let dequantize = match is_nested {
            true => None,
            false => find("dequantize_4bit", None)?,
        };
        if product.is_none() && dequantize.is_none() {
            return Ok(None);
        }
        let book = match numbers.filter(|_| !is_nested) {
            Some(numbers) => Some(self.book(numbers)?),
            None => None,
        };
        Ok(Some(FourBit {
            kernels: self,
            kind,
            product,
            dequantize,
            book,
        }))
    }
}

impl FourBit {
    /// Returns `x (rows, I) · weightᵀ`, `(rows, O)` in the dtype of `x`, in one launch; `None` for more rows than the
    /// kernels multiply with codes (8 of f32, 64 of f16 and bf16, 16 with offsets), and if there is no kernel.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors that do not match,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn product(&self, x: &Tensor, weight: &FourBitWeight<'_>) -> Result<Option<Tensor>> {
        check(weight)?;
        let rows = check_rows(x, weight.inputs)?;
        let (one_row, more) = match &self.product {
            Some(Product::Half(product)) => return product.product(x, &operands(weight)),
            Some(Product::Float(one_row, more)) if rows <= MOST_FLOAT_ROWS => (one_row, more),
            _ => return Ok(None),
        };
        let loaded = match rows {
            1 => one_row,
            _ => more,
        };
        let x = dense(x)?;
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
        Ok(Some(y))
    }

    /// Returns the weight `(O, I)` in the dtype of the activations, in one launch; `None` for nested scales.
    ///
    /// # Errors
    /// As [`FourBit::product`].
    pub fn dequantize(&self, weight: &FourBitWeight<'_>) -> Result<Option<Tensor>> {
        check(weight)?;
        let Some(loaded) = &self.dequantize else {
            return Ok(None);
        };
        let to = (self.kind, weight.codes.device());
        let y = Tensor::f_empty([weight.outputs, weight.inputs], to)?;
        let count = y.numel() as i64 / weight.group;
        let mut arguments = self.arguments(weight);
        arguments.extend([("y", Elements(&y)), ("count", I64(count))]);
        let blocks = (count as usize).div_ceil(loaded.variant.size("GROUPS")?);
        self.kernels.launch(loaded, [blocks, 1], &arguments)?;
        Ok(Some(y))
    }

    fn arguments<'a>(&'a self, weight: &FourBitWeight<'a>) -> Vec<(&'static str, Argument<'a>)> {
        let mut arguments = vec![
            ("codes", Elements(weight.codes)),
            ("scales", Elements(weight.scales.tensor())),
        ];
        if let FourBitNumbers::Offset(offsets) = weight.numbers {
            arguments.push(("offsets", Elements(offsets)));
        }
        arguments.extend(self.book.as_ref().map(|book| ("book", Elements(book))));
        arguments
    }
}

fn operands<'a>(weight: &FourBitWeight<'a>) -> Operands<'a> {
    Operands {
        codes: weight.codes,
        scales: weight.scales.tensor(),
        offsets: match weight.numbers {
            FourBitNumbers::Offset(offsets) => Some(offsets),
            _ => None,
        },
        nested: match weight.scales {
            FourBitScales::Nested {
                book,
                scales,
                offsets,
                ..
            } => Some(Nested {
                book,
                scales,
                offsets,
            }),
            FourBitScales::Full(_) => None,
        },
        size: [weight.outputs, weight.inputs],
    }
}

/// Checks the sizes of a weight, within which the kernels stay.
fn check(weight: &FourBitWeight<'_>) -> Result<()> {
    let count = weight.outputs * weight.inputs;
    let groups = count / weight.group.max(1);
    let mut sizes = vec![
        ("codes", weight.codes, count / 2),
        ("scales", weight.scales.tensor(), groups),
    ];
    if let FourBitNumbers::Offset(offsets) = weight.numbers {
        sizes.push(("offsets", offsets, groups));
    }
    if let FourBitScales::Nested {
        book,
        scales,
        offsets,
        ..
    } = weight.scales
    {
        let blocks = (groups as usize).div_ceil(256) as i64;
        sizes.extend([("book", book, 256), ("scales of scales", scales, blocks)]);
        let outputs: i64 = offsets.iter().map(|(outputs, _)| outputs).sum();
        if offsets.len() > MOST_OFFSETS || outputs != weight.outputs {
            let expected = format!(
                "the outputs and offsets of at most {MOST_OFFSETS} weights, {} outputs together",
                weight.outputs
            );
            return Err(Common::option("offsets", format!("{offsets:?}"), expected).into());
        }
    }
    for (name, tensor, expected) in sizes {
        if tensor.numel() as i64 != expected || !tensor.is_contiguous() {
            let expected = format!("{expected} elements, contiguous");
            return Err(Common::shape(name, tensor.size(), expected).into());
        }
    }
    Ok(())
}
