use overdrive_core::Error as Common;
use overdrive_sys::transfer::to_device;
use tch::{Kind, Tensor};

use crate::Result;
use crate::kernels::Argument::{F32, I32, I64, Tensor as Elements};
use crate::kernels::{Kernels, Request, check_shapes, dtype, is_aligned, multiples_of_16};

/// The sequences of a call, and where their states are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatePlan {
    sequences: usize,
    tokens: i64,
    /// The first token of each sequence and the end of the last one, then the slots that the states are read from (-1: a
    /// state of zeros), then those they are written to.
    numbers: Vec<i32>,
}

impl StatePlan {
    /// Returns the plan of sequences with the tokens `offsets[i]..offsets[i + 1]`, whose states are read from the slots
    /// `from` of a pool (`None`: a state of zeros), and written to the slots `to`. A slot that a sequence writes may be
    /// read by no other one.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for lists of other lengths, and for a number that i32 cannot hold.
    pub fn new(offsets: &[i64], from: &[Option<i64>], to: &[i64]) -> Result<Self> {
        let sequences = offsets.len().saturating_sub(1);
        let (Some(&tokens), true) = (offsets.last(), [from.len(), to.len()] == [sequences; 2])
        else {
            let given = format!("{} and {}", from.len(), to.len());
            let expected = format!("{sequences} each, one for each sequence of `offsets`");
            return Err(Common::option("slots", given, expected).into());
        };
        let from = from.iter().map(|slot| slot.unwrap_or(-1));
        let all = offsets
            .iter()
            .copied()
            .chain(from)
            .chain(to.iter().copied());
        let numbers = all.map(|number| {
            let narrow = i32::try_from(number);
            narrow.map_err(|_| Common::option("plan", number, "less than 2³¹").into())
        });
        Ok(Self {
            sequences,
            tokens,
            numbers: numbers.collect::<Result<_>>()?,
        })
    }
}

/// A plan on the GPU, with the stream that it was uploaded for.
#[derive(Debug)]
pub(crate) struct UploadedPlan {
    plan: StatePlan,
    stream: usize,
    tensor: Tensor,
}

/// The inputs of the gated delta rule for packed sequences, whose states are in a pool. Each key head serves `H / H_k`
/// consecutive value heads.
///
/// N: tokens of all sequences, H_k: key heads, H: value heads, D_k, D_v: the widths of keys and values, S: states.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRule<'a> {
    /// The queries `(N, H_k, D_k)`, in f32, f16 or bf16, with their channels side by side.
    pub query: &'a Tensor,
    /// The keys, of the shape and dtype of the queries.
    pub key: &'a Tensor,
    /// The values `(N, H, D_v)`, of the dtype of the queries.
    pub value: &'a Tensor,
    /// The logarithms of the decays, f32 `(N, H)`, contiguous.
    pub decay: &'a Tensor,
    /// The rates of the updates, f32 `(N, H)`, contiguous.
    pub beta: &'a Tensor,
    /// The pool, f32 `(S, H, D_k, D_v)`, contiguous, which is written.
    pub states: &'a Tensor,
    /// The sequences.
    pub plan: &'a StatePlan,
    /// The factor of the queries.
    pub scale: f64,
    /// If `true`, queries and keys are divided by their lengths.
    pub qk_l2norm: bool,
}

impl DeltaRule<'_> {
    /// Returns `true` if the memory layout of the tensors is supported.
    fn is_wide(&self) -> bool {
        let rows = [self.query, self.key, self.value].into_iter().all(|x| {
            let [token, head, channel] = x.stride()[..] else {
                return false;
            };
            channel == 1 && multiples_of_16(&[token, head, x.size()[2]]) && is_aligned(x)
        });
        let dense = [self.decay, self.beta, self.states];
        rows && dense
            .into_iter()
            .all(|x| x.is_contiguous() && is_aligned(x))
    }
}

impl Kernels {
    /// Advances the states through all tokens in one launch, and returns the output `(N, H, D_v)` in the dtype of the
    /// values; `None`, with nothing done, if there is no kernel for this call. The arithmetic is in f32.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for tensors whose shapes do not fit together,
    /// [`Error::Driver`](crate::Error::Driver) if the kernel cannot be loaded or launched.
    pub fn delta_rule(&self, call: &DeltaRule<'_>) -> Result<Option<Tensor>> {
        let (&[tokens, key_heads, key_dim], &[_, heads, value_dim]) =
            (&call.key.size()[..], &call.value.size()[..])
        else {
            return Ok(None);
        };
        let slots = call.states.size().first().copied().unwrap_or(0);
        check_shapes(&[
            ("key", call.key, &[call.plan.tokens, key_heads, key_dim]),
            ("query", call.query, &[tokens, key_heads, key_dim]),
            ("value", call.value, &[tokens, heads, value_dim]),
            ("decay", call.decay, &[tokens, heads]),
            ("beta", call.beta, &[tokens, heads]),
            ("states", call.states, &[slots, heads, key_dim, value_dim]),
        ])?;
        let kinds = [call.query, call.key].map(Tensor::kind);
        let fits = tokens > 0
            && key_heads > 0
            && heads % key_heads == 0
            && kinds == [call.value.kind(); 2]
            && [call.states, call.decay, call.beta].map(Tensor::kind) == [Kind::Float; 3]
            && call.is_wide();
        let (true, Some(dtype)) = (fits, dtype(call.value.kind())) else {
            return Ok(None);
        };
        let found = self.find(&Request {
            kernel: "delta_rule",
            dtype,
            constants: vec![("NORM", i64::from(call.qk_l2norm))],
            least: ("KEYS", key_dim),
            aligned: true,
        })?;
        let (Some(kernel), Some(plan)) = (found, self.uploaded(call.plan)?) else {
            return Ok(None);
        };
        let shape = [tokens, heads, value_dim];
        let y = Tensor::f_empty(shape, (call.value.kind(), call.value.device()))?;
        let mut arguments = vec![
            ("query", Elements(call.query)),
            ("key", Elements(call.key)),
            ("value", Elements(call.value)),
            ("decay", Elements(call.decay)),
            ("beta", Elements(call.beta)),
            ("states", Elements(call.states)),
            ("plan", Elements(&plan)),
            ("y", Elements(&y)),
            ("sequences", I32(call.plan.sequences as i64)),
            ("heads", I32(heads)),
            ("group", I32(heads / key_heads)),
            ("key_dim", I32(key_dim)),
            ("value_dim", I32(value_dim)),
        ];
        let names = [
            "q_token", "q_head", "k_token", "k_head", "v_token", "v_head",
        ];
        let strides = [call.query, call.key, call.value];
        let strides = strides.iter().flat_map(|x| x.stride()[..2].to_vec());
        arguments.extend(names.into_iter().zip(strides.map(I64)));
        arguments.push(("scale", F32(call.scale)));
        let columns = kernel.variant.size("COLUMNS")?;
        let programs = [
            call.plan.sequences * heads as usize,
            value_dim as usize / columns,
        ];
        self.launch(&kernel, programs, &arguments)?;
        Ok(Some(y))
    }
}

/// The short causal convolution before the rule, with SiLU, for packed sequences whose last inputs are in a pool.
#[derive(Debug, Clone, Copy)]
pub struct CausalConv1d<'a> {
    /// The inputs `(N, C)`, in f32, f16 or bf16, with their channels side by side.
    pub x: &'a Tensor,
    /// The filters `(C, K)`, contiguous, of the dtype of the inputs.
    pub weight: &'a Tensor,
    /// The pool `(S, C, K - 1)` of last inputs, contiguous, of the same dtype, which is written.
    pub states: &'a Tensor,
    /// The sequences.
    pub plan: &'a StatePlan,
}

impl Kernels {
    /// Returns a plan on the GPU; `None` in a capture, whose replays would have the plan of this step. The layers of a step
    /// have the same plan, which is uploaded once.
    fn uploaded(&self, plan: &StatePlan) -> Result<Option<Tensor>> {
        let Some((stream, 0)) = self.sequence()? else {
            return Ok(None);
        };
        let mut last = self.state_plan.lock();
        if let Some(known) = &*last
            && (&known.plan, known.stream) == (plan, stream)
        {
            return Ok(Some(known.tensor.shallow_clone()));
        }
        let tensor = to_device(Tensor::f_from_slice(&plan.numbers)?, self.device())?;
        *last = Some(UploadedPlan {
            plan: plan.clone(),
            stream,
            tensor: tensor.shallow_clone(),
        });
        Ok(Some(tensor))
    }

    /// Convolves each channel with its own filter, updates the pool in the same launch, and returns `(N, C)`; `None`, with
    /// nothing done, if there is no kernel for this call.
    ///
    /// # Errors
    /// As [`delta_rule`](Self::delta_rule).
    pub fn causal_conv1d(&self, call: &CausalConv1d<'_>) -> Result<Option<Tensor>> {
        let (&[tokens, channels], &[_, width]) = (&call.x.size()[..], &call.weight.size()[..])
        else {
            return Ok(None);
        };
        let slots = call.states.size().first().copied().unwrap_or(0);
        check_shapes(&[
            ("x", call.x, &[call.plan.tokens, channels]),
            ("weight", call.weight, &[channels, width]),
            ("states", call.states, &[slots, channels, width - 1]),
        ])?;
        let kind = call.x.kind();
        let stride = call.x.stride();
        let dense = [call.weight, call.states];
        let fits = tokens > 0
            && stride[1] == 1
            && multiples_of_16(&[channels, stride[0]])
            && is_aligned(call.x)
            && [call.weight, call.states].iter().all(|x| x.kind() == kind)
            && dense.iter().all(|x| x.is_contiguous() && is_aligned(x));
        let (true, Some(dtype)) = (fits, dtype(kind)) else {
            return Ok(None);
        };
        let found = self.find(&Request {
            kernel: "causal_conv1d",
            dtype,
            constants: vec![("WIDTH", width)],
            least: ("BLOCK", 1),
            aligned: true,
        })?;
        let (Some(kernel), Some(plan)) = (found, self.uploaded(call.plan)?) else {
            return Ok(None);
        };
        let y = Tensor::f_empty([tokens, channels], (kind, call.x.device()))?;
        let arguments = [
            ("x", Elements(call.x)),
            ("weight", Elements(call.weight)),
            ("states", Elements(call.states)),
            ("plan", Elements(&plan)),
            ("y", Elements(&y)),
            ("sequences", I32(call.plan.sequences as i64)),
            ("channels", I32(channels)),
            ("x_token", I64(stride[0])),
        ];
        let blocks = (channels as usize).div_ceil(kernel.variant.size("BLOCK")?);
        self.launch(&kernel, [call.plan.sequences, blocks], &arguments)?;
        Ok(Some(y))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_has_offsets_and_slots_and_no_state_is_minus_one() {
        let plan = StatePlan::new(&[0, 3, 4], &[None, Some(2)], &[0, 1]).unwrap();
        assert_eq!(plan.numbers, [0, 3, 4, -1, 2, 0, 1]);
        let short = StatePlan::new(&[0, 3, 4], &[None], &[0, 1]).unwrap_err();
        assert!(short.to_string().contains("2 each"), "{short}");
        assert!(StatePlan::new(&[0, 1 << 31], &[None], &[0]).is_err());
    }
}
