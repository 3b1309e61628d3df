//! The kernels with each instruction set of the machine, against plain loops in f64.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_kernels::InstructionSet;

use super::*;
use crate::sequences::packed_sequences;

const KEY_HEADS: usize = 2;
const HEADS: usize = 4;

/// Returns numbers in -1..1 that depend on the seed only.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bits = state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        bits as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The inputs of some tokens, one sequence after another.
struct Case {
    offsets: Vec<i64>,
    lengths: Vec<i64>,
    key_dim: usize,
    value_dim: usize,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    decay: Vec<f32>,
    beta: Vec<f32>,
    states: Vec<f32>,
}

impl Case {
    fn new(lengths: &[i64], key_dim: usize, value_dim: usize) -> Case {
        let mut offsets = vec![0];
        for length in lengths {
            offsets.push(offsets[offsets.len() - 1] + length);
        }
        let tokens = usize::try_from(offsets[lengths.len()]).unwrap();
        Case {
            offsets,
            lengths: lengths.to_vec(),
            key_dim,
            value_dim,
            query: numbers(1, tokens * KEY_HEADS * key_dim),
            key: numbers(2, tokens * KEY_HEADS * key_dim),
            value: numbers(3, tokens * HEADS * value_dim),
            decay: numbers(4, tokens * HEADS).iter().map(|x| x - 1.0).collect(),
            beta: numbers(5, tokens * HEADS).iter().map(|x| x.abs()).collect(),
            states: numbers(6, lengths.len() * HEADS * key_dim * value_dim),
        }
    }

    fn sequences(&self) -> Vec<Sequence> {
        let rows = 0..self.lengths.len() as i64;
        let slots: Vec<_> = rows.map(crate::StateSlot::from).collect();
        packed_sequences(&self.offsets, &self.lengths, Some(&slots))
    }

    fn problem<'a>(&'a self, set: InstructionSet, sequences: &'a [Sequence]) -> Problem<'a, f32> {
        let rows = |data: &'a [f32], heads: usize, width: usize| Rows {
            data,
            strides: [0, heads * width, width],
            width,
        };
        Problem {
            query: rows(&self.query, KEY_HEADS, self.key_dim),
            key: rows(&self.key, KEY_HEADS, self.key_dim),
            value: rows(&self.value, HEADS, self.value_dim),
            decay: rows(&self.decay, HEADS, 1),
            beta: rows(&self.beta, HEADS, 1),
            sequences,
            key_heads: KEY_HEADS,
            heads: HEADS,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            scale: 0.5,
            qk_l2norm: true,
            set,
        }
    }

    /// Returns the outputs and the last states, token by token in f64.
    fn reference(&self) -> (Vec<f64>, Vec<f64>) {
        let (dk, dv) = (self.key_dim, self.value_dim);
        let mut states: Vec<f64> = self.states.iter().map(|x| f64::from(*x)).collect();
        let mut outputs = vec![0.0; self.value.len()];
        let normal = |x: &[f32]| -> Vec<f64> {
            let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            let length = (squares + 1e-6).sqrt();
            x.iter().map(|x| f64::from(*x) / length).collect()
        };
        for (index, pair) in self.offsets.windows(2).enumerate() {
            for token in usize::try_from(pair[0]).unwrap()..usize::try_from(pair[1]).unwrap() {
                for head in 0..HEADS {
                    let shared = token * KEY_HEADS + head / (HEADS / KEY_HEADS);
                    let key = normal(&self.key[shared * dk..][..dk]);
                    let query = normal(&self.query[shared * dk..][..dk]);
                    let row = token * HEADS + head;
                    let decay = f64::from(self.decay[row]).exp();
                    let state = &mut states[(index * HEADS + head) * dk * dv..][..dk * dv];
                    for column in 0..dv {
                        let mut stored = 0.0;
                        for d in 0..dk {
                            state[d * dv + column] *= decay;
                            stored += key[d] * state[d * dv + column];
                        }
                        let value = f64::from(self.value[row * dv + column]);
                        let delta = f64::from(self.beta[row]) * (value - stored);
                        for d in 0..dk {
                            state[d * dv + column] += key[d] * delta;
                            outputs[row * dv + column] += 0.5 * query[d] * state[d * dv + column];
                        }
                    }
                }
            }
        }
        (outputs, states)
    }
}

fn difference(a: &[f32], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - b).abs())
        .fold(0.0, f64::max)
}

#[test]
fn every_instruction_set_computes_the_rule() {
    for (lengths, key_dim, value_dim) in
        [(&[1, 0, 70][..], 5, 3), (&[65], 16, 32), (&[3, 130], 9, 70)]
    {
        let case = Case::new(lengths, key_dim, value_dim);
        let sequences = case.sequences();
        let (expected, last) = case.reference();
        for set in InstructionSet::available() {
            let mut output = vec![f32::NAN; expected.len()];
            let mut states = case.states.clone();
            forward(
                &case.problem(set, &sequences),
                &mut output,
                &mut states,
                None,
            );
            let off = difference(&output, &expected);
            assert!(off < 1e-5, "{set:?}: {off}");
            let off = difference(&states, &last);
            assert!(off < 1e-5, "{set:?}: {off}");
        }
    }
}

#[test]
fn every_instruction_set_computes_the_same_gradients() {
    let case = Case::new(&[70, 1, 0, 9], 7, 40);
    let sequences = case.sequences();
    let output_gradient = numbers(8, case.value.len());
    let mut found: Vec<(InstructionSet, Vec<f32>)> = Vec::new();
    for set in InstructionSet::available() {
        let problem = case.problem(set, &sequences);
        let columns = block_columns(set);
        let slab = problem.blocks(columns) * columns * case.key_dim;
        let chunks: usize = sequences.iter().map(|s| chunks_of(s.tokens)).sum();
        let mut saved = vec![f32::NAN; chunks * HEADS * slab];
        let (mut output, mut states) = (vec![0.0; case.value.len()], case.states.clone());
        forward(&problem, &mut output, &mut states, Some(&mut saved));
        let mut query = vec![f32::NAN; case.query.len()];
        let mut key = vec![f32::NAN; case.key.len()];
        let mut value = vec![f32::NAN; case.value.len()];
        let mut decay = vec![f32::NAN; case.decay.len()];
        let mut beta = vec![f32::NAN; case.beta.len()];
        let mut states = numbers(9, case.states.len());
        let results = ResultGradients {
            saved: &saved,
            output: Some(&output_gradient),
        };
        let inputs = InputGradients {
            query: &mut query,
            key: &mut key,
            value: &mut value,
            decay: &mut decay,
            beta: &mut beta,
            states: &mut states,
        };
        backward(&problem, &results, inputs);
        found.push((set, [query, key, value, decay, beta, states].concat()));
    }
    // The widest set is compared with libtorch's gradients by the tests of the crate.
    let widest: Vec<f64> = found[0].1.iter().map(|x| f64::from(*x)).collect();
    for (set, gradients) in &found[1..] {
        let off = difference(gradients, &widest);
        assert!(off < 1e-4, "{set:?}: {off}");
    }
}

#[test]
fn every_instruction_set_convolves() {
    let (channels, width) = (300, 4);
    let lengths = [20_i64, 1, 0, 40];
    let offsets = [0_i64, 20, 21, 21, 61];
    let sequences = packed_sequences(&offsets, &lengths, None);
    let x = numbers(1, 61 * channels);
    let weight = numbers(2, channels * width);
    for set in InstructionSet::available() {
        let conv = Conv {
            x: Rows {
                data: &x[..],
                strides: [0, channels, 0],
                width: channels,
            },
            weight: &weight,
            bias: None,
            sequences: &sequences,
            width,
            silu: true,
            set,
        };
        let mut y = vec![f32::NAN; x.len()];
        conv_forward(&conv, &mut y, &mut []);
        for (sequence, pair) in sequences.iter().zip(offsets.windows(2)) {
            for token in 0..sequence.tokens {
                let row = usize::try_from(pair[0]).unwrap() + token;
                for channel in 0..channels {
                    let mut z = 0.0;
                    for tap in 0..width.min(token + 1) {
                        let weight = weight[channel * width + width - 1 - tap];
                        z += f64::from(weight) * f64::from(x[(row - tap) * channels + channel]);
                    }
                    let expected = z / (1.0 + (-z).exp());
                    let off = (f64::from(y[row * channels + channel]) - expected).abs();
                    assert!(off < 1e-6, "{set:?}: {off}");
                }
            }
        }
    }
}
