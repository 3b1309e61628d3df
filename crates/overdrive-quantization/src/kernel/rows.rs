//! The activations of a product, in each form that a kernel of it takes, made once.

use std::cell::OnceCell;

use super::activations::Int8Rows;
use super::element::Element;

/// Rows of activations `(rows, width)`.
#[derive(Debug)]
pub(crate) struct Rows<'a, T> {
    x: &'a [T],
    pub(crate) rows: usize,
    pub(crate) width: usize,
    floats: OnceCell<Vec<f32>>,
    int8: OnceCell<Int8Rows>,
}

impl<'a, T: Element> Rows<'a, T> {
    pub(crate) fn new(x: &'a [T], width: usize) -> Self {
        Rows {
            x,
            rows: x.len().checked_div(width).unwrap_or(0),
            width,
            floats: OnceCell::new(),
            int8: OnceCell::new(),
        }
    }

    /// As floats, `(rows, width)`.
    pub(crate) fn floats(&self) -> &[f32] {
        T::as_floats(self.x).unwrap_or_else(|| {
            self.floats.get_or_init(|| {
                let mut floats = Vec::new();
                T::floats(self.x, &mut floats);
                floats
            })
        })
    }

    /// In 8 bits, with one scale a row.
    pub(crate) fn int8(&self) -> &Int8Rows {
        self.int8
            .get_or_init(|| Int8Rows::quantize(self.x, self.width))
    }
}
