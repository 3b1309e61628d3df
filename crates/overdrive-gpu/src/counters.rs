use std::collections::HashMap;

use tch::{Device, Kind, Tensor};

use crate::Result;

/// The number of rows of a table. Further streams and captures get none.
const ROWS: usize = 1024;

/// Counters in the memory of a GPU, with which the programs of a launch count how many of them have finished. The last
/// program resets them to zero, so that consecutive launches share them without a launch that clears them.
///
/// Launches that may run at the same time must not share counters. Launches run in order on a stream and, in a capture,
/// on a stream of that capture: its graph is replayed as a whole and never concurrently with itself, but possibly on
/// another stream. Each stream and each stream of a capture therefore has its own row, which it keeps for the life of
/// the process: 528 bytes on a GPU with 132 multiprocessors.
#[derive(Debug)]
pub(crate) struct Counters {
    /// i32 `(ROWS, width)`.
    pub(crate) table: Tensor,
    width: usize,
    rows: HashMap<(usize, u64), usize>,
}

impl Counters {
    /// Allocates rows of at least `width` counters and waits for the device, so that every stream sees the zeros.
    pub(crate) fn new(width: usize, device: Device) -> Result<Self> {
        // Rows begin at multiples of 16 bytes.
        let width = width.next_multiple_of(4);
        let zeros = Tensor::f_zeros([(ROWS * width) as i64], (Kind::Int, Device::Cpu))?;
        Ok(Self {
            table: zeros.f_to_device(device)?,
            width,
            rows: HashMap::new(),
        })
    }

    /// Returns the first counter of a stream, or of a stream in a capture; `None` if all rows are in use.
    pub(crate) fn of(&mut self, sequence: (usize, u64)) -> Option<usize> {
        let next = self.rows.len();
        if next == ROWS && !self.rows.contains_key(&sequence) {
            return None;
        }
        let row = *self.rows.entry(sequence).or_insert(next);
        Some(row * self.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stream_and_each_capture_has_counters_of_its_own() {
        let mut counters = Counters::new(5, Device::Cpu).unwrap();
        assert_eq!(counters.of((7, 0)), Some(0));
        assert_eq!(counters.of((7, 1)), Some(8));
        assert_eq!(counters.of((8, 0)), Some(16));
        assert_eq!(counters.of((7, 1)), Some(8));
        for capture in 2..ROWS as u64 - 1 {
            assert!(counters.of((7, capture)).is_some());
        }
        // One row too many.
        assert_eq!(counters.of((9, 0)), None);
        assert_eq!(counters.of((8, 0)), Some(16));
        assert_eq!(counters.table.size(), [8 * ROWS as i64]);
    }
}
