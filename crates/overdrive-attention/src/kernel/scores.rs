//! What happens to a tile of scores `(keys, lanes)` between the products.
//!
//! Scores are kept in units of `log2`: a softmax weight is `2^(score - maximum)`.

use std::f64::consts::LOG2_E;

use super::block::{KEYS, ROWS};
use super::dropout::RowKeys;
use super::element::Element;
use super::lanes::{InstructionSet, Lanes, Real};
use super::multiversioned;
use super::problem::{Bias, BiasValues, Rules, Sequence};

/// Softcap, ALiBi, bias, mask and dropout of the rows of a block.
#[derive(Debug)]
pub(super) struct Adjustment<'p, E: Element> {
    pub(super) rules: &'p Rules<'p, E::Acc>,
    pub(super) set: InstructionSet,
    pub(super) sequence: Sequence,
    pub(super) lanes: usize,
    pub(super) rows: usize,
    /// Query and head of each row.
    pub(super) places: [(usize, usize); ROWS],
    /// First key that each row sees, sink tokens aside.
    pub(super) starts: [usize; ROWS],
    /// One past the last key that each row sees.
    pub(super) ends: [usize; ROWS],
    /// The key at which each row stands.
    pub(super) positions: [i64; ROWS],
    pub(super) slopes: [E::Acc; ROWS],
    pub(super) dropout: Option<RowKeys>,
}

impl<E: Element> Adjustment<'_, E> {
    /// Turns the products of a tile, whose queries carry `RowBlock::query_factor`, into scores.
    ///
    /// With a softcap, `derivative` takes its derivative at each score.
    pub(super) fn scores(
        &self,
        tile: &mut [E::Acc],
        start: usize,
        derivative: Option<&mut [E::Acc]>,
    ) {
        if let Some(cap) = self.rules.softcap {
            softcap(self.set, tile, derivative, E::Acc::of(cap * LOG2_E));
        }
        if self.rules.slopes.is_some() {
            self.alibi(tile, start);
        }
        if let Some(bias) = &self.rules.bias {
            self.bias(bias, tile, start);
        }
        if !self.sees_all(start, tile.len() / self.lanes) {
            self.mask(tile, start);
        }
    }

    /// Whether every row sees every key of `start..start + count`.
    fn sees_all(&self, start: usize, count: usize) -> bool {
        // Starts and ends rise with the query, so first and last row bound them.
        let (end, window) = (self.ends[0], self.starts[self.rows - 1]);
        end >= start + count && (window <= start || start + count <= self.rules.sink_tokens)
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
        let sinks = self.rules.sink_tokens.saturating_sub(start);
        hide(self.set, tile, self.lanes, &from, &to, sinks);
    }

    fn alibi(&self, tile: &mut [E::Acc], start: usize) {
        let (mut positions, mut slopes) = ([E::Acc::ZERO; ROWS], [E::Acc::ZERO; ROWS]);
        for row in 0..self.rows {
            positions[row] = E::Acc::of((self.positions[row] - start as i64) as f64);
            slopes[row] = self.slopes[row] * E::Acc::of(-LOG2_E);
        }
        slope(self.set, tile, self.lanes, &positions, &slopes);
    }

    fn bias(&self, bias: &Bias<'_, E::Acc>, tile: &mut [E::Acc], start: usize) {
        let [by_batch, by_head, by_query, by_key] = bias.strides;
        let log2_e = E::Acc::of(LOG2_E);
        for row in 0..self.rows {
            let (query, head) = self.places[row];
            let base = self.sequence.batch * by_batch + head * by_head + query * by_query;
            let base = base + start * by_key;
            let column = tile[row..].iter_mut().step_by(self.lanes).enumerate();
            match bias.values {
                BiasValues::Keep(keep) => column
                    .filter(|(key, _)| !keep[base + key * by_key])
                    .for_each(|(_, score)| *score = -E::Acc::INFINITY),
                BiasValues::Add(add) => {
                    column.for_each(|(key, score)| *score += add[base + key * by_key] * log2_e)
                }
            }
        }
    }

    /// Drops weights of `tile` and scales the others up, the same ones whenever it is called.
    pub(super) fn drop_weights(&self, tile: &mut [E::Acc], start: usize) {
        if let Some(keys) = &self.dropout {
            drop_out(self.set, tile, self.lanes, start, keys);
        }
    }
}

multiversioned! {
    /// `cap · log2(e) · tanh(tile)`, and `1 - tanh²` for the derivative.
    fn softcap<R>(tile: &mut [R], derivative: Option<&mut [R]>, cap: R) = softcap_body
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn softcap_body<V: Lanes>(
    tile: &mut [V::Scalar],
    mut derivative: Option<&mut [V::Scalar]>,
    cap: V::Scalar,
) {
    // SAFETY: the caller vouches for the instruction set; every access is checked to be in bounds.
    unsafe {
        let (cap, one) = (V::splat(cap), V::splat(V::Scalar::ONE));
        if let Some(derivative) = &derivative {
            assert!(derivative.len() >= tile.len());
        }
        let mut at = 0;
        for chunk in tile.chunks_exact_mut(V::LEN) {
            let bent = tanh(V::load(chunk.as_ptr()));
            bent.mul(cap).store(chunk.as_mut_ptr());
            if let Some(derivative) = derivative.as_deref_mut() {
                one.sub(bent.mul(bent))
                    .store(derivative.as_mut_ptr().add(at));
            }
            at += V::LEN;
        }
    }
}

/// tanh, from `2^x` where it is bent and from its series near zero, where that would cancel.
///
/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn tanh<V: Lanes>(x: V) -> V {
    let of = V::Scalar::of;
    // SAFETY: the caller vouches for the instruction set.
    let splat = |value: f64| unsafe { V::splat(of(value)) };
    let one = splat(1.0);
    // tanh(20) is 1 in either precision; NaN passes.
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
    x.abs().where_le(splat(0.0625), series.mul(x), bent)
}

multiversioned! {
    /// Adds `slopes · |positions - key|`.
    fn slope<R>(
        tile: &mut [R],
        lanes: usize,
        positions: &[R; ROWS],
        slopes: &[R; ROWS],
    ) = slope_body
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn slope_body<V: Lanes>(
    tile: &mut [V::Scalar],
    lanes: usize,
    positions: &[V::Scalar; ROWS],
    slopes: &[V::Scalar; ROWS],
) {
    assert!(lanes <= ROWS);
    for (key, row) in tile.chunks_exact_mut(lanes).enumerate() {
        // SAFETY: the caller vouches for the instruction set; `lanes` bounds every access.
        unsafe {
            let key = V::splat(V::Scalar::of(key as f64));
            for at in (0..lanes).step_by(V::LEN) {
                let distance = V::load(positions.as_ptr().add(at)).sub(key).abs();
                let score = V::load(row.as_ptr().add(at));
                V::load(slopes.as_ptr().add(at))
                    .mul_add(distance, score)
                    .store(row.as_mut_ptr().add(at));
            }
        }
    }
}

multiversioned! {
    /// Hides the keys outside `from..to` of each row; the first `sinks` only where they are past `to`.
    fn hide<R>(
        tile: &mut [R],
        lanes: usize,
        from: &[R; ROWS],
        to: &[R; ROWS],
        sinks: usize,
    ) = hide_body
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn hide_body<V: Lanes>(
    tile: &mut [V::Scalar],
    lanes: usize,
    from: &[V::Scalar; ROWS],
    to: &[V::Scalar; ROWS],
    sinks: usize,
) {
    assert!(lanes <= ROWS);
    for (key, row) in tile.chunks_exact_mut(lanes).enumerate() {
        // SAFETY: the caller vouches for the instruction set; `lanes` bounds every access.
        unsafe {
            let hidden = V::splat(-V::Scalar::INFINITY);
            let place = V::splat(V::Scalar::of(key as f64));
            for at in (0..lanes).step_by(V::LEN) {
                let mut score = V::load(row.as_ptr().add(at));
                score = V::load(to.as_ptr().add(at)).where_le(place, hidden, score);
                if key >= sinks {
                    score = V::load(from.as_ptr().add(at)).where_le(place, score, hidden);
                }
                score.store(row.as_mut_ptr().add(at));
            }
        }
    }
}

multiversioned! {
    /// Dropout, compiled for the instruction set; the compiler makes the vectors.
    fn drop_out<R>(tile: &mut [R], lanes: usize, start: usize, keys: &RowKeys) = drop_out_body
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn drop_out_body<V: Lanes>(
    tile: &mut [V::Scalar],
    lanes: usize,
    start: usize,
    keys: &RowKeys,
) {
    keys.apply(tile, lanes, start);
}

multiversioned! {
    /// One step of the online softmax: `tile` becomes weights relative to the new maximum, and
    /// `factors` what all weights before are to be scaled by.
    fn softmax<R>(
        tile: &mut [R],
        lanes: usize,
        maxima: &mut [R],
        sums: &mut [R],
        factors: &mut [R],
    ) = softmax_body
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn softmax_body<V: Lanes>(
    tile: &mut [V::Scalar],
    lanes: usize,
    maxima: &mut [V::Scalar],
    sums: &mut [V::Scalar],
    factors: &mut [V::Scalar],
) {
    let keys = tile.len() / lanes;
    assert!(maxima.len() >= lanes && sums.len() >= lanes && factors.len() >= lanes);
    assert!(keys <= KEYS);
    for at in (0..lanes).step_by(V::LEN) {
        // SAFETY: the caller vouches for the instruction set; `lanes` and `keys` bound every access.
        unsafe {
            let column = tile.as_mut_ptr().add(at);
            let before = V::load(maxima.as_ptr().add(at));
            let (mut even, mut odd) = (before, before);
            let mut key = 0;
            while key + 2 <= keys {
                even = even.max(V::load(column.add(key * lanes)));
                odd = odd.max(V::load(column.add((key + 1) * lanes)));
                key += 2;
            }
            if key < keys {
                even = even.max(V::load(column.add(key * lanes)));
            }
            let maximum = even.max(odd);
            let factor = before.sub(maximum).exp2();
            let mut sum = V::load(sums.as_ptr().add(at)).mul(factor);
            for key in 0..keys {
                let at = column.add(key * lanes);
                let weight = V::load(at).sub(maximum).exp2();
                sum = sum.add(weight);
                weight.store(at);
            }
            maximum.store(maxima.as_mut_ptr().add(at));
            sum.store(sums.as_mut_ptr().add(at));
            factor.store(factors.as_mut_ptr().add(at));
        }
    }
}

multiversioned! {
    /// `scores` become weights `2^(score - logsumexp)`, and `gradients` (of the weights) those of the
    /// scores: `weight · (gradient - delta)`.
    fn softmax_gradient<R>(
        scores: &mut [R],
        gradients: &mut [R],
        lanes: usize,
        logsumexp: &[R],
        delta: &[R],
    ) = softmax_gradient_body
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn softmax_gradient_body<V: Lanes>(
    scores: &mut [V::Scalar],
    gradients: &mut [V::Scalar],
    lanes: usize,
    logsumexp: &[V::Scalar],
    delta: &[V::Scalar],
) {
    let keys = scores.len() / lanes;
    assert!(gradients.len() >= scores.len() && logsumexp.len() >= lanes && delta.len() >= lanes);
    for at in (0..lanes).step_by(V::LEN) {
        // SAFETY: the caller vouches for the instruction set; `lanes` and `keys` bound every access.
        unsafe {
            let normaliser = V::load(logsumexp.as_ptr().add(at));
            let delta = V::load(delta.as_ptr().add(at));
            for key in 0..keys {
                let place = key * lanes + at;
                let score = scores.as_mut_ptr().add(place);
                let gradient = gradients.as_mut_ptr().add(place);
                let weight = V::load(score).sub(normaliser).exp2();
                weight.store(score);
                weight.mul(V::load(gradient).sub(delta)).store(gradient);
            }
        }
    }
}

multiversioned! {
    /// `to *= by`, number by number.
    fn multiply<R>(to: &mut [R], by: &[R]) = multiply_body
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn multiply_body<V: Lanes>(to: &mut [V::Scalar], by: &[V::Scalar]) {
    for (to, by) in to.iter_mut().zip(by) {
        *to = *to * *by;
    }
}
