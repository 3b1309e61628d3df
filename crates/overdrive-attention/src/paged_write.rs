use overdrive_core::Error as Common;
use overdrive_gpu::PagedWrite;
use overdrive_kernels::Accumulate;
use overdrive_kernels::tensors::Strided;
use overdrive_sys::storage::memory_overlaps;
use overdrive_sys::transfer::to_device;
use tch::{Device, Kind, Tensor};

use crate::blockwise::for_kind;
use crate::call::shape_error;
use crate::error::other_device;
use crate::kernel::{View, write_quantized_rows, write_rows};
use crate::paged_blocks::largest_code;
use crate::{Error, Result};

/// The slots in a pool of blocks for the new tokens of a step: token `t` is written to row `slots[t] % block_size` of
/// block `slots[t] / block_size`.
///
/// Create it once for all layers of a step.
#[derive(Debug)]
pub struct PagedSlots {
    len: usize,
    /// Empty if only the device knows them.
    slots: Vec<usize>,
    block_size: usize,
    /// The slot after the last one.
    end: usize,
    device: Device,
    /// The blocks and rows as tensors, for a device that cannot read `slots`.
    indices: Option<(Tensor, Tensor)>,
}

impl PagedSlots {
    /// Creates it from slots of a pool on `device` whose blocks have `block_size` rows. No two slots may be the same.
    ///
    /// # Errors
    /// [`Error::PagedLayout`] for a block size of 0; [`Error::Tch`] if the device does not exist.
    pub fn new(slots: Vec<usize>, block_size: usize, device: Device) -> Result<PagedSlots> {
        if block_size == 0 {
            return Err(Error::PagedLayout {
                argument: "block_size",
                problem: "is 0, expected at least 1".to_owned(),
            });
        }
        let indices = match device {
            Device::Cpu => None,
            device => Some(indices(&slots, block_size, device)?),
        };
        Ok(PagedSlots {
            // Computed once for a step, so that the check in each layer compares one number.
            end: slots.iter().max().map_or(0, |last| last + 1),
            len: slots.len(),
            slots,
            block_size,
            device,
            indices,
        })
    }

    /// Creates it from tensors at fixed addresses, for captured steps: token `t` goes to row `rows[t]` of block
    /// `blocks[t]`; i64 `(T,)`. The host does not check their contents: as for `index_put_`, a slot outside the pool is
    /// an error on a CPU and undefined on a GPU, and of two tokens with equal slots either may remain.
    ///
    /// # Errors
    /// [`Error::PagedLayout`] for other dtypes or shapes.
    pub fn of_device(blocks: &Tensor, rows: &Tensor, block_size: usize) -> Result<PagedSlots> {
        for (argument, tensor) in [("blocks", blocks), ("rows", rows)] {
            let (kind, size) = (tensor.f_kind()?, tensor.size());
            if kind != Kind::Int64 || size.len() != 1 || size != blocks.size() {
                let problem = format!("is {kind:?} {size:?}, expected Int64 (T,)");
                return Err(Error::PagedLayout { argument, problem });
            }
        }
        Ok(PagedSlots {
            len: blocks.numel(),
            slots: Vec::new(),
            block_size,
            end: 0,
            device: blocks.device(),
            indices: Some((blocks.shallow_clone(), rows.shallow_clone())),
        })
    }

    /// Returns the number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there is no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// Writes `rows` (T, H_kv, D), the keys or values of T new tokens, to their slots of `pool`
/// (blocks, H_kv, block_size, D), in place; vLLM's `reshape_and_cache_flash`. No gradient is recorded.
///
/// This is a plain copy on a CPU and one `index_put_` elsewhere. `rows` may be a view of the pool: on a CPU it is
/// copied before the first row is written.
///
/// # Errors
/// [`Error::Common`] if the tensors do not fit, and
/// [`Error::PagedLayout`] for a slot outside the pool; nothing is written then.
///
/// ```
/// use overdrive_attention::{PagedSlots, paged_write};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_attention::Error> {
/// let mut pool = Tensor::zeros([4, 1, 2, 3], (Kind::Float, Device::Cpu)); // 4 blocks of 2 tokens
/// let keys = Tensor::ones([1, 1, 3], (Kind::Float, Device::Cpu));
/// let slots = PagedSlots::new(vec![5], 2, Device::Cpu)?; // the second row of the third block
/// paged_write(&keys, &mut pool, &slots)?;
/// assert_eq!(pool.get(2).get(0).get(1), keys.get(0).get(0));
/// # Ok(())
/// # }
/// ```
pub fn paged_write(rows: &Tensor, pool: &mut Tensor, slots: &PagedSlots) -> Result<()> {
    check(rows, pool, slots)?;
    check_kind(rows, pool)?;
    let rows = rows.f_detach()?;
    let Some((blocks, places)) = &slots.indices else {
        // The kernel reads the rows while it writes the pool.
        let rows = match memory_overlaps(&rows, pool) {
            true => {
                let mut copy = rows.f_empty_like()?;
                copy.f_copy_(&rows)?;
                copy
            }
            false => rows,
        };
        let strided = Strided::rows(&rows.f_transpose(0, 1)?.f_unsqueeze(0)?)?;
        return for_kind!(rows.kind(), copy(&strided, pool, slots));
    };
    let _written = pool.f_index_put_(&[Some(blocks), None, Some(places)], &rows, false)?;
    Ok(())
}

/// Writes the keys and values `(T, H_kv, D)` of T new tokens to their slots of two pools, as [`paged_write`] does for
/// each. On CUDA it is one launch of a kernel of overdrive-gpu where they are used.
///
/// # Errors
/// As for [`paged_write`]; keys may have been written if the values do not fit.
pub fn paged_write_pair(
    [keys, values]: [&Tensor; 2],
    [key_pool, value_pool]: [&mut Tensor; 2],
    slots: &PagedSlots,
) -> Result<()> {
    if let (Some((blocks, places)), Some(kernels)) =
        (&slots.indices, overdrive_gpu::kernels(slots.device)?)
    {
        for (rows, pool) in [(keys, &*key_pool), (values, &*value_pool)] {
            check(rows, pool, slots)?;
            check_kind(rows, pool)?;
        }
        let (keys, values) = (keys.f_detach()?, values.f_detach()?);
        let call = PagedWrite {
            keys: &keys,
            values: &values,
            key_pool,
            value_pool,
            blocks,
            places,
        };
        if kernels.paged_write(&call)? {
            return Ok(());
        }
    }
    paged_write(keys, key_pool, slots)?;
    paged_write(values, value_pool, slots)
}

/// Quantizes `rows` (T, H_kv, D), the keys or values of T new tokens, and writes them to their slots of a quantized pool
/// ([`PagedBlocks`](crate::PagedBlocks)): the codes to `codes` (blocks, H_kv, block_size, D), Int8 or Float8e4m3fn, and
/// the scale of each row to `scales` (blocks, H_kv, block_size), f32. The largest magnitude of a row gets the largest
/// code, 127 or 448, and the others are rounded to nearest, ties to even (vLLM's `int8_per_token_head` and
/// `fp8_per_token_head`). A row with an element that is not finite is read as NaN.
///
/// # Errors
/// As for [`paged_write`]; nothing is written then.
pub fn paged_write_quantized(
    rows: &Tensor,
    codes: &mut Tensor,
    scales: &mut Tensor,
    slots: &PagedSlots,
) -> Result<()> {
    check(rows, codes, slots)?;
    let largest = largest_code(codes)?;
    if scales.kind() != Kind::Float
        || scales.size() != codes.size()[..3]
        || !scales.is_contiguous()
        || scales.device() != slots.device
    {
        let expected = format!(
            "contiguous Float {:?}, a scale for each row of codes",
            &codes.size()[..3]
        );
        return Err(shape_error("scales", scales, expected));
    }
    if !rows.is_floating_point() {
        let expected = "Float, Half or BFloat16";
        return Err(Error::Common(Common::dtype("rows", rows.kind(), expected)));
    }
    let rows = rows.f_detach()?.f_to_kind(Kind::Float)?;
    let Some((blocks, places)) = &slots.indices else {
        let strided = Strided::rows(&rows.f_transpose(0, 1)?.f_unsqueeze(0)?)?;
        return write_quantized_rows(
            &View::of(&strided)?,
            codes,
            scales,
            sizes(codes),
            &slots.slots,
        );
    };
    let most = rows.f_abs()?.f_amax([-1].as_slice(), true)?;
    let scale = most.f_divide_scalar(largest)?;
    let least = f64::from(f32::MIN_POSITIVE);
    let scale = scale.f_masked_fill(&scale.f_lt(least)?, 0.0)?;
    // An infinite scale becomes NaN.
    let scale = scale.f_add(&scale.f_subtract(&scale)?)?;
    let fitted = rows
        .f_divide(&scale.f_clamp_min(least)?)?
        .f_nan_to_num(0.0, 0.0, 0.0)?;
    let fitted = match codes.kind() {
        Kind::Int8 => fitted.f_round()?,
        _ => fitted.f_clamp(-largest, largest)?,
    };
    let fitted = fitted.f_to_kind(codes.kind())?.f_view_dtype(Kind::Uint8)?;
    let place = [Some(blocks), None, Some(places)];
    // Bytes, because not every device can index e4m3.
    let mut bytes = codes.f_view_dtype(Kind::Uint8)?;
    let _written = bytes.f_index_put_(&place, &fitted, false)?;
    let _written = scales.f_index_put_(&place, &scale.f_squeeze_dim(-1)?, false)?;
    Ok(())
}

fn copy<E: Accumulate>(rows: &Strided, pool: &Tensor, slots: &PagedSlots) -> Result<()> {
    write_rows::<E>(&View::of(rows)?, pool, sizes(pool), &slots.slots)
}

/// Returns the heads, the rows of a block and the channels of a pool.
fn sizes(pool: &Tensor) -> (usize, usize, usize) {
    let size = |at: usize| usize::try_from(pool.size()[at]).unwrap_or(0);
    (size(1), size(2), size(3))
}

/// Returns the blocks and rows of slots as tensors.
fn indices(slots: &[usize], block_size: usize, device: Device) -> Result<(Tensor, Tensor)> {
    let tensor = |of: fn(usize, usize) -> usize| -> Result<Tensor> {
        let numbers: Vec<i64> = slots
            .iter()
            .map(|slot| i64::try_from(of(*slot, block_size)).unwrap_or(i64::MAX))
            .collect();
        Ok(to_device(Tensor::f_from_slice(&numbers)?, device)?)
    };
    Ok((
        tensor(|slot, size| slot / size)?,
        tensor(|slot, size| slot % size)?,
    ))
}

fn check(rows: &Tensor, pool: &Tensor, slots: &PagedSlots) -> Result<()> {
    let (r, p) = (rows.size(), pool.size());
    if p.len() != 4 || usize::try_from(p[2]) != Ok(slots.block_size) || !pool.is_contiguous() {
        let expected = format!(
            "contiguous blocks (blocks, heads, {}, dim)",
            slots.block_size
        );
        return Err(shape_error("pool", pool, expected));
    }
    if r.len() != 3 || usize::try_from(r[0]) != Ok(slots.len()) || (r[1], r[2]) != (p[1], p[3]) {
        let expected = format!(
            "[{}, {}, {}]: one row for each slot, with the heads and dim of the pool",
            slots.len(),
            p[1],
            p[3]
        );
        return Err(shape_error("rows", rows, expected));
    }
    for (name, device) in [("rows", rows.device()), ("pool", pool.device())] {
        if device != slots.device {
            return Err(other_device(name, device, slots.device));
        }
    }
    let rows_in_pool = p[0].saturating_mul(p[2]);
    if i64::try_from(slots.end).unwrap_or(i64::MAX) > rows_in_pool {
        return Err(Error::PagedLayout {
            argument: "slots",
            problem: format!(
                "slot {} is outside a pool of {} blocks of {} tokens",
                slots.end - 1,
                p[0],
                p[2]
            ),
        });
    }
    Ok(())
}

fn check_kind(rows: &Tensor, pool: &Tensor) -> Result<()> {
    if rows.kind() == pool.kind() {
        return Ok(());
    }
    Err(Error::Common(Common::dtype(
        "rows",
        rows.kind(),
        format!("{:?}, as the pool is", pool.kind()),
    )))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use tch::{Device, Kind, Tensor};

    use super::{PagedSlots, indices, paged_write, paged_write_quantized};

    #[test]
    fn rows_of_the_pool_itself_are_read_before_they_are_overwritten() {
        let mut pool = Tensor::arange(8, (Kind::Float, Device::Cpu)).view([1, 1, 4, 2]);
        let rows = pool.view([4, 1, 2]).narrow(0, 0, 2);
        let slots = PagedSlots::new(vec![1, 2], 4, Device::Cpu).unwrap();
        paged_write(&rows, &mut pool, &slots).unwrap();
        let found = Vec::<f32>::try_from(pool.view(-1)).unwrap();
        assert_eq!(found, [0.0, 1.0, 0.0, 1.0, 2.0, 3.0, 6.0, 7.0]);
    }

    #[test]
    fn the_copy_on_a_cpu_and_the_operator_for_other_devices_write_the_same() {
        for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16] {
            // Strided as a view of a joint projection is.
            let rows = Tensor::randn([3, 2, 10], (Kind::Float, Device::Cpu)).to_kind(kind);
            let rows = rows.narrow(2, 4, 5);
            let pool = || Tensor::zeros([4, 2, 3, 5], (kind, Device::Cpu));
            let (mut copied, mut put) = (pool(), pool());
            let plain = PagedSlots::new(vec![7, 8, 0], 3, Device::Cpu).unwrap();
            paged_write(&rows, &mut copied, &plain).unwrap();
            let mut by_index = PagedSlots::new(vec![7, 8, 0], 3, Device::Cpu).unwrap();
            by_index.indices = Some(indices(&[7, 8, 0], 3, Device::Cpu).unwrap());
            paged_write(&rows, &mut put, &by_index).unwrap();
            assert_eq!(copied, put);
            assert_eq!(copied.get(2).select(1, 1), rows.get(0));
            assert_eq!(copied.get(0).select(1, 0), rows.get(2));
        }
    }

    #[test]
    fn the_kernel_on_a_cpu_and_the_operators_for_other_devices_quantize_the_same() {
        let cpu = |kind| (kind, Device::Cpu);
        for codes in [Kind::Int8, Kind::Float8e4m3fn] {
            let mut rows = Tensor::arange(30, cpu(Kind::Float)).view([3, 2, 5]).sin();
            // A row of zeros, and one that is not finite.
            let _ = rows.get(1).get(0).fill_(0.0);
            let _ = rows.get(2).get(1).get(3).fill_(f64::INFINITY);
            let pool = || Tensor::zeros([4, 2, 3, 5], cpu(codes));
            let scales = || Tensor::zeros([4, 2, 3], cpu(Kind::Float));
            let (mut ours, mut theirs) = ((pool(), scales()), (pool(), scales()));
            let mut slots = PagedSlots::new(vec![7, 8, 0], 3, Device::Cpu).unwrap();
            paged_write_quantized(&rows, &mut ours.0, &mut ours.1, &slots).unwrap();
            slots.indices = Some(indices(&[7, 8, 0], 3, Device::Cpu).unwrap());
            paged_write_quantized(&rows, &mut theirs.0, &mut theirs.1, &slots).unwrap();
            assert!(ours.1.allclose(&theirs.1, 0.0, 0.0, true), "{codes:?}");
            let read = |(codes, scales): (Tensor, Tensor)| {
                codes.to_kind(Kind::Float) * scales.unsqueeze(-1)
            };
            let (ours, theirs) = (read(ours), read(theirs));
            assert!(ours.allclose(&theirs, 0.0, 0.0, true), "{codes:?}");
            assert!(ours.get(0).get(1).get(0).isnan().all().int64_value(&[]) == 1);
            assert_eq!(ours.isnan().sum(Kind::Int64).int64_value(&[]), 5);
            rows = rows.nan_to_num(0.0, 0.0, 0.0);
            let off = ours.get(2).select(1, 1) - rows.get(0);
            assert!(off.abs().max().double_value(&[]) < 0.07, "{codes:?}");
        }
    }
}
