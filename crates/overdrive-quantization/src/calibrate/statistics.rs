use tch::{Kind, Tensor};

use crate::{Error, Result};

/// The second moments that are collected of the inputs of a linear layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Moments {
    /// The mean square of each input, for clipping and SmoothQuant: `I` numbers.
    Diagonal,
    /// The second moments of all pairs of inputs, for GPTQ: `I · I` numbers in f32.
    #[default]
    Full,
}

/// The second moments and largest magnitudes of the inputs `(…, I)` of a linear layer over a calibration set.
#[derive(Debug)]
pub struct InputStatistics {
    /// The sums of `x²` or `xᵀx`, f32 `(I,)` or `(I, I)`.
    sums: Tensor,
    /// The largest magnitudes, f32 `(I,)`.
    largest: Tensor,
    rows: i64,
    moments: Moments,
}

impl InputStatistics {
    /// Creates empty statistics for layers of `inputs` inputs on `device`.
    ///
    /// # Errors
    /// [`Error::Common`] if `inputs` is not positive, and errors of libtorch.
    pub fn new(inputs: i64, moments: Moments, device: tch::Device) -> Result<InputStatistics> {
        overdrive_core::check_positive("inputs", inputs)?;
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

    /// Adds the rows of `x (…, I)`, of any floating-point dtype.
    ///
    /// # Errors
    /// [`Error::Common`] if the last dimension is not `I`, [`Error::Values`] if a value is not finite.
    pub fn add(&mut self, x: &Tensor) -> Result<()> {
        let inputs = self.inputs();
        if x.size().last() != Some(&inputs) {
            return Err(Error::shape("x", x.size(), format!("(…, {inputs})")));
        }
        let rows = x
            .f_detach()?
            .f_to_kind(Kind::Float)?
            .f_reshape([-1, inputs])?;
        if rows.size()[0] == 0 {
            return Ok(());
        }
        // One test for NaN and infinity on the maxima, which are far fewer than the inputs.
        let largest = rows.f_abs()?.f_amax([0], false)?;
        if !largest.f_isfinite()?.f_all()?.f_int64_value(&[])?.eq(&1) {
            let expected = "finite activations; an fp16 model may overflow, so use bf16 or fp32";
            return Err(Error::values("x", "infinity or NaN", expected));
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
                // In place: a second `(I, I)` matrix would double the memory.
                let _same = self.sums.f_addmm_(&rows.f_tr()?, &rows)?;
            }
        }
        self.rows += rows.size()[0];
        Ok(())
    }

    /// Returns the number of inputs of a row.
    pub fn inputs(&self) -> i64 {
        self.largest.numel() as i64
    }

    /// Returns the number of rows that were added.
    pub fn rows(&self) -> i64 {
        self.rows
    }

    /// Returns the largest magnitude of each input, f32 `(I,)`.
    pub fn largest(&self) -> &Tensor {
        &self.largest
    }

    /// Returns the mean square of each input, f32 `(I,)`; ones if no row was added.
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

    /// Returns the mean of `xᵀx`, f32 `(I, I)`: half the Hessian of the squared error of a layer in each row of
    /// its weight. `None` if only the diagonal was collected or no row was added.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn second_moments(&self) -> Result<Option<Tensor>> {
        match self.moments {
            Moments::Full if self.rows > 0 => Ok(Some(self.sums.f_div_scalar(self.rows as f64)?)),
            _ => Ok(None),
        }
    }

    /// Returns the statistics of the inputs divided by `scales (I,)`.
    ///
    /// # Errors
    /// [`Error::Common`] for scales of another shape.
    pub fn divided_by(&self, scales: &Tensor) -> Result<InputStatistics> {
        if scales.size() != self.largest.size() {
            let expected = format!("({},)", self.inputs());
            return Err(Error::shape("scales", scales.size(), expected));
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

    /// Returns the mean squared error of the outputs, summed over a row, if `approximate` replaces
    /// `weight (O, I)`: `tr(Δ · E[xᵀx] · Δᵀ)`. If only the diagonal was collected, the inputs are assumed to be
    /// uncorrelated.
    ///
    /// # Errors
    /// [`Error::Common`] for weights of other shapes.
    pub fn output_error(&self, weight: &Tensor, approximate: &Tensor) -> Result<f64> {
        let inputs = self.inputs();
        if weight.size() != approximate.size() || weight.size().last() != Some(&inputs) {
            let expected = format!("{:?} with {inputs} inputs, as the weight is", weight.size());
            return Err(Error::shape("approximate", approximate.size(), expected));
        }
        let difference = weight
            .f_to_kind(Kind::Float)?
            .f_sub(&approximate.f_to_kind(Kind::Float)?)?;
        let error = match self.second_moments()? {
            Some(moments) => difference.f_matmul(&moments)?.f_mul(&difference)?,
            None => difference.f_square()?.f_mul(&self.mean_squares()?)?,
        };
        // Summed in f64: a layer has millions of elements.
        Ok(error.f_sum(Kind::Double)?.f_double_value(&[])?)
    }
}
