use overdrive_core::Error as Common;
use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{F32, I32, I64, Tensor as Elements};
use crate::kernels::{
    Argument, Kernels, Loaded, Request, dense, dtype, is_aligned, multiples_of_16,
};

/// The coefficients of the loss of a row.
///
/// The loss is `lse - (1-ε)·x[label] - ε·mean(x) + z·lse²`, where `x` are the logits (`c·tanh(x/c)` if there is a
/// cap `c`) and `lse` is their log-sum-exp.
#[derive(Debug, Clone, Copy)]
pub struct LossTerms {
    /// The label of ignored rows.
    pub ignore_index: i64,
    /// The weight ε of the uniform distribution.
    pub label_smoothing: f32,
    /// The weight z of the squared `lse`.
    pub z_loss: f32,
    /// The cap of logits.
    pub softcap: Option<f32>,
}

/// The cross-entropy of rows with one number of classes and dtype, and its gradient.
///
/// A row whose label is neither a class nor the label to ignore has a loss and a gradient of NaN.
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy {
    kernels: &'static Kernels,
    terms: LossTerms,
    find: Loaded,
    write: Loaded,
    both: Loaded,
}

impl Kernels {
    /// Returns the kernels for rows of `classes` classes; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn cross_entropy(
        &'static self,
        kind: Kind,
        classes: i64,
        terms: LossTerms,
    ) -> Result<Option<CrossEntropy>> {
        let Some(dtype) = dtype(kind).filter(|_| i32::try_from(classes + (1 << 16)).is_ok()) else {
            return Ok(None);
        };
        let find = |find: bool, write: bool| {
            self.find(&Request {
                kernel: "cross_entropy",
                dtype,
                constants: vec![
                    ("FIND", i64::from(find)),
                    ("WRITE", i64::from(write)),
                    ("CAP", i64::from(terms.softcap.is_some())),
                ],
                least: ("BLOCK", 1),
                aligned: multiples_of_16(&[classes]),
            })
        };
        let variants = (find(true, false)?, find(false, true)?, find(true, true)?);
        Ok(match variants {
            (Some(find), Some(write), Some(both)) => Some(CrossEntropy {
                kernels: self,
                terms,
                find,
                write,
                both,
            }),
            _ => None,
        })
    }
}

impl CrossEntropy {
    /// Returns the loss and the log-sum-exp of each row, both in f32.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors on another device, of another dtype or not contiguous,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn losses(&self, logits: &Tensor, labels: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = || Tensor::f_empty(labels.size(), (Kind::Float, logits.device()));
        let (losses, lse) = (new()?, new()?);
        let outputs = [("losses", Elements(&losses)), ("lse", Elements(&lse))];
        // No gradient is written, so nothing is scaled.
        self.launch(&self.find, logits, labels, &outputs, 0.0)?;
        Ok((losses, lse))
    }

    /// Replaces the logits by the gradient of the sum of the losses, times `scale` and the value in `factor`.
    ///
    /// # Errors
    /// As [`CrossEntropy::losses`].
    pub fn gradient(
        &self,
        logits: &mut Tensor,
        labels: &Tensor,
        lse: &Tensor,
        factor: &Tensor,
        scale: f64,
    ) -> Result<()> {
        let (lse, factor) = (dense(lse)?, dense(factor)?);
        let inputs = [("lse", Elements(&lse)), ("factor", Elements(&factor))];
        self.launch(&self.write, logits, labels, &inputs, scale)
    }

    /// Returns the loss of each row in f32, and replaces the logits by `scale` times the gradient of the losses' sum.
    ///
    /// # Errors
    /// As [`CrossEntropy::losses`].
    pub fn losses_and_gradient(
        &self,
        logits: &mut Tensor,
        labels: &Tensor,
        scale: f64,
    ) -> Result<Tensor> {
        let losses = Tensor::f_empty(labels.size(), (Kind::Float, logits.device()))?;
        let outputs = [("losses", Elements(&losses))];
        self.launch(&self.both, logits, labels, &outputs, scale)?;
        Ok(losses)
    }

    fn launch(
        &self,
        loaded: &Loaded,
        logits: &Tensor,
        labels: &Tensor,
        others: &[(&'static str, Argument<'_>)],
        scale: f64,
    ) -> Result<()> {
        let size = logits.size();
        let fits = logits.is_contiguous() && is_aligned(logits) && size.len() == 2;
        if !fits || labels.size() != size[..1] {
            let expected =
                "(N, V), contiguous and aligned to 16 bytes, with one label for each row";
            return Err(Common::shape("logits", size, expected).into());
        }
        let labels = dense(labels)?;
        let mut arguments = vec![("logits", Elements(logits)), ("labels", Elements(&labels))];
        arguments.extend_from_slice(others);
        arguments.extend([
            ("classes", I32(size[1])),
            ("ignore_index", I64(self.terms.ignore_index)),
            ("smoothing", F32(self.terms.label_smoothing.into())),
            ("z_loss", F32(self.terms.z_loss.into())),
            ("softcap", F32(self.terms.softcap.unwrap_or(0.0).into())),
            ("scale", F32(scale)),
        ]);
        self.kernels
            .launch(loaded, [size[0] as usize, 1], &arguments)
    }
}
