//! The code books of 8-bit states on each device.

use std::sync::{Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::code_book::{BLOCK, CODES, CodeBook};

/// The code books as tensors on a device.
#[derive(Debug)]
pub(crate) struct DeviceBooks {
    /// The values of the codes of averages, followed by those of the codes of squares: f32 `(2 · CODES,)`.
    pub(crate) values: Tensor,
    /// The indices in `values` of the first code of each book: i32 `(2, 1)`.
    pub(crate) first_codes: Tensor,
    /// The bounds between codes, one fewer than codes.
    pub(crate) bounds: [Tensor; 2],
    /// Codes of 0 that fill up the last block of a piece: one fewer than a block.
    pub(crate) zeros: [Tensor; 2],
}

/// The code books on each device that has run an 8-bit update.
static BOOKS: Mutex<Vec<(Device, DeviceBooks)>> = Mutex::new(Vec::new());

impl DeviceBooks {
    /// Returns handles to the books of `device`, which are uploaded at their first use: an upload from ordinary
    /// memory waits for the device.
    pub(crate) fn of(device: Device) -> Result<Self> {
        let mut books = BOOKS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = books.iter().find(|(other, _)| *other == device) {
            return Ok(found.shallow_clone());
        }
        let new = Self::new(device)?;
        let handles = new.shallow_clone();
        books.push((device, new));
        Ok(handles)
    }

    fn new(device: Device) -> Result<Self> {
        let books = [CodeBook::signed(), CodeBook::unsigned()];
        let values: Vec<f32> = books.iter().flat_map(|book| book.codes).collect();
        let bounds = |book: &CodeBook| -> Result<Tensor> {
            // The last bound is infinity, which `bucketize` does not need.
            let bounds = Tensor::f_from_slice(&book.nearest.bounds()[..CODES - 1])?;
            Ok(bounds.f_to_device(device)?)
        };
        let zeros = |book: &CodeBook| -> Result<Tensor> {
            let code = i64::from(book.nearest.nearest(0.0));
            Ok(Tensor::f_full(
                [BLOCK as i64 - 1],
                code,
                (Kind::Uint8, device),
            )?)
        };
        let first_codes = Tensor::f_from_slice(&[0_i32, CODES as i32])?.f_view([2, 1])?;
        Ok(Self {
            values: Tensor::f_from_slice(&values)?.f_to_device(device)?,
            first_codes: first_codes.f_to_device(device)?,
            bounds: [bounds(books[0])?, bounds(books[1])?],
            zeros: [zeros(books[0])?, zeros(books[1])?],
        })
    }

    fn shallow_clone(&self) -> Self {
        let both = |pair: &[Tensor; 2]| [pair[0].shallow_clone(), pair[1].shallow_clone()];
        Self {
            values: self.values.shallow_clone(),
            first_codes: self.first_codes.shallow_clone(),
            bounds: both(&self.bounds),
            zeros: both(&self.zeros),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_its_books_once() {
        let [first, second] = [(); 2].map(|()| DeviceBooks::of(Device::Cpu).expect("memory"));
        assert_eq!(first.values.data_ptr(), second.values.data_ptr());
        for (row, zeros) in (0..).zip(&first.zeros) {
            let code = zeros.int64_value(&[0]);
            assert_eq!(first.values.double_value(&[row * CODES as i64 + code]), 0.0);
        }
    }
}
