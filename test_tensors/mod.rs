//! Random tensors for tests, the same in every run. A test program includes this file by `#[path]`.

use std::cell::RefCell;

use overdrive_core::random::Generator;
use tch::Tensor;

thread_local! {
    /// One for each test: libtorch's generator is that of the process.
    static GENERATOR: RefCell<Generator> = RefCell::new(Generator::new(1, 0));
}

/// Returns normally distributed numbers of this shape, Double on the CPU: the next ones of the test's generator.
pub(crate) fn normal(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let draw = |generator: &mut Generator| (0..count).map(|_| generator.normal()).collect();
    let numbers: Vec<f64> = GENERATOR.with_borrow_mut(draw);
    Tensor::from_slice(&numbers).view(shape)
}
