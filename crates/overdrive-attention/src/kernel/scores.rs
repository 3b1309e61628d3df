//! The operations on a tile of scores `(keys, lanes)` between the matmuls.
//!
//! Scores are kept in units of `log2`: a softmax weight is `2^(score - maximum)`.

use std::f64::consts::LOG2_E;

use overdrive_kernels::{Accumulate, InstructionSet, Real, Vector, vectorized};

use super::block::{KEYS, ROWS};
use super::dropout::RowKeys;
use super::inputs::{Bias, BiasValues, Rules, Sequence};

/// The softcap, ALiBi, bias, mask and dropout of the rows of a block.
#[derive(Debug)]
pub(super) struct Adjustment<'p, E: Accumulate> {
    pub(super) rules: &'p Rules<'p, E::Acc>,
    pub(super) set: InstructionSet,
    pub(super) sequence: Sequence,
    pub(super) lanes: usize,
    pub(super) rows: usize,
    /// The query and head of each row.
    pub(super) queries_and_heads: [(usize, usize); ROWS],
    /// The first key that each row sees, except for sink tokens.
    pub(super) starts: [usize; ROWS],
    /// The key after the last one that each row sees.
    pub(super) ends: [usize; ROWS],
    /// The position of each row among the keys.
    pub(super) positions: [i64; ROWS],
    pub(super) slopes: [E::Acc; ROWS],
    pub(super) dropout: Option<RowKeys>,
}

impl<E: Accumulate> Adjustment<'_, E> {
    /// Converts the products of a tile, whose queries include `RowBlock::query_factor`, to scores.
    ///
    /// With a softcap, `derivative` receives its derivative at each score.
    pub(super) fn scores(
        &self,
        tile: &mut [E::Acc],
        start: usize,
        derivative: Option<&mut [E::Acc]>,
    ) {
        // The cap comes first, as in flash-attn: bias and mask are added to capped scores.
        if let Some(cap) = self.rules.softcap {
            softcap(self.set, tile, derivative, E::Acc::of(cap * LOG2_E));
        }
        if self.rules.slopes.is_some() {
            self.alibi(tile, start);
        }
        if let Some(bias) = &self.rules.bias {
            self.bias(bias, tile, start);
        }
        // Most tiles of a causal block are below the diagonal and need no mask.
        if !self.sees_all(start, tile.len() / self.lanes) {
            self.mask(tile, start);
        }
    }

    /// Returns `true` if every row sees every key of `start..start + count`.
    fn sees_all(&self, start: usize, count: usize) -> bool {
        // Starts and ends increase with the query, so the first and last row bound them.
        let (end, window) = (self.ends[0], self.starts[self.rows - 1]);
        end >= start + count && (window <= start || start + count <= self.rules.limits.sink_tokens)
    }

    fn mask(&self, tile: &mut [E::Acc], start: usize) {
        let count = tile.len() / self.lanes;
        // Relative to the tile these are small, hence exact in f32.
        let relative = |key: usize| {
            let offset = key.max(start) - start;
            E::Acc::of(offset.min(count) as f64)
        };
        let (mut from, mut to) = ([E::Acc::ZERO; ROWS], [E::Acc::ZERO; ROWS]);
        for row in 0..self.rows {
            (from[row], to[row]) = (relative(self.starts[row]), relative(self.ends[row]));
        }
        // Relative to the tile, as its keys are.
        let sinks = self.rules.limits.sink_tokens.saturating_sub(start);
        hide(self.set, tile, self.lanes, &from, &to, sinks);
    }

    fn alibi(&self, tile: &mut [E::Acc], start: usize) {
        let (mut positions, mut slopes) = ([E::Acc::ZERO; ROWS], [E::Acc::ZERO; ROWS]);
        for row in 0..self.rows {
            // Subtracted as integers: a position beyond 2^24 is not exact in f32.
            positions[row] = E::Acc::of((self.positions[row] - start as i64) as f64);
            // In units of log2, as the scores are, and negative because distance lowers a score.
            slopes[row] = self.slopes[row] * E::Acc::of(-LOG2_E);
        }
        slope(self.set, tile, self.lanes, &positions, &slopes);
    }

    fn bias(&self, bias: &Bias<'_, E::Acc>, tile: &mut [E::Acc], start: usize) {
        // Not vectorized: neighbours in a tile are queries, whose biases are a row apart in memory.
        let [by_batch, by_head, by_query, by_key] = bias.strides;
        let log2_e = E::Acc::of(LOG2_E);
        for row in 0..self.rows {
            let (query, head) = self.queries_and_heads[row];
            let base = self.sequence.batch * by_batch + head * by_head + query * by_query;
            let base = base + start * by_key;
            let column = tile[row..].iter_mut().step_by(self.lanes).enumerate();
            match bias.values {
                BiasValues::Keep(keep) => column
                    .filter(|(key, _)| !keep[base + key * by_key].get())
                    .for_each(|(_, score)| *score = -E::Acc::INFINITY),
                BiasValues::Add(add) => {
                    column.for_each(|(key, score)| *score += add[base + key * by_key] * log2_e)
                }
            }
        }
    }

    /// Drops weights of `tile` and scales up the others; every call drops the same weights.
    pub(super) fn drop_weights(&self, tile: &mut [E::Acc], start: usize) {
        if let Some(keys) = &self.dropout {
            drop_out(self.set, tile, self.lanes, start, keys);
        }
    }
}

vectorized! {
    /// Replaces `tile` by `cap · log2(e) · tanh(tile)`, and writes `1 - tanh²` for the derivative.
    fn softcap<S: Simd, R: Real>(
        s: S,
        tile: &mut [R],
        derivative: Option<&mut [R]>,
        cap: R,
    ) {
        let (cap, one) = (R::Vector::<S>::splat(s, cap), R::Vector::<S>::splat(s, R::ONE));
        let chunks = tile.chunks_exact_mut(R::Vector::<S>::LEN);
        match derivative {
            None => {
                for chunk in chunks {
                    tanh(s, R::Vector::<S>::load(s, chunk)).mul(cap).store(chunk);
                }
            }
            Some(derivative) => {
                let derivatives = derivative.chunks_exact_mut(R::Vector::<S>::LEN);
                // `zip` would stop at a shorter slice and leave the other scores uncapped.
                assert!(derivatives.len() >= chunks.len());
                for (chunk, derivative) in chunks.zip(derivatives) {
                    let bent = tanh(s, R::Vector::<S>::load(s, chunk));
                    bent.mul(cap).store(chunk);
                    one.sub(bent.mul(bent)).store(derivative);
                }
            }
        }
    }
}

/// Returns tanh, computed from `2^x` and, near zero, where that would cancel, from its series.
#[inline(always)]
fn tanh<V: Vector>(s: V::Token, x: V) -> V {
    let splat = |value: f64| V::splat(s, V::Scalar::of(value));
    let one = splat(1.0);
    // tanh(20) is 1 in either precision; NaN passes through.
    let bounded = splat(-20.0).max(splat(20.0).min(x));
    let power = bounded.mul(splat(2.0 * LOG2_E)).exp2();
    let bent = power.sub(one).div(power.add(one));
    let square = x.mul(x);
    // Through x^13 inside 1/16: off by 1e-18.
    let mut series = splat(21_844.0 / 6_081_075.0);
    for coefficient in [
        -1_382.0 / 155_925.0,
        62.0 / 2835.0,
        -17.0 / 315.0,
        2.0 / 15.0,
        -1.0 / 3.0,
        1.0,
    ] {
        series = series.mul_add(square, splat(coefficient));
    }
    x.abs().select_lt(splat(0.0625), series.mul(x), bent)
}

vectorized! {
    /// Adds `slopes · |positions - key|`.
    fn slope<S: Simd, R: Real>(
        s: S,
        tile: &mut [R],
        lanes: usize,
        positions: &[R; ROWS],
        slopes: &[R; ROWS],
    ) {
        for (key, row) in tile.chunks_exact_mut(lanes).enumerate() {
            let key = R::Vector::<S>::splat(s, R::of(key as f64));
            let columns = positions.chunks_exact(R::Vector::<S>::LEN);
            let columns = columns.zip(slopes.chunks_exact(R::Vector::<S>::LEN));
            for (scores, (position, slope)) in
                row.chunks_exact_mut(R::Vector::<S>::LEN).zip(columns)
            {
                let distance = R::Vector::<S>::load(s, position).sub(key).abs();
                let slope = R::Vector::<S>::load(s, slope);
                slope.mul_add(distance, R::Vector::<S>::load(s, scores)).store(scores);
            }
        }
    }
}

vectorized! {
    /// Hides the keys outside `from..to` of each row, but the first `sinks` keys only if they are past `to`.
    fn hide<S: Simd, R: Real>(
        s: S,
        tile: &mut [R],
        lanes: usize,
        from: &[R; ROWS],
        to: &[R; ROWS],
        sinks: usize,
    ) {
        let hidden = R::Vector::<S>::splat(s, -R::INFINITY);
        for (key, row) in tile.chunks_exact_mut(lanes).enumerate() {
            let index = R::Vector::<S>::splat(s, R::of(key as f64));
            let columns = from.chunks_exact(R::Vector::<S>::LEN);
            let columns = columns.zip(to.chunks_exact(R::Vector::<S>::LEN));
            for (scores, (from, to)) in row.chunks_exact_mut(R::Vector::<S>::LEN).zip(columns) {
                let mut score = R::Vector::<S>::load(s, scores);
                score = index.select_lt(R::Vector::<S>::load(s, to), score, hidden);
                // The exemption is from the left limit only: a causal mask hides sink tokens like other keys.
                if key >= sinks {
                    score = index.select_lt(R::Vector::<S>::load(s, from), hidden, score);
                }
                score.store(scores);
            }
        }
    }
}

vectorized! {
    /// Applies dropout; the compiler vectorizes the loop.
    fn drop_out<S: Simd, R: Real>(
        _s: S,
        tile: &mut [R],
        lanes: usize,
        start: usize,
        keys: &RowKeys,
    ) {
        keys.apply(tile, lanes, start);
    }
}

vectorized! {
    /// Does one step of the online softmax: `tile` becomes weights relative to the new maximum, and
    /// `factors` the scale of all weights before.
    pub(super) fn softmax<S: Simd, R: Real>(
        s: S,
        tile: &mut [R],
        lanes: usize,
        maxima: &mut [R],
        sums: &mut [R],
        factors: &mut [R],
    ) {
        assert!(tile.len() <= KEYS * lanes);
        // One vector of rows at a time over all keys, so that maximum and sum stay in registers.
        for at in (0..lanes).step_by(R::Vector::<S>::LEN) {
            let before = R::Vector::<S>::load(s, &maxima[at..]);
            // Two chains, because each comparison depends on the previous one.
            let (mut even, mut odd) = (before, before);
            let mut pairs = tile.chunks_exact(2 * lanes);
            for pair in pairs.by_ref() {
                let (first, second) = pair.split_at(lanes);
                even = even.max(R::Vector::<S>::load(s, &first[at..]));
                odd = odd.max(R::Vector::<S>::load(s, &second[at..]));
            }
            if let Some(last) = pairs.remainder().get(..lanes) {
                even = even.max(R::Vector::<S>::load(s, &last[at..]));
            }
            let maximum = even.max(odd);
            // 1 for a row that has not seen a key yet: its maximum stays the lowest finite number, its sum 0.
            let factor = before.sub(maximum).exp2();
            let mut sum = R::Vector::<S>::load(s, &sums[at..]).mul(factor);
            for row in tile.chunks_exact_mut(lanes) {
                let row = &mut row[at..];
                let weight = R::Vector::<S>::load(s, row).sub(maximum).exp2();
                sum = sum.add(weight);
                weight.store(row);
            }
            maximum.store(&mut maxima[at..]);
            sum.store(&mut sums[at..]);
            factor.store(&mut factors[at..]);
        }
    }
}

vectorized! {
    /// Replaces `scores` by weights `2^(score - logsumexp)`, and `gradients` (of the weights) by those of the
    /// scores: `weight · (gradient - delta)`.
    pub(super) fn softmax_gradient<S: Simd, R: Real>(
        s: S,
        scores: &mut [R],
        gradients: &mut [R],
        lanes: usize,
        logsumexp: &[R],
        delta: &[R],
    ) {
        assert!(gradients.len() >= scores.len());
        for at in (0..lanes).step_by(R::Vector::<S>::LEN) {
            // No maximum is subtracted: the log-sum-exp is at least every score, so no weight exceeds 1.
            let normaliser = R::Vector::<S>::load(s, &logsumexp[at..]);
            let delta = R::Vector::<S>::load(s, &delta[at..]);
            let rows = scores.chunks_exact_mut(lanes);
            for (scores, gradients) in rows.zip(gradients.chunks_exact_mut(lanes)) {
                let (scores, gradients) = (&mut scores[at..], &mut gradients[at..]);
                let weight = R::Vector::<S>::load(s, scores).sub(normaliser).exp2();
                weight.store(scores);
                weight.mul(R::Vector::<S>::load(s, gradients).sub(delta)).store(gradients);
            }
        }
    }
}

vectorized! {
    /// Multiplies `to` by `by`, element by element.
    pub(super) fn multiply<S: Simd, R: Real>(_s: S, to: &mut [R], by: &[R]) {
        for (to, by) in to.iter_mut().zip(by) {
            *to = *to * *by;
        }
    }
}
