//! Copies of rows into the blocks of a pool.

use overdrive_kernels::InstructionSet;
use overdrive_sys::raw;
use tch::{Kind, Tensor};

use super::eight_bit::{quantize_fp8, quantize_int8};
use super::inputs::View;
use crate::Result;

/// Copies row `t` of head `h` of `rows` to row `slots[t] % block_size` of head `h` of block
/// `slots[t] / block_size` of `pool (blocks, heads, block_size, dim)`, contiguous and on the CPU.
///
/// The caller has checked that every slot is in the pool, and that `pool` does not share memory with
/// `rows`.
pub(crate) fn write_rows<E: raw::Element>(
    rows: &View<'_, E>,
    pool: &Tensor,
    (heads, block_size, dim): (usize, usize, usize),
    slots: &[usize],
) -> Result<()> {
    // SAFETY: as for any operator that writes in place, its caller sees to it that nobody uses the
    // tensor meanwhile; `paged_write` has found that `rows` is other memory.
    let pool = unsafe { raw::slice_mut::<E>(pool)? };
    for (token, slot) in slots.iter().enumerate() {
        let (block, row) = (slot / block_size, slot % block_size);
        for head in 0..heads {
            let at = ((block * heads + head) * block_size + row) * dim;
            pool[at..][..dim].copy_from_slice(rows.row(0, head, token, dim));
        }
    }
    Ok(())
}

/// Quantizes the rows and writes their codes as [`write_rows`] writes elements, and their scales to `scales (blocks,
/// heads, block_size)`. `codes` is Int8 or Float8e4m3fn.
pub(crate) fn write_quantized_rows(
    rows: &View<'_, f32>,
    codes: &Tensor,
    scales: &Tensor,
    sizes: (usize, usize, usize),
    slots: &[usize],
) -> Result<()> {
    let set = InstructionSet::best();
    // SAFETY: as in `write_rows`.
    let scales = unsafe { raw::slice_mut::<f32>(scales)? };
    if codes.kind() == Kind::Int8 {
        // SAFETY: as in `write_rows`.
        let codes = unsafe { raw::slice_mut::<i8>(codes)? };
        quantize_rows(rows, codes, scales, sizes, slots, |row, codes| {
            quantize_int8(set, row, codes)
        });
        return Ok(());
    }
    let bytes = codes.f_view_dtype(Kind::Uint8)?;
    // SAFETY: as in `write_rows`.
    let codes = unsafe { raw::slice_mut::<u8>(&bytes)? };
    quantize_rows(rows, codes, scales, sizes, slots, |row, codes| {
        quantize_fp8(set, row, codes)
    });
    Ok(())
}

fn quantize_rows<C>(
    rows: &View<'_, f32>,
    codes: &mut [C],
    scales: &mut [f32],
    (heads, block_size, dim): (usize, usize, usize),
    slots: &[usize],
    quantize: impl Fn(&[f32], &mut [C]) -> f32,
) {
    for (token, slot) in slots.iter().enumerate() {
        let (block, row) = (slot / block_size, slot % block_size);
        for head in 0..heads {
            let at = (block * heads + head) * block_size + row;
            let codes = &mut codes[at * dim..][..dim];
            scales[at] = quantize(rows.row(0, head, token, dim), codes);
        }
    }
}
