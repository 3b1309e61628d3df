//! The choice between cuDNN's attention and flash on a GPU.
//!
//! libtorch 2.11 itself prefers cuDNN on compute capability 9 and 10 and flash elsewhere. cuDNN's kernels are written
//! for those chips and are faster in training; flash in libtorch is FlashAttention 2, which was written for Ampere. But
//! cuDNN builds a plan for each new shape, which takes 23 to 37 ms. In decoding, the number of keys grows with each
//! token, so every step would build a plan: without gradients, flash stays first.

use std::sync::{Mutex, OnceLock, PoisonError};

use tch::{Device, Kind};

use crate::call::{Call, Sizes};

/// The limit on the number of shapes that cuDNN builds plans for, so that plans take at most about half a second of a
/// run. A program with more shapes has no fixed shapes, such as batches that are padded to their longest sequence.
const MOST_SHAPES: usize = 16;

/// The last version of cuDNN that is wrong for lengths that are not multiples of 128; libtorch also requires a later one.
const LAST_WRONG_CUDNN: i64 = 91_500;

/// The properties of a GPU that the preference depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(crate) capability: Option<(u32, u32)>,
    /// cuDNN's version, such as 91900 for 9.19; 0 without cuDNN.
    pub(crate) cudnn_version: i64,
}

/// The sizes and dtype that cuDNN builds a plan for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Shape {
    pub(crate) sizes: Sizes,
    pub(crate) kind: Kind,
    pub(crate) is_causal: bool,
    pub(crate) has_dropout: bool,
}

/// The shapes that cuDNN has built plans for.
#[derive(Debug, Default)]
pub(crate) struct Shapes(Vec<Shape>);

impl Shapes {
    /// Returns `true` if there is a plan for the shape, or room for another.
    pub(crate) fn admit(&self, shape: &Shape) -> bool {
        self.0.contains(shape) || self.0.len() < MOST_SHAPES
    }

    pub(crate) fn add(&mut self, shape: Shape) {
        if !self.0.contains(&shape) && self.0.len() < MOST_SHAPES {
            self.0.push(shape);
        }
    }
}

/// Returns `true` if cuDNN's attention comes before flash for a call of this shape.
pub(crate) fn prefers_cudnn(gpu: Gpu, shape: &Shape, known: &Shapes) -> bool {
    matches!(gpu.capability, Some((9 | 10, _)))
        && gpu.cudnn_version > LAST_WRONG_CUDNN
        && matches!(shape.kind, Kind::Half | Kind::BFloat16)
        && known.admit(shape)
}

static KNOWN: Mutex<Shapes> = Mutex::new(Shapes(Vec::new()));

/// Returns `true` if cuDNN's attention comes before flash for the call.
pub(crate) fn of(call: &Call<'_>) -> bool {
    let Device::Cuda(index) = call.device else {
        return false;
    };
    // Looked up for each layer of each step.
    if !call.needs_grad || call.is_packed || is_deprioritized() {
        return false;
    }
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    prefers_cudnn(gpu(index), &shape(call), &known)
}

/// Returns `true` if the user prefers flash, by libtorch's own variable.
fn is_deprioritized() -> bool {
    static VARIABLE: OnceLock<bool> = OnceLock::new();
    *VARIABLE.get_or_init(|| {
        std::env::var("TORCH_CUDNN_SDPA_DEPRIORITIZED").is_ok_and(|value| value == "1")
    })
}

/// Records that cuDNN runs the call and then has a plan for its shape.
pub(crate) fn note(call: &Call<'_>) {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    known.add(shape(call));
}

fn shape(call: &Call<'_>) -> Shape {
    Shape {
        sizes: call.sizes,
        kind: call.kind,
        is_causal: call.is_causal(),
        has_dropout: call.options.dropout_p > 0.0,
    }
}

fn gpu(index: usize) -> Gpu {
    static GPUS: Mutex<Vec<(usize, Gpu)>> = Mutex::new(Vec::new());
    let mut gpus = GPUS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, gpu)) = gpus.iter().find(|(other, _)| *other == index) {
        return *gpu;
    }
    let gpu = Gpu {
        capability: overdrive_sys::cuda::compute_capability(index).ok(),
        cudnn_version: overdrive_sys::cuda::cudnn_version().unwrap_or(0),
    };
    gpus.push((index, gpu));
    gpu
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOPPER: Gpu = Gpu {
        capability: Some((9, 0)),
        cudnn_version: 91_900,
    };

    fn shape(queries: i64) -> Shape {
        Shape {
            sizes: Sizes {
                batch: 2,
                heads: 8,
                kv_heads: 2,
                queries,
                keys: queries,
                key_dim: 128,
                value_dim: 128,
            },
            kind: Kind::BFloat16,
            is_causal: true,
            has_dropout: false,
        }
    }

    #[test]
    fn cudnn_comes_first_in_training_on_hopper_and_datacenter_blackwell() {
        let known = Shapes::default();
        let with = |capability| Gpu {
            capability,
            ..HOPPER
        };
        for (capability, expected) in [
            (None, false),
            (Some((8, 0)), false),
            (Some((8, 9)), false),
            (Some((9, 0)), true),
            (Some((10, 0)), true),
            (Some((10, 3)), true),
            (Some((12, 0)), false),
        ] {
            let found = prefers_cudnn(with(capability), &shape(1024), &known);
            assert_eq!(found, expected, "{capability:?}");
        }
        let old = Gpu {
            cudnn_version: 91_500,
            ..HOPPER
        };
        assert!(!prefers_cudnn(old, &shape(1024), &known));
        let wide = Shape {
            kind: Kind::Float,
            ..shape(1024)
        };
        assert!(!prefers_cudnn(HOPPER, &wide, &known));
    }

    #[test]
    fn a_program_of_many_shapes_gets_plans_for_the_first_ones_only() {
        let mut known = Shapes::default();
        for length in 0..40 {
            let shape = shape(64 * (length + 1));
            if prefers_cudnn(HOPPER, &shape, &known) {
                known.add(shape);
            }
        }
        assert_eq!(known.0.len(), MOST_SHAPES);
        assert!(prefers_cudnn(HOPPER, &shape(64), &known));
        assert!(!prefers_cudnn(HOPPER, &shape(64 * 40), &known));
    }
}
