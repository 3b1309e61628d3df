//! Dequantization with libtorch's operators, for devices that the codecs do not support.
//!
//! The weight is dequantized slice by slice to f32 and, rounded once, written directly to its position in the dense
//! weight; no other tensor of the size of the weight is allocated. The tests check that on the CPU the results are
//! those of the codecs.

use std::sync::{Mutex, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::codec::code_book::Book;
use crate::codec::{dynamic, fp8};
use crate::tiles::{self, Tiled};
use crate::weight::{Magnitudes, Storage};
use crate::{QuantizedWeight, Result, gpu};

/// The number of elements that are dequantized at once, a multiple of every block size. Their temporaries take at most
/// 8 bytes per element (128 MiB). Each slice takes two or three launches of microseconds each, so a GPU would wait for
/// smaller slices.
const SLICE: i64 = 1 << 24;

/// The numbers of both codes of a byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pairs {
    /// Of a code book, the high half first.
    Book(Book),
    /// The codes less this, the low half first.
    Less(u8),
}

impl Pairs {
    /// Returns the table on `device`, f32 `(256, 2)`, which is uploaded at its first use there: an upload from
    /// ordinary memory waits for the device.
    fn on(self, device: Device) -> Result<Tensor> {
        static TABLES: Mutex<Vec<((Pairs, Device), Tensor)>> = Mutex::new(Vec::new());
        let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (self, device);
        if let Some((_, table)) = tables.iter().find(|(other, _)| *other == key) {
            return Ok(table.shallow_clone());
        }
        let numbers: Vec<f32> = match self {
            Pairs::Book(book) => book.pairs().as_flattened().to_vec(),
            Pairs::Less(zero) => (0..=u8::MAX)
                .flat_map(|byte| [byte & 15, byte >> 4])
                .map(|code| f32::from(code) - f32::from(zero))
                .collect(),
        };
        let table = Tensor::f_from_slice(&numbers)?.f_view([256, 2])?;
        let table = table.f_to_device(device)?;
        let handle = table.shallow_clone();
        tables.push((key, table));
        Ok(handle)
    }

    /// Returns the numbers of packed codes, f32 `(2 · bytes,)`.
    fn numbers(self, bytes: &Tensor) -> Result<Tensor> {
        let index = bytes.f_reshape([-1])?.f_to_kind(Kind::Int)?;
        let pairs = self.on(bytes.device())?.f_index_select(0, &index)?;
        Ok(pairs.f_view([-1])?)
    }
}

/// Returns the first elements and the lengths of slices of `of` units of `size` elements each.
fn slices(of: i64, size: i64) -> impl Iterator<Item = (i64, i64)> {
    let count = (SLICE / size.max(1)).clamp(1, of.max(1));
    let firsts = (0..of).step_by(count.unsigned_abs() as usize);
    firsts.map(move |first| (first, count.min(of - first)))
}

/// Dequantizes the whole weight.
pub(crate) fn dequantize(weight: &QuantizedWeight, kind: Kind) -> Result<Tensor> {
    if let Some(dense) = gpu::dequantize(weight, kind)? {
        return Ok(dense);
    }
    let target = Tensor::f_empty(weight.size(), (kind, weight.device()))?;
    match &weight.storage {
        Storage::Blocks { codes, magnitudes } => of_blocks(weight, codes, magnitudes, &target)?,
        Storage::Grouped { order, .. } => {
            let order = Order::new(order.as_deref())?;
            for (first, count) in slices(weight.outputs, weight.inputs) {
                let rows = weight.storage.narrowed(first, count)?;
                order.write(&target.f_narrow(0, first, count)?, |to| {
                    of_groups(&rows, weight.inputs, to)
                })?;
            }
        }
        Storage::Tiled(tiled) => {
            let order = Order::new(tiled.order.as_ref())?;
            for (first, count) in slices(
                weight.outputs / tiles::OUTPUTS,
                weight.inputs * tiles::OUTPUTS,
            ) {
                let (first_row, rows) = (first * tiles::OUTPUTS, count * tiles::OUTPUTS);
                order.write(&target.f_narrow(0, first_row, rows)?, |to| {
                    of_tiles(tiled, weight.inputs, first, count, to)
                })?;
            }
        }
        Storage::Int8 { codes, scales } => {
            let _ = codes.f_mul_out(&target, &scales.f_unsqueeze(1)?)?;
        }
        Storage::Fp8 { .. } => {
            for (first, count) in slices(weight.outputs, weight.inputs) {
                let rows = weight.storage.narrowed(first, count)?;
                of_float8(&rows, &target.f_narrow(0, first, count)?)?;
            }
        }
    }
    Ok(target)
}

/// Dequantizes the rows `ids (n,)`.
pub(crate) fn rows(weight: &QuantizedWeight, ids: &Tensor, kind: Kind) -> Result<Tensor> {
    let device = weight.device();
    let target = || Tensor::f_empty([ids.numel() as i64, weight.inputs], (kind, device));
    match &weight.storage {
        Storage::Blocks { codes, magnitudes } if weight.inputs % 2 == 0 => {
            let (book, options) = weight.scheme.blocks()?;
            let block = options.block_size as i64;
            let pairs = Pairs::Book(book);
            let codes = codes.f_view([weight.outputs, -1])?.f_index_select(0, ids)?;
            let numbers = pairs.numbers(&codes)?.f_view([-1, weight.inputs])?;
            let columns = Tensor::f_arange(weight.inputs, (Kind::Int64, device))?;
            let first = ids.f_unsqueeze(1)?.f_mul_scalar(weight.inputs)?;
            let blocks = first.f_add(&columns)?.f_div_scalar_mode(block, "floor")?;
            let magnitudes = magnitudes
                .tensor()?
                .f_index_select(0, &blocks.f_view([-1])?)?;
            let target = target()?;
            let _ = numbers.f_mul_out(&target, &magnitudes.f_view_as(&numbers)?)?;
            Ok(target)
        }
        // Their blocks may cross rows, and their tiles do.
        Storage::Blocks { .. } | Storage::Tiled(_) => {
            Ok(dequantize(weight, kind)?.f_index_select(0, ids)?)
        }
        Storage::Grouped { order, .. } => {
            let target = target()?;
            let rows = weight
                .storage
                .by_row(|tensor| tensor.f_index_select(0, ids))?;
            Order::new(order.as_deref())?
                .write(&target, |to| of_groups(&rows, weight.inputs, to))?;
            Ok(target)
        }
        Storage::Int8 { .. } | Storage::Fp8 { .. } => {
            let target = target()?;
            let rows = weight
                .storage
                .by_row(|tensor| tensor.f_index_select(0, ids))?;
            match &rows {
                Storage::Int8 { codes, scales } => {
                    let _ = codes.f_mul_out(&target, &scales.f_unsqueeze(1)?)?;
                }
                rows => of_float8(rows, &target)?,
            }
            Ok(target)
        }
    }
}

fn of_blocks(
    weight: &QuantizedWeight,
    codes: &Tensor,
    magnitudes: &Magnitudes,
    target: &Tensor,
) -> Result<()> {
    let (book, options) = weight.scheme.blocks()?;
    let block = options.block_size as i64;
    let pairs = Pairs::Book(book);
    let target = target.f_view([-1])?;
    let magnitudes = magnitudes.tensor()?;
    for (first, count) in slices(weight.outputs * weight.inputs, 1) {
        let bytes = codes.f_narrow(0, first / 2, (count + 1) / 2)?;
        let numbers = pairs.numbers(&bytes)?;
        let whole = count / block * block;
        // A shorter last block has its own row.
        for (begin, len, width) in [(0, whole, block), (whole, count - whole, count - whole)] {
            if len == 0 {
                continue;
            }
            let to = target.f_narrow(0, first + begin, len)?;
            let of_blocks = magnitudes.f_narrow(0, (first + begin) / block, len / width)?;
            let numbers = numbers.f_narrow(0, begin, len)?.f_view([-1, width])?;
            let _ = numbers.f_mul_out(&to.f_view([-1, width])?, &of_blocks.f_unsqueeze(1)?)?;
        }
    }
    Ok(())
}

/// The inputs of the columns of codes, if they are not in the order of the inputs.
struct Order(Option<Tensor>);

impl Order {
    fn new(order: Option<&Tensor>) -> Result<Self> {
        Ok(Self(
            order
                .map(|order| order.f_to_kind(Kind::Int64))
                .transpose()?,
        ))
    }

    /// Calls `write` with a tensor for columns in the order of the codes, and puts them in their places in `target`.
    fn write(&self, target: &Tensor, write: impl Fn(&Tensor) -> Result<()>) -> Result<()> {
        let Some(order) = &self.0 else {
            return write(target);
        };
        let columns = target.f_empty_like()?;
        write(&columns)?;
        let _ = target.shallow_clone().f_index_copy_(1, order, &columns)?;
        Ok(())
    }
}

/// Dequantizes rows of groups, in the order of the codes.
fn of_groups(rows: &Storage, inputs: i64, target: &Tensor) -> Result<()> {
    let Storage::Grouped {
        codes,
        scales,
        offsets,
        ..
    } = rows
    else {
        return Ok(());
    };
    let shape = [scales.size()[0], scales.size()[1], -1];
    let target = target.f_view(shape)?;
    let four = codes.size()[1] != inputs;
    let numbers = match (four, offsets) {
        (true, None) => Pairs::Less(8).numbers(codes)?,
        (true, Some(_)) => Pairs::Less(0).numbers(codes)?,
        (false, _) => codes.shallow_clone(),
    };
    let numbers = numbers.f_view(shape)?;
    // Bytes times f16 would be f16; numbers in f32 times f16 are f32.
    let scales = match four {
        true => scales.f_unsqueeze(-1)?,
        false => scales.f_unsqueeze(-1)?.f_to_kind(Kind::Float)?,
    };
    scaled(
        &numbers,
        &scales,
        offsets.as_ref().map(|o| o.f_unsqueeze(-1)).transpose()?,
        &target,
    )
}

/// Writes `numbers · scales + offsets` to `target`, rounded once.
fn scaled(
    numbers: &Tensor,
    scales: &Tensor,
    offsets: Option<Tensor>,
    target: &Tensor,
) -> Result<()> {
    let _ = match offsets {
        None => numbers.f_mul_out(target, scales)?,
        Some(offsets) => offsets.f_addcmul_out(target, numbers, scales)?,
    };
    Ok(())
}

/// Dequantizes `count` tiles of outputs from the `first` on, with the columns in the order of the codes.
fn of_tiles(tiled: &Tiled, inputs: i64, first: i64, count: i64, target: &Tensor) -> Result<()> {
    let bytes = tiles::bytes(&tiled.codes.f_narrow(0, first, count)?)?;
    let mut shape = bytes.size();
    shape.push(2);
    let zero = if tiled.offsets.is_none() { 8 } else { 0 };
    let numbers = Pairs::Less(zero)
        .numbers(&bytes)?
        .f_view(shape.as_slice())?;
    let numbers = tiles::in_rows(&numbers)?;
    let target = target.f_view(numbers.size().as_slice())?;
    // One for each 32 inputs, which lie in one group.
    let units = inputs / tiles::UNIT;
    let each = |tensor: &Tensor| -> Result<Tensor> {
        let rows = tensor.f_narrow(0, first * tiles::OUTPUTS, count * tiles::OUTPUTS)?;
        let (outputs, groups) = (rows.size()[0], rows.size()[1]);
        let rows = rows
            .f_unsqueeze(2)?
            .f_expand([outputs, groups, units / groups], false)?;
        let mut shape = numbers.size();
        shape[4..].fill(1);
        Ok(rows.f_reshape(shape.as_slice())?)
    };
    let offsets = tiled.offsets.as_ref().map(each).transpose()?;
    scaled(&numbers, &each(&tiled.scales)?, offsets, &target)
}

/// Dequantizes rows of 8-bit floats.
fn of_float8(rows: &Storage, target: &Tensor) -> Result<()> {
    if let Storage::Fp8 { codes, scales } = rows {
        // Their numbers are exact in f16 and bf16. libtorch promotes no 8-bit floats.
        let kind = match target.kind() {
            Kind::Double => Kind::Float,
            kind => kind,
        };
        let numbers = codes.f_view_dtype(Kind::Float8e4m3fn)?.f_to_kind(kind)?;
        let scales = match scales.dim() {
            // One scale for each group of a row.
            2 => scales
                .f_repeat_interleave_self_int(fp8::BLOCK as i64, 1, None)?
                .f_narrow(1, 0, codes.size()[1])?,
            _ => scales.f_unsqueeze(1)?,
        };
        let _ = numbers.f_mul_out(target, &scales)?;
    }
    Ok(())
}

impl Magnitudes {
    /// Returns the magnitudes as f32 `(blocks,)`, on any device.
    pub(crate) fn tensor(&self) -> Result<Tensor> {
        let (codes, code_book, scales, offset) = match self {
            Magnitudes::Full(magnitudes) => return Ok(magnitudes.shallow_clone()),
            Magnitudes::Quantized {
                codes,
                code_book,
                scales,
                offset,
            } => (codes, code_book, scales, offset),
        };
        let mut numbers = code_book.f_index_select(0, &codes.f_to_kind(Kind::Int)?)?;
        let (len, block) = (codes.numel() as i64, dynamic::BLOCK as i64);
        let whole = len / block * block;
        for (first, len, width) in [(0, whole, block), (whole, len - whole, len - whole)] {
            if len > 0 {
                let part = numbers.f_narrow(0, first, len)?;
                let scales = scales.f_narrow(0, first / block, len / width)?;
                let _ = part.f_view([-1, width])?.f_mul_(&scales.f_unsqueeze(1)?)?;
            }
        }
        let _ = numbers.f_add_scalar_(f64::from(*offset))?;
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests;
