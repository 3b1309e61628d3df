//! Copies of a few tokens into a buffer, without the dispatch of libtorch.
//!
//! With two `narrow`s and two `copy_`s, a token of 4 heads of 64 channels takes several microseconds per
//! layer; copying the 2 KB is a small fraction of it.
#![allow(
    unsafe_code,
    reason = "rows are copied between tensors of any strides by address"
)]

use overdrive_sys::raw;
use tch::Tensor;

use crate::Result;
use crate::buffer::Buffer;

/// The size in bytes above which libtorch's copy is used: it runs on all threads, and its start-up cost
/// is negligible for large copies.
const LARGE: i64 = 256 << 10;

/// Copies the tokens `from..from + count` of `source (B, H, T, D)` to position `at` of `target (B', H,
/// C, D)`, `B <= B'`, of the same dtype and device.
pub(crate) fn copy_tokens(
    target: &Tensor,
    at: i64,
    source: &Tensor,
    (from, count): (i64, i64),
) -> Result<()> {
    let (sizes, to) = (source.size(), target.size());
    let element = source.kind().elt_size_in_bytes();
    let bytes = sizes[0] * sizes[1] * count * sizes[3] * element as i64;
    let fits = sizes.len() == 4
        && to.len() == 4
        && sizes[0] <= to[0]
        && sizes[1] == to[1]
        && sizes[3] == to[3]
        && source.kind() == target.kind()
        && (0..=sizes[2]).contains(&from)
        && (0..=sizes[2] - from).contains(&count)
        && (0..=to[2]).contains(&at)
        && count <= to[2] - at;
    if fits && bytes <= LARGE {
        let (strides, to_strides) = (source.stride(), target.stride());
        // If a tensor has no address (on another device, or as a negated view), libtorch copies it or
        // returns the error.
        let addresses = raw::address(target).and_then(|to| Ok((to, raw::address(source)?)));
        if let Ok((to_start, start)) = addresses
            && dense_rows(&sizes, &strides)
            && dense_rows(&to, &to_strides)
        {
            // SAFETY: both have the same dtype and have addresses; `fits` keeps every row inside both
            // tensors, whose elements `raw::address` found in their storages. The cache is borrowed for
            // writing, so nothing else writes to its buffer; code that writes to the caller's tensor while
            // it is read would also race with libtorch's own operators. `ptr::copy` allows the two to
            // overlap, in case the caller passes a view of this same cache.
            unsafe {
                copy_rows(
                    Rows::new(to_start, &to_strides, element, at),
                    Rows::new(start, &strides, element, from),
                    [sizes[0], sizes[1], count].map(to_usize),
                    to_usize(sizes[3]) * element,
                );
            }
            return Ok(());
        }
    }
    target
        .f_narrow(0, 0, sizes[0])?
        .f_narrow(2, at, count)?
        .f_copy_(&source.f_narrow(2, from, count)?)?;
    Ok(())
}

/// Returns the elements of the keys and values of a buffer in f32 on the CPU, to be written.
pub(crate) fn rows_of(buffer: &mut Buffer) -> Result<(&mut [f32], &mut [f32])> {
    // SAFETY: the buffer made both tensors, and they share no memory. The buffer is borrowed for writing; code
    // that reads a view of a cache while the cache changes would also race with libtorch's own operators.
    unsafe { Ok((buffer.keys.slice_mut()?, buffer.values.slice_mut()?)) }
}

/// Returns `true` if the elements of a row are adjacent and no stride is negative.
fn dense_rows(sizes: &[i64], strides: &[i64]) -> bool {
    (strides[3] == 1 || sizes[3] <= 1) && strides[..3].iter().all(|stride| *stride >= 0)
}

fn to_usize(size: i64) -> usize {
    usize::try_from(size).unwrap_or(0)
}

/// The address of the first row of a `(B, H, T, D)` tensor from some token on, and the strides in
/// bytes.
#[derive(Clone, Copy)]
struct Rows {
    start: *mut u8,
    batch: usize,
    head: usize,
    token: usize,
}

impl Rows {
    fn new(address: *mut u8, strides: &[i64], element: usize, from: i64) -> Rows {
        let token = to_usize(strides[2]) * element;
        Rows {
            start: address.wrapping_add(to_usize(from) * token),
            batch: to_usize(strides[0]) * element,
            head: to_usize(strides[1]) * element,
            token,
        }
    }
}

/// # Safety
/// All rows `(b, h, t)` below `counts`, of `bytes` bytes, lie in readable and writable memory.
unsafe fn copy_rows(to: Rows, from: Rows, counts: [usize; 3], bytes: usize) {
    let [batches, heads, tokens] = counts;
    // If the tokens of a head are adjacent in both tensors, one long copy for each head replaces a copy
    // for each token.
    let together = tokens == 1 || (to.token == bytes && from.token == bytes);
    let (runs, run) = match together {
        true => (1, tokens * bytes),
        false => (tokens, bytes),
    };
    if run == 0 {
        return;
    }
    for batch in 0..batches {
        for head in 0..heads {
            for token in 0..runs {
                // SAFETY: the caller's contract.
                unsafe {
                    let source = from
                        .start
                        .add(batch * from.batch + head * from.head + token * from.token);
                    let target = to
                        .start
                        .add(batch * to.batch + head * to.head + token * to.token);
                    std::ptr::copy(source, target, run);
                }
            }
        }
    }
}
