//! The values that the elements of a quantized weight can take, for every storage.

use tch::{Device, Kind, Tensor};

use crate::codec::code_book::Book;
use crate::codec::grouped::{HALF_DIGITS, half_scale, rounded_up};
use crate::codec::{dynamic, fp8};
use crate::tiles::Tiled;
use crate::weight::{Magnitudes, Storage};
use crate::{Error, QuantizedWeight, Result, Scheme};

/// The values of each group: `number(code) · step + offset`.
pub(super) struct Grid {
    /// The number of elements of a group, counted along the flattened weight.
    pub(super) group: usize,
    /// The step of each group.
    pub(super) steps: Vec<f32>,
    /// The offset of each group; empty if there are none.
    pub(super) offsets: Vec<f32>,
    /// The numbers that a step can be, in ascending order; `None` if it can be any number.
    allowed: Option<Vec<f32>>,
    levels: Levels,
}

enum Levels {
    /// The integers `code − zero`, for codes in `low..=high`.
    Integers {
        low: f32,
        high: f32,
        zero: f32,
    },
    /// A code book, and the midpoints between its numbers.
    Book(Book, [f32; 15]),
    Fp8,
}

impl Grid {
    /// Returns the grid of `weight`.
    pub(super) fn of(weight: &QuantizedWeight) -> Result<Grid> {
        let inputs = weight.inputs.unsigned_abs() as usize;
        match &weight.storage {
            Storage::Int8 { scales, .. } => Ok(Grid {
                group: inputs,
                steps: floats(scales)?,
                offsets: Vec::new(),
                allowed: None,
                levels: Levels::Integers {
                    low: -127.0,
                    high: 127.0,
                    zero: 0.0,
                },
            }),
            Storage::Tiled(_) => Grid::of(&weight.in_rows()?),
            Storage::Grouped { order: Some(_), .. } => {
                let found = "of reordered inputs (GPTQ's `desc_act`)";
                Err(Error::option(
                    "weight",
                    found,
                    "of groups of neighbouring inputs",
                ))
            }
            Storage::Grouped {
                codes,
                scales,
                offsets,
                ..
            } => {
                let groups = scales
                    .size()
                    .get(1)
                    .map_or(1, |n| n.unsigned_abs() as usize);
                let levels = match (
                    codes.kind(),
                    codes.size() == [weight.outputs, weight.inputs],
                ) {
                    (Kind::Int8, _) => (-128.0, 127.0, 0.0),
                    (_, true) => (0.0, 255.0, 0.0),
                    _ if offsets.is_none() => (0.0, 15.0, 8.0),
                    _ => (0.0, 15.0, 0.0),
                };
                let (low, high, zero) = levels;
                Ok(Grid {
                    group: inputs / groups.max(1),
                    steps: floats(scales)?,
                    offsets: offsets.as_deref().map_or(Ok(Vec::new()), floats)?,
                    allowed: None,
                    levels: Levels::Integers { low, high, zero },
                })
            }
            Storage::Blocks { magnitudes, .. } => {
                let (book, options) = weight.scheme.blocks()?;
                let allowed = match magnitudes {
                    Magnitudes::Quantized { code_book, .. } if is_microscaled(weight.scheme) => {
                        let mut numbers = floats(code_book)?;
                        numbers.retain(|number| *number >= 0.0);
                        numbers.sort_by(f32::total_cmp);
                        Some(numbers)
                    }
                    _ => None,
                };
                Ok(Grid {
                    group: options.block_size,
                    steps: block_steps(magnitudes)?,
                    offsets: Vec::new(),
                    allowed,
                    levels: Levels::Book(book, book.bounds()),
                })
            }
            Storage::Fp8 { scales, .. } => Ok(Grid {
                group: inputs,
                steps: floats(scales)?,
                offsets: Vec::new(),
                allowed: None,
                levels: Levels::Fp8,
            }),
        }
    }

    /// Returns the step of a group times `ratio`, or the number nearest to it that a step can be.
    pub(super) fn scaled_step(&self, group: usize, ratio: f32) -> f32 {
        let step = self.steps[group] * ratio;
        let Some(allowed) = &self.allowed else {
            return step;
        };
        let above = allowed.partition_point(|number| *number < step);
        let near = [above.checked_sub(1), Some(above)];
        let near = near.into_iter().flatten().filter_map(|at| allowed.get(at));
        let distance = |number: &&f32| (**number - step).abs();
        let nearest = near.min_by(|a, b| distance(a).total_cmp(&distance(b)));
        nearest.copied().unwrap_or(step)
    }

    /// Returns the code and the value nearest to `x` among those of `group`.
    #[inline]
    pub(super) fn nearest(&self, group: usize, x: f32) -> (u8, f32) {
        let offset = self.offsets.get(group).copied().unwrap_or_default();
        self.nearest_of(self.steps[group], offset, x)
    }

    /// Returns the same for another step and offset.
    #[inline]
    pub(super) fn nearest_of(&self, step: f32, offset: f32, x: f32) -> (u8, f32) {
        match &self.levels {
            Levels::Integers { low, high, zero } => {
                // Divided, as the codecs do, so that the same numbers get the same codes.
                let level = ((x - offset) / step + zero)
                    .round_ties_even()
                    .clamp(*low, *high);
                // In `-128..256`: the cast gives the byte of signed and of unsigned codes.
                (level as i32 as u8, (level - zero) * step + offset)
            }
            Levels::Book(book, bounds) => {
                let x = x / step;
                let rank = bounds.iter().filter(|&&bound| x > bound).count();
                let code = book.code_at(rank as u32);
                (code, book.numbers()[usize::from(code)] * step)
            }
            Levels::Fp8 => {
                let code = fp8::encode(x / step);
                (code, fp8::decode(code) * step)
            }
        }
    }

    /// Writes the steps and offsets to `weight`, from which the grid was created, and reads them back as stored:
    /// scales are rounded to f16, and the magnitudes of blocks may be quantized.
    pub(super) fn set_steps(&mut self, weight: &mut QuantizedWeight) -> Result<()> {
        let device = weight.device();
        match &mut weight.storage {
            // A grid is made of weights in rows.
            Storage::Tiled(_) => {}
            Storage::Int8 { scales, .. } | Storage::Fp8 { scales, .. } => {
                *scales = like(&self.steps, scales)?;
            }
            Storage::Grouped {
                scales, offsets, ..
            } => {
                // Rounded up as the codec does, so that offsets stay exact in f16.
                if scales.kind() == Kind::Half {
                    self.fit_half();
                }
                *scales = like(&self.steps, scales)?.into();
                if let Some(offsets) = offsets {
                    *offsets = like(&self.offsets, offsets)?.into();
                    self.offsets = floats(offsets)?;
                }
                self.steps = floats(scales)?;
            }
            Storage::Blocks { magnitudes, .. } => {
                match magnitudes {
                    Magnitudes::Full(full) => *full = like(&self.steps, full)?,
                    // A step is one of the numbers that the codes of 8 bits have.
                    Magnitudes::Quantized {
                        codes, code_book, ..
                    } if is_microscaled(weight.scheme) => {
                        let numbers = floats(code_book)?;
                        let nearest = |step: &f32| {
                            let distance = |code: &u8| (numbers[usize::from(*code)] - step).abs();
                            let codes = 0..=u8::MAX;
                            codes
                                .min_by(|a, b| distance(a).total_cmp(&distance(b)))
                                .unwrap_or_default()
                        };
                        let packed: Vec<u8> = self.steps.iter().map(nearest).collect();
                        let like = codes.size();
                        *codes = Tensor::f_from_slice(&packed)?
                            .f_view(&like[..])?
                            .f_to_device(device)?;
                    }
                    Magnitudes::Quantized {
                        codes,
                        scales,
                        offset,
                        ..
                    } => {
                        let mut packed = vec![0u8; self.steps.len()];
                        let mut outer = vec![0f32; self.steps.len().div_ceil(dynamic::BLOCK)];
                        let mean = self.steps.iter().map(|&x| f64::from(x)).sum::<f64>();
                        *offset = (mean / self.steps.len().max(1) as f64) as f32;
                        let quantized =
                            dynamic::quantize(&self.steps, *offset, &mut packed, &mut outer);
                        quantized.map_err(|_| {
                            Error::values("weight", "infinity or NaN", "finite numbers")
                        })?;
                        *codes = Tensor::f_from_slice(&packed)?.f_to_device(device)?;
                        *scales = Tensor::f_from_slice(&outer)?.f_to_device(device)?;
                    }
                }
                self.steps = block_steps(magnitudes)?;
            }
        }
        Ok(())
    }

    /// Makes the steps numbers of f16, and the offsets the same multiples of them as before.
    fn fit_half(&mut self) {
        if self.offsets.is_empty() {
            for step in &mut self.steps {
                *step = rounded_up(*step, HALF_DIGITS);
            }
        }
        for (step, offset) in self.steps.iter_mut().zip(&mut self.offsets) {
            let zero = (-*offset / *step).round_ties_even();
            *step = match zero {
                0.0..16.0 => half_scale(*step, zero),
                _ => rounded_up(*step, HALF_DIGITS),
            };
            *offset = -zero * *step;
        }
    }

    /// Writes the codes `(O·I,)`, one in each byte, to `weight`.
    pub(super) fn set_codes(codes: &[u8], weight: &mut QuantizedWeight) -> Result<()> {
        let high_first = matches!(weight.storage, Storage::Blocks { .. });
        let old = weight.storage.codes();
        // Two codes in a byte: the tensor has half as many elements.
        let halves = old.numel() < codes.len();
        let bytes: Vec<u8> = if halves {
            let pair = |pair: &[u8]| match (pair, high_first) {
                (&[first, second], true) => (first << 4) | second,
                (&[first, second], false) => first | (second << 4),
                (&[last], true) => last << 4,
                (other, _) => other.first().copied().unwrap_or_default(),
            };
            codes.chunks(2).map(pair).collect()
        } else {
            codes.to_vec()
        };
        let new = Tensor::f_from_data_size(&bytes, &old.size(), old.kind())?;
        let new = new.f_to_device(old.device())?;
        match &mut weight.storage {
            Storage::Grouped { codes, .. } => *codes = new.into(),
            Storage::Int8 { codes, .. }
            | Storage::Fp8 { codes, .. }
            | Storage::Blocks { codes, .. }
            // A grid is made of weights in rows.
            | Storage::Tiled(Tiled { codes, .. }) => *codes = new,
        }
        Ok(())
    }
}

/// Returns the elements on the CPU.
pub(super) fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    let flat = tensor
        .f_to_kind(Kind::Float)?
        .f_to_device(Device::Cpu)?
        .f_reshape([-1])?;
    Ok(Vec::try_from(&flat)?)
}

/// Returns `numbers` as a tensor of the shape, dtype and device of `old`.
fn like(numbers: &[f32], old: &Tensor) -> Result<Tensor> {
    let tensor = Tensor::f_from_slice(numbers)?.f_view(&old.size()[..])?;
    Ok(tensor.f_to_kind(old.kind())?.f_to_device(old.device())?)
}

/// Returns `true` if the scales of blocks are numbers of 8 bits.
fn is_microscaled(scheme: Scheme) -> bool {
    matches!(scheme, Scheme::Mxfp4 | Scheme::Nvfp4)
}

fn block_steps(magnitudes: &Magnitudes) -> Result<Vec<f32>> {
    match magnitudes {
        Magnitudes::Full(full) => floats(full),
        Magnitudes::Quantized {
            codes,
            code_book,
            scales,
            offset,
        } => {
            let codes = codes.f_to_device(Device::Cpu)?;
            let codes: Vec<u8> = Vec::try_from(&codes.f_reshape([-1])?)?;
            let (book, scales) = (floats(code_book)?, floats(scales)?);
            let number = |(index, &code): (usize, &u8)| {
                book[usize::from(code)] * scales[index / dynamic::BLOCK] + offset
            };
            Ok(codes.iter().enumerate().map(number).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    /// Returns numbers spread evenly over -1..1, the same in every run.
    fn numbers(size: [i64; 2]) -> Tensor {
        let x = Tensor::arange(size[0] * size[1], (Kind::Double, Device::Cpu)) * 12.9898;
        let x = x.sin() * 43_758.545_3;
        ((&x - x.floor()) * 2 - 1).view(size).to_kind(Kind::Float)
    }

    fn flat(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(&tensor.reshape([-1])).unwrap()
    }

    /// Returns the codes of the nearest values.
    fn codes(grid: &Grid, numbers: &Tensor) -> Vec<u8> {
        let code = |(place, &x): (usize, &f32)| grid.nearest(place / grid.group, x).0;
        flat(numbers).iter().enumerate().map(code).collect()
    }

    fn is_double(scheme: Scheme) -> bool {
        matches!(scheme, Scheme::Nf4(options) | Scheme::Fp4(options) if options.double_quant)
    }

    #[test]
    fn a_weight_whose_own_codes_and_steps_are_put_back_is_the_same() {
        for name in Scheme::NAMES {
            let scheme: Scheme = name.parse().unwrap();
            let mut packed = QuantizedWeight::quantize(&numbers([6, 384]), scheme).unwrap();
            let before = packed.dequantize(Kind::Float).unwrap();
            let mut grid = Grid::of(&packed).unwrap();
            let steps = grid.steps.clone();
            grid.set_steps(&mut packed).unwrap();
            if is_double(scheme) {
                // Kept in 8 bits once more: within half of the widest cell of the book (0.9 / 64) and a
                // cell of the table in which it is looked up.
                let mean = steps.iter().sum::<f32>() / steps.len() as f32;
                let most = steps
                    .iter()
                    .fold(0f32, |most, x| most.max((x - mean).abs()));
                let bound = most * (0.9 / 128.0 + 2.0 / 65_535.0) + 1e-6;
                for (new, old) in grid.steps.iter().zip(&steps) {
                    assert!((new - old).abs() <= bound, "{name}: {new} for {old}");
                }
            } else {
                assert_eq!(grid.steps, steps, "{name}");
                assert_eq!(packed.dequantize(Kind::Float).unwrap(), before, "{name}");
            }
            let kept = packed.dequantize(Kind::Float).unwrap();
            Grid::set_codes(&codes(&grid, &kept), &mut packed).unwrap();
            assert_eq!(packed.dequantize(Kind::Float).unwrap(), kept, "{name}");
        }
    }

    #[test]
    fn no_codes_are_nearer_than_those_of_the_grid() {
        for name in Scheme::NAMES {
            let scheme: Scheme = name.parse().unwrap();
            let weight = numbers([6, 384]);
            let mut packed = QuantizedWeight::quantize(&weight, scheme).unwrap();
            let error = |packed: &QuantizedWeight| {
                let difference = packed.dequantize(Kind::Float).unwrap() - &weight;
                let error = difference.square().sum(Kind::Double);
                error.double_value(&[])
            };
            let codecs = error(&packed);
            let grid = Grid::of(&packed).unwrap();
            Grid::set_codes(&codes(&grid, &weight), &mut packed).unwrap();
            let nearest = error(&packed);
            assert!(
                nearest <= codecs * (1.0 + 1e-6),
                "{name}: {nearest}, {codecs}"
            );
            // The codecs choose by the magnitudes before those are kept in 8 bits; otherwise only numbers
            // in the middle between two may differ.
            let bound = if is_double(scheme) { 1e-3 } else { 1e-4 };
            assert!(
                codecs <= nearest * (1.0 + bound),
                "{name}: {codecs}, {nearest}"
            );
        }
    }

    #[test]
    fn the_number_of_a_code_is_what_the_weight_dequantizes_to() {
        for name in Scheme::NAMES {
            let scheme: Scheme = name.parse().unwrap();
            let weight = numbers([2, 256]);
            let mut packed = QuantizedWeight::quantize(&weight, scheme).unwrap();
            let grid = Grid::of(&packed).unwrap();
            let chosen = |(place, &x): (usize, &f32)| grid.nearest(place / grid.group, 1.7 * x);
            let (codes, expected): (Vec<u8>, Vec<f32>) =
                flat(&weight).iter().enumerate().map(chosen).unzip();
            Grid::set_codes(&codes, &mut packed).unwrap();
            let found = packed.dequantize(Kind::Float).unwrap().reshape([-1]);
            let difference = (found - Tensor::from_slice(&expected)).abs().max();
            assert!(difference.double_value(&[]) < 1e-6, "{name}");
        }
    }
}
