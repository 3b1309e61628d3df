//! Reproducible tensors, and the comparison of a function's values and gradients with a reference.

#![allow(dead_code, reason = "each test file uses a part")]

use tch::{Kind, Tensor};

/// Numbers of a fixed generator, roughly normal: tests run in threads, so libtorch's global generator
/// would not repeat.
pub(crate) fn values(shape: &[i64], seed: u64) -> Tensor {
    let count: i64 = shape.iter().product();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678_9abc_def1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let numbers: Vec<f32> = (0..count)
        .map(|_| (uniform() + uniform() + uniform() + uniform()) * 1.7)
        .collect();
    Tensor::from_slice(&numbers).reshape(shape)
}

/// Labels in `0..classes`; each `every`-th is -100 (none for 0).
pub(crate) fn labels(shape: &[i64], classes: i64, every: usize, seed: u64) -> Tensor {
    let count: i64 = shape.iter().product();
    let label = |i: i64| {
        let mixed = (i as u64 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        match every {
            0 => mixed as i64 % classes,
            every if (i as usize + 1).is_multiple_of(every) => -100,
            _ => mixed as i64 % classes,
        }
    };
    Tensor::from_slice(&(0..count).map(label).collect::<Vec<_>>()).reshape(shape)
}

/// The outputs of `f` in `kind`, and the gradients of a fixed combination of them: one for each input.
pub(crate) fn run(
    inputs: &[Tensor],
    kind: Kind,
    f: impl Fn(&[Tensor]) -> Vec<Tensor>,
) -> [Vec<Tensor>; 2] {
    run_weighted(inputs, kind, kind, f)
}

/// [`run`] with the factors of the combination, which are the gradients that reach `f`'s backward,
/// rounded to `weights`: two runs see the same gradients though they compute in different dtypes.
fn run_weighted(
    inputs: &[Tensor],
    kind: Kind,
    weights: Kind,
    f: impl Fn(&[Tensor]) -> Vec<Tensor>,
) -> [Vec<Tensor>; 2] {
    let inputs: Vec<Tensor> = inputs
        .iter()
        .map(|x| x.to_kind(kind).detach().set_requires_grad(true))
        .collect();
    let outputs = f(&inputs);
    let mut loss = Tensor::from(0.0_f64);
    for (index, output) in outputs.iter().enumerate() {
        let factors = values(&output.size(), 99 + index as u64).to_kind(weights);
        let factors = factors.to_kind(Kind::Double);
        loss += (output.to_kind(Kind::Double) * factors).sum(Kind::Double);
    }
    loss.backward();
    let gradients = inputs.iter().map(Tensor::grad).collect();
    [outputs, gradients]
}

/// Asserts `|a - b| ≤ tolerance · (1 + max|b|)` element by element, with infinities and NaN alike.
pub(crate) fn assert_close(what: &str, a: &Tensor, b: &Tensor, tolerance: f64) {
    assert_eq!(a.size(), b.size(), "{what}: shapes");
    let (a, b) = (a.to_kind(Kind::Double), b.to_kind(Kind::Double));
    if a.numel() == 0 {
        return;
    }
    let scale = 1.0 + b.abs().max().double_value(&[]);
    let close = a.allclose(&b, 0.0, tolerance * scale, true);
    assert!(
        close,
        "{what}: off by {:e} of {scale:e} (tolerance {tolerance:e})",
        (&a - &b).abs().max().double_value(&[])
    );
}

/// Compares `f` in `kind` with `reference` in f64, outputs and gradients.
pub(crate) fn compare(
    inputs: &[Tensor],
    kind: Kind,
    tolerance: f64,
    f: impl Fn(&[Tensor]) -> Vec<Tensor>,
    reference: impl Fn(&[Tensor]) -> Vec<Tensor>,
) {
    // The reference starts from the same rounded inputs and the same rounded gradients.
    let rounded: Vec<Tensor> = inputs.iter().map(|x| x.to_kind(kind)).collect();
    let ours = run_weighted(&rounded, kind, kind, f);
    let exact = run_weighted(&rounded, Kind::Double, kind, reference);
    for (what, (ours, exact)) in ["output", "gradient"].iter().zip(ours.iter().zip(&exact)) {
        assert_eq!(ours.len(), exact.len());
        for (index, (a, b)) in ours.iter().zip(exact).enumerate() {
            assert_close(&format!("{what} {index} in {kind:?}"), a, b, tolerance);
        }
    }
}

/// The dtypes with kernels, and what a result rounded to each is off by at most, relative to the
/// largest element: some units of f32, and half a unit in the last place of bf16 (2⁻⁹) or f16 (2⁻¹²)
/// with room for a second rounding in the gradient.
pub(crate) const KINDS: [(Kind, f64); 3] = [
    (Kind::Float, 2e-6),
    (Kind::BFloat16, 8e-3),
    (Kind::Half, 1e-3),
];
