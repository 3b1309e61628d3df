//! Attention of a few queries over quantized keys and values, a block of keys at a time.
//!
//! A block of keys is dequantized into memory that stays in the L1 cache and multiplied with the queries that
//! share it, and likewise a block of values, so only codes are read from main memory. The softmax over the blocks
//! is online (Dao 2023, <https://arxiv.org/abs/2307.08691>).

use overdrive_kernels::math::exp;
use overdrive_kernels::threads::{chunk_len, run_jobs, workers};
use overdrive_kernels::{InstructionSet, LANES, Simd, each_vector, load, store, vectorized};
use overdrive_sys::raw::BoolByte;

use super::codec::Format;

/// The minimum number of keys in a block.
const KEYS: usize = 64;
/// The minimum number of keys in a split, if the keys of few heads are split among threads.
const SPLIT_KEYS: usize = 512;
/// The start of a running maximum: finite, because the difference of two infinities is NaN.
const LOWEST: f32 = -1e30;

/// The rows of all heads, contiguous within a head; `head` is the distance between heads in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) head: usize,
}

/// The codes and scales of all heads, each with room for `capacity` tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Codes<'a> {
    pub(super) format: Format,
    pub(super) codes: &'a [u8],
    pub(super) lines: &'a [f32],
    pub(super) capacity: usize,
}

/// The inputs of attention: contiguous queries `(B, H, T, D)` over `quantized` tokens as codes, followed by
/// `recent` tokens.
#[derive(Debug)]
pub(super) struct AttendInputs<'a> {
    pub(super) batch: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) queries: usize,
    pub(super) query: &'a [f32],
    pub(super) keys: Codes<'a>,
    pub(super) values: Codes<'a>,
    pub(super) quantized: usize,
    pub(super) recent_keys: Rows<'a>,
    pub(super) recent_values: Rows<'a>,
    pub(super) recent: usize,
    pub(super) scale: f32,
    pub(super) softcap: Option<f32>,
    /// The number of tokens that a query sees, its own included.
    pub(super) window: Option<usize>,
    /// `true` where a key is seen, `(B, T, S)`, in place of causality and window.
    pub(super) mask: Option<&'a [BoolByte]>,
}

impl AttendInputs<'_> {
    fn tokens(&self) -> usize {
        self.quantized + self.recent
    }

    /// Returns the number of query rows that share a key.
    fn rows(&self) -> usize {
        self.heads / self.kv_heads * self.queries
    }

    /// Returns the number of keys of a block: whole lines of scales.
    fn step(&self) -> usize {
        let line = self.keys.format.block.max(1);
        KEYS.div_ceil(line) * line
    }

    /// Returns the tokens that query `query` sees if there is no mask.
    fn seen(&self, query: usize) -> (usize, usize) {
        let end = self.tokens() + 1 + query - self.queries;
        (
            self.window.map_or(0, |window| end.saturating_sub(window)),
            end,
        )
    }
}

/// The result of a split of the keys for each row: sums of values, the maximum, the sum of weights.
struct Partial<'a> {
    sums: &'a mut [f32],
    maxima: &'a mut [f32],
    weights: &'a mut [f32],
}

impl<'a> Partial<'a> {
    fn len(inputs: &AttendInputs<'_>) -> usize {
        inputs.rows() * (inputs.values.format.dim + 2)
    }

    fn of(elements: &'a mut [f32], rows: usize) -> Partial<'a> {
        let (maxima, rest) = elements.split_at_mut(rows);
        let (weights, sums) = rest.split_at_mut(rows);
        Partial {
            sums,
            maxima,
            weights,
        }
    }
}

/// The dequantized keys and values of a block, and its scores.
struct Scratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
}

/// Writes the attention to `output (B, H, T, D_v)`, contiguous.
pub(super) fn attend(set: InstructionSet, inputs: &AttendInputs<'_>, output: &mut [f32]) {
    let (heads, rows) = (inputs.batch * inputs.kv_heads, inputs.rows());
    let dim = inputs.values.format.dim;
    let (len, step) = (Partial::len(inputs), inputs.step());
    let splits = match heads {
        _ if output.is_empty() => return,
        // Two splits for each thread, so that one slow split does not delay all threads.
        heads if heads < 2 * workers() => (2 * workers())
            .div_ceil(heads)
            .min(inputs.tokens() / SPLIT_KEYS)
            .max(1),
        _ => 1,
    };
    let bound = |split: usize| match split {
        split if split == splits => inputs.tokens(),
        // A split begins at a line of scales.
        split => inputs.tokens() * split / splits / step * step,
    };
    let mut results = vec![0.0; heads * splits * len];
    // One chunk for each thread, so that each allocates its scratch once.
    let chunk = chunk_len(heads * splits, 1);
    let jobs = results.chunks_mut(chunk * len).enumerate();
    run_jobs(jobs, |(job, results)| {
        let mut scratch = Scratch {
            keys: vec![0.0; step * inputs.keys.format.dim],
            values: vec![0.0; step * dim],
            scores: vec![0.0; rows * step],
        };
        for (task, result) in (job * chunk..).zip(results.chunks_exact_mut(len)) {
            let (head, split) = (task / splits, task % splits);
            let tokens = (bound(split), bound(split + 1));
            let result = Partial::of(result, rows);
            attend_to_tokens(set, inputs, head, tokens, result, &mut scratch);
        }
    });
    let rows_of_heads = output.chunks_exact_mut(rows * dim);
    for (output, results) in rows_of_heads.zip(results.chunks_exact_mut(splits * len)) {
        let (first, others) = results.split_at_mut(len);
        let merged = Partial::of(first, rows);
        for other in others.chunks_exact_mut(len) {
            let other = Partial::of(other, rows);
            for row in 0..rows {
                let maximum = merged.maxima[row].max(other.maxima[row]);
                let ours = (merged.maxima[row] - maximum).exp();
                let theirs = (other.maxima[row] - maximum).exp();
                merged.maxima[row] = maximum;
                merged.weights[row] = merged.weights[row] * ours + other.weights[row] * theirs;
                let to = &mut merged.sums[row * dim..][..dim];
                for (to, from) in to.iter_mut().zip(&other.sums[row * dim..]) {
                    *to = *to * ours + from * theirs;
                }
            }
        }
        for (row, to) in output.chunks_exact_mut(dim).enumerate() {
            // The result of a query that sees no key is zero.
            let weight = merged.weights[row];
            let factor = if weight > 0.0 { 1.0 / weight } else { 0.0 };
            for (to, from) in to.iter_mut().zip(&merged.sums[row * dim..]) {
                *to = from * factor;
            }
        }
    }
}

/// Dequantizes codes to rows.
pub(super) fn dequantize(format: &Format, codes: &[u8], lines: &[f32], rows: &mut [f32]) {
    dequantize_rows(InstructionSet::best(), format, codes, lines, rows);
}

vectorized! {
    fn dequantize_rows<S: Simd>(
        _s: S,
        format: &Format,
        codes: &[u8],
        lines: &[f32],
        rows: &mut [f32],
    ) {
        format.dequantize(codes, lines, rows);
    }
}

vectorized! {
    /// Computes the online softmax of the queries of one key head over the tokens
    /// `tokens.0..tokens.1`.
    fn attend_to_tokens<S: Simd>(
        s: S,
        inputs: &AttendInputs<'_>,
        head: usize,
        tokens: (usize, usize),
        result: Partial<'_>,
        scratch: &mut Scratch,
    ) {
        let (from, to) = tokens;
        let Partial {
            sums,
            maxima,
            weights,
        } = result;
        sums.fill(0.0);
        weights.fill(0.0);
        maxima.fill(LOWEST);
        let (step, quantized) = (inputs.step(), inputs.quantized);
        let first = match inputs.mask {
            Some(_) => from,
            None => from.max(inputs.seen(0).0 / step * step),
        };
        let (key_dim, value_dim) = (inputs.keys.format.dim, inputs.values.format.dim);
        let (rows, group) = (inputs.rows(), inputs.queries);
        let query = &inputs.query[head * rows * key_dim..][..rows * key_dim];
        let batch = head / inputs.kv_heads;
        let mut start = first;
        while start < to {
            let end = match start < quantized {
                true => (start + step).min(to).min(quantized),
                false => (start + step).min(to),
            };
            let count = end - start;
            let (keys, values) = if start < quantized {
                let (keys, values) = (
                    &mut scratch.keys[..count * key_dim],
                    &mut scratch.values[..count * value_dim],
                );
                read_codes(&inputs.keys, head, start, count, keys);
                read_codes(&inputs.values, head, start, count, values);
                (&*keys, &*values)
            } else {
                let at = start - quantized;
                let rows = |rows: &Rows<'_>, dim: usize| {
                    let start = head * rows.head + at * dim;
                    start..start + count * dim
                };
                (
                    &inputs.recent_keys.data[rows(&inputs.recent_keys, key_dim)],
                    &inputs.recent_values.data[rows(&inputs.recent_values, value_dim)],
                )
            };
            for row in 0..rows {
                let scores = &mut scratch.scores[row * step..][..count];
                let query = &query[row * key_dim..][..key_dim];
                for (score, key) in scores.iter_mut().zip(keys.chunks_exact(key_dim)) {
                    *score = dot(s, query, key) * inputs.scale;
                }
                if let Some(cap) = inputs.softcap {
                    for score in &mut *scores {
                        *score = (*score / cap).tanh() * cap;
                    }
                }
                hide(inputs, (batch, row % group), start, scores);
                let highest = scores.iter().copied().fold(LOWEST, f32::max);
                let maximum = maxima[row].max(highest);
                // With two floats for each block, vector instructions would gain nothing.
                let factor = (maxima[row] - maximum).exp();
                maxima[row] = maximum;
                weights[row] = weights[row] * factor + exponentiate(s, scores, maximum);
                let sums = &mut sums[row * value_dim..][..value_dim];
                add_values(s, sums, factor, scores, values, value_dim);
            }
            start = end;
        }
    }
}

#[inline(always)]
fn read_codes(from: &Codes<'_>, head: usize, start: usize, count: usize, to: &mut [f32]) {
    let format = &from.format;
    let (token, bytes) = (head * from.capacity + start, format.row_bytes());
    let codes = &from.codes[token * bytes..][..count * bytes];
    let lines = &from.lines[token / format.rows_per_line() * format.line_len()..];
    format.dequantize(codes, lines, to);
}

/// Sets the scores of the tokens that the query does not see to minus infinity.
#[inline(always)]
fn hide(
    inputs: &AttendInputs<'_>,
    (batch, query): (usize, usize),
    start: usize,
    scores: &mut [f32],
) {
    match inputs.mask {
        Some(mask) => {
            let row = (batch * inputs.queries + query) * inputs.tokens() + start;
            for (score, seen) in scores.iter_mut().zip(&mask[row..]) {
                *score = if seen.get() {
                    *score
                } else {
                    f32::NEG_INFINITY
                };
            }
        }
        None => {
            let (first, end) = inputs.seen(query);
            if start >= first && start + scores.len() <= end {
                return;
            }
            for (token, score) in (start..).zip(scores) {
                if token < first || token >= end {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
    }
}

#[inline(always)]
fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    each_vector(
        a.len(),
        #[inline(always)]
        |span| sum = s.mul_add(load(s, a, span), load(s, b, span), sum),
    );
    s.reduce_add(sum)
}

/// Replaces scores by `exp(score - maximum)`, which is 0 for minus infinity, and returns their sum.
#[inline(always)]
fn exponentiate<S: Simd>(s: S, scores: &mut [f32], maximum: f32) -> f32 {
    let (maximum, mut total) = (s.splat(maximum), s.splat(0.0));
    let (vectors, rest) = scores.as_chunks_mut::<LANES>();
    for scores in vectors {
        let weights = exp(s, s.sub(s.load_f32(scores), maximum));
        total = s.add(total, weights);
        s.store_f32(weights, scores);
    }
    if !rest.is_empty() {
        // Lanes past the end have a weight of 0.
        let mut padded = [f32::NEG_INFINITY; LANES];
        padded[..rest.len()].copy_from_slice(rest);
        let weights = exp(s, s.sub(s.load_f32(&padded), maximum));
        total = s.add(total, weights);
        s.store_f32(weights, &mut padded);
        rest.copy_from_slice(&padded[..rest.len()]);
    }
    s.reduce_add(total)
}

/// `sums = sums · factor + Σ weight · value`.
#[inline(always)]
fn add_values<S: Simd>(
    s: S,
    sums: &mut [f32],
    factor: f32,
    weights: &[f32],
    values: &[f32],
    dim: usize,
) {
    // The number of sums that fit into registers.
    const VECTORS: usize = 4;
    const WIDE: usize = VECTORS * LANES;
    let factor = s.splat(factor);
    let mut start = 0;
    while start + WIDE <= dim {
        let to = &mut sums[start..start + WIDE];
        let (vectors, _) = to.as_chunks_mut::<LANES>();
        let mut totals = [s.splat(0.0); VECTORS];
        for (total, sums) in totals.iter_mut().zip(&*vectors) {
            *total = s.mul(s.load_f32(sums), factor);
        }
        for (weight, value) in weights.iter().zip(values.chunks_exact(dim)) {
            let (values, _) = value[start..start + WIDE].as_chunks::<LANES>();
            let weight = s.splat(*weight);
            for (total, value) in totals.iter_mut().zip(values) {
                *total = s.mul_add(weight, s.load_f32(value), *total);
            }
        }
        for (total, sums) in totals.into_iter().zip(vectors) {
            s.store_f32(total, sums);
        }
        start += WIDE;
    }
    let rest = &mut sums[start..];
    each_vector(
        rest.len(),
        #[inline(always)]
        |span| {
            let mut total = s.mul(load(s, rest, span), factor);
            for (weight, value) in weights.iter().zip(values.chunks_exact(dim)) {
                total = s.mul_add(s.splat(*weight), load(s, &value[start..], span), total);
            }
            store(s, total, rest, span);
        },
    );
}

#[cfg(test)]
mod tests {
    use super::super::codec::{QuantizationAxis, QuantizationBits};
    use super::*;

    /// Returns values in -1..1.
    fn values(count: usize, seed: f32) -> Vec<f32> {
        (0..count)
            .map(|i| (i as f32 * 12.9898 + seed).sin())
            .collect()
    }

    /// Returns the codes and scales of `tokens` rows of two heads, and their dequantized rows.
    fn quantized(format: &Format, tokens: usize, seed: f32) -> (Vec<u8>, Vec<f32>, Vec<f32>) {
        let rows = values(2 * tokens * format.dim, seed);
        let mut codes = vec![0; 2 * tokens * format.row_bytes()];
        let mut lines = vec![0.0; 2 * tokens / format.rows_per_line() * format.line_len()];
        format.quantize(&rows, &mut codes, &mut lines);
        let mut back = vec![0.0; rows.len()];
        format.dequantize(&codes, &lines, &mut back);
        (codes, lines, back)
    }

    /// Returns the attention in f64 over dequantized rows.
    fn expected(inputs: &AttendInputs<'_>, keys: &[f32], values: &[f32]) -> Vec<f64> {
        let (dim, value_dim) = (inputs.keys.format.dim, inputs.values.format.dim);
        let (quantized, recent) = (inputs.quantized, inputs.recent);
        let row = |dense: &[f32], rows: &Rows<'_>, head: usize, token: usize, dim: usize| {
            let (data, at) = match token.checked_sub(quantized) {
                None => (dense, (head * quantized + token) * dim),
                Some(token) => (rows.data, head * rows.head + token * dim),
            };
            data[at..at + dim]
                .iter()
                .map(|x| f64::from(*x))
                .collect::<Vec<_>>()
        };
        let mut output = Vec::new();
        for (index, query) in inputs.query.chunks_exact(dim).enumerate() {
            let head = index / inputs.rows();
            let (first, end) = inputs.seen(index % inputs.queries);
            let mut sums = vec![0.0; value_dim];
            let mut total = 0.0;
            for token in first..end.min(quantized + recent) {
                let key = row(keys, &inputs.recent_keys, head, token, dim);
                let score: f64 = query.iter().zip(&key).map(|(q, k)| f64::from(*q) * k).sum();
                let weight = (score * f64::from(inputs.scale)).exp();
                total += weight;
                let value = row(values, &inputs.recent_values, head, token, value_dim);
                sums.iter_mut()
                    .zip(value)
                    .for_each(|(sum, v)| *sum += weight * v);
            }
            output.extend(sums.into_iter().map(|sum| sum / total));
        }
        output
    }

    #[test]
    fn every_instruction_set_attends_as_a_plain_sum_does() {
        for (bits, axis) in [
            (QuantizationBits::Eight, QuantizationAxis::Token),
            (QuantizationBits::Four, QuantizationAxis::Channel),
        ] {
            let format = |dim| Format {
                bits,
                axis,
                dim,
                group: 4,
                block: 32,
            };
            let (key_format, value_format) = (format(20), format(84));
            let (quantized_tokens, recent, queries) = (128, 21, 2);
            let (codes, lines, keys) = quantized(&key_format, quantized_tokens, 0.1);
            let (value_codes, value_lines, dense) = quantized(&value_format, quantized_tokens, 0.2);
            let (recent_keys, recent_values) =
                (values(2 * recent * 20, 0.3), values(2 * recent * 84, 0.4));
            let query = values(4 * queries * 20, 0.5);
            let inputs = AttendInputs {
                batch: 1,
                heads: 4,
                kv_heads: 2,
                queries,
                query: &query,
                keys: Codes {
                    format: key_format,
                    codes: &codes,
                    lines: &lines,
                    capacity: quantized_tokens,
                },
                values: Codes {
                    format: value_format,
                    codes: &value_codes,
                    lines: &value_lines,
                    capacity: quantized_tokens,
                },
                quantized: quantized_tokens,
                recent_keys: Rows {
                    data: &recent_keys,
                    head: recent * 20,
                },
                recent_values: Rows {
                    data: &recent_values,
                    head: recent * 84,
                },
                recent,
                scale: 0.7,
                softcap: None,
                window: Some(100),
                mask: None,
            };
            let expected = expected(&inputs, &keys, &dense);
            for set in InstructionSet::available() {
                let mut output = vec![f32::NAN; expected.len()];
                attend(set, &inputs, &mut output);
                for (got, expected) in output.iter().zip(&expected) {
                    let off = (f64::from(*got) - expected).abs();
                    assert!(off < 1e-5, "{set:?}: {got} instead of {expected}");
                }
            }
        }
    }
}
