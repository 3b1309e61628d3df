//! The forward pass of one token: decoding.
//!
//! A state is used once, so it is read from memory, and updated there, row by row, with the sums of the products in the L1
//! cache. Each element is computed by the operations of the passes over a slab, in the same order.

use std::ops::Range;

use overdrive_kernels::{Element, LANES, SharedSlice, Simd, each_vector, load, store};

/// Adds the products of `R` rows of a state with a key and a query: `at_key += Σ key · row`, in the order of the rows.
#[inline(always)]
fn add_products<S: Simd, const R: usize>(
    s: S,
    rows: [&[f32]; R],
    key: &[f32],
    query: &[f32],
    at_key: &mut [f32],
    at_query: &mut [f32],
) {
    let mut keys = [s.splat(0.0); R];
    let mut queries = keys;
    for r in 0..R {
        keys[r] = s.splat(key[r]);
        queries[r] = s.splat(query[r]);
    }
    let whole = at_key.len() - at_key.len() % LANES;
    let (of_key, rest_key) = at_key.split_at_mut(whole);
    let (of_query, rest_query) = at_query.split_at_mut(whole);
    let lanes = rows.map(
        #[inline(always)]
        |row| &row[..whole].as_chunks::<LANES>().0[..whole / LANES],
    );
    let sums = of_key
        .as_chunks_mut::<LANES>()
        .0
        .iter_mut()
        .zip(of_query.as_chunks_mut::<LANES>().0);
    for (index, (at_key, at_query)) in sums.enumerate() {
        let (mut of_key, mut of_query) = (s.load_f32(at_key), s.load_f32(at_query));
        for r in 0..R {
            let x = s.load_f32(&lanes[r][index]);
            of_key = s.mul_add(keys[r], x, of_key);
            of_query = s.mul_add(queries[r], x, of_query);
        }
        s.store_f32(of_key, at_key);
        s.store_f32(of_query, at_query);
    }
    each_vector(
        rest_key.len(),
        #[inline(always)]
        |span| {
            let (mut of_key, mut of_query) = (load(s, rest_key, span), load(s, rest_query, span));
            for r in 0..R {
                let x = load(s, &rows[r][whole..], span);
                of_key = s.mul_add(keys[r], x, of_key);
                of_query = s.mul_add(queries[r], x, of_query);
            }
            store(s, of_key, rest_key, span);
            store(s, of_query, rest_query, span);
        },
    );
}

/// Some columns of the states of a head in the pool, before and after a token: of two slots or of one.
pub(super) struct StateColumns<'a> {
    pub(super) states: &'a SharedSlice<'a, f32>,
    /// The index of the first element before and after the token.
    pub(super) first: [usize; 2],
    /// The number of columns.
    pub(super) width: usize,
    /// The distance of the rows.
    pub(super) stride: usize,
}

#[allow(unsafe_code, reason = "threads that write disjoint parts of tensors")]
impl StateColumns<'_> {
    fn range(&self, first: usize, row: usize) -> Range<usize> {
        let at = first + row * self.stride;
        at..at + self.width
    }

    /// Returns a row before the token.
    #[inline(always)]
    fn row(&self, row: usize) -> &[f32] {
        // SAFETY: no other job writes it, and this one has no row for writing at the same time.
        unsafe { self.states.range(self.range(self.first[0], row)) }
    }

    /// Returns a row for the state after the token, which has the elements of before.
    #[allow(clippy::mut_from_ref, reason = "one job has these columns")]
    #[inline(always)]
    fn row_to_update(&self, row: usize) -> &mut [f32] {
        let [before, after] = self.first;
        // SAFETY: each column of a state that is written belongs to one job, which uses a row at a time for writing.
        let to = unsafe { self.states.range_mut(self.range(after, row)) };
        if before != after {
            to.copy_from_slice(self.row(row));
        }
        to
    }
}

/// The numbers and rows of a token.
pub(super) struct Token<'a, T> {
    pub(super) key: &'a [f32],
    pub(super) query: &'a [f32],
    /// Of the key and the query.
    pub(super) product: f32,
    pub(super) decay: f32,
    pub(super) beta: f32,
    /// The columns of the value.
    pub(super) value: &'a [T],
}

/// Advances columns of a state by one token, and writes these columns of the output. `sums` are two buffers.
#[inline(always)]
pub(super) fn advance<S: Simd, T: Element>(
    s: S,
    state: &StateColumns<'_>,
    token: &Token<'_, T>,
    [at_key, at_query]: [&mut Vec<f32>; 2],
    output: &mut [T],
) {
    let (dim, width) = (token.key.len(), output.len());
    for sums in [&mut *at_key, &mut *at_query] {
        sums.clear();
        sums.resize(width, 0.0);
    }
    let grouped = dim - dim % 4;
    for row in (0..grouped).step_by(4) {
        let rows: [&[f32]; 4] = [
            state.row(row),
            state.row(row + 1),
            state.row(row + 2),
            state.row(row + 3),
        ];
        let (key, query) = (&token.key[row..row + 4], &token.query[row..row + 4]);
        add_products(s, rows, key, query, at_key, at_query);
    }
    for row in grouped..dim {
        let (key, query) = (&token.key[row..=row], &token.query[row..=row]);
        add_products(s, [state.row(row)], key, query, at_key, at_query);
    }
    let (decay, beta) = (s.splat(token.decay), s.splat(token.beta));
    let product = s.splat(token.product);
    each_vector(
        width,
        #[inline(always)]
        |span| {
            let error = s.sub(
                load(s, token.value, span),
                s.mul(decay, load(s, at_key, span)),
            );
            let delta = s.mul(beta, error);
            let read = s.mul(decay, load(s, at_query, span));
            store(s, s.mul_add(product, delta, read), output, span);
            store(s, delta, at_key, span);
        },
    );
    // The same place of the next head before the token, seen from a row after it.
    let next_head = dim * state.stride + state.first[0];
    let next_head = next_head
        .wrapping_sub(state.first[1])
        .wrapping_mul(size_of::<f32>());
    let whole = width - width % LANES;
    let (deltas, rest_deltas) = at_key.split_at(whole);
    for (row, &key) in token.key.iter().enumerate() {
        let key = s.splat(key);
        let (lanes, rest) = state.row_to_update(row).split_at_mut(whole);
        let (lanes, _) = lanes.as_chunks_mut::<LANES>();
        for (x, delta) in lanes.iter_mut().zip(deltas.as_chunks::<LANES>().0) {
            // Of the next head, whose state is read next; this pass waits for no memory.
            s.prefetch_near(x.as_ptr().cast::<u8>().wrapping_add(next_head));
            let decayed = s.mul(decay, s.load_f32(x));
            s.store_f32(s.mul_add(key, s.load_f32(delta), decayed), x);
        }
        each_vector(
            rest.len(),
            #[inline(always)]
            |span| {
                let decayed = s.mul(decay, load(s, rest, span));
                let x = s.mul_add(key, load(s, rest_deltas, span), decayed);
                store(s, x, rest, span);
            },
        );
    }
}
