//! The short causal convolution, forward and backward.
//!
//! A job takes a block of channels. It converts the rows of a few tokens to f32 in a buffer, after the K - 1 rows before
//! them, so each output is K multiply-adds of whole vectors. Each output is computed by the same operations in the same
//! order however the tokens are divided among calls.

#![allow(unsafe_code, reason = "threads that write disjoint parts of tensors")]

use std::ops::Range;

use overdrive_kernels::math::sigmoid;
use overdrive_kernels::threads::parallel_ranges;
use overdrive_kernels::{
    Buffers, Element, InstructionSet, Kept, Kernel, SharedSlice, Simd, capacity_bytes, convert,
    each_vector, load, store,
};

use super::problem::{Rows, Sequence};

/// The number of tokens in the buffer.
const TOKENS: usize = 16;

/// The number of channels of a job: a row of a block is several cache lines, and the buffer fits into the L1 cache.
const CHANNELS: usize = 256;

/// The number of channels of a job of the backward pass, which has three buffers.
const BACKWARD_CHANNELS: usize = 128;

/// The least number of elements for which threads are worth their start.
const PARALLEL_WORK: usize = 1 << 15;

/// The inputs, options and sizes of a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Conv<'a, T> {
    /// (batch, token, 1, C)
    pub(crate) x: Rows<'a, T>,
    /// (C, K)
    pub(crate) weight: &'a [f32],
    /// (C,)
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) sequences: &'a [Sequence],
    pub(crate) width: usize,
    pub(crate) silu: bool,
    pub(crate) set: InstructionSet,
}

impl<T: Element> Conv<'_, T> {
    fn channels(&self) -> usize {
        self.x.width
    }

    fn parallel(&self) -> bool {
        let tokens: usize = self.sequences.iter().map(|s| s.tokens).sum();
        tokens * self.channels() >= PARALLEL_WORK
    }

    /// Returns the range of an element of a state, for each channel of a block: the states are (S, C, K - 1).
    fn state_at(&self, slot: usize, channels: &Range<usize>) -> Range<usize> {
        let before = self.width - 1;
        let first = slot * self.channels() + channels.start;
        first * before..(first + channels.len()) * before
    }

    /// Copies the weights of a block as (K, channels).
    fn weights(&self, channels: &Range<usize>, to: &mut Vec<f32>) {
        to.clear();
        for tap in 0..self.width {
            let of_channel = |channel| self.weight[channel * self.width + tap];
            to.extend(channels.clone().map(of_channel));
        }
    }
}

/// Computes `y` (rows, C), and replaces the rows of `states` (S, C, K - 1) that the sequences have.
pub(crate) fn forward<T: Element>(conv: &Conv<'_, T>, y: &mut [T], states: &mut [T]) {
    let blocks = conv.channels().div_ceil(CHANNELS);
    let (y, states) = (SharedSlice::new(y), SharedSlice::new(states));
    let jobs = conv.sequences.len() * blocks;
    parallel_ranges(jobs, 1, conv.parallel(), |jobs| {
        for job in jobs {
            Kept::with(&WORKSPACE, |workspace| {
                let start = job % blocks * CHANNELS;
                conv.set.run(Forward {
                    conv,
                    y: &y,
                    states: &states,
                    sequence: conv.sequences[job / blocks],
                    channels: start..conv.channels().min(start + CHANNELS),
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
    /// (K, channels)
    weights: Vec<f32>,
    /// The inputs of some tokens after the K - 1 inputs before them, (K - 1 + TOKENS, channels).
    inputs: Vec<f32>,
    /// The gradients before the activation, (TOKENS, channels).
    outputs: Vec<f32>,
    /// The gradients of `inputs`.
    gradients: Vec<f32>,
    /// The gradients of the weights and of the bias, (K + 1, channels).
    sums: Vec<f32>,
}

impl Buffers for Workspace {
    fn bytes(&self) -> usize {
        let vectors = [
            &self.weights,
            &self.inputs,
            &self.outputs,
            &self.gradients,
            &self.sums,
        ];
        vectors.map(capacity_bytes).iter().sum()
    }
}

/// Returns the linear part of an output, for one vector of channels.
#[inline(always)]
fn convolve<S: Simd>(
    s: S,
    weights: &[f32],
    bias: Option<&[f32]>,
    inputs: &[f32],
    count: usize,
    span: overdrive_kernels::Span,
) -> S::F {
    let mut sum = match bias {
        Some(bias) => load(s, bias, span),
        None => s.splat(0.0),
    };
    for (weights, inputs) in weights.chunks_exact(count).zip(inputs.chunks_exact(count)) {
        sum = s.mul_add(load(s, weights, span), load(s, inputs, span), sum);
    }
    sum
}

struct Forward<'a, 'p, T> {
    conv: &'a Conv<'p, T>,
    y: &'a SharedSlice<'a, T>,
    states: &'a SharedSlice<'a, T>,
    sequence: Sequence,
    channels: Range<usize>,
    workspace: &'a mut Workspace,
}

impl<T: Element> Kernel for Forward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Forward {
            conv,
            sequence,
            channels,
            ..
        } = self;
        let Workspace {
            weights, inputs, ..
        } = self.workspace;
        let (count, before) = (channels.len(), conv.width - 1);
        conv.weights(&channels, weights);
        let bias = conv.bias.map(|bias| &bias[channels.clone()]);
        inputs.clear();
        inputs.resize((before + TOKENS) * count, 0.0);
        if let Some(from) = sequence.from {
            // SAFETY: a block of channels of a state that is written belongs to one job, and no other job reads it.
            let state = unsafe { self.states.range(conv.state_at(from, &channels)) };
            read_state(state, before, &mut inputs[..before * count]);
        }
        for start in (0..sequence.tokens).step_by(TOKENS) {
            let tokens = start..sequence.tokens.min(start + TOKENS);
            for (index, token) in tokens.clone().enumerate() {
                let from = &conv.x.row(&sequence, token, 0)[channels.clone()];
                convert(s, from, &mut inputs[(before + index) * count..][..count]);
                let at = (sequence.output + token) * conv.channels();
                let at = at + channels.start..at + channels.end;
                // SAFETY: a block of channels of a token belongs to one job.
                let y = unsafe { self.y.range_mut(at) };
                let window = &inputs[index * count..][..conv.width * count];
                each_vector(
                    count,
                    #[inline(always)]
                    |span| {
                        let z = convolve(s, weights, bias, window, count, span);
                        let z = match conv.silu {
                            true => s.mul(z, sigmoid(s, z)),
                            false => z,
                        };
                        store(s, z, y, span);
                    },
                );
            }
            let rows = tokens.len() * count;
            inputs.copy_within(rows..rows + before * count, 0);
        }
        if let Some(slot) = sequence.slot {
            // SAFETY: a block of channels of a state that is written belongs to one job, and no other job reads it.
            let state = unsafe { self.states.range_mut(conv.state_at(slot, &channels)) };
            write_state(&inputs[..before * count], before, state);
        }
    }
}

/// Converts a state (channels, K - 1) to rows (K - 1, channels).
#[inline(always)]
fn read_state<T: Element>(state: &[T], before: usize, rows: &mut [f32]) {
    let count = rows.len() / before.max(1);
    for (row, to) in rows.chunks_exact_mut(count.max(1)).enumerate() {
        for (to, from) in to.iter_mut().zip(state[row..].iter().step_by(before)) {
            *to = from.to_f32();
        }
    }
}

/// Converts rows (K - 1, channels) to a state (channels, K - 1).
#[inline(always)]
fn write_state<T: Element>(rows: &[f32], before: usize, state: &mut [T]) {
    let count = rows.len() / before.max(1);
    for (row, from) in rows.chunks_exact(count.max(1)).enumerate() {
        let to = state[row..].iter_mut().step_by(before);
        for (to, from) in to.zip(from) {
            *to = T::from_f32(*from);
        }
    }
}

/// The gradients of the inputs, all contiguous.
pub(crate) struct ConvGradients<'a, T> {
    /// (rows, C)
    pub(crate) x: &'a mut [T],
    /// (C, K)
    pub(crate) weight: &'a mut [f32],
    /// (C,)
    pub(crate) bias: &'a mut [f32],
    /// (S, C, K - 1): the gradients of the last states, which become those of the first ones.
    pub(crate) states: &'a mut [T],
}

/// Computes the gradients of the inputs from `dy` (rows, C), for the first states (S, C, K - 1) of the sequences that have
/// one.
pub(crate) fn backward<T: Element>(
    conv: &Conv<'_, T>,
    dy: Option<&[T]>,
    first_states: &[T],
    gradients: ConvGradients<'_, T>,
) {
    let outputs = Outputs {
        x: SharedSlice::new(gradients.x),
        weight: SharedSlice::new(gradients.weight),
        bias: SharedSlice::new(gradients.bias),
        states: SharedSlice::new(gradients.states),
    };
    // All sequences in one job, since the gradients of its weights are sums over them: in this order on any number of
    // threads.
    let blocks = conv.channels().div_ceil(BACKWARD_CHANNELS);
    parallel_ranges(blocks, 1, conv.parallel(), |blocks| {
        for block in blocks {
            Kept::with(&WORKSPACE, |workspace| {
                let start = block * BACKWARD_CHANNELS;
                conv.set.run(Backward {
                    conv,
                    dy,
                    first_states,
                    outputs: &outputs,
                    channels: start..conv.channels().min(start + BACKWARD_CHANNELS),
                    workspace,
                });
            });
        }
    });
}

struct Outputs<'a, T> {
    x: SharedSlice<'a, T>,
    weight: SharedSlice<'a, f32>,
    bias: SharedSlice<'a, f32>,
    states: SharedSlice<'a, T>,
}

struct Backward<'a, 'p, T> {
    conv: &'a Conv<'p, T>,
    dy: Option<&'a [T]>,
    first_states: &'a [T],
    outputs: &'a Outputs<'a, T>,
    channels: Range<usize>,
    workspace: &'a mut Workspace,
}

impl<T: Element> Kernel for Backward<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (conv, channels) = (self.conv, self.channels.clone());
        let (count, width) = (channels.len(), conv.width);
        let workspace = &mut *self.workspace;
        conv.weights(&channels, &mut workspace.weights);
        workspace.sums.clear();
        workspace.sums.resize((width + 1) * count, 0.0);
        workspace.inputs.resize((width - 1 + TOKENS) * count, 0.0);
        workspace.outputs.resize(TOKENS * count, 0.0);
        workspace
            .gradients
            .resize((width - 1 + TOKENS) * count, 0.0);
        for sequence in conv.sequences {
            self.sequence(s, sequence);
        }
        let (weights, bias) = self.workspace.sums.split_at(width * count);
        // SAFETY: a block of channels belongs to one job.
        let (of_weight, of_bias) = unsafe {
            (
                self.outputs
                    .weight
                    .range_mut(channels.start * width..channels.end * width),
                self.outputs.bias.range_mut(channels),
            )
        };
        write_state(weights, width, of_weight);
        of_bias.copy_from_slice(bias);
    }
}

impl<T: Element> Backward<'_, '_, T> {
    #[inline(always)]
    fn sequence<S: Simd>(&mut self, s: S, sequence: &Sequence) {
        let (conv, channels) = (self.conv, self.channels.clone());
        let (count, before) = (channels.len(), conv.width - 1);
        let carried = before * count;
        // The gradients of the K - 1 inputs after those of the next tokens to go back to: first those of the last state.
        let workspace = &mut *self.workspace;
        workspace.gradients[..carried].fill(0.0);
        if let Some(slot) = sequence.slot {
            // SAFETY: a block of channels of a state belongs to one job.
            let state = unsafe {
                self.outputs
                    .states
                    .range_mut(conv.state_at(slot, &channels))
            };
            read_state(state, before, &mut workspace.gradients[..carried]);
        }
        for start in (0..sequence.tokens).step_by(TOKENS).rev() {
            let tokens = start..sequence.tokens.min(start + TOKENS);
            let rows = tokens.len() * count;
            self.workspace.gradients.copy_within(0..carried, rows);
            self.workspace.gradients[..rows].fill(0.0);
            self.read_inputs(s, sequence, &tokens);
            self.tokens(s, sequence, &tokens);
            for (index, token) in tokens.clone().enumerate() {
                let at = (sequence.output + token) * conv.channels();
                let at = at + channels.start..at + channels.end;
                // SAFETY: a block of channels of a token belongs to one job.
                let to = unsafe { self.outputs.x.range_mut(at) };
                let from = &self.workspace.gradients[(before + index) * count..][..count];
                convert(s, from, to);
            }
        }
        if let Some(slot) = sequence.slot {
            // SAFETY: a block of channels of a state belongs to one job.
            let state = unsafe {
                self.outputs
                    .states
                    .range_mut(conv.state_at(slot, &channels))
            };
            write_state(&self.workspace.gradients[..carried], before, state);
        }
    }

    /// Reads the inputs of tokens and the K - 1 inputs before them.
    #[inline(always)]
    fn read_inputs<S: Simd>(&mut self, s: S, sequence: &Sequence, tokens: &Range<usize>) {
        let (conv, channels) = (self.conv, self.channels.clone());
        let (count, before) = (channels.len(), conv.width - 1);
        let inputs = &mut self.workspace.inputs;
        if tokens.start < before {
            match sequence.from {
                Some(from) => {
                    let state = &self.first_states[conv.state_at(from, &channels)];
                    read_state(state, before, &mut inputs[..before * count]);
                }
                None => inputs[..before * count].fill(0.0),
            }
            // Of the state, the last rows are before the first of these tokens that is read below.
            inputs.copy_within(tokens.start * count..before * count, 0);
        }
        for token in tokens.start.saturating_sub(before)..tokens.end {
            let from = &conv.x.row(sequence, token, 0)[channels.clone()];
            let row = before + token - tokens.start;
            convert(s, from, &mut inputs[row * count..][..count]);
        }
    }

    /// Adds to the gradients of the inputs, weights and bias.
    #[inline(always)]
    fn tokens<S: Simd>(&mut self, s: S, sequence: &Sequence, tokens: &Range<usize>) {
        let (conv, channels, count) = (self.conv, self.channels.clone(), self.channels.len());
        let bias = conv.bias.map(|bias| &bias[channels.clone()]);
        let Workspace {
            weights,
            inputs,
            outputs,
            gradients,
            sums,
        } = &mut *self.workspace;
        for (index, token) in tokens.clone().enumerate() {
            let dz = &mut outputs[index * count..][..count];
            let Some(dy) = self.dy else {
                dz.fill(0.0);
                continue;
            };
            let at = (sequence.output + token) * conv.channels();
            let dy = &dy[at + channels.start..at + channels.end];
            if !conv.silu {
                convert(s, dy, dz);
                continue;
            }
            let window = &inputs[index * count..][..conv.width * count];
            each_vector(
                count,
                #[inline(always)]
                |span| {
                    let z = convolve(s, weights, bias, window, count, span);
                    let gate = sigmoid(s, z);
                    // σ(z) · (1 + z · (1 - σ(z)))
                    let slope = s.mul_add(z, s.sub(s.splat(1.0), gate), s.splat(1.0));
                    store(s, s.mul(s.mul(gate, slope), load(s, dy, span)), dz, span);
                },
            );
        }
        let rows = tokens.len();
        let (of_weights, of_bias) = sums.split_at_mut(conv.width * count);
        each_vector(
            count,
            #[inline(always)]
            |span| {
                let mut of_tokens = s.splat(0.0);
                for index in 0..rows {
                    of_tokens = s.add(of_tokens, load(s, &outputs[index * count..], span));
                }
                store(s, s.add(load(s, of_bias, span), of_tokens), of_bias, span);
            },
        );
        let taps = of_weights
            .chunks_exact_mut(count)
            .zip(weights.chunks_exact(count));
        for (tap, (sum, weight)) in taps.enumerate() {
            each_vector(
                count,
                #[inline(always)]
                |span| {
                    let mut of_tokens = s.splat(0.0);
                    let weight = load(s, weight, span);
                    for index in 0..rows {
                        let dz = load(s, &outputs[index * count..], span);
                        let at = (index + tap) * count;
                        of_tokens = s.mul_add(dz, load(s, &inputs[at..], span), of_tokens);
                        let gradient = &mut gradients[at..][..count];
                        let dx = s.mul_add(dz, weight, load(s, gradient, span));
                        store(s, dx, gradient, span);
                    }
                    store(s, s.add(load(s, sum, span), of_tokens), sum, span);
                },
            );
        }
    }
}
