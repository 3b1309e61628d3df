//! Dot products of bytes in plain loops.

use super::Portable;
use crate::{BYTES, Int8};

impl Int8 for Portable {
    type W = [i8; BYTES];
    type X = [i8; BYTES];
    type A = [i32; 4];

    #[inline(always)]
    fn zero(self) -> [i32; 4] {
        [0; 4]
    }

    #[inline(always)]
    fn load_codes(self, from: &[i8; BYTES]) -> [i8; BYTES] {
        *from
    }

    #[inline(always)]
    fn load_activations(self, from: &[i8; BYTES]) -> [i8; BYTES] {
        *from
    }

    #[inline(always)]
    fn dot(self, mut sums: [i32; 4], w: [i8; BYTES], x: [i8; BYTES]) -> [i32; 4] {
        // Two products of codes fit 16 bits, and with that eight lanes a register (`smull`, `sadalp`).
        let mut at = 0;
        while at < BYTES {
            for (lane, sum) in sums.iter_mut().enumerate() {
                let pair = at + 2 * lane;
                let product = |at: usize| i32::from(i16::from(w[at]) * i16::from(x[at]));
                *sum += product(pair) + product(pair + 1);
            }
            at += 8;
        }
        sums
    }

    #[inline(always)]
    fn add_sums(self, a: [i32; 4], b: [i32; 4]) -> [i32; 4] {
        [a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]]
    }

    #[inline(always)]
    fn total(self, sums: [i32; 4]) -> i32 {
        sums[0] + sums[1] + sums[2] + sums[3]
    }
}
