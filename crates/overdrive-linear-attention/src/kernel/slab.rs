//! The passes over a slab, and the rows of queries and keys that they take.

use overdrive_kernels::{Element, LANES, Simd, each_vector, load, store};

/// The number that is added to the square of a row's length, as in transformers and flash-linear-attention.
pub(super) const EPS: f32 = 1e-6;

/// One vector for each 16 columns of a slab.
pub(super) type Columns<S, const N: usize> = [<S as overdrive_kernels::Floats>::F; N];

#[inline(always)]
pub(super) fn zeros<S: Simd, const N: usize>(s: S) -> Columns<S, N> {
    [s.splat(0.0); N]
}

/// Reads columns from a row of a slab's width.
#[inline(always)]
pub(super) fn load_columns<S: Simd, const N: usize>(s: S, row: &[f32]) -> Columns<S, N> {
    let (lanes, _) = row.as_chunks::<LANES>();
    let mut columns = zeros::<S, N>(s);
    for j in 0..N {
        columns[j] = s.load_f32(&lanes[j]);
    }
    columns
}

/// Writes columns to a row of a slab's width.
#[inline(always)]
pub(super) fn store_columns<S: Simd, const N: usize>(
    s: S,
    columns: Columns<S, N>,
    row: &mut [f32],
) {
    let (lanes, _) = row.as_chunks_mut::<LANES>();
    for j in 0..N {
        s.store_f32(columns[j], &mut lanes[j]);
    }
}

/// Returns `(Sᵀ k, Sᵀ q)`; without `QUERY`, only the first, and no query is read.
#[inline(always)]
pub(super) fn read<S: Simd, const N: usize, const QUERY: bool>(
    s: S,
    slab: &[f32],
    key: &[f32],
    query: &[f32],
) -> (Columns<S, N>, Columns<S, N>) {
    let (mut at_key, mut at_query) = (zeros::<S, N>(s), zeros::<S, N>(s));
    for ((row, &key), &query) in slab.chunks_exact(N * LANES).zip(key).zip(query) {
        let (key, query) = (s.splat(key), s.splat(query));
        let (lanes, _) = row.as_chunks::<LANES>();
        for j in 0..N {
            let x = s.load_f32(&lanes[j]);
            at_key[j] = s.mul_add(key, x, at_key[j]);
            if QUERY {
                at_query[j] = s.mul_add(query, x, at_query[j]);
            }
        }
    }
    (at_key, at_query)
}

/// Writes `decay · S + k deltaᵀ`.
#[inline(always)]
pub(super) fn update<S: Simd, const N: usize>(
    s: S,
    slab: &[f32],
    to: &mut [f32],
    decay: f32,
    key: &[f32],
    delta: &Columns<S, N>,
) {
    let decay = s.splat(decay);
    let rows = slab
        .chunks_exact(N * LANES)
        .zip(to.chunks_exact_mut(N * LANES));
    for ((row, to), &key) in rows.zip(key) {
        let key = s.splat(key);
        let (lanes, _) = row.as_chunks::<LANES>();
        let (to, _) = to.as_chunks_mut::<LANES>();
        for j in 0..N {
            let x = s.mul(decay, s.load_f32(&lanes[j]));
            s.store_f32(s.mul_add(key, delta[j], x), &mut to[j]);
        }
    }
}

/// Computes [`update`] in place.
#[inline(always)]
pub(super) fn update_in_place<S: Simd, const N: usize>(
    s: S,
    slab: &mut [f32],
    decay: f32,
    key: &[f32],
    delta: &Columns<S, N>,
) {
    let decay = s.splat(decay);
    for (row, &key) in slab.chunks_exact_mut(N * LANES).zip(key) {
        let key = s.splat(key);
        let (lanes, _) = row.as_chunks_mut::<LANES>();
        for j in 0..N {
            let x = s.mul(decay, s.load_f32(&lanes[j]));
            s.store_f32(s.mul_add(key, delta[j], x), &mut lanes[j]);
        }
    }
}

/// Computes [`update_in_place`], and [`read`] with the key and query of the next token, in one pass and with the same operations.
#[inline(always)]
pub(super) fn update_and_read<S: Simd, const N: usize, const QUERY: bool>(
    s: S,
    slab: &mut [f32],
    decay: f32,
    key: &[f32],
    delta: &Columns<S, N>,
    (next_key, next_query): (&[f32], &[f32]),
) -> (Columns<S, N>, Columns<S, N>) {
    let (mut at_key, mut at_query) = (zeros::<S, N>(s), zeros::<S, N>(s));
    let decay = s.splat(decay);
    let rows = slab.chunks_exact_mut(N * LANES).zip(key);
    for ((row, &key), (&next_key, &next_query)) in rows.zip(next_key.iter().zip(next_query)) {
        let (key, next_key, next_query) = (s.splat(key), s.splat(next_key), s.splat(next_query));
        let (lanes, _) = row.as_chunks_mut::<LANES>();
        for j in 0..N {
            let x = s.mul(decay, s.load_f32(&lanes[j]));
            let x = s.mul_add(key, delta[j], x);
            s.store_f32(x, &mut lanes[j]);
            at_key[j] = s.mul_add(next_key, x, at_key[j]);
            if QUERY {
                at_query[j] = s.mul_add(next_query, x, at_query[j]);
            }
        }
    }
    (at_key, at_query)
}

/// Returns the sum of products.
#[inline(always)]
pub(super) fn dot<S: Simd, A: Element, B: Element>(s: S, a: &[A], b: &[B]) -> f32 {
    let mut sum = s.splat(0.0);
    each_vector(
        a.len(),
        #[inline(always)]
        |span| sum = s.mul_add(load(s, a, span), load(s, b, span), sum),
    );
    s.reduce_add(sum)
}

/// Returns the factor of a row: `scale`, divided by its length if rows are normalized.
#[inline(always)]
pub(super) fn factor<S: Simd, T: Element>(s: S, x: &[T], scale: f32, normalize: bool) -> f32 {
    match normalize {
        true => scale / (dot(s, x, x) + EPS).sqrt(),
        false => scale,
    }
}

/// Writes `factor · x`.
#[inline(always)]
pub(super) fn scaled<S: Simd, A: Element, B: Element>(s: S, x: &[A], factor: f32, to: &mut [B]) {
    let factor = s.splat(factor);
    each_vector(
        x.len(),
        #[inline(always)]
        |span| store(s, s.mul(load(s, x, span), factor), to, span),
    );
}

/// Calls `row` with each row of two slabs, its index, and adds the sum of the lanes of its result to that of `sums`.
#[inline(always)]
pub(super) fn sum_rows<S: Simd, const N: usize>(
    s: S,
    gradient: &mut [f32],
    state: &[f32],
    sums: &mut [f32],
    mut row: impl FnMut(&mut [[f32; LANES]], &[[f32; LANES]], usize) -> S::F,
) {
    let columns = N * LANES;
    let (fours, rest) = sums.as_chunks_mut::<4>();
    let grouped = fours.len() * 4;
    let (of_fours, of_rest) = gradient.split_at_mut(grouped * columns);
    let (states, rest_states) = state.split_at(grouped * columns);
    let rows = of_fours
        .chunks_exact_mut(4 * columns)
        .zip(states.chunks_exact(4 * columns));
    // Four at a time, since the sums of the lanes of four vectors take little more time than those of one.
    for (group, (four, (gradient, state))) in fours.iter_mut().zip(rows).enumerate() {
        let (gradient, _) = gradient.as_chunks_mut::<LANES>();
        let (state, _) = state.as_chunks::<LANES>();
        let mut parts = [s.splat(0.0); 4];
        for (index, part) in parts.iter_mut().enumerate() {
            let lanes = index * N..(index + 1) * N;
            *part = row(
                &mut gradient[lanes.clone()],
                &state[lanes],
                group * 4 + index,
            );
        }
        let each = s.reduce_add_each(parts);
        for (sum, part) in four.iter_mut().zip(each) {
            *sum += part;
        }
    }
    let rows = of_rest
        .chunks_exact_mut(columns)
        .zip(rest_states.chunks_exact(columns));
    for (index, (sum, (gradient, state))) in rest.iter_mut().zip(rows).enumerate() {
        let (gradient, _) = gradient.as_chunks_mut::<LANES>();
        let (state, _) = state.as_chunks::<LANES>();
        *sum += s.reduce_add(row(gradient, state, grouped + index));
    }
}
