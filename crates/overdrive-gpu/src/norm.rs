use overdrive_core::Error as Common;
use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{F32, I32, Tensor as Elements};
use crate::kernels::{Kernels, Loaded, Request, check_shapes, dense, dtype, multiples_of_16};

/// RMSNorm for rows of one width and dtype, forward and backward.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm {
    kernels: &'static Kernels,
    width: i64,
    /// The dtype of the residual and of the normalised rows if `x`, the weight and the sum are f32.
    low: Option<Kind>,
    forward: Loaded,
    backward: Loaded,
    /// The backward pass with a further gradient to add.
    backward_add: Loaded,
}

/// The results of [`RmsNorm::forward`].
#[derive(Debug)]
pub struct Normalized {
    /// The normalized rows.
    pub y: Tensor,
    /// The rows before normalization: `x`, or its sum with the residual.
    pub x: Tensor,
    /// The reciprocal root mean square of each row, in f32.
    pub inverse: Tensor,
}

/// The results of [`RmsNorm::backward`].
#[derive(Debug)]
pub struct NormGradients {
    /// The gradient of the rows that were normalised, in their dtype.
    pub dx: Tensor,
    /// The same in low precision, for the residual of mixed precision.
    pub narrow: Option<Tensor>,
    /// The gradient of the weight, in f32.
    pub dw: Tensor,
}

impl Kernels {
    /// Returns the kernels for rows of `width` elements; `None` if there are none. With `add`, a residual is added
    /// first.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn rms_norm(&'static self, kind: Kind, width: i64, add: bool) -> Result<Option<RmsNorm>> {
        self.norm(kind, width, add, false)
    }

    /// Returns the kernels for rows of `width` elements to which a residual is added, in the dtypes of mixed precision: `x`,
    /// the weight and the sum are f32; the residual, the normalised rows and their gradient are `low`, f16 or bf16. `None`
    /// if there are none.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn add_rms_norm_mixed(&'static self, low: Kind, width: i64) -> Result<Option<RmsNorm>> {
        match low {
            Kind::Half | Kind::BFloat16 => self.norm(low, width, true, true),
            _ => Ok(None),
        }
    }

    fn norm(
        &'static self,
        kind: Kind,
        width: i64,
        add: bool,
        mixed: bool,
    ) -> Result<Option<RmsNorm>> {
        let Some(dtype) = dtype(kind) else {
            return Ok(None);
        };
        let find = |kernel, add| {
            self.find(&Request {
                kernel,
                dtype,
                constants: vec![("ADD", i64::from(add)), ("MIXED", i64::from(mixed))],
                least: ("BLOCK", width),
                aligned: multiples_of_16(&[width]),
            })
        };
        let forward = find("rms_norm_forward", add)?;
        let backward = find("rms_norm_backward", false)?;
        let backward_add = find("rms_norm_backward", true)?;
        Ok(match (forward, backward, backward_add) {
            (Some(forward), Some(backward), Some(backward_add)) => Some(RmsNorm {
                kernels: self,
                width,
                low: mixed.then_some(kind),
                forward,
                backward,
                backward_add,
            }),
            _ => None,
        })
    }
}

impl RmsNorm {
    /// Normalizes the rows of `x`, or of `x + residual`, in one launch.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors on another device or of another dtype,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn forward(
        &self,
        x: &Tensor,
        residual: Option<&Tensor>,
        weight: &Tensor,
        eps: f64,
    ) -> Result<Normalized> {
        let (x, weight) = (dense(x)?, dense(weight)?);
        let residual = residual.map(dense).transpose()?;
        let size = x.size();
        let (rows, width) = (self.rows_of(&x, &weight)?, self.width);
        if let Some(residual) = &residual {
            check_shapes(&[("residual", residual, &size)])?;
        }
        let y = Tensor::f_empty(&size, (self.low.unwrap_or(x.kind()), x.device()))?;
        let inverse = Tensor::f_empty(&size[..size.len() - 1], (Kind::Float, x.device()))?;
        let total = match &residual {
            Some(_) => Some(Tensor::f_empty(&size, (x.kind(), x.device()))?),
            None => None,
        };
        let mut arguments = vec![("x", Elements(&x))];
        arguments.extend(
            residual
                .as_ref()
                .map(|tensor| ("residual", Elements(tensor))),
        );
        arguments.extend([("weight", Elements(&weight)), ("y", Elements(&y))]);
        arguments.extend(total.as_ref().map(|tensor| ("total", Elements(tensor))));
        arguments.extend([
            ("inverse", Elements(&inverse)),
            ("rows", I32(rows)),
            ("width", I32(width)),
            ("eps", F32(eps)),
        ]);
        let blocks = (rows as usize).div_ceil(self.forward.variant.size("ROWS")?);
        self.kernels
            .launch(&self.forward, [blocks, 1], &arguments)?;
        Ok(Normalized {
            y,
            x: total.unwrap_or(x),
            inverse,
        })
    }

    /// Returns the gradients of the rows, to which `extra` is added, and of the weight.
    ///
    /// The gradient of the weight is summed in an order that depends only on the number of multiprocessors.
    ///
    /// # Errors
    /// As [`RmsNorm::forward`].
    pub fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        inverse: &Tensor,
        dy: &Tensor,
        extra: Option<&Tensor>,
    ) -> Result<NormGradients> {
        let (x, weight, dy) = (dense(x)?, dense(weight)?, dense(dy)?);
        let inverse = dense(inverse)?;
        let extra = extra.map(dense).transpose()?;
        let (rows, width) = (self.rows_of(&x, &weight)?, self.width);
        let size = x.size();
        check_shapes(&[
            ("dy", &dy, &size),
            ("inverse", &inverse, &size[..size.len() - 1]),
        ])?;
        if let Some(extra) = &extra {
            check_shapes(&[("extra", extra, &size)])?;
        }
        let loaded = match extra {
            Some(_) => &self.backward_add,
            None => &self.backward,
        };
        // Enough programs for each multiprocessor to switch between 16 warps while it waits for rows.
        let each = (16 / loaded.variant.warps as usize).max(1);
        let blocks = (rows as usize).div_ceil(loaded.variant.size("ROWS")?);
        let programs = blocks.min(each * self.kernels.multiprocessors());
        let dx = Tensor::f_empty(x.size(), (x.kind(), x.device()))?;
        let narrow = self
            .low
            .map(|low| Tensor::f_empty(x.size(), (low, x.device())));
        let narrow = narrow.transpose()?;
        let partial = Tensor::f_empty([programs as i64, width], (Kind::Float, x.device()))?;
        let mut arguments = vec![
            ("x", Elements(&x)),
            ("weight", Elements(&weight)),
            ("inverse", Elements(&inverse)),
            ("dy", Elements(&dy)),
        ];
        arguments.extend(extra.as_ref().map(|tensor| ("extra", Elements(tensor))));
        arguments.push(("dx", Elements(&dx)));
        arguments.extend(narrow.as_ref().map(|tensor| ("narrow", Elements(tensor))));
        arguments.extend([
            ("partial", Elements(&partial)),
            ("rows", I32(rows)),
            ("width", I32(width)),
        ]);
        self.kernels.launch(loaded, [programs, 1], &arguments)?;
        let dw = partial.f_sum_dim_intlist([0_i64].as_slice(), false, Kind::Float)?;
        Ok(NormGradients { dx, narrow, dw })
    }

    /// Returns the number of rows `(…, width)`, checked against the weight `(width,)`.
    fn rows_of(&self, x: &Tensor, weight: &Tensor) -> Result<i64> {
        let (size, width) = (x.size(), self.width);
        if width < 1 || size.last() != Some(&width) {
            return Err(Common::shape("x", size, format!("[…, {width}]")).into());
        }
        check_shapes(&[("weight", weight, &[width])])?;
        Ok(x.numel() as i64 / width)
    }
}
