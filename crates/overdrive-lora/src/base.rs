use overdrive_quantization::QuantizedWeight;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// The weight of a linear map that adapters stand beside.
#[derive(Debug)]
pub enum BaseWeight {
    /// Numbers of a floating kind.
    Dense {
        /// `(O, I)`, or `(I, O)` where `transposed`.
        weight: Tensor,
        /// The layout of GPT-2's `Conv1D` (PEFT's `fan_in_fan_out`).
        transposed: bool,
    },
    /// A packed weight, frozen.
    Quantized(QuantizedWeight),
}

impl BaseWeight {
    /// `[O, I]`.
    pub fn size(&self) -> [i64; 2] {
        match self {
            BaseWeight::Dense { weight, transposed } => {
                match (weight.size().as_slice(), transposed) {
                    (&[outputs, inputs], false) | (&[inputs, outputs], true) => [outputs, inputs],
                    _ => [0, 0],
                }
            }
            BaseWeight::Quantized(weight) => weight.size(),
        }
    }

    /// Where it is.
    pub fn device(&self) -> Device {
        match self {
            BaseWeight::Dense { weight, .. } => weight.device(),
            BaseWeight::Quantized(weight) => weight.device(),
        }
    }

    /// The kind of its numbers; `None` where it is packed.
    pub fn kind(&self) -> Option<Kind> {
        match self {
            BaseWeight::Dense { weight, .. } => Some(weight.kind()),
            BaseWeight::Quantized(_) => None,
        }
    }

    /// Another handle of the same memory.
    pub fn shallow_clone(&self) -> BaseWeight {
        match self {
            BaseWeight::Dense { weight, transposed } => BaseWeight::Dense {
                weight: weight.shallow_clone(),
                transposed: *transposed,
            },
            BaseWeight::Quantized(weight) => BaseWeight::Quantized(weight.shallow_clone()),
        }
    }

    /// Its numbers `(O, I)` in `kind`: a view of the weight itself where it is dense and of that kind.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn to_dense(&self, kind: Kind) -> Result<Tensor> {
        Ok(match self {
            BaseWeight::Dense { weight, transposed } => {
                let weight = weight.f_detach()?;
                let weight = if *transposed { weight.f_tr()? } else { weight };
                weight.f_to_kind(kind)?
            }
            BaseWeight::Quantized(weight) => weight.dequantize(kind)?,
        })
    }

    /// The squared length of each row, `(O, 1)`, and the rows times `aᵀ`, `(O, r)`, in the kind of
    /// `a (r, I)`. Rows are converted a block at a time.
    pub(crate) fn rows_by(&self, a: &Tensor) -> Result<(Tensor, Tensor)> {
        let rows = match self {
            BaseWeight::Quantized(weight) => weight.dequantize(a.kind())?,
            BaseWeight::Dense { .. } => {
                let weight = self.to_dense(self.kind().unwrap_or(a.kind()))?;
                if weight.kind() != a.kind() {
                    return by_blocks(&weight, a);
                }
                weight
            }
        };
        one_block(&rows, a)
    }
}

fn one_block(rows: &Tensor, a: &Tensor) -> Result<(Tensor, Tensor)> {
    let lengths = rows.f_norm_scalaropt_dim(2, [1i64].as_slice(), true)?;
    Ok((lengths.f_square()?, rows.f_mm(&a.f_tr()?)?))
}

fn by_blocks(weight: &Tensor, a: &Tensor) -> Result<(Tensor, Tensor)> {
    let [outputs, inputs] = weight.size()[..] else {
        return one_block(weight, a);
    };
    let step = ((1 << 20) / inputs.max(1)).max(1);
    let (mut lengths, mut products) = (Vec::new(), Vec::new());
    let mut start = 0;
    while start < outputs {
        let len = step.min(outputs - start);
        let rows = weight.f_narrow(0, start, len)?.f_to_kind(a.kind())?;
        let (squares, product) = one_block(&rows, a)?;
        lengths.push(squares);
        products.push(product);
        start += len;
    }
    Ok((Tensor::f_cat(&lengths, 0)?, Tensor::f_cat(&products, 0)?))
}
