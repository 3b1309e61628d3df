//! Where kernels put what they compute.

use super::element::Element;
use super::threads::Target;

/// The results of a product. Kernels write them through this trait, a few at a time, so that they are
/// compiled once, whatever the type of the results.
pub(super) trait Results {
    /// Writes the values of a row of activations for the outputs from `output` on.
    fn put(&self, row: usize, output: usize, values: &[f32]);
}

/// The columns of one weight, to which its bias is added.
pub(super) struct Columns<'a, T> {
    pub(super) bias: Option<&'a [T]>,
    /// The column of its first output.
    pub(super) first: usize,
    pub(super) target: &'a Target<'a, T>,
}

impl<T: Element> Results for Columns<'_, T> {
    fn put(&self, row: usize, output: usize, values: &[f32]) {
        for (index, value) in values.iter().enumerate() {
            let output = output + index;
            let bias = self.bias.map_or(0.0, |bias| bias[output].to_f32());
            self.target
                .set(row, self.first + output, T::from_f32(value + bias));
        }
    }
}
