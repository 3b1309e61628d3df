use std::sync::atomic::{AtomicBool, Ordering};

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_sys::raw::host_value;
use overdrive_sys::storage::memory_overlaps;
use tch::{Device, Kind, Tensor};

use crate::error::{check_device, check_floating, wrong_shape};
use crate::kernel::cross_entropy::{gradient, loss};
use crate::loss_options::Labels;
use crate::tensors::copy_of;
use crate::{CrossEntropyOptions, CrossEntropyOutput, Error, Reduction, Result, composed, gpu};
use overdrive_kernels::tensors::{Fresh, elements, elements_mut, has_kernel};
use overdrive_kernels::with_element;

/// Returns the cross-entropy of `logits (…, V)` under `labels (…)` (i64), as
/// `torch.nn.functional.cross_entropy` does, but without the tensor of log-probabilities.
///
/// Forward reads the logits and saves them with one f32 for each row; backward computes the gradient in one
/// pass, in the memory of the logits if `reuse_logits` is set. Low-precision logits are widened: the loss is
/// f32.
///
/// The result does not depend on the number of threads.
///
/// # Errors
/// [`Error::Label`] with the row and the value if a label on a CPU is not a class, [`Error::Common`] if the tensors do
/// not match or an option is out of range. Labels on a GPU are not checked, because the host would wait for the device:
/// there, a label that is not a class causes a device error, as in PyTorch, or with the kernels of overdrive-gpu a loss
/// of NaN.
///
/// ```
/// use overdrive_fused::{CrossEntropyOptions, cross_entropy};
/// use tch::{Device, Kind, Tensor};
///
/// let logits = Tensor::zeros([3, 8], (Kind::Float, Device::Cpu));
/// let labels = Tensor::from_slice(&[1_i64, 7, -100]);
/// let output = cross_entropy(&logits, &labels, &CrossEntropyOptions::default())?;
/// assert_eq!(output.tokens()?, 2);
/// assert!((output.loss.double_value(&[]) - 8.0_f64.ln()).abs() < 1e-6);
/// # Ok::<(), overdrive_fused::Error>(())
/// ```
pub fn cross_entropy(
    logits: &Tensor,
    labels: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<CrossEntropyOutput> {
    options.validate()?;
    let size = logits.size();
    check_floating("cross_entropy", "logits", logits)?;
    let Some((&classes, leading)) = size.split_last().filter(|(classes, _)| **classes > 0) else {
        return Err(wrong_shape(
            "cross_entropy",
            "logits",
            logits,
            "(…, V) with at least one class",
        ));
    };
    check_device(
        "cross_entropy",
        ("labels", labels.device()),
        ("logits", logits.device()),
    )?;
    let labels = Labels::new("cross_entropy", labels, leading, classes, options)?;
    let count = labels.count.shallow_clone();
    let rows = logits.f_reshape([-1, classes])?;
    let gpu = gpu::cross_entropy(&rows, options)?;
    let loss = match labels.known {
        Some(tokens) if gpu.is_none() && has_kernel(&rows) && rows.numel() > 0 => {
            let function = CrossEntropy {
                options: *options,
                labels: labels.flat,
                tokens,
                logits: Logits::new(options),
            };
            apply(function, &[&rows])?.remove(0)
        }
        known => {
            let sum = match gpu {
                Some(kernels) => {
                    let function = OnGpu {
                        kernels,
                        labels: labels.flat.shallow_clone(),
                        logits: Logits::new(options),
                    };
                    apply(function, &[&rows])?.remove(0)
                }
                None => composed::loss(&rows, &labels.flat, options)?,
            };
            match (known, options.reduction) {
                (None, Reduction::Mean) => labels.mean_of(&sum)?,
                (known, _) => sum.f_mul_scalar(options.scale(known.unwrap_or_default()))?,
            }
        }
    };
    Ok(CrossEntropyOutput { loss, count })
}

struct CrossEntropy {
    options: CrossEntropyOptions,
    labels: Tensor,
    tokens: i64,
    logits: Logits,
}

/// The memory of the logits, which backward may reuse for their gradient.
struct Logits {
    reuse: bool,
    /// If `true`, backward has written the gradient there.
    used_up: AtomicBool,
}

impl Logits {
    fn new(options: &CrossEntropyOptions) -> Self {
        Self {
            reuse: options.reuse_logits,
            used_up: AtomicBool::new(false),
        }
    }

    /// Returns the logits, or a copy of them, to be overwritten with the gradient.
    fn target(&self, logits: &Tensor, labels: &Tensor) -> Result<Tensor> {
        if !self.reuse {
            return copy_of(logits);
        }
        if self.used_up.swap(true, Ordering::Relaxed) {
            return Err(Error::BackwardAgain {
                function: CrossEntropy::NAME,
                option: "reuse_logits to false",
            });
        }
        match memory_overlaps(logits, labels) {
            // Labels in the memory of the logits are read while the gradient is written.
            true => copy_of(logits),
            false => Ok(logits.shallow_clone()),
        }
    }
}

impl Function for CrossEntropy {
    const NAME: &'static str = "cross_entropy";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let logits = inputs[0].f_contiguous()?;
        let mut lse = Fresh::<f32>::new(&self.labels.size())?;
        let mut losses = vec![0.0; self.labels.numel()];
        with_element!(logits.kind(), T => loss::<T>(
            self.options.terms(),
            elements(&logits)?,
            elements(&self.labels)?,
            &mut losses,
            lse.elements_mut()?,
        ));
        context.save_for_backward(&[&logits, &lse.into_tensor()]);
        let scale = self.options.scale(self.tokens);
        Ok(vec![scalar(sum(&losses) * scale)?])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let ([logits, lse], Some(upstream)) = (context.saved(), &gradients[0]) else {
            return Ok(vec![None]);
        };
        let mut target = self.logits.target(logits, &self.labels)?;
        let scale = match self.tokens {
            // As in PyTorch, the mean over no rows is NaN, and its gradient is zero.
            0 => 0.0,
            tokens => {
                let upstream = match host_value(upstream) {
                    Some(value) => value,
                    None => upstream.f_double_value(&[])?,
                };
                self.options.scale(tokens) * upstream
            }
        };
        with_element!(logits.kind(), T => gradient::<T>(
            self.options.terms(),
            elements_mut(&mut target)?,
            elements(&self.labels)?,
            elements(lse)?,
            scale as f32,
        ));
        Ok(vec![Some(target)])
    }
}

/// The sum of the losses, computed by the GPU kernels.
struct OnGpu {
    kernels: overdrive_gpu::CrossEntropy,
    labels: Tensor,
    logits: Logits,
}

impl Function for OnGpu {
    const NAME: &'static str = CrossEntropy::NAME;

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let logits = overdrive_gpu::dense(inputs[0])?;
        let (losses, lse) = self.kernels.losses(&logits, &self.labels)?;
        context.save_for_backward(&[&logits, &lse]);
        Ok(vec![losses.f_sum(Kind::Float)?])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let ([logits, lse], Some(upstream)) = (context.saved(), &gradients[0]) else {
            return Ok(vec![None]);
        };
        let mut target = self.logits.target(logits, &self.labels)?;
        let factor = upstream.f_to_kind(Kind::Float)?;
        self.kernels
            .gradient(&mut target, &self.labels, lse, &factor, 1.0)?;
        Ok(vec![Some(target)])
    }
}

/// Returns the sum of the losses, in f64 and in order, so that it does not depend on the number of threads.
pub(crate) fn sum(losses: &[f32]) -> f64 {
    losses.iter().map(|&loss| f64::from(loss)).sum()
}

/// Returns an f32 scalar.
pub(crate) fn scalar(value: f64) -> Result<Tensor> {
    Ok(Tensor::f_scalar_tensor(value, (Kind::Float, Device::Cpu))?)
}
