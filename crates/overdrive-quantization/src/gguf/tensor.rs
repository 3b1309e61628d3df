use std::path::Path;

use tch::{Device, Kind, Tensor};

use super::decode::{GroupsMut, decode};
use super::tensor_type::GgufType;
use crate::codec::{run_jobs, units_of_job};
use crate::weight::Storage;
use crate::{Error, GroupOptions, QuantizedWeight, Result, Scheme};

/// The description of a tensor in the header.
#[derive(Debug)]
pub(super) struct Info {
    pub(super) name: String,
    /// The shape with the slowest dimension first, as in libtorch.
    pub(super) shape: Vec<i64>,
    pub(super) kind: GgufType,
    /// The distance from the first tensor in bytes.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// The position of the first byte in the file.
    pub(super) start: usize,
    pub(super) end: usize,
}

/// A tensor of a [`GgufFile`](super::GgufFile) whose elements have not been read yet.
#[derive(Debug, Clone, Copy)]
pub struct GgufTensor<'a> {
    pub(super) path: &'a Path,
    pub(super) info: &'a Info,
    /// The shape: that of `info`, or of a [slice](GgufTensor::slice) of it.
    pub(super) shape: &'a [i64],
    pub(super) data: &'a [u8],
}

impl<'a> GgufTensor<'a> {
    /// Returns the name.
    pub fn name(&self) -> &'a str {
        &self.info.name
    }

    /// Returns the shape in libtorch's order: `(O, I)` for a linear layer.
    pub fn shape(&self) -> &'a [i64] {
        self.shape
    }

    /// Returns the slice `index` of the first dimension without copying it, such as an expert's matrix `(O, I)` from a
    /// stack `(E, O, I)`, or its bias from `(E, O)`. It has the name of the whole tensor. Returns `None` if there is no such
    /// slice, or if the tensor is a vector.
    pub fn slice(&self, index: usize) -> Option<GgufTensor<'a>> {
        let &[count, _, ..] = self.shape else {
            return None;
        };
        let count = usize::try_from(count).ok()?;
        let bytes = self.data.len() / count.max(1);
        let start = index.checked_mul(bytes).filter(|_| index < count)?;
        Some(GgufTensor {
            shape: self.shape.get(1..)?,
            data: self.data.get(start..start.checked_add(bytes)?)?,
            ..*self
        })
    }

    /// Returns the type in which the tensor is stored.
    pub fn tensor_type(&self) -> GgufType {
        self.info.kind
    }

    /// Returns the bytes of the tensor in the file.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Returns the dense tensor of `kind` on `device`; in f32 its elements are bit for bit those of the `gguf`
    /// Python package.
    ///
    /// `rows` selects rows of the first dimension, as `index_select` does: some of them, or a permutation.
    ///
    /// # Errors
    /// [`Error::Common`] with `Parse` for scales that are not finite, [`Error::Values`] for rows that do not
    /// exist, and errors of libtorch.
    pub fn dequantize(&self, rows: Option<&[i64]>, kind: Kind, device: Device) -> Result<Tensor> {
        if let Some(stored) = self.info.kind.kind() {
            let whole = Tensor::f_from_data_size(self.data, self.shape, stored)?;
            let chosen = match rows {
                Some(rows) => {
                    self.check_rows(rows)?;
                    whole.f_index_select(0, &Tensor::f_from_slice(rows)?)?
                }
                None => whole,
            };
            return Ok(chosen.f_to_device(device)?.f_to_kind(kind)?);
        }
        if self.data.is_empty() {
            // The number of rows of an empty tensor cannot be computed from its bytes.
            return Ok(Tensor::f_empty(self.shape, (kind, device))?);
        }
        let order = self.order(rows)?;
        if self.info.kind == GgufType::MXFP4 {
            let dense = self.microscaled(&order)?.dequantize(kind)?;
            let shape = self.shape_of(order.len());
            return Ok(dense.f_view(&shape[..])?.f_to_device(device)?);
        }
        let Some(groups) = self.info.kind.groups() else {
            return Err(self.damaged("its type has neither a dtype nor blocks"));
        };
        let mut numbers = vec![0f32; order.len() * self.width()];
        let decoded = self.decode(&order, groups)?;
        let group = groups.group_size;
        let per_job = units_of_job(group);
        let jobs = numbers.chunks_mut(per_job * group).enumerate();
        run_jobs(jobs, |(job, numbers)| {
            for (index, numbers) in (job * per_job..).zip(numbers.chunks_mut(group)) {
                let codes = &decoded.codes[index * group..][..group];
                let scale = decoded.scales[index];
                let offset = decoded.offsets.get(index);
                for (number, &code) in numbers.iter_mut().zip(codes) {
                    // Multiplied and added apart, not fused, as the `gguf` package does.
                    let product = value(code, groups) * scale;
                    *number = offset.map_or(product, |offset| product + offset);
                }
            }
        });
        let shape = self.shape_of(order.len());
        let tensor = Tensor::f_from_slice(&numbers)?.f_view(&shape[..])?;
        Ok(tensor.f_to_device(device)?.f_to_kind(kind)?)
    }

    /// Returns the tensor as a quantized weight of the same elements on the CPU, or `None` if it is not quantized or not
    /// a matrix. `rows` selects rows as in [`dequantize`](GgufTensor::dequantize).
    ///
    /// # Errors
    /// As [`dequantize`](GgufTensor::dequantize).
    pub fn to_quantized(&self, rows: Option<&[i64]>) -> Result<Option<QuantizedWeight>> {
        let &[_, inputs] = self.shape else {
            return Ok(None);
        };
        if self.data.is_empty() {
            return Ok(None);
        }
        if self.info.kind == GgufType::MXFP4 {
            return self.microscaled(&self.order(rows)?).map(Some);
        }
        let Some(groups) = self.info.kind.groups() else {
            return Ok(None);
        };
        let order = self.order(rows)?;
        let outputs = order.len() as i64;
        let decoded = self.decode(&order, groups)?;
        let per_row = inputs / groups.group_size as i64;
        let of_groups = |numbers: &[f32]| -> Result<Tensor> {
            let tensor = Tensor::f_from_slice(numbers)?.f_view([outputs, per_row])?;
            let kind = match self.info.kind.has_half_scales() {
                true => Kind::Half,
                false => Kind::Float,
            };
            Ok(tensor.f_to_kind(kind)?)
        };
        let codes = match (groups.bits, groups.symmetric) {
            (4, _) => {
                let (pairs, _) = decoded.codes.as_chunks::<2>();
                let packed: Vec<u8> = pairs.iter().map(|[low, high]| low | (high << 4)).collect();
                Tensor::f_from_slice(&packed)?.f_view([outputs, inputs / 2])?
            }
            (_, true) => Tensor::f_from_data_size(&decoded.codes, &[outputs, inputs], Kind::Int8)?,
            (_, false) => Tensor::f_from_slice(&decoded.codes)?.f_view([outputs, inputs])?,
        };
        let offsets = (!groups.symmetric).then(|| of_groups(&decoded.offsets));
        let storage = Storage::grouped(
            codes,
            of_groups(&decoded.scales)?,
            offsets.transpose()?,
            None,
        );
        let scheme = Scheme::Grouped(groups);
        Ok(Some(QuantizedWeight::of(
            scheme,
            [outputs, inputs],
            storage,
        )))
    }

    /// Returns the shape of so many rows of the last dimension.
    fn shape_of(&self, rows: usize) -> Vec<i64> {
        let mut shape = self.shape.to_vec();
        if let Some(first) = shape.first_mut().filter(|_| self.shape.len() > 1) {
            *first = (rows / self.rows_of_one()) as i64;
        }
        shape
    }

    /// Returns the rows `order` of the last dimension as MXFP4 on the CPU. A block has its exponent first, then the codes:
    /// those of its first half in the low halves of bytes, those of its second in the high ones.
    fn microscaled(&self, order: &[usize]) -> Result<QuantizedWeight> {
        let (row_bytes, block) = (self.row_bytes(), self.info.kind.block_bytes());
        let blocks = row_bytes / block;
        let mut scales: Vec<u8> = Vec::with_capacity(order.len() * blocks);
        let mut codes: Vec<u8> = Vec::with_capacity(order.len() * blocks * (block - 1));
        for row in order {
            for block in self.data[row * row_bytes..][..row_bytes].chunks_exact(block) {
                scales.extend(&block[..1]);
                let pairs = block[1..].as_chunks::<2>().0;
                codes.extend(pairs.iter().map(|[first, second]| first & 15 | second << 4));
                codes.extend(
                    pairs
                        .iter()
                        .map(|[first, second]| first >> 4 | second & 0xF0),
                );
            }
        }
        let rows = order.len() as i64;
        let codes = Tensor::f_from_slice(&codes)?.f_view([rows, -1])?;
        let scales = Tensor::f_from_slice(&scales)?.f_view([rows, -1])?;
        QuantizedWeight::from_mxfp4(codes, scales).map_err(|error| match error {
            Error::Values { .. } => self.damaged("it has scales that are not finite"),
            other => other,
        })
    }

    /// Returns the number of elements along the last dimension.
    fn width(&self) -> usize {
        // Never negative: the header has unsigned numbers.
        self.shape.last().map_or(1, |&n| n.unsigned_abs() as usize)
    }

    /// Returns the number of rows of the last dimension in one of the first.
    fn rows_of_one(&self) -> usize {
        let inner = self.shape.iter().skip(1).rev().skip(1);
        inner
            .map(|&n| n.unsigned_abs() as usize)
            .product::<usize>()
            .max(1)
    }

    /// Returns the row of the last dimension at each index of the result.
    fn order(&self, rows: Option<&[i64]>) -> Result<Vec<usize>> {
        let inner = self.rows_of_one();
        let Some(rows) = rows else {
            return Ok((0..self.data.len() / self.row_bytes()).collect());
        };
        self.check_rows(rows)?;
        let of_row = |&row: &i64| {
            let first = row.unsigned_abs() as usize * inner;
            first..first + inner
        };
        Ok(rows.iter().flat_map(of_row).collect())
    }

    fn check_rows(&self, rows: &[i64]) -> Result<()> {
        // Blocks lie along the only dimension of a vector: it has no rows to select.
        let vector = self.info.kind.is_quantized() && self.shape.len() < 2;
        let count = match self.shape.first() {
            Some(&first) if !vector => first,
            _ => 0,
        };
        match rows.iter().find(|row| !(0..count).contains(*row)) {
            None => Ok(()),
            Some(row) => {
                let expected = format!("rows in 0..{count}, the rows of `{}`", self.info.name);
                Err(Error::values("rows", row.to_string(), expected))
            }
        }
    }

    /// Returns the number of bytes of a row of the last dimension, for a type with blocks.
    fn row_bytes(&self) -> usize {
        self.width() / self.info.kind.block_size() * self.info.kind.block_bytes()
    }

    /// Decodes the codes, scales and offsets of the rows `order`.
    fn decode(&self, order: &[usize], groups: GroupOptions) -> Result<Groups> {
        let (kind, width) = (self.info.kind, self.width());
        let (block, bytes) = (kind.block_size(), kind.block_bytes());
        let (row_bytes, per_row) = (self.row_bytes(), width / groups.group_size);
        let per_block = block / groups.group_size;
        let offsets_per_row = if groups.symmetric { 0 } else { per_row };
        let mut all = Groups {
            codes: vec![0; order.len() * width],
            scales: vec![0.0; order.len() * per_row],
            offsets: vec![0.0; order.len() * offsets_per_row],
        };
        let rows = units_of_job(width);
        // Symmetric types have no offsets.
        let offsets = all.offsets.chunks_mut(rows * per_row);
        let offsets = offsets.chain(std::iter::repeat_with(Default::default));
        let jobs = order
            .chunks(rows)
            .zip(all.codes.chunks_mut(rows * width))
            .zip(all.scales.chunks_mut(rows * per_row))
            .zip(offsets);
        run_jobs(jobs, |(((order, codes), scales), offsets)| {
            let mut offsets = offsets.chunks_mut(per_block);
            order
                .iter()
                .flat_map(|row| self.data[row * row_bytes..][..row_bytes].chunks_exact(bytes))
                .zip(codes.chunks_mut(block))
                .zip(scales.chunks_mut(per_block))
                .for_each(|((data, codes), scales)| {
                    let mut groups_mut = GroupsMut {
                        codes,
                        scales,
                        offsets: offsets.next().unwrap_or_default(),
                    };
                    decode(kind, data, &mut groups_mut);
                });
        });
        let mut scales = all.scales.iter().chain(&all.offsets);
        if scales.any(|scale| !scale.is_finite()) {
            return Err(self.damaged("it has scales that are not finite"));
        }
        Ok(all)
    }

    fn damaged(&self, reason: &str) -> Error {
        let reason = format!("the tensor `{}`: {reason}", self.info.name);
        overdrive_core::Error::parse("GGUF", self.path)(reason).into()
    }
}

/// The codes, scales and offsets of some rows.
struct Groups {
    codes: Vec<u8>,
    scales: Vec<f32>,
    offsets: Vec<f32>,
}

/// Returns the number of a code, before its scale.
fn value(code: u8, groups: GroupOptions) -> f32 {
    match (groups.bits, groups.symmetric) {
        (4, true) => f32::from(code) - 8.0,
        (_, true) => f32::from(code.cast_signed()),
        _ => f32::from(code),
    }
}
