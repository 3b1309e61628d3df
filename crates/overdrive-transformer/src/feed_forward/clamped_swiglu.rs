use tch::Tensor;

use crate::Result;
use crate::config::ExpertsConfig;
use crate::sigmoid_gates::gated;

/// The gate of gpt-oss's experts: `(up + 1) · gate · sigmoid(α · gate)`, where gate is bounded from above and up on
/// both sides. Gate and up are neighbouring channels, gate first.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClampedSwiglu {
    alpha: f64,
    limit: f64,
}

impl ClampedSwiglu {
    pub(crate) fn new(config: &ExpertsConfig) -> ClampedSwiglu {
        ClampedSwiglu {
            alpha: config.swiglu_alpha,
            limit: config.swiglu_limit,
        }
    }

    /// Computes `(…, I)` of `joint (…, 2I)`.
    pub(crate) fn forward(&self, joint: &Tensor, fused: bool) -> Result<Tensor> {
        let pairs = joint.f_unflatten(-1, [-1, 2])?;
        let gate = pairs.f_select(-1, 0)?.f_clamp_max(self.limit)?;
        let up = pairs.f_select(-1, 1)?.f_clamp(-self.limit, self.limit)?;
        let gated = gated(&gate, &gate.f_mul_scalar(self.alpha)?, fused)?;
        Ok(up.f_add_scalar(1.0)?.f_mul(&gated)?)
    }

    /// Computes [`forward`](Self::forward) for rows of f32 in slices.
    pub(crate) fn forward_rows(&self, joint: &[f32], y: &mut [f32]) {
        let (alpha, limit) = (self.alpha as f32, self.limit as f32);
        let (pairs, _) = joint.as_chunks::<2>();
        for (y, [gate, up]) in y.iter_mut().zip(pairs) {
            // `min` and `max` would replace NaN by the bound, and libtorch keeps it.
            let gate = if *gate > limit { limit } else { *gate };
            let up = up.clamp(-limit, limit);
            *y = (up + 1.0) * gate / (1.0 + (-alpha * gate).exp());
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn no_gate_depends_on_the_rows_beside_it() {
        let own = ClampedSwiglu {
            alpha: 1.702,
            limit: 7.0,
        };
        let numbers = Tensor::arange_start_step(-20.0, 15.0, 0.5, (Kind::Float, Device::Cpu));
        let joint = numbers.view([5, 14]);
        let all = own.forward(&joint, true).unwrap();
        let by_libtorch = own.forward(&joint, false).unwrap();
        assert!(all.allclose(&by_libtorch, 1e-6, 1e-7, false));
        for row in 0..5 {
            let alone = own.forward(&joint.narrow(0, row, 1), true).unwrap();
            assert_eq!(alone, all.narrow(0, row, 1));
        }
    }
}
