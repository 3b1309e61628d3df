use overdrive_core::Error as Common;
use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{I32, Tensor as Elements};
use crate::kernels::{Kernels, Loaded, Request, dense, dtype, is_aligned, multiples_of_16};
use crate::quantized::ROWS_TOGETHER;

/// A weight `(O, I)` of 8-bit codes with a scale for each output; both tensors are contiguous.
#[derive(Debug, Clone, Copy)]
pub struct EightBitWeight<'a> {
    /// The codes, i8 `(O, I)`.
    pub codes: &'a Tensor,
    /// The scales, f32 `(O,)`.
    pub scales: &'a Tensor,
}

/// Products with 8-bit weights, and their dequantization, for one dtype of activations.
#[derive(Debug, Clone, Copy)]
pub struct EightBit {
    kernels: &'static Kernels,
    kind: Kind,
    one_row: Loaded,
    rows: Loaded,
    dequantize: Loaded,
}

impl Kernels {
    /// Returns the kernels for activations of a dtype and weights like this one; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) if the tensors do not fit each other,
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn eight_bit(
        &'static self,
        kind: Kind,
        weight: &EightBitWeight<'_>,
    ) -> Result<Option<EightBit>> {
        let inputs = weight.size()?[1];
        let tensors = [weight.codes, weight.scales];
        let fits = tensors
            .iter()
            .all(|tensor| tensor.is_contiguous() && is_aligned(tensor));
        let Some(dtype) = dtype(kind).filter(|_| fits) else {
            return Ok(None);
        };
        let find = |kernel, rows: Option<i64>| {
            self.find(&Request {
                kernel,
                dtype,
                constants: rows.map(|rows| ("ROWS", rows)).into_iter().collect(),
                least: ("BLOCK", 1),
                aligned: multiples_of_16(&[inputs]),
            })
        };
        let one_row = find("few_rows_8bit", Some(1))?;
        let rows = find("few_rows_8bit", Some(ROWS_TOGETHER))?;
        let dequantize = find("dequantize_8bit", None)?;
        Ok(match (one_row, rows, dequantize) {
            (Some(one_row), Some(rows), Some(dequantize)) => Some(EightBit {
                kernels: self,
                kind,
                one_row,
                rows,
                dequantize,
            }),
            _ => None,
        })
    }
}

impl EightBit {
    /// Returns `x (rows, I) · weightᵀ`, `(rows, O)` in the dtype of `x`, in one launch.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors that do not fit each other,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn product(&self, x: &Tensor, weight: &EightBitWeight<'_>) -> Result<Tensor> {
        let [outputs, inputs] = weight.size()?;
        let size = x.size();
        if size.len() != 2 || size[1] != inputs {
            return Err(Common::shape("x", size, format!("(rows, {inputs})")).into());
        }
        let x = dense(x)?;
        let loaded = match size[0] {
            1 => &self.one_row,
            _ => &self.rows,
        };
        let y = Tensor::f_empty([size[0], outputs], (self.kind, x.device()))?;
        let arguments = [
            ("x", Elements(&x)),
            ("codes", Elements(weight.codes)),
            ("scales", Elements(weight.scales)),
            ("y", Elements(&y)),
            ("rows", I32(size[0])),
            ("outputs", I32(outputs)),
            ("inputs", I32(inputs)),
        ];
        let blocks = (size[0] as usize).div_ceil(loaded.variant.size("ROWS")?)
            * (outputs as usize).div_ceil(loaded.variant.size("OUTPUTS")?);
        self.kernels.launch(loaded, [blocks, 1], &arguments)?;
        Ok(y)
    }

    /// Returns the weight `(O, I)` in the dtype of the activations, in one launch.
    ///
    /// # Errors
    /// As [`EightBit::product`].
    pub fn dequantize(&self, weight: &EightBitWeight<'_>) -> Result<Tensor> {
        let [outputs, inputs] = weight.size()?;
        let y = Tensor::f_empty([outputs, inputs], (self.kind, weight.codes.device()))?;
        let arguments = [
            ("codes", Elements(weight.codes)),
            ("scales", Elements(weight.scales)),
            ("y", Elements(&y)),
            ("inputs", I32(inputs)),
        ];
        let columns = (inputs as usize).div_ceil(self.dequantize.variant.size("BLOCK")?);
        self.kernels
            .launch(&self.dequantize, [outputs as usize, columns], &arguments)?;
        Ok(y)
    }
}

impl EightBitWeight<'_> {
    /// Returns the outputs and inputs of a weight whose tensors fit each other.
    fn size(&self) -> Result<[i64; 2]> {
        match *self.codes.size() {
            [outputs, inputs] if self.scales.size() == [outputs] => Ok([outputs, inputs]),
            _ => {
                let expected = format!("(O,), with codes of shape {:?}", self.codes.size());
                Err(Common::shape("scales", self.scales.size(), expected).into())
            }
        }
    }
}
