use tch::{Kind, Tensor};

use crate::{Error, Result};

/// What is gathered of the inputs of a linear map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Moments {
    /// The second moment of each input: what clipping and SmoothQuant need, `I` numbers.
    Diagonal,
    /// The second moments of all pairs: what GPTQ needs, `I · I` numbers in fp32.
    #[default]
    Full,
}

/// Second moments and largest magnitudes of the inputs `(…, I)` of a linear map, over a calibration set.
#[derive(Debug)]
pub struct InputStatistics {
    /// f32 `(I,)` or `(I, I)`: sums, not means.
    sums: Tensor,
    /// f32 `(I,)`.
    largest: Tensor,
    rows: i64,
    moments: Moments,
}

impl InputStatistics {
    /// Of nothing yet, for maps of `inputs` numbers, on the device of `like`.
    ///
    /// # Errors
    /// [`Error::BadOption`] for no inputs, and errors of libtorch.
    pub fn new(inputs: i64, moments: Moments, device: tch::Device) -> Result<InputStatistics> {
        if inputs < 1 {
            return Err(Error::BadOption {
                option: "inputs",
                found: inputs.to_string(),
                expected: "at least 1".to_owned(),
            });
        }
        let options = (Kind::Float, device);
        let sums = match moments {
            Moments::Diagonal => Tensor::f_zeros([inputs], options)?,
            Moments::Full => Tensor::f_zeros([inputs, inputs], options)?,
        };
        Ok(InputStatistics {
            sums,
            largest: Tensor::f_zeros([inputs], options)?,
            rows: 0,
            moments,
        })
    }

    /// Adds the rows of `x (…, I)`, of any floating kind.
    ///
    /// # Errors
    /// [`Error::BadInput`] if the last dimension is not `I` or a number is not finite.
    pub fn add(&mut self, x: &Tensor) -> Result<()> {
        let inputs = self.inputs();
        if x.size().last() != Some(&inputs) {
            return Err(Error::BadInput {
                name: "x",
                found: format!("of shape {:?}", x.size()),
                expected: format!("(…, {inputs})"),
            });
        }
        let rows = x
            .f_detach()?
            .f_to_kind(Kind::Float)?
            .f_reshape([-1, inputs])?;
        if rows.size()[0] == 0 {
            return Ok(());
        }
        let largest = rows.f_abs()?.f_amax([0], false)?;
        if !largest.f_isfinite()?.f_all()?.f_int64_value(&[])?.eq(&1) {
            return Err(Error::BadInput {
                name: "x",
                found: "partly infinite or NaN".to_owned(),
                expected: "finite activations; in fp16 a model may overflow, bf16 or fp32 do not"
                    .to_owned(),
            });
        }
        self.largest = self.largest.f_maximum(&largest)?;
        match self.moments {
            Moments::Diagonal => {
                let squares = rows
                    .f_square()?
                    .f_sum_dim_intlist([0i64].as_slice(), false, None)?;
                let _same = self.sums.f_add_(&squares)?;
            }
            Moments::Full => {
                let _same = self.sums.f_addmm_(&rows.f_tr()?, &rows)?;
            }
        }
        self.rows += rows.size()[0];
        Ok(())
    }

    /// How many inputs a row has.
    pub fn inputs(&self) -> i64 {
        self.largest.numel() as i64
    }

    /// Rows seen.
    pub fn rows(&self) -> i64 {
        self.rows
    }

    /// The largest magnitude of each input, f32 `(I,)`.
    pub fn largest(&self) -> &Tensor {
        &self.largest
    }

    /// The mean square of each input, f32 `(I,)`; ones where no row was seen.
    ///
    /// # Errors
    /// An error of libtorch.
    pub(crate) fn mean_squares(&self) -> Result<Tensor> {
        if self.rows == 0 {
            return Ok(self.largest.f_ones_like()?);
        }
        let sums = match self.moments {
            Moments::Diagonal => self.sums.shallow_clone(),
            Moments::Full => self.sums.f_diagonal(0, 0, 1)?,
        };
        Ok(sums.f_div_scalar(self.rows as f64)?)
    }

    /// The mean of `xᵀx`, f32 `(I, I)`: half the Hessian of a map's squared error in each row of its
    /// weight. `None` where only the diagonal was gathered, or no row was seen.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn second_moments(&self) -> Result<Option<Tensor>> {
        match self.moments {
            Moments::Full if self.rows > 0 => Ok(Some(self.sums.f_div_scalar(self.rows as f64)?)),
            _ => Ok(None),
        }
    }

    /// Those of inputs divided by `scales (I,)`.
    ///
    /// # Errors
    /// [`Error::BadInput`] for scales of another number.
    pub fn divided_by(&self, scales: &Tensor) -> Result<InputStatistics> {
        if scales.size() != self.largest.size() {
            return Err(Error::BadInput {
                name: "scales",
                found: format!("of shape {:?}", scales.size()),
                expected: format!("({},)", self.inputs()),
            });
        }
        let scales = scales.f_to_kind(Kind::Float)?;
        let sums = match self.moments {
            Moments::Diagonal => self.sums.f_div(&scales.f_square()?)?,
            Moments::Full => self.sums.f_div(&scales)?.f_div(&scales.f_unsqueeze(1)?)?,
        };
        Ok(InputStatistics {
            sums,
            largest: self.largest.f_div(&scales)?,
            rows: self.rows,
            moments: self.moments,
        })
    }

    /// The mean squared error of a row of outputs, summed over outputs, when `weight (O, I)` is
    /// exchanged for `approximate`: `tr(Δ · E[xᵀx] · Δᵀ)`. Of inputs taken as uncorrelated where only
    /// the diagonal was gathered.
    ///
    /// # Errors
    /// [`Error::BadInput`] for weights of other shapes.
    pub fn output_error(&self, weight: &Tensor, approximate: &Tensor) -> Result<f64> {
        let inputs = self.inputs();
        if weight.size() != approximate.size() || weight.size().last() != Some(&inputs) {
            return Err(Error::BadInput {
                name: "approximate",
                found: format!("of shape {:?}", approximate.size()),
                expected: format!(
                    "that of the weight, {:?}, with {inputs} inputs",
                    weight.size()
                ),
            });
        }
        let difference = weight
            .f_to_kind(Kind::Float)?
            .f_sub(&approximate.f_to_kind(Kind::Float)?)?;
        let error = match self.second_moments()? {
            Some(moments) => difference.f_matmul(&moments)?.f_mul(&difference)?,
            None => difference.f_square()?.f_mul(&self.mean_squares()?)?,
        };
        Ok(error.f_sum(Kind::Double)?.f_double_value(&[])?)
    }
}
