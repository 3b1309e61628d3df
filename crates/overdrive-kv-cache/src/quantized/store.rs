//! The quantized keys, or values, of one layer.
#![allow(
    unsafe_code,
    reason = "the elements of tensors that only the store has, as slices"
)]

use overdrive_sys::raw;
use tch::{Device, Kind, Tensor};

use super::codec::{Format, QuantizationAxis, QuantizationBits};
use super::kernel;
use crate::Result;
use crate::buffer::copied;
use crate::key_values::Spec;

/// The codes `(B, H, capacity, row_bytes)`, u8, and their scales and minima `(B, H, capacity /
/// rows_per_line, line_len)`, f32, contiguous.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) codes: Tensor,
    pub(super) lines: Tensor,
    pub(super) format: Format,
    batch: i64,
    heads: i64,
    pub(super) capacity: i64,
}

fn size(n: i64) -> usize {
    usize::try_from(n).unwrap_or(0)
}

impl Store {
    /// Allocates a store for `capacity` tokens, a multiple of the block.
    pub(super) fn new(spec: &Spec, format: Format, capacity: i64) -> Result<Store> {
        Store::empty((spec.batch, spec.heads), spec.device, format, capacity)
    }

    fn empty(
        (batch, heads): (i64, i64),
        device: Device,
        format: Format,
        capacity: i64,
    ) -> Result<Store> {
        let lines = capacity / format.rows_per_line() as i64;
        let codes = [batch, heads, capacity, format.row_bytes() as i64];
        let scales = [batch, heads, lines, format.line_len() as i64];
        Ok(Store {
            codes: Tensor::f_empty(codes, (Kind::Uint8, device))?,
            lines: Tensor::f_empty(scales, (Kind::Float, device))?,
            format,
            batch,
            heads,
            capacity,
        })
    }

    /// Returns views of the codes and the scales of the first `tokens` tokens.
    pub(super) fn filled(&self, tokens: i64) -> Result<[Tensor; 2]> {
        let lines = tokens / self.format.rows_per_line() as i64;
        Ok([
            self.codes.f_narrow(2, 0, tokens)?,
            self.lines.f_narrow(2, 0, lines)?,
        ])
    }

    /// Returns all codes and scales, for the kernel.
    pub(super) fn codes(&self) -> Result<kernel::Codes<'_>> {
        // SAFETY: only `quantize` writes codes and scales, and it borrows the store for writing.
        unsafe {
            Ok(kernel::Codes {
                format: self.format,
                codes: raw::slice(&self.codes)?,
                lines: raw::slice(&self.lines)?,
                capacity: size(self.capacity),
            })
        }
    }

    /// Returns a store for `capacity` tokens with a copy of the first `tokens` tokens.
    pub(super) fn resized(&self, capacity: i64, tokens: i64) -> Result<Store> {
        let device = self.codes.device();
        let resized = Store::empty((self.batch, self.heads), device, self.format, capacity)?;
        for (mut to, from) in resized
            .filled(tokens)?
            .into_iter()
            .zip(self.filled(tokens)?)
        {
            to.f_copy_(&from)?;
        }
        Ok(resized)
    }

    /// Returns a store whose row `i` is row `rows[i]` of this one.
    pub(super) fn selected(&self, rows: &Tensor) -> Result<Store> {
        Ok(Store {
            codes: self.codes.f_index_select(0, rows)?,
            lines: self.lines.f_index_select(0, rows)?,
            batch: i64::try_from(rows.numel()).unwrap_or(i64::MAX),
            ..*self
        })
    }

    pub(super) fn copy(&self) -> Result<Store> {
        Ok(Store {
            codes: copied(&self.codes)?,
            lines: copied(&self.lines)?,
            ..*self
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.codes.numel() + 4 * self.lines.numel()) as u64
    }

    /// Quantizes `rows (B, H, n, D)`, `n` a multiple of the block, as the tokens from `at` on.
    pub(super) fn quantize(&mut self, at: i64, rows: &Tensor) -> Result<()> {
        let rows = rows.f_to_kind(Kind::Float)?.f_contiguous()?;
        let tokens = rows.size()[2];
        if rows.device() != Device::Cpu {
            return self.quantize_by_operators(at, &rows);
        }
        let format = self.format;
        // SAFETY: codes and scales were made by the store, which is borrowed for writing; `rows` is
        // read while an operator would read it.
        let (rows, codes, lines) = unsafe {
            (
                raw::slice::<f32>(&rows)?,
                raw::slice_mut::<u8>(&self.codes)?,
                raw::slice_mut::<f32>(&self.lines)?,
            )
        };
        let (tokens, at, capacity) = (size(tokens), size(at), size(self.capacity));
        if tokens == 0 || format.dim == 0 {
            return Ok(());
        }
        let per_line = format.rows_per_line();
        let rows = rows.chunks_exact(tokens * format.dim);
        let codes = codes.chunks_exact_mut(capacity * format.row_bytes());
        let lines = lines.chunks_exact_mut(capacity / per_line * format.line_len());
        for ((rows, codes), lines) in rows.zip(codes).zip(lines) {
            let codes = &mut codes[at * format.row_bytes()..][..tokens * format.row_bytes()];
            let lines = &mut lines[at / per_line * format.line_len()..];
            format.quantize(rows, codes, lines);
        }
        Ok(())
    }

    /// Dequantizes the first `tokens` tokens to the first positions of `to (B, H, C, D)`, of any dtype;
    /// fastest for contiguous f32 on a CPU.
    pub(super) fn dequantize_into(&self, tokens: i64, to: &Tensor) -> Result<()> {
        if to.device() != Device::Cpu || to.kind() != Kind::Float || !to.is_contiguous() {
            return self.dequantize_to(0, &to.f_narrow(2, 0, tokens)?);
        }
        let (format, capacity, room) = (self.format, size(self.capacity), size(to.size()[2]));
        // SAFETY: `to` is a scratch tensor that belongs to the caller; the others are only read.
        let (codes, lines, to) = unsafe {
            (
                raw::slice::<u8>(&self.codes)?,
                raw::slice::<f32>(&self.lines)?,
                raw::slice_mut::<f32>(to)?,
            )
        };
        let tokens = size(tokens);
        if tokens == 0 || format.dim == 0 {
            return Ok(());
        }
        let codes = codes.chunks_exact(capacity * format.row_bytes());
        let lines = lines.chunks_exact(capacity / format.rows_per_line() * format.line_len());
        let heads = to.chunks_exact_mut(room * format.dim);
        for ((to, codes), lines) in heads.zip(codes).zip(lines) {
            let codes = &codes[..tokens * format.row_bytes()];
            kernel::dequantize(&format, codes, lines, &mut to[..tokens * format.dim]);
        }
        Ok(())
    }

    /// Returns the scales and the minima of each row of the given lines, `(B, H, tokens, D)`.
    fn lines_by_row(&self, lines: &Tensor, tokens: i64) -> Result<[Tensor; 2]> {
        let (format, half) = (&self.format, self.format.line_len() as i64 / 2);
        let spread = |values: Tensor| match format.axis {
            QuantizationAxis::Token => {
                values.f_repeat_interleave_self_int(format.group as i64, -1, None)
            }
            QuantizationAxis::Channel => {
                values.f_repeat_interleave_self_int(format.block as i64, 2, Some(tokens))
            }
        };
        Ok([
            spread(lines.f_narrow(-1, 0, half)?)?,
            spread(lines.f_narrow(-1, half, half)?)?,
        ])
    }

    /// Dequantizes the tokens from `from` on, the beginning of a block, to `to (B, H, n, D)` with libtorch's
    /// operators: one launch for 8 bits and four for 4 bits, which read the codes and write values of `to`'s dtype.
    fn dequantize_to(&self, from: i64, to: &Tensor) -> Result<()> {
        let (format, tokens) = (&self.format, to.size()[2]);
        if tokens == 0 {
            return Ok(());
        }
        let per_line = format.rows_per_line() as i64;
        let (half_line, group) = (format.line_len() as i64 / 2, format.group as i64);
        let codes = self.codes.f_narrow(2, from, tokens)?;
        let lines = self.lines.f_narrow(2, from / per_line, tokens / per_line)?;
        // The parts of a row, each with one code per byte: the whole byte, or its low bits and its high bits.
        let nibbles = match format.bits {
            QuantizationBits::Eight => vec![codes],
            QuantizationBits::Four => vec![
                codes.f_bitwise_and(15i64)?,
                codes.f_bitwise_right_shift_tensor_scalar(4i64)?,
            ],
        };
        let parts = nibbles.len() as i64;
        // A byte holds value `i` in its low and value `i + group/2` in its high bits; see `Format`.
        let of_part = |tensor: &Tensor, part: i64| {
            let split = [-1, parts, group / parts];
            tensor.f_unflatten(-1, split.as_slice())?.f_select(-2, part)
        };
        for (part, codes) in (0..).zip(&nibbles) {
            let codes = codes.f_unflatten(-1, [-1, group / parts].as_slice())?;
            let to = of_part(to, part)?;
            let line = |start: i64| -> Result<Tensor> {
                let values = lines.f_narrow(-1, start, half_line)?;
                Ok(match format.axis {
                    // One value for each group of a row.
                    QuantizationAxis::Token => values.f_unsqueeze(-1)?,
                    // One value for each channel of a block of rows.
                    QuantizationAxis::Channel => of_part(&values, part)?.f_unsqueeze(3)?,
                })
            };
            let rows = |tensor: &Tensor| match format.axis {
                QuantizationAxis::Token => Ok(tensor.shallow_clone()),
                QuantizationAxis::Channel => {
                    tensor.f_unflatten(2, [-1, format.block as i64].as_slice())
                }
            };
            let (scales, least) = (line(0)?, line(half_line)?);
            let _same = least.f_addcmul_out(&rows(&to)?, &rows(&codes)?, &scales)?;
        }
        Ok(())
    }

    /// Dequantizes the tokens `from..from + tokens` to f32 with libtorch's operators; `from` is the
    /// beginning of a block.
    pub(super) fn dequantize_by_operators(&self, from: i64, tokens: i64) -> Result<Tensor> {
        let size = [self.batch, self.heads, tokens, self.format.dim as i64];
        let to = Tensor::f_empty(size, (Kind::Float, self.codes.device()))?;
        self.dequantize_to(from, &to)?;
        Ok(to)
    }

    fn quantize_by_operators(&mut self, at: i64, rows: &Tensor) -> Result<()> {
        let format = self.format;
        let (tokens, highest) = (rows.size()[2], f64::from(format.bits.highest()));
        let (groups, dim) = match format.axis {
            QuantizationAxis::Token => (
                rows.f_unflatten(-1, [-1, format.group as i64].as_slice())?,
                -1,
            ),
            QuantizationAxis::Channel => (
                rows.f_unflatten(2, [-1, format.block as i64].as_slice())?,
                3,
            ),
        };
        let (low, high) = (groups.f_amin(dim, false)?, groups.f_amax(dim, false)?);
        let range = high.f_sub(&low)?;
        let scales = range.f_div_scalar(highest)?;
        let not_finite = range.f_isfinite()?.f_logical_not()?;
        // As in the code for slices, a group with a value that is not finite dequantizes to NaN, so
        // that it cannot be mistaken for valid values.
        let unknown = |x: &Tensor| x.f_masked_fill(&not_finite, f64::NAN);
        let lines = Tensor::f_cat(&[unknown(&scales)?, unknown(&low)?], -1)?;
        let [scales, least] = self.lines_by_row(&lines, tokens)?;
        let codes = rows
            .f_sub(&least)?
            .f_div(&scales)?
            // A constant group has scale 0, and 0/0 is NaN: its code is 0, which means the
            // minimum.
            .f_nan_to_num(0.0, highest, 0.0)?
            .f_round()?
            .f_clamp(0.0, highest)?
            .f_to_kind(Kind::Uint8)?;
        let codes = match format.bits {
            QuantizationBits::Eight => codes,
            QuantizationBits::Four => {
                let half = format.group as i64 / 2;
                let codes = codes.f_unflatten(-1, [-1, 2, half].as_slice())?;
                let high = codes
                    .f_select(-2, 1)?
                    .f_bitwise_left_shift_tensor_scalar(4i64)?;
                codes
                    .f_select(-2, 0)?
                    .f_bitwise_or_tensor(&high)?
                    .f_flatten(-2, -1)?
            }
        };
        let line = at / format.rows_per_line() as i64;
        self.codes.f_narrow(2, at, tokens)?.f_copy_(&codes)?;
        self.lines
            .f_narrow(2, line, lines.size()[2])?
            .f_copy_(&lines)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the code for slices with the operators, which run on a GPU, where slices are not available.
    #[test]
    fn operators_and_slices_quantize_alike() {
        let device = Device::Cpu;
        let spec = Spec {
            batch: 2,
            heads: 3,
            key_dim: 12,
            value_dim: 12,
            kind: Kind::Float,
            device,
        };
        let rows = Tensor::arange(2 * 3 * 16 * 12, (Kind::Float, device))
            .f_view([2, 3, 16, 12])
            .and_then(|rows| (rows * 0.37).f_sin())
            .and_then(|rows| rows.f_mul_scalar(3.0));
        let rows = match rows {
            Ok(rows) => rows,
            Err(error) => panic!("{error}"),
        };
        for bits in [QuantizationBits::Eight, QuantizationBits::Four] {
            for axis in [QuantizationAxis::Token, QuantizationAxis::Channel] {
                let format = Format {
                    bits,
                    axis,
                    dim: 12,
                    group: 4,
                    block: 8,
                };
                let run = || -> Result<(Tensor, Tensor, Tensor)> {
                    let mut slices = Store::new(&spec, format, 24)?;
                    let mut operators = Store::new(&spec, format, 24)?;
                    slices.quantize(8, &rows)?;
                    operators.quantize_by_operators(8, &rows)?;
                    // The first block is quantized too, so that all of it can be read.
                    slices.quantize(0, &rows.f_narrow(2, 0, 8)?)?;
                    operators.quantize_by_operators(0, &rows.f_narrow(2, 0, 8)?)?;
                    let read = Tensor::f_empty([2, 3, 30, 12], (Kind::Float, device))?;
                    slices.dequantize_into(24, &read)?;
                    let whole = Tensor::f_cat(&[rows.f_narrow(2, 0, 8)?, rows.shallow_clone()], 2)?;
                    Ok((
                        read.f_narrow(2, 0, 24)?,
                        operators.dequantize_by_operators(0, 24)?,
                        whole,
                    ))
                };
                match run() {
                    Ok((slices, operators, whole)) => {
                        assert!(slices.allclose(&operators, 1e-5, 1e-5, false), "{format:?}");
                        let off = (&slices - &whole).abs().max().double_value(&[]);
                        let step = 6.0 / f64::from(bits.highest());
                        assert!(off <= step / 2.0 + 1e-5, "{format:?} is off by {off}");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    /// The operators that are not views.
    #[derive(Default)]
    struct Counter(std::cell::RefCell<Vec<String>>);

    impl overdrive_sys::dispatch_mode::DispatchMode for Counter {
        fn after(
            &self,
            call: &overdrive_sys::dispatch_mode::OperatorCall,
        ) -> overdrive_sys::CallbackResult<()> {
            if !call.aliases()? || call.mutates()? {
                self.0.borrow_mut().push(call.full_name());
            }
            Ok(())
        }
    }

    #[test]
    fn half_precision_is_dequantized_by_one_operator_a_part_of_a_byte() -> Result<()> {
        let device = Device::Cpu;
        let spec = Spec {
            batch: 2,
            heads: 2,
            key_dim: 16,
            value_dim: 16,
            kind: Kind::BFloat16,
            device,
        };
        let rows = Tensor::f_arange(2 * 2 * 16 * 16, (Kind::Float, device))?
            .f_view([2, 2, 16, 16])?
            .f_mul_scalar(0.37)?
            .f_sin()?;
        for (bits, expected) in [
            (QuantizationBits::Eight, vec!["aten::addcmul.out"]),
            (
                QuantizationBits::Four,
                vec![
                    "aten::bitwise_and.Scalar",
                    "aten::bitwise_right_shift.Tensor_Scalar",
                    "aten::addcmul.out",
                    "aten::addcmul.out",
                ],
            ),
        ] {
            for axis in [QuantizationAxis::Token, QuantizationAxis::Channel] {
                let format = Format {
                    bits,
                    axis,
                    dim: 16,
                    group: 8,
                    block: 4,
                };
                let mut store = Store::new(&spec, format, 24)?;
                store.quantize(0, &rows)?;
                let to = Tensor::f_zeros([2, 2, 20, 16], (Kind::BFloat16, device))?;
                let counter = std::rc::Rc::new(Counter::default());
                let mode = overdrive_sys::dispatch_mode::push_mode(std::rc::Rc::clone(&counter)
                    as std::rc::Rc<dyn overdrive_sys::dispatch_mode::DispatchMode>);
                store.dequantize_into(16, &to)?;
                drop(mode);
                assert_eq!(counter.0.take(), expected, "{format:?}");
                let exact = Tensor::f_empty([2, 2, 16, 16], (Kind::Float, device))?;
                store.dequantize_into(16, &exact)?;
                let read = to.f_narrow(2, 0, 16)?.f_to_kind(Kind::Float)?;
                // Half a step of bf16 for values up to 1, plus the rounding of f32.
                let off = (&read - &exact).abs().max().double_value(&[]);
                assert!(off <= 2f64.powi(-9) + 1e-6, "{format:?} is off by {off}");
                let rest = to.f_narrow(2, 16, 4)?.f_abs()?.f_max()?;
                assert_eq!(rest.double_value(&[]), 0.0);
            }
        }
        Ok(())
    }
}
