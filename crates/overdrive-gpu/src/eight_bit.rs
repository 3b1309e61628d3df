use overdrive_core::Error as Common;
use tch::{Kind, Tensor};

use crate::Result;
use crate::few_bits::{Format, Operands, Wanted, check_rows};
use crate::kernels::Argument::{I32, Tensor as Elements};
use crate::kernels::{Kernels, Loaded, Request, dense, dtype, is_aligned, multiples_of_16};
use crate::quantized::{MOST_FLOAT_ROWS, Product, ROWS_TOGETHER};

/// A weight `(O, I)` of 8-bit codes with one scale for each output or for each group of its inputs; both tensors are
/// contiguous.
#[derive(Debug, Clone, Copy)]
pub struct EightBitWeight<'a> {
    /// The codes `(O, I)`: i8 or u8, depending on `numbers`.
    pub codes: &'a Tensor,
    /// The scales: f32 `(O,)` or f16 `(O, I/group)`.
    pub scales: &'a Tensor,
    /// The format of the codes.
    pub numbers: EightBitNumbers,
}

/// The values that 8-bit codes represent, before the scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EightBitNumbers {
    /// Integers, i8.
    Integer,
    /// Floats with 4 bits of exponent and 3 of mantissa (e4m3), u8. A NaN is read as 480.
    Float,
}

/// Matmuls with 8-bit weights, and their dequantization, for one dtype of activations.
#[derive(Debug)]
pub struct EightBit {
    kernels: &'static Kernels,
    kind: Kind,
    product: Option<Product>,
    dequantize: Option<Loaded>,
}

impl Kernels {
    /// Returns the kernels for activations of a dtype and weights like this one; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) if the tensors do not match,
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn eight_bit(
        &'static self,
        kind: Kind,
        weight: &EightBitWeight<'_>,
    ) -> Result<Option<EightBit>> {
        let [_, inputs, group] = weight.size()?;
        let tensors = [weight.codes, weight.scales];
        let fits = tensors
            .iter()
            .all(|tensor| tensor.is_contiguous() && is_aligned(tensor));
        let Some(dtype) = dtype(kind).filter(|_| fits) else {
            return Ok(None);
        };
        let is_integer = weight.numbers == EightBitNumbers::Integer;
        // The kernels for f32 and for dequantization support only integers with one scale for each output.
        let is_simple = is_integer && group == 0;
        let find = |kernel, rows: Option<i64>| match is_simple {
            true => self.find(&Request {
                kernel,
                dtype,
                constants: rows.map(|rows| ("ROWS", rows)).into_iter().collect(),
                least: ("BLOCK", 1),
                aligned: multiples_of_16(&[inputs]),
            }),
            false => Ok(None),
        };
        let product = match (kind, weight.scales.kind()) {
            (Kind::Float, _) => {
                let (one, more) = (Some(1), Some(ROWS_TOGETHER));
                let both = find("few_rows_8bit", one)?.zip(find("few_rows_8bit", more)?);
                both.map(|(one_row, rows)| Product::Float(one_row, rows))
            }
            (_, scales @ (Kind::Float | Kind::Half)) if multiples_of_16(&[inputs]) => {
                let wanted = Wanted {
                    format: match is_integer {
                        true => Format::Int8,
                        false => Format::Fp8,
                    },
                    has_offsets: false,
                    is_nested: false,
                    has_half_scales: scales == Kind::Half,
                    group,
                    book: None,
                };
                self.few_bits(kind, wanted)?.map(Product::Half)
            }
            _ => None,
        };
        let dequantize = find("dequantize_8bit", None)?;
        if product.is_none() && dequantize.is_none() {
            return Ok(None);
        }
        Ok(Some(EightBit {
            kernels: self,
            kind,
            product,
            dequantize,
        }))
    }
}

impl EightBit {
    /// Returns `x (rows, I) · weightᵀ`, `(rows, O)` in the dtype of `x`, in one launch; `None` for more rows than the
    /// kernels multiply with codes (8 of f32, 64 of f16 and bf16), and if there is no kernel.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors that do not match,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn product(&self, x: &Tensor, weight: &EightBitWeight<'_>) -> Result<Option<Tensor>> {
        let [outputs, inputs, _] = weight.size()?;
        let rows = check_rows(x, inputs)?;
        let operands = Operands {
            codes: weight.codes,
            scales: weight.scales,
            offsets: None,
            nested: None,
            size: [outputs, inputs],
        };
        let (one_row, more) = match &self.product {
            Some(Product::Half(product)) => return product.product(x, &operands),
            Some(Product::Float(one_row, more)) if rows <= MOST_FLOAT_ROWS => (one_row, more),
            _ => return Ok(None),
        };
        let loaded = match rows {
            1 => one_row,
            _ => more,
        };
        let x = dense(x)?;
        let y = Tensor::f_empty([rows, outputs], (self.kind, x.device()))?;
        let arguments = [
            ("x", Elements(&x)),
            ("codes", Elements(weight.codes)),
            ("scales", Elements(weight.scales)),
            ("y", Elements(&y)),
            ("rows", I32(rows)),
            ("outputs", I32(outputs)),
            ("inputs", I32(inputs)),
        ];
        let blocks = (rows as usize).div_ceil(loaded.variant.size("ROWS")?)
            * (outputs as usize).div_ceil(loaded.variant.size("OUTPUTS")?);
        self.kernels.launch(loaded, [blocks, 1], &arguments)?;
        Ok(Some(y))
    }

    /// Returns the weight `(O, I)` in the dtype of the activations, in one launch; `None` for floats and for groups.
    ///
    /// # Errors
    /// As [`EightBit::product`].
    pub fn dequantize(&self, weight: &EightBitWeight<'_>) -> Result<Option<Tensor>> {
        let [outputs, inputs, _] = weight.size()?;
        let Some(loaded) = &self.dequantize else {
            return Ok(None);
        };
        let y = Tensor::f_empty([outputs, inputs], (self.kind, weight.codes.device()))?;
        let arguments = [
            ("codes", Elements(weight.codes)),
            ("scales", Elements(weight.scales)),
            ("y", Elements(&y)),
            ("inputs", I32(inputs)),
        ];
        let columns = (inputs as usize).div_ceil(loaded.variant.size("BLOCK")?);
        self.kernels
            .launch(loaded, [outputs as usize, columns], &arguments)?;
        Ok(Some(y))
    }
}

impl EightBitWeight<'_> {
    /// Checks that the tensors of the weight match. Returns the number of outputs, of inputs, and of inputs that share
    /// a scale, 0 for all.
    fn size(&self) -> Result<[i64; 3]> {
        match (&*self.codes.size(), &*self.scales.size()) {
            (&[outputs, inputs], &[scaled]) if scaled == outputs => Ok([outputs, inputs, 0]),
            (&[outputs, inputs], &[scaled, groups])
                if scaled == outputs && groups > 0 && inputs % groups == 0 =>
            {
                Ok([outputs, inputs, inputs / groups])
            }
            _ => {
                let size = self.codes.size();
                let expected = format!("(O,) or (O, groups), with codes of shape {size:?}");
                Err(Common::shape("scales", self.scales.size(), expected).into())
            }
        }
    }
}
