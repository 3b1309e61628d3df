//! Attention of a few queries over codes, a block of keys at a time.
//!
//! A block of keys is made f32 in memory that stays in the nearest cache, multiplied with the queries
//! that share it, and so the values: what is read from main memory are the codes. Online softmax over
//! the blocks (Dao 2023, <https://arxiv.org/abs/2307.08691>).
#![allow(
    unsafe_code,
    reason = "functions compiled for an instruction set, and threads that write disjoint parts"
)]

use overdrive_sys::threads;

use super::codec::Format;

/// Keys of a block, at least.
const KEYS: usize = 64;
/// Numbers that the sums of a product are kept in, whole vectors of any instruction set.
const LANES: usize = 16;
/// Keys that a part has at least where those of few heads are split among threads.
const PART_KEYS: usize = 512;
/// Where a running maximum starts: finite, lest the difference of two be NaN.
const LOWEST: f32 = -1e30;

/// Rows of all heads, one behind another, that of a head `head` numbers behind that of the one before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) head: usize,
}

/// Codes and scales of all heads, each of room for `capacity` tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct Codes<'a> {
    pub(super) format: Format,
    pub(super) codes: &'a [u8],
    pub(super) lines: &'a [f32],
    pub(super) capacity: usize,
}

/// Attention of queries `(B, H, T, D)`, contiguous, over `quantized` tokens of codes and after them
/// `recent` ones.
#[derive(Debug)]
pub(super) struct Problem<'a> {
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
    /// Tokens that a query sees, its own included.
    pub(super) window: Option<usize>,
    /// Whether a key is seen, `(B, T, S)`, in place of causality and window.
    pub(super) mask: Option<&'a [bool]>,
}

impl Problem<'_> {
    fn tokens(&self) -> usize {
        self.quantized + self.recent
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Rows of queries that share a key.
    fn rows(&self) -> usize {
        self.group() * self.queries
    }

    /// Keys of a block: whole lines of scales.
    fn step(&self) -> usize {
        let line = self.keys.format.block.max(1);
        KEYS.div_ceil(line) * line
    }

    /// The tokens that query `query` sees where there is no mask.
    fn seen(&self, query: usize) -> (usize, usize) {
        let end = self.tokens() + 1 + query - self.queries;
        (
            self.window.map_or(0, |window| end.saturating_sub(window)),
            end,
        )
    }
}

/// What a part leaves for each row: sums of values, the maximum, the sum of weights.
pub(super) struct Part<'a> {
    sums: &'a mut [f32],
    maxima: &'a mut [f32],
    weights: &'a mut [f32],
}

impl<'a> Part<'a> {
    fn len(problem: &Problem<'_>) -> usize {
        problem.rows() * (problem.values.format.dim + 2)
    }

    fn of(numbers: &'a mut [f32], rows: usize) -> Part<'a> {
        let (maxima, rest) = numbers.split_at_mut(rows);
        let (weights, sums) = rest.split_at_mut(rows);
        Part {
            sums,
            maxima,
            weights,
        }
    }
}

/// The memory of a block.
pub(super) struct Scratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    scores: Vec<f32>,
}

/// A slice that threads write to in disjoint parts.
struct Shared(*mut f32, usize);

// SAFETY: the parts that threads take of it are disjoint.
unsafe impl Sync for Shared {}

impl Shared {
    /// # Safety
    /// No part that overlaps this one is alive.
    #[allow(
        clippy::mut_from_ref,
        reason = "the caller vouches that parts are disjoint"
    )]
    unsafe fn part(&self, start: usize, len: usize) -> &mut [f32] {
        assert!(start <= self.1 && len <= self.1 - start);
        // SAFETY: in bounds; disjoint by the caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// Writes the attention to `output (B, H, T, D_v)`, contiguous.
pub(super) fn attend(problem: &Problem<'_>, output: &mut [f32]) {
    let (heads, rows) = (problem.batch * problem.kv_heads, problem.rows());
    let dim = problem.values.format.dim;
    let (len, step) = (Part::len(problem), problem.step());
    let workers = threads::intra_op().max(1);
    let parts = match heads {
        0 => return,
        heads if heads < 2 * workers => (2 * workers)
            .div_ceil(heads)
            .min(problem.tokens() / PART_KEYS)
            .max(1),
        _ => 1,
    };
    let mut results = vec![0.0; heads * parts * len];
    let shared = Shared(results.as_mut_ptr(), results.len());
    threads::parallel_for(heads * parts, 1, |range| {
        let mut scratch = Scratch {
            keys: vec![0.0; step * problem.keys.format.dim],
            values: vec![0.0; step * dim],
            scores: vec![0.0; rows * step],
        };
        for task in range {
            let (head, part) = (task / parts, task % parts);
            let cut = |part: usize| match part {
                part if part == parts => problem.tokens(),
                // At the beginning of a line of scales.
                part => problem.tokens() * part / parts / step * step,
            };
            // SAFETY: one part a task.
            let numbers = unsafe { shared.part(task * len, len) };
            let result = Part::of(numbers, rows);
            let tokens = (cut(part), cut(part + 1));
            sweep(problem, head, tokens, result, &mut scratch);
        }
    });
    let rows_of_heads = output.chunks_exact_mut(rows * dim);
    for (output, results) in rows_of_heads.zip(results.chunks_exact_mut(parts * len)) {
        let (first, others) = results.split_at_mut(len);
        let merged = Part::of(first, rows);
        for other in others.chunks_exact_mut(len) {
            let other = Part::of(other, rows);
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
            // A query that sees no key has zeros.
            let weight = merged.weights[row];
            let factor = if weight > 0.0 { 1.0 / weight } else { 0.0 };
            for (to, from) in to.iter_mut().zip(&merged.sums[row * dim..]) {
                *to = from * factor;
            }
        }
    }
}

/// Defines `name`, which runs `body::<FUSED>` compiled for the widest instruction set of the machine.
macro_rules! multiversioned {
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) = $body:ident) => {
        $(#[$doc])*
        pub(super) fn $name($($arg: $type),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                fn avx512($($arg: $type),*) {
                    $body::<true>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $type),*) {
                    $body::<true>($($arg),*)
                }
                let has_avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
                let has_avx512 = is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl");
                if has_avx2 && has_avx512 {
                    // SAFETY: the instructions were found.
                    return unsafe { avx512($($arg),*) };
                }
                if has_avx2 {
                    // SAFETY: as above.
                    return unsafe { avx2($($arg),*) };
                }
            }
            // Elsewhere a fused multiply-add may be a slow library call.
            $body::<{ cfg!(target_arch = "aarch64") }>($($arg),*)
        }
    };
}

multiversioned! {
    /// The rows that codes stand for.
    fn dequantize(format: &Format, codes: &[u8], lines: &[f32], rows: &mut [f32]) = dequantize_body
}

#[inline(always)]
fn dequantize_body<const FUSED: bool>(
    format: &Format,
    codes: &[u8],
    lines: &[f32],
    rows: &mut [f32],
) {
    format.dequantize(codes, lines, rows);
}

multiversioned! {
    /// Online softmax of the queries of one key head over the tokens `tokens.0..tokens.1`.
    fn sweep(
        problem: &Problem<'_>,
        head: usize,
        tokens: (usize, usize),
        result: Part<'_>,
        scratch: &mut Scratch,
    ) = sweep_body
}

#[inline(always)]
fn sweep_body<const FUSED: bool>(
    problem: &Problem<'_>,
    head: usize,
    (from, to): (usize, usize),
    result: Part<'_>,
    scratch: &mut Scratch,
) {
    let Part {
        sums,
        maxima,
        weights,
    } = result;
    sums.fill(0.0);
    weights.fill(0.0);
    maxima.fill(LOWEST);
    let (step, quantized) = (problem.step(), problem.quantized);
    let first = match problem.mask {
        Some(_) => from,
        None => from.max(problem.seen(0).0 / step * step),
    };
    let (key_dim, value_dim) = (problem.keys.format.dim, problem.values.format.dim);
    let (rows, group) = (problem.rows(), problem.queries);
    let query = &problem.query[head * rows * key_dim..][..rows * key_dim];
    let batch = head / problem.kv_heads;
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
            read_codes(&problem.keys, head, start, count, keys);
            read_codes(&problem.values, head, start, count, values);
            (&*keys, &*values)
        } else {
            let at = start - quantized;
            let rows = |rows: &Rows<'_>, dim: usize| {
                let start = head * rows.head + at * dim;
                start..start + count * dim
            };
            (
                &problem.recent_keys.data[rows(&problem.recent_keys, key_dim)],
                &problem.recent_values.data[rows(&problem.recent_values, value_dim)],
            )
        };
        for row in 0..rows {
            let scores = &mut scratch.scores[row * step..][..count];
            let query = &query[row * key_dim..][..key_dim];
            for (score, key) in scores.iter_mut().zip(keys.chunks_exact(key_dim)) {
                *score = dot::<FUSED>(query, key) * problem.scale;
            }
            if let Some(cap) = problem.softcap {
                for score in &mut *scores {
                    *score = (*score / cap).tanh() * cap;
                }
            }
            hide(problem, (batch, row % group), start, scores);
            let highest = scores.iter().copied().fold(LOWEST, f32::max);
            let maximum = maxima[row].max(highest);
            let factor = exp::<FUSED>(maxima[row] - maximum);
            maxima[row] = maximum;
            let mut total = [0.0; LANES];
            let mut chunks = scores.chunks_exact_mut(LANES);
            for chunk in &mut chunks {
                for (score, total) in chunk.iter_mut().zip(&mut total) {
                    *score = weight::<FUSED>(*score, maximum);
                    *total += *score;
                }
            }
            for (score, total) in chunks.into_remainder().iter_mut().zip(&mut total) {
                *score = weight::<FUSED>(*score, maximum);
                *total += *score;
            }
            weights[row] = weights[row] * factor + total.iter().sum::<f32>();
            let sums = &mut sums[row * value_dim..][..value_dim];
            add_values::<FUSED>(sums, factor, scores, values, value_dim);
        }
        start = end;
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

/// Sets the scores of what the query does not see to minus infinity.
#[inline(always)]
fn hide(problem: &Problem<'_>, (batch, query): (usize, usize), start: usize, scores: &mut [f32]) {
    match problem.mask {
        Some(mask) => {
            let row = (batch * problem.queries + query) * problem.tokens() + start;
            for (score, seen) in scores.iter_mut().zip(&mask[row..]) {
                *score = if *seen { *score } else { f32::NEG_INFINITY };
            }
        }
        None => {
            let (first, end) = problem.seen(query);
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
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn dot<const FUSED: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let (a_rest, b_rest) = (a_chunks.remainder(), b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] = multiply_add::<FUSED>(a[lane], b[lane], sums[lane]);
        }
    }
    for ((a, b), sum) in a_rest.iter().zip(b_rest).zip(&mut sums) {
        *sum = multiply_add::<FUSED>(*a, *b, *sum);
    }
    // By halves, as vectors add up.
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            sums[lane] += sums[lane + width];
        }
    }
    sums[0]
}

/// `sums = sums · factor + Σ weight · value`.
#[inline(always)]
fn add_values<const FUSED: bool>(
    sums: &mut [f32],
    factor: f32,
    weights: &[f32],
    values: &[f32],
    dim: usize,
) {
    const WIDE: usize = 4 * LANES;
    let mut start = 0;
    while start + WIDE <= dim {
        let to = &mut sums[start..start + WIDE];
        let mut lanes = [0.0; WIDE];
        for (lane, sum) in lanes.iter_mut().zip(&*to) {
            *lane = sum * factor;
        }
        for (weight, value) in weights.iter().zip(values.chunks_exact(dim)) {
            let value = &value[start..start + WIDE];
            for lane in 0..WIDE {
                lanes[lane] = multiply_add::<FUSED>(*weight, value[lane], lanes[lane]);
            }
        }
        to.copy_from_slice(&lanes);
        start += WIDE;
    }
    let rest = &mut sums[start..];
    for sum in &mut *rest {
        *sum *= factor;
    }
    if rest.is_empty() {
        return;
    }
    for (weight, value) in weights.iter().zip(values.chunks_exact(dim)) {
        for (sum, value) in rest.iter_mut().zip(&value[start..]) {
            *sum = multiply_add::<FUSED>(*weight, *value, *sum);
        }
    }
}

/// `exp(score - maximum)`; nought for minus infinity.
#[inline(always)]
fn weight<const FUSED: bool>(score: f32, maximum: f32) -> f32 {
    let weight = exp::<FUSED>(score - maximum);
    if score == f32::NEG_INFINITY {
        0.0
    } else {
        weight
    }
}

/// `e^x` for `x <= 0` to about 2e-7, relative; NaN stays NaN.
#[inline(always)]
fn exp<const FUSED: bool>(x: f32) -> f32 {
    /// 1.5 · 2^23: adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    /// `2^f` for `|f| <= 1/2`: a least-maximum fit.
    const FIT: [f32; 7] = [
        0.000_153_458_08,
        0.001_339_993,
        0.009_618_489,
        0.055_503_286,
        0.240_226_46,
        std::f32::consts::LN_2,
        1.0,
    ];
    let y = x * std::f32::consts::LOG2_E;
    // Not `max`, which would lose a NaN.
    let y = if y < -126.0 { -126.0 } else { y };
    let rounded = y + ROUND;
    let rest = y - (rounded - ROUND);
    let mut sum = FIT[0];
    for coefficient in &FIT[1..] {
        sum = multiply_add::<FUSED>(sum, rest, *coefficient);
    }
    let exponent = rounded
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    sum * f32::from_bits(exponent << 23)
}
