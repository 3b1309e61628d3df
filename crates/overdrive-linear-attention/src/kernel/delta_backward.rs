//! The backward pass of the delta rule.
//!
//! With `a = exp(g)`, `u = Sᵀk`, `e = v - a·u` and `δ = β·e` of a token, and `D` the gradient of the state after it:
//!
//! ```text
//! G  = D + q doᵀ            dq = S' do                  (S' = a·S + k δᵀ, the state after the token)
//! dδ = Gᵀ k                 dv = β·dδ    dβ = dδ · e
//! dk = G δ - S (a·dv)       dg = ⟨D', S⟩
//! D' = a·G - k (a·dv)ᵀ      the gradient of S, the state before the token
//! ```
//!
//! `dg` is that simple because the factor `a` multiplies every use of `S`. The tokens run backwards through the chunks
//! whose first states forward saved. A chunk is computed again to get its deltas and the states at every [`STEPS`] tokens,
//! from which the states of these few are computed once more: all that a slab needs stays in the L2 cache.

#![allow(unsafe_code, reason = "threads that write disjoint parts of tensors")]

use std::ops::Range;

use overdrive_kernels::threads::parallel_ranges;
use overdrive_kernels::{
    Buffers, Element, Kept, Kernel, LANES, SharedSlice, Simd, capacity_bytes, convert,
};

use super::delta_forward::{
    PARALLEL_WORK, SlabChunk, Tokens, load_slabs, store_slabs, zero_or_convert,
};
use super::problem::{CHUNK, Problem, Sequence, Unit, block_columns, vectors};
use super::slab::{
    Columns, dot, factor, load_columns, read, scaled, store_columns, sum_rows, update,
    update_and_read, zeros,
};

/// The number of tokens whose states are in the cache at the same time, the square root of [`CHUNK`].
const STEPS: usize = 8;

/// The gradients of the results.
pub(crate) struct ResultGradients<'a, T> {
    /// The slabs that forward saved.
    pub(crate) saved: &'a [f32],
    /// (rows, H, D_v)
    pub(crate) output: Option<&'a [T]>,
}

/// The gradients of the inputs, all contiguous.
pub(crate) struct InputGradients<'a, T> {
    /// (rows, H_k, D_k)
    pub(crate) query: &'a mut [T],
    /// (rows, H_k, D_k)
    pub(crate) key: &'a mut [T],
    /// (rows, H, D_v)
    pub(crate) value: &'a mut [T],
    /// (rows, H)
    pub(crate) decay: &'a mut [f32],
    /// (rows, H)
    pub(crate) beta: &'a mut [f32],
    /// (S, H, D_k, D_v): the gradients of the last states, which become those of the first ones.
    pub(crate) states: &'a mut [f32],
}

/// Computes the gradients of the inputs.
pub(crate) fn backward<T: Element>(
    problem: &Problem<'_, T>,
    results: &ResultGradients<'_, T>,
    inputs: InputGradients<'_, T>,
) {
    let outputs = Outputs {
        query: SharedSlice::new(inputs.query),
        key: SharedSlice::new(inputs.key),
        value: SharedSlice::new(inputs.value),
        decay: SharedSlice::new(inputs.decay),
        beta: SharedSlice::new(inputs.beta),
        states: SharedSlice::new(inputs.states),
    };
    // One job for each key head of a sequence, since its gradients are sums over all slabs: in this order on any number of
    // threads.
    let jobs = problem.sequences.len() * problem.key_heads;
    parallel_ranges(jobs, 1, problem.work() >= PARALLEL_WORK, |jobs| {
        for job in jobs {
            Kept::with(&WORKSPACE, |workspace| {
                problem.set.run(Job {
                    problem,
                    results,
                    outputs: &outputs,
                    sequence: problem.sequences[job / problem.key_heads],
                    key_head: job % problem.key_heads,
                    workspace,
                });
            });
        }
    });
}

struct Outputs<'a, T> {
    query: SharedSlice<'a, T>,
    key: SharedSlice<'a, T>,
    value: SharedSlice<'a, T>,
    decay: SharedSlice<'a, f32>,
    beta: SharedSlice<'a, f32>,
    states: SharedSlice<'a, f32>,
}

thread_local! {
    static WORKSPACE: Kept<Workspace> = const { Kept::new() };
}

/// The buffers of a job.
#[derive(Debug, Default)]
struct Workspace {
    /// The gradients of the slabs of the key head, (units, D_k, columns).
    gradients: Vec<f32>,
    tokens: Tokens,
    chunk: SlabChunk,
    /// The gradients of the normalized keys of a chunk, (tokens, D_k).
    keys: Vec<f32>,
    /// The gradients of the normalized queries of a chunk, (tokens, D_k).
    queries: Vec<f32>,
    slab: SlabBuffers,
}

/// The buffers for a slab and a chunk.
#[derive(Debug, Default)]
struct SlabBuffers {
    /// The gradients of the outputs, (tokens, columns).
    outputs: Vec<f32>,
    /// `v - a·u`, (tokens, columns).
    errors: Vec<f32>,
    /// β times the errors, (tokens, columns).
    deltas: Vec<f32>,
    /// The states before each [`STEPS`] tokens, (CHUNK / STEPS, D_k, columns).
    starts: Vec<f32>,
    /// The states before and after each of some tokens, (STEPS + 1, D_k, columns).
    states: Vec<f32>,
}

impl Buffers for Workspace {
    fn bytes(&self) -> usize {
        let slab = &self.slab;
        let vectors = [
            &self.gradients,
            &self.keys,
            &self.queries,
            &slab.outputs,
            &slab.errors,
            &slab.deltas,
            &slab.starts,
            &slab.states,
        ];
        let bytes: usize = vectors.map(capacity_bytes).iter().sum();
        bytes + self.tokens.bytes() + self.chunk.bytes()
    }
}

/// All slabs of a key head, and all tokens of a sequence.
struct Job<'a, 'p, T> {
    problem: &'a Problem<'p, T>,
    results: &'a ResultGradients<'a, T>,
    outputs: &'a Outputs<'a, T>,
    sequence: Sequence,
    key_head: usize,
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
            outputs,
            ..
        } = self;
        let columns = N * LANES;
        let (dim, size) = (problem.key_dim, problem.key_dim * columns);
        let units = problem.group() * problem.blocks(columns);
        let Workspace {
            gradients,
            tokens,
            chunk,
            keys,
            queries,
            slab,
        } = self.workspace;
        gradients.resize(units * size, 0.0);
        let state = (sequence.slot, key_head);
        load_slabs(
            problem,
            &outputs.states,
            state,
            0..units,
            columns,
            gradients,
        );
        for start in (0..sequence.tokens).step_by(CHUNK).rev() {
            let range = start..sequence.tokens.min(start + CHUNK);
            tokens.fill(s, problem, &sequence, key_head, range.clone());
            for sums in [&mut *keys, &mut *queries] {
                sums.clear();
                sums.resize(range.len() * dim, 0.0);
            }
            for (index, gradient) in gradients.chunks_exact_mut(size).enumerate() {
                let unit = problem.unit(key_head, index, columns);
                chunk.fill(s, problem, &sequence, unit, range.clone(), columns);
                slab.fill(s, problem, self.results, &sequence, unit, range.clone());
                let at = sequence.first_chunk + start / CHUNK;
                let at = (at * problem.heads + unit.head) * problem.blocks(columns) + unit.block;
                slab.forward::<S, N>(s, tokens, chunk, &self.results.saved[at * size..][..size]);
                for first in (0..range.len()).step_by(STEPS).rev() {
                    let steps = first..range.len().min(first + STEPS);
                    slab.expand::<S, N>(s, tokens, chunk, steps.clone(), size);
                    for token in steps.clone().rev() {
                        let step = Step {
                            token,
                            index: token - steps.start,
                            decay: chunk.decays[token],
                            beta: chunk.betas[token],
                            key: tokens.key(token, dim),
                            query: tokens.query(token, dim),
                        };
                        let found = slab.step::<S, N>(
                            s,
                            &step,
                            gradient,
                            &mut keys[token * dim..][..dim],
                            &mut queries[token * dim..][..dim],
                        );
                        write(s, problem, outputs, &sequence, unit, start + token, &found);
                    }
                }
            }
            for token in range.clone() {
                let row = (sequence.output + token) * problem.key_heads + key_head;
                let of_row = row * dim..(row + 1) * dim;
                let of_chunk = (token - start) * dim;
                // SAFETY: a row of a key head belongs to one job, in both tensors.
                let (key, query) = unsafe {
                    (
                        outputs.key.range_mut(of_row.clone()),
                        outputs.query.range_mut(of_row),
                    )
                };
                let from = problem.key.row(&sequence, token, key_head);
                let gradient = &mut keys[of_chunk..][..dim];
                normalization(s, from, 1.0, problem.qk_l2norm, gradient, key);
                let from = problem.query.row(&sequence, token, key_head);
                let gradient = &mut queries[of_chunk..][..dim];
                normalization(s, from, problem.scale, problem.qk_l2norm, gradient, query);
            }
        }
        store_slabs(
            problem,
            &outputs.states,
            state,
            0..units,
            columns,
            gradients,
        );
    }
}

/// A token in the backward pass of a slab.
struct Step<'a> {
    /// The index in the chunk.
    token: usize,
    /// The index of the state before it in [`SlabBuffers::states`].
    index: usize,
    decay: f32,
    beta: f32,
    key: &'a [f32],
    query: &'a [f32],
}

/// The gradients of a token that belong to a slab.
struct Found<S: Simd, const N: usize> {
    value: Columns<S, N>,
    beta: f32,
    decay: f32,
}

impl SlabBuffers {
    /// Reads the gradients of the outputs.
    #[inline(always)]
    fn fill<S: Simd, T: Element>(
        &mut self,
        s: S,
        problem: &Problem<'_, T>,
        results: &ResultGradients<'_, T>,
        sequence: &Sequence,
        unit: Unit,
        tokens: Range<usize>,
    ) {
        let columns = block_columns(problem.set);
        let count = tokens.len() * columns;
        for buffer in [&mut self.outputs, &mut self.errors, &mut self.deltas] {
            buffer.resize(count, 0.0);
        }
        for (token, to) in tokens.zip(self.outputs.chunks_exact_mut(columns)) {
            let row = (sequence.output + token) * problem.heads + unit.head;
            let at = row * problem.value_dim + unit.column;
            let from = results.output.map(|output| &output[at..at + unit.count]);
            zero_or_convert(s, from, to);
        }
    }

    /// Computes the errors and deltas of a chunk, and the states before each [`STEPS`] tokens.
    #[inline(always)]
    fn forward<S: Simd, const N: usize>(
        &mut self,
        s: S,
        tokens: &Tokens,
        chunk: &SlabChunk,
        first: &[f32],
    ) {
        let (columns, size) = (N * LANES, first.len());
        let (dim, count) = (size / columns, chunk.decays.len());
        self.starts.resize(count.div_ceil(STEPS) * size, 0.0);
        self.states.resize((STEPS + 1) * size, 0.0);
        let state = &mut self.states[..size];
        state.copy_from_slice(first);
        // Of the queries nothing is needed, so the keys stand in for them.
        let key = tokens.key(0, dim);
        let (mut at_key, _) = read::<S, N, false>(s, state, key, key);
        for token in 0..count {
            if token % STEPS == 0 {
                self.starts[token / STEPS * size..][..size].copy_from_slice(state);
            }
            let row = token * columns..(token + 1) * columns;
            let decay = chunk.decays[token];
            let (factor, beta) = (s.splat(decay), s.splat(chunk.betas[token]));
            let mut error = load_columns::<S, N>(s, &chunk.values[row.clone()]);
            let mut delta = error;
            for j in 0..N {
                error[j] = s.sub(error[j], s.mul(factor, at_key[j]));
                delta[j] = s.mul(beta, error[j]);
            }
            store_columns::<S, N>(s, error, &mut self.errors[row.clone()]);
            store_columns::<S, N>(s, delta, &mut self.deltas[row]);
            if token + 1 < count {
                let (key, next) = (tokens.key(token, dim), tokens.key(token + 1, dim));
                (at_key, _) =
                    update_and_read::<S, N, false>(s, state, decay, key, &delta, (next, next));
            }
        }
    }

    /// Computes the states before and after each of a few tokens.
    #[inline(always)]
    fn expand<S: Simd, const N: usize>(
        &mut self,
        s: S,
        tokens: &Tokens,
        chunk: &SlabChunk,
        steps: Range<usize>,
        size: usize,
    ) {
        let columns = N * LANES;
        let dim = size / columns;
        let start = &self.starts[steps.start / STEPS * size..][..size];
        self.states[..size].copy_from_slice(start);
        for (index, token) in steps.enumerate() {
            let (before, after) = self.states[index * size..][..2 * size].split_at_mut(size);
            let delta = load_columns::<S, N>(s, &self.deltas[token * columns..][..columns]);
            let key = tokens.key(token, dim);
            update::<S, N>(s, before, after, chunk.decays[token], key, &delta);
        }
    }

    /// Takes the gradient of the slab from after a token to before it, and adds to those of the token's key and query.
    #[inline(always)]
    fn step<S: Simd, const N: usize>(
        &mut self,
        s: S,
        step: &Step<'_>,
        gradient: &mut [f32],
        key_gradient: &mut [f32],
        query_gradient: &mut [f32],
    ) -> Found<S, N> {
        let (columns, size) = (N * LANES, gradient.len());
        let dim = size / columns;
        let states = &self.states[step.index * size..][..2 * size];
        let (before, after) = states.split_at(size);
        let row = step.token * columns..(step.token + 1) * columns;
        let output = load_columns::<S, N>(s, &self.outputs[row.clone()]);
        let delta = load_columns::<S, N>(s, &self.deltas[row.clone()]);
        let error = load_columns::<S, N>(s, &self.errors[row]);

        // G = D + q doᵀ, dδ = Gᵀ k, dq = S' do.
        let mut of_delta = zeros::<S, N>(s);
        let (keys, queries) = (&step.key[..dim], &step.query[..dim]);
        sum_rows::<S, N>(
            s,
            gradient,
            after,
            &mut query_gradient[..dim],
            #[inline(always)]
            |gradient, state, row| {
                let (key, query) = (s.splat(keys[row]), s.splat(queries[row]));
                let mut sum = s.splat(0.0);
                for j in 0..N {
                    let x = s.mul_add(query, output[j], s.load_f32(&gradient[j]));
                    s.store_f32(x, &mut gradient[j]);
                    of_delta[j] = s.mul_add(key, x, of_delta[j]);
                    sum = s.mul_add(s.load_f32(&state[j]), output[j], sum);
                }
                sum
            },
        );

        let (beta, decay) = (s.splat(step.beta), s.splat(step.decay));
        let (mut value, mut read) = (of_delta, of_delta);
        let mut of_beta = s.splat(0.0);
        for j in 0..N {
            of_beta = s.mul_add(of_delta[j], error[j], of_beta);
            value[j] = s.mul(beta, of_delta[j]);
            read[j] = s.sub(s.splat(0.0), s.mul(decay, value[j]));
        }

        // dk = G δ - S (a·dv), D' = a·G - k (a·dv)ᵀ, dg = ⟨D', S⟩.
        let mut of_decay = zeros::<S, N>(s);
        sum_rows::<S, N>(
            s,
            gradient,
            before,
            &mut key_gradient[..dim],
            #[inline(always)]
            |gradient, state, row| {
                let key = s.splat(keys[row]);
                let mut sum = s.splat(0.0);
                for j in 0..N {
                    let (g, x) = (s.load_f32(&gradient[j]), s.load_f32(&state[j]));
                    sum = s.mul_add(g, delta[j], sum);
                    sum = s.mul_add(x, read[j], sum);
                    let g = s.mul_add(key, read[j], s.mul(decay, g));
                    s.store_f32(g, &mut gradient[j]);
                    of_decay[j] = s.mul_add(g, x, of_decay[j]);
                }
                sum
            },
        );
        let mut total = of_decay[0];
        for part in &of_decay[1..] {
            total = s.add(total, *part);
        }
        Found {
            value,
            beta: s.reduce_add(of_beta),
            decay: s.reduce_add(total),
        }
    }
}

/// Writes the gradients of a token that belong to a slab, or adds them to those of the slabs before it.
#[inline(always)]
fn write<S: Simd, T: Element, const N: usize>(
    s: S,
    problem: &Problem<'_, T>,
    outputs: &Outputs<'_, T>,
    sequence: &Sequence,
    unit: Unit,
    token: usize,
    found: &Found<S, N>,
) {
    let row = (sequence.output + token) * problem.heads + unit.head;
    let at = row * problem.value_dim + unit.column;
    // SAFETY: a value head of a token belongs to one job.
    let (value, decay, beta) = unsafe {
        (
            outputs.value.range_mut(at..at + unit.count),
            &mut outputs.decay.range_mut(row..row + 1)[0],
            &mut outputs.beta.range_mut(row..row + 1)[0],
        )
    };
    for (j, to) in value.chunks_mut(LANES).enumerate() {
        let mut lanes = [0.0; LANES];
        s.store_f32(found.value[j], &mut lanes);
        convert(s, &lanes[..to.len()], to);
    }
    let (before_decay, before_beta) = match unit.block {
        0 => (0.0, 0.0),
        _ => (*decay, *beta),
    };
    *decay = before_decay + found.decay;
    *beta = before_beta + found.beta;
}

/// Writes the gradient of a row from that of the row times its factor, which it overwrites.
#[inline(always)]
fn normalization<S: Simd, T: Element>(
    s: S,
    x: &[T],
    scale: f32,
    normalize: bool,
    gradient: &mut [f32],
    to: &mut [T],
) {
    let factor = factor(s, x, scale, normalize);
    if normalize {
        // The part along the row that a change of its length takes away: x · (x·dy) / (x·x + eps).
        let along = -dot(s, x, gradient) / (dot(s, x, x) + super::slab::EPS);
        for (gradient, x) in gradient.iter_mut().zip(x) {
            *gradient = s.mul_add_scalar(x.to_f32(), along, *gradient);
        }
    }
    scaled(s, gradient, factor, to);
}
