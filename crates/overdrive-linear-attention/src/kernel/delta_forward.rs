//! The forward pass of the delta rule: the states of all sequences advance by their tokens.

#![allow(unsafe_code, reason = "threads that write disjoint parts of tensors")]

use std::ops::Range;

use overdrive_kernels::threads::{parallel_ranges, workers};
use overdrive_kernels::{
    Buffers, Element, Kept, Kernel, LANES, SharedSlice, Simd, capacity_bytes, convert,
};

use super::one_token::{self, StateColumns, Token};
use super::problem::{CHUNK, Problem, Sequence, Unit, block_columns, vectors};
use super::slab::{
    dot, factor, load_columns, read, scaled, store_columns, update_and_read, update_in_place,
};

/// The bytes of all slabs of a job, which stay in the L2 cache.
const SLABS_BYTES: usize = 256 << 10;

/// The least work for which threads are worth their start, some tens of microseconds.
pub(super) const PARALLEL_WORK: usize = 1 << 18;

/// Computes `output` (rows, H, D_v), and advances the rows of `states` (S, H, D_k, D_v) that the sequences have. If given,
/// `saved` receives the slabs at the start of each chunk: (chunks, H, blocks, D_k, columns).
pub(crate) fn forward<T: Element>(
    problem: &Problem<'_, T>,
    output: &mut [T],
    states: &mut [f32],
    saved: Option<&mut [f32]>,
) {
    let columns = block_columns(problem.set);
    let units = problem.group() * problem.blocks(columns);
    let pairs = problem.sequences.len() * problem.key_heads;
    if units == 0 || pairs == 0 {
        return;
    }
    // The more slabs a job has, the less often the same queries and keys are normalized; but each thread should have
    // several jobs, and the slabs of a job have to fit into the cache.
    let fit = SLABS_BYTES / (problem.key_dim * columns * size_of::<f32>()).max(1);
    let few = (units * pairs).div_ceil(4 * workers());
    let units_per_job = fit.min(few).clamp(1, units);
    let jobs_per_pair = units.div_ceil(units_per_job);

    let (output, states) = (SharedSlice::new(output), SharedSlice::new(states));
    let saved = saved.map(SharedSlice::new);
    let parallel = problem.work() >= PARALLEL_WORK;
    parallel_ranges(pairs * jobs_per_pair, 1, parallel, |jobs| {
        for job in jobs {
            let (pair, part) = (job / jobs_per_pair, job % jobs_per_pair);
            let first = part * units_per_job;
            Kept::with(&WORKSPACE, |workspace| {
                problem.set.run(Job {
                    problem,
                    sequence: problem.sequences[pair / problem.key_heads],
                    key_head: pair % problem.key_heads,
                    units: first..units.min(first + units_per_job),
                    output: &output,
                    states: &states,
                    saved: saved.as_ref(),
                    workspace,
                });
            });
        }
    });
}

thread_local! {
    static WORKSPACE: Kept<Workspace> = const { Kept::new() };
}

/// The buffers of a job.
#[derive(Debug, Default)]
struct Workspace {
    /// The slabs of the job, (units, D_k, columns).
    slabs: Vec<f32>,
    tokens: Tokens,
    chunk: SlabChunk,
    /// The products of a state with a key and a query.
    sums: [Vec<f32>; 2],
}

impl Buffers for Workspace {
    fn bytes(&self) -> usize {
        let sums: usize = self.sums.iter().map(capacity_bytes).sum();
        capacity_bytes(&self.slabs) + self.tokens.bytes() + self.chunk.bytes() + sums
    }
}

/// The keys and queries of a chunk, normalized and scaled, (tokens, D_k), with their products, (tokens).
#[derive(Debug, Default)]
pub(super) struct Tokens {
    pub(super) keys: Vec<f32>,
    pub(super) queries: Vec<f32>,
    pub(super) products: Vec<f32>,
}

impl Tokens {
    pub(super) fn bytes(&self) -> usize {
        let vectors = [&self.keys, &self.queries, &self.products];
        vectors.map(capacity_bytes).iter().sum()
    }

    /// Reads the tokens of a key head.
    #[inline(always)]
    pub(super) fn fill<S: Simd, T: Element>(
        &mut self,
        s: S,
        problem: &Problem<'_, T>,
        sequence: &Sequence,
        key_head: usize,
        tokens: Range<usize>,
    ) {
        let (dim, count) = (problem.key_dim, tokens.len());
        self.keys.resize(count * dim, 0.0);
        self.queries.resize(count * dim, 0.0);
        self.products.resize(count, 0.0);
        let rows = self
            .keys
            .chunks_exact_mut(dim)
            .zip(self.queries.chunks_exact_mut(dim))
            .zip(&mut self.products);
        for (token, ((key, query), product)) in tokens.zip(rows) {
            let from = problem.key.row(sequence, token, key_head);
            scaled(s, from, factor(s, from, 1.0, problem.qk_l2norm), key);
            let from = problem.query.row(sequence, token, key_head);
            let scale = factor(s, from, problem.scale, problem.qk_l2norm);
            scaled(s, from, scale, query);
            *product = dot(s, key, query);
        }
    }

    #[inline(always)]
    pub(super) fn key(&self, token: usize, dim: usize) -> &[f32] {
        &self.keys[token * dim..][..dim]
    }

    #[inline(always)]
    pub(super) fn query(&self, token: usize, dim: usize) -> &[f32] {
        &self.queries[token * dim..][..dim]
    }
}

/// The numbers of a slab's columns in a chunk besides keys and queries.
#[derive(Debug, Default)]
pub(super) struct SlabChunk {
    /// exp(g), (tokens).
    pub(super) decays: Vec<f32>,
    /// (tokens)
    pub(super) betas: Vec<f32>,
    /// (tokens, columns), with zeros beyond the last column.
    pub(super) values: Vec<f32>,
    /// (tokens, columns)
    outputs: Vec<f32>,
}

impl SlabChunk {
    pub(super) fn bytes(&self) -> usize {
        let vectors = [&self.decays, &self.betas, &self.values, &self.outputs];
        vectors.map(capacity_bytes).iter().sum()
    }

    #[inline(always)]
    pub(super) fn fill<S: Simd, T: Element>(
        &mut self,
        s: S,
        problem: &Problem<'_, T>,
        sequence: &Sequence,
        unit: Unit,
        tokens: Range<usize>,
        columns: usize,
    ) {
        let count = tokens.len();
        self.decays.clear();
        self.betas.clear();
        self.values.resize(count * columns, 0.0);
        self.outputs.resize(count * columns, 0.0);
        for (token, to) in tokens.zip(self.values.chunks_exact_mut(columns)) {
            let decay = problem.decay.number(sequence, token, unit.head);
            self.decays.push(decay.exp());
            self.betas
                .push(problem.beta.number(sequence, token, unit.head));
            let row = problem.value.row(sequence, token, unit.head);
            zero_or_convert(s, Some(&row[unit.column..][..unit.count]), to);
        }
    }
}

/// Converts the elements of a row; zeros beyond it, or without one.
#[inline(always)]
pub(super) fn zero_or_convert<S: Simd, T: Element>(s: S, from: Option<&[T]>, to: &mut [f32]) {
    let from = from.unwrap_or(&[]);
    let (to, beyond) = to.split_at_mut(from.len());
    convert(s, from, to);
    beyond.fill(0.0);
}

/// Some slabs of a key head, and all tokens of a sequence.
struct Job<'a, 'p, T> {
    problem: &'a Problem<'p, T>,
    sequence: Sequence,
    key_head: usize,
    units: Range<usize>,
    output: &'a SharedSlice<'a, T>,
    states: &'a SharedSlice<'a, f32>,
    saved: Option<&'a SharedSlice<'a, f32>>,
    workspace: &'a mut Workspace,
}

impl<T: Element> Kernel for Job<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match vectors::<S>() {
            2 => self.run_with::<S, 2>(s),
            _ => self.run_with::<S, 1>(s),
        }
    }
}

impl<T: Element> Job<'_, '_, T> {
    #[inline(always)]
    fn run_with<S: Simd, const N: usize>(self, s: S) {
        let Job {
            problem,
            sequence,
            key_head,
            ..
        } = self;
        let columns = N * LANES;
        let size = problem.key_dim * columns;
        if let (Some(from), Some(to), None, 1) =
            (sequence.from, sequence.slot, self.saved, sequence.tokens)
        {
            return self.one_token(s, [from, to], columns);
        }
        let Workspace {
            slabs,
            tokens,
            chunk,
            ..
        } = self.workspace;
        slabs.resize(self.units.len() * size, 0.0);
        load_slabs(
            problem,
            self.states,
            (sequence.from, key_head),
            self.units.clone(),
            columns,
            slabs,
        );
        for start in (0..sequence.tokens).step_by(CHUNK) {
            let range = start..sequence.tokens.min(start + CHUNK);
            tokens.fill(s, problem, &sequence, key_head, range.clone());
            for (index, slab) in self.units.clone().zip(slabs.chunks_exact_mut(size)) {
                let unit = problem.unit(key_head, index, columns);
                if let Some(saved) = self.saved {
                    let at = sequence.first_chunk + start / CHUNK;
                    let at = (at * problem.heads + unit.head) * problem.blocks(columns);
                    let at = (at + unit.block) * size;
                    // SAFETY: each slab of a chunk belongs to one job.
                    let to = unsafe { saved.range_mut(at..at + size) };
                    to.copy_from_slice(slab);
                }
                chunk.fill(s, problem, &sequence, unit, range.clone(), columns);
                advance::<S, N>(s, slab, tokens, chunk, problem.key_dim);
                let rows = chunk.outputs.chunks_exact(columns);
                for (token, from) in range.clone().zip(rows) {
                    let row = (sequence.output + token) * problem.heads + unit.head;
                    let at = row * problem.value_dim + unit.column;
                    // SAFETY: each column of a head of a token belongs to one job.
                    let to = unsafe { self.output.range_mut(at..at + unit.count) };
                    convert(s, &from[..unit.count], to);
                }
            }
        }
        let state = (sequence.slot, key_head);
        store_slabs(problem, self.states, state, self.units, columns, slabs);
    }
}

impl<T: Element> Job<'_, '_, T> {
    /// Advances the states in the pool, from one slot to another or in place.
    #[inline(always)]
    fn one_token<S: Simd>(self, s: S, slots: [usize; 2], columns: usize) {
        let Job {
            problem, sequence, ..
        } = self;
        let Workspace { tokens, sums, .. } = self.workspace;
        tokens.fill(s, problem, &sequence, self.key_head, 0..1);
        let blocks = problem.blocks(columns);
        let mut from = self.units.start;
        while from < self.units.end {
            // The units of one head.
            let to = self.units.end.min((from / blocks + 1) * blocks);
            let (first, last) = (
                problem.unit(self.key_head, from, columns),
                problem.unit(self.key_head, to - 1, columns),
            );
            from = to;
            let (head, of_head) = (first.head, first.column..last.column + last.count);
            let stride = problem.value_dim;
            let at = |slot: usize| {
                (slot * problem.heads + head) * problem.key_dim * stride + of_head.start
            };
            let state = StateColumns {
                states: self.states,
                first: slots.map(at),
                width: of_head.len(),
                stride,
            };
            let token = Token {
                key: tokens.key(0, problem.key_dim),
                query: tokens.query(0, problem.key_dim),
                product: tokens.products[0],
                decay: problem.decay.number(&sequence, 0, head).exp(),
                beta: problem.beta.number(&sequence, 0, head),
                value: &problem.value.row(&sequence, 0, head)[of_head.clone()],
            };
            let row = (sequence.output * problem.heads + head) * stride;
            // SAFETY: each column of a head of a token belongs to one job.
            let output = unsafe {
                self.output
                    .range_mut(row + of_head.start..row + of_head.end)
            };
            one_token::advance(s, &state, &token, sums.each_mut(), output);
        }
    }
}

/// Copies slabs of a key head, which are `units`, from the pool; zeros for a sequence without a slot.
#[inline(always)]
pub(super) fn load_slabs<T: Element>(
    problem: &Problem<'_, T>,
    states: &SharedSlice<'_, f32>,
    (slot, key_head): (Option<usize>, usize),
    units: Range<usize>,
    columns: usize,
    slabs: &mut [f32],
) {
    let Some(slot) = slot else {
        return slabs.fill(0.0);
    };
    each_row(problem, slot, key_head, units, columns, |at, in_slabs| {
        // SAFETY: each column of a state that is written belongs to one job, and no other job reads it.
        let from = unsafe { states.range(at) };
        let to = &mut slabs[in_slabs..][..columns];
        match (from.first_chunk::<LANES>(), columns) {
            // Without a call of `memcpy` for a line of the cache.
            (Some(line), LANES) => to.copy_from_slice(line),
            _ => {
                to[..from.len()].copy_from_slice(from);
                to[from.len()..].fill(0.0);
            }
        }
    });
}

/// Copies slabs of a key head, which are `units`, to the pool.
#[inline(always)]
pub(super) fn store_slabs<T: Element>(
    problem: &Problem<'_, T>,
    states: &SharedSlice<'_, f32>,
    (slot, key_head): (Option<usize>, usize),
    units: Range<usize>,
    columns: usize,
    slabs: &[f32],
) {
    let Some(slot) = slot else { return };
    each_row(problem, slot, key_head, units, columns, |at, in_slabs| {
        // SAFETY: each column of a state that is written belongs to one job, and no other job reads it.
        let to = unsafe { states.range_mut(at) };
        match to.first_chunk_mut::<LANES>() {
            Some(line) if columns == LANES => {
                line.copy_from_slice(&slabs[in_slabs..][..LANES]);
            }
            _ => {
                let count = to.len();
                to.copy_from_slice(&slabs[in_slabs..][..count]);
            }
        }
    });
}

/// Calls `copy` with the range in the pool and the index in the slabs of each row of the slabs, in the order of the pool:
/// neighbouring blocks of a row before the next row.
#[inline(always)]
fn each_row<T: Element>(
    problem: &Problem<'_, T>,
    slot: usize,
    key_head: usize,
    units: Range<usize>,
    columns: usize,
    mut copy: impl FnMut(Range<usize>, usize),
) {
    let blocks = problem.blocks(columns);
    let mut from = units.start;
    while from < units.end {
        // The units of one head.
        let to = units.end.min((from / blocks + 1) * blocks);
        let first = problem.unit(key_head, from, columns);
        let state = (slot * problem.heads + first.head) * problem.key_dim * problem.value_dim;
        for row in 0..problem.key_dim {
            let end = state + (row + 1) * problem.value_dim;
            let mut at = end - problem.value_dim + first.column;
            let mut in_slabs = ((from - units.start) * problem.key_dim + row) * columns;
            for _ in from..to {
                copy(at..end.min(at + columns), in_slabs);
                at += columns;
                in_slabs += problem.key_dim * columns;
            }
        }
        from = to;
    }
}

/// Advances a slab by the tokens of a chunk, and writes their outputs.
#[inline(always)]
fn advance<S: Simd, const N: usize>(
    s: S,
    slab: &mut [f32],
    tokens: &Tokens,
    chunk: &mut SlabChunk,
    dim: usize,
) {
    let columns = N * LANES;
    let count = chunk.decays.len();
    let (mut at_key, mut at_query) =
        read::<S, N, true>(s, slab, tokens.key(0, dim), tokens.query(0, dim));
    for token in 0..count {
        let decay = chunk.decays[token];
        let (beta, product) = (s.splat(chunk.betas[token]), s.splat(tokens.products[token]));
        let factor = s.splat(decay);
        let mut delta = load_columns::<S, N>(s, &chunk.values[token * columns..][..columns]);
        let mut output = at_query;
        for j in 0..N {
            // Of the decayed state, which is not in memory yet.
            delta[j] = s.mul(beta, s.sub(delta[j], s.mul(factor, at_key[j])));
            output[j] = s.mul_add(product, delta[j], s.mul(factor, at_query[j]));
        }
        store_columns::<S, N>(s, output, &mut chunk.outputs[token * columns..][..columns]);
        let key = tokens.key(token, dim);
        if token + 1 < count {
            let next = (tokens.key(token + 1, dim), tokens.query(token + 1, dim));
            (at_key, at_query) = update_and_read::<S, N, true>(s, slab, decay, key, &delta, next);
        } else {
            update_in_place::<S, N>(s, slab, decay, key, &delta);
        }
    }
}
