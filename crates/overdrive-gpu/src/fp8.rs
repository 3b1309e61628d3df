use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{I32, I64, Tensor as Elements};
use crate::kernels::{Kernels, Request, dtype, is_aligned, multiples_of_16};

/// The number of largest magnitudes that the cast reduces, and so of programs that look for them.
const PARTIALS: i64 = 1024;

/// A format of 8-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fp8Format {
    /// 4 bits of exponent, 3 of mantissa, up to 448, without infinities: for activations and weights.
    E4m3,
    /// 5 bits of exponent, 2 of mantissa, up to 57344: for gradients.
    E5m2,
}

/// A matrix `(M, K)` in 8-bit floats, which are its elements multiplied by a scale that takes the largest of them to the
/// largest number of the format.
#[derive(Debug)]
pub struct Fp8Matrix {
    /// The codes, u8 `(M, K)`.
    pub codes: Tensor,
    /// The codes of the transpose, u8 `(K, ⌈M/16⌉·16)`, with 0 in the columns from M on.
    pub columns: Option<Tensor>,
    /// The factor from codes to elements, f32 `(1,)`.
    pub inverse: Tensor,
}

impl Kernels {
    /// Converts a matrix `(M, K)` in f32, f16 or bf16, and if `columns` is set also its transpose, in two launches and
    /// without a read of the device by the host. Returns `None` if there is no kernel for it: `K` must be a multiple of 16.
    ///
    /// # Errors
    /// [`Error::Driver`](crate::Error::Driver) if a kernel cannot be loaded or launched.
    pub fn to_fp8(
        &self,
        x: &Tensor,
        format: Fp8Format,
        columns: bool,
    ) -> Result<Option<Fp8Matrix>> {
        let (&[rows, width], Some(dtype)) = (x.size().as_slice(), dtype(x.kind())) else {
            return Ok(None);
        };
        let count = rows * width;
        if count == 0 || !multiples_of_16(&[width]) || !x.is_contiguous() || !is_aligned(x) {
            return Ok(None);
        }
        let amax = self.find(&Request {
            kernel: "fp8_amax",
            dtype,
            constants: Vec::new(),
            least: ("BLOCK", 1),
            aligned: true,
        })?;
        let cast = self.find(&Request {
            kernel: "fp8_cast",
            dtype,
            constants: vec![
                ("E5M2", i64::from(format == Fp8Format::E5m2)),
                ("COLUMNS", i64::from(columns)),
            ],
            least: ("PARTIALS", PARTIALS),
            aligned: true,
        })?;
        let Some((amax, cast)) = amax.zip(cast) else {
            return Ok(None);
        };

        let all = div_ceil(count, amax.variant.size("BLOCK")? as i64);
        let blocks = div_ceil(all, PARTIALS);
        let programs = div_ceil(all, blocks);
        let device = x.device();
        let partial = Tensor::f_empty([programs], (Kind::Float, device))?;
        let arguments = [
            ("x", Elements(x)),
            ("partial", Elements(&partial)),
            ("count", I64(count)),
            ("blocks", I32(blocks)),
        ];
        self.launch(&amax, [programs as usize, 1], &arguments)?;

        let padded = div_ceil(rows, 16) * 16;
        let codes = Tensor::f_empty([rows, width], (Kind::Uint8, device))?;
        let transposed = match columns {
            true => Some(Tensor::f_empty([width, padded], (Kind::Uint8, device))?),
            false => None,
        };
        let inverse = Tensor::f_empty([1], (Kind::Float, device))?;
        let mut arguments = vec![
            ("x", Elements(x)),
            ("partial", Elements(&partial)),
            ("codes", Elements(&codes)),
        ];
        arguments.extend(
            transposed
                .as_ref()
                .map(|columns| ("columns", Elements(columns))),
        );
        arguments.extend([
            ("inverse", Elements(&inverse)),
            ("rows", I32(rows)),
            ("width", I32(width)),
        ]);
        arguments.extend(columns.then_some(("padded", I32(padded))));
        arguments.push(("partials", I32(programs)));
        let tile = cast.variant.size("TILE")?;
        let blocks = [padded as usize, width as usize].map(|size| size.div_ceil(tile));
        self.launch(&cast, blocks, &arguments)?;
        Ok(Some(Fp8Matrix {
            codes,
            columns: transposed,
            inverse,
        }))
    }
}

/// Returns `a / b`, rounded up, of positive numbers.
fn div_ceil(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}
