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
    by_row: OnceCell<Int8Rows>,
    /// With groups of 16, 32, 64, 128 and 256.
    by_group: [OnceCell<Int8Rows>; 5],
}

impl<'a, T: Element> Rows<'a, T> {
    pub(crate) fn new(x: &'a [T], width: usize) -> Self {
        Rows {
            x,
            rows: x.len().checked_div(width).unwrap_or(0),
            width,
            floats: OnceCell::new(),
            by_row: OnceCell::new(),
            by_group: Default::default(),
        }
    }

    pub(crate) fn x(&self) -> &'a [T] {
        self.x
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
        self.by_row
            .get_or_init(|| Int8Rows::quantize(self.x, self.width, None))
    }

    /// In 8 bits, with one scale for each `group` inputs; a power of two of 16 to 256, `None` otherwise.
    pub(crate) fn int8_by_group(&self, group: usize) -> Option<&Int8Rows> {
        let index = [16, 32, 64, 128, 256].iter().position(|g| *g == group)?;
        let make = || Int8Rows::quantize(self.x, self.width, Some(group));
        Some(self.by_group[index].get_or_init(make))
    }
}
