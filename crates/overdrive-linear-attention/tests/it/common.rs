//! Inputs and comparisons that the tests share.

use overdrive_linear_attention::DeltaRuleInputs;
use tch::{Device, Kind, Tensor};

/// Returns the largest difference of two tensors.
pub(crate) fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.size(), b.size());
    if a.numel() == 0 {
        return 0.0;
    }
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    (a - b).abs().max().double_value(&[])
}

/// Returns `true` if two tensors have the same dtype, shape and values.
pub(crate) fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    a.kind() == b.kind() && a.size() == b.size() && a.equal(b)
}

/// Returns normally distributed numbers that depend on the seed only, whichever tests run at the same time.
pub(crate) fn random(seed: u64, shape: &[i64], kind: Kind) -> Tensor {
    let count: i64 = shape.iter().product();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        (bits as f64 + 0.5) / f64::from(1 << 24)
    };
    let numbers: Vec<f64> = (0..count)
        .map(|_| {
            let (radius, angle) = (uniform(), uniform());
            (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
        })
        .collect();
    Tensor::from_slice(&numbers).reshape(shape).to_kind(kind)
}

/// The sizes of a problem.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) key_heads: i64,
    pub(crate) heads: i64,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
}

/// The tensors of the delta rule.
#[derive(Debug)]
pub(crate) struct Owned {
    pub(crate) query: Tensor,
    pub(crate) key: Tensor,
    pub(crate) value: Tensor,
    pub(crate) decay: Tensor,
    pub(crate) beta: Tensor,
}

impl Owned {
    /// Returns inputs whose first dimensions are `leading`.
    pub(crate) fn random(seed: u64, leading: &[i64], shape: Shape, kind: Kind) -> Owned {
        let of = |seed: u64, rest: &[i64]| random(seed, &[leading, rest].concat(), Kind::Double);
        Owned {
            query: of(seed, &[shape.key_heads, shape.key_dim]).to_kind(kind),
            key: of(seed + 1, &[shape.key_heads, shape.key_dim]).to_kind(kind),
            value: of(seed + 2, &[shape.heads, shape.value_dim]).to_kind(kind),
            decay: (-of(seed + 3, &[shape.heads]).square() * 0.3).to_kind(match kind {
                Kind::Double => Kind::Double,
                _ => Kind::Float,
            }),
            beta: of(seed + 4, &[shape.heads]).sigmoid().to_kind(kind),
        }
    }

    pub(crate) fn inputs(&self) -> DeltaRuleInputs<'_> {
        DeltaRuleInputs {
            query: &self.query,
            key: &self.key,
            value: &self.value,
            decay: &self.decay,
            beta: &self.beta,
        }
    }

    pub(crate) fn tensors(&self) -> [&Tensor; 5] {
        [&self.query, &self.key, &self.value, &self.decay, &self.beta]
    }

    pub(crate) fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Owned {
        let [query, key, value, decay, beta] = self.tensors().map(f);
        Owned {
            query,
            key,
            value,
            decay,
            beta,
        }
    }

    /// Returns copies that require gradients.
    pub(crate) fn leaves(&self) -> Owned {
        self.map(|x| x.detach().copy().set_requires_grad(true))
    }
}

/// Returns zeros in f32.
pub(crate) fn zeros(shape: &[i64]) -> Tensor {
    Tensor::zeros(shape, (Kind::Float, Device::Cpu))
}
