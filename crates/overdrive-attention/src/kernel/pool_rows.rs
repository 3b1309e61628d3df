//! Copies of rows into the blocks of a pool.

use overdrive_sys::raw;
use tch::Tensor;

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
