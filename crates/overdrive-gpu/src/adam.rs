use overdrive_core::Error as Common;
use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{F32, I64, Tensor as Elements};
use crate::kernels::{Kernels, Loaded, Request, dtype, is_aligned, multiples_of_16};

/// The number of elements that share a scale.
const BLOCK: i64 = 256;

/// A step of AdamW on parameters of one dtype, with running averages in 8-bit codes and one scale for each 256
/// elements.
#[derive(Debug, Clone, Copy)]
pub struct Adam8 {
    kernels: &'static Kernels,
    step: Loaded,
}

/// The running average of a parameter's gradients, or of their squares.
#[derive(Debug, Clone, Copy)]
pub struct CodedAverage<'a> {
    /// The codes, u8 `(N,)`.
    pub codes: &'a Tensor,
    /// The scale of each block, f32 `(⌈N/256⌉,)`.
    pub scales: &'a Tensor,
    /// The values of the codes, f32 `(256,)`, ascending.
    pub book: &'a Tensor,
    /// The bounds between the values, f32 `(255,)`: the code of a number is the number of bounds below it.
    pub bounds: &'a Tensor,
}

/// The factors of an update.
#[derive(Debug, Clone, Copy)]
pub struct AdamFactors {
    /// The factors of both averages.
    pub betas: (f64, f64),
    /// The factors of the gradient and of its square in the averages.
    pub rests: (f64, f64),
    /// The factor of the parameter.
    pub decay: f64,
    /// The factor of the update.
    pub step_size: f64,
    /// The factor of the root of the squares.
    pub correction2: f64,
    /// The term added to the denominator.
    pub eps: f64,
}

impl Kernels {
    /// Returns the kernel for parameters of a dtype and number of elements; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded.
    pub fn adam8(&'static self, kind: Kind, count: i64) -> Result<Option<Adam8>> {
        let Some(dtype) = dtype(kind) else {
            return Ok(None);
        };
        let step = self.find(&Request {
            kernel: "adam8",
            dtype,
            constants: vec![("BLOCK", BLOCK)],
            least: ("ROWS", 1),
            aligned: multiples_of_16(&[count]),
        })?;
        Ok(step.map(|step| Adam8 {
            kernels: self,
            step,
        }))
    }
}

impl Adam8 {
    /// Returns `true` if the memory layout of these tensors, which the kernel changes in place, is supported.
    pub fn takes(tensors: &[&Tensor]) -> bool {
        tensors
            .iter()
            .all(|tensor| tensor.is_contiguous() && is_aligned(tensor))
    }

    /// Updates a parameter `(N,)` and both averages in place, in one launch.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors with the wrong length, dtype or device,
    /// [`Error::Driver`](crate::Error::Driver) if the launch fails.
    pub fn step(
        &self,
        parameter: &Tensor,
        gradient: &Tensor,
        average: CodedAverage<'_>,
        squares: CodedAverage<'_>,
        factors: &AdamFactors,
    ) -> Result<()> {
        let count = parameter.numel() as i64;
        let blocks = (count as u64).div_ceil(BLOCK as u64) as i64;
        for (name, tensor, len) in [
            ("parameter", parameter, count),
            ("gradient", gradient, count),
            ("codes of the average", average.codes, count),
            ("codes of the squares", squares.codes, count),
            ("scales of the average", average.scales, blocks),
            ("scales of the squares", squares.scales, blocks),
            ("book of the average", average.book, 256),
            ("book of the squares", squares.book, 256),
            ("bounds of the average", average.bounds, 255),
            ("bounds of the squares", squares.bounds, 255),
        ] {
            if tensor.numel() as i64 != len || !tensor.is_contiguous() {
                let expected = format!("{len} elements, contiguous");
                return Err(Common::shape(name, tensor.size(), expected).into());
            }
        }
        let arguments = [
            ("parameter", Elements(parameter)),
            ("gradient", Elements(gradient)),
            ("codes1", Elements(average.codes)),
            ("codes2", Elements(squares.codes)),
            ("scales1", Elements(average.scales)),
            ("scales2", Elements(squares.scales)),
            ("book1", Elements(average.book)),
            ("bounds1", Elements(average.bounds)),
            ("book2", Elements(squares.book)),
            ("bounds2", Elements(squares.bounds)),
            ("count", I64(count)),
            ("beta1", F32(factors.betas.0)),
            ("beta2", F32(factors.betas.1)),
            ("rest1", F32(factors.rests.0)),
            ("rest2", F32(factors.rests.1)),
            ("decay", F32(factors.decay)),
            ("step_size", F32(factors.step_size)),
            ("correction2", F32(factors.correction2)),
            ("eps", F32(factors.eps)),
        ];
        let programs = (blocks as usize).div_ceil(self.step.variant.size("ROWS")?);
        self.kernels.launch(&self.step, [programs, 1], &arguments)
    }
}
