use overdrive_autograd::NoGradGuard;
use overdrive_sys::autocast;
use tch::{Kind, Tensor};

use crate::delta_fused::{self, Converted, Plan};
use crate::delta_math::Terms;
use crate::error::{
    check_contiguous, check_device, check_floating, check_kind, check_shape, wrong_shape,
};
use crate::gpu;
use crate::kernel::Sequence;
use crate::options::choose;
use crate::sequences::{batch_sequences, each_group, lengths, packed_sequences};
use crate::state_slot::{apart, checked_slots, copy_states};
use crate::{Backend, DeltaRuleOptions, Result, StateSlot};

/// The tensors of the gated delta rule, for a batch or for packed sequences.
///
/// B: batch, T: tokens of a sequence, N: tokens of all sequences, H_k: key heads, H: value heads, D_k, D_v: the widths of
/// keys and values. H is a multiple of H_k: each key head serves H / H_k consecutive value heads. All are floating-point
/// and on the same device; the rows of `query`, `key` and `value` may be views of one tensor.
#[derive(Debug, Clone, Copy)]
pub struct DeltaRuleInputs<'a> {
    /// The queries (B, T, H_k, D_k), or packed (N, H_k, D_k).
    pub query: &'a Tensor,
    /// The keys, in the shape of the queries.
    pub key: &'a Tensor,
    /// The values (B, T, H, D_v), or packed (N, H, D_v).
    pub value: &'a Tensor,
    /// The logarithms of the factors by which the state decays at each token (`g` in the papers), at most 0: (B, T, H), or
    /// packed (N, H).
    pub decay: &'a Tensor,
    /// The rates at which a token overwrites the value at its key, usually in 0..1, in the shape of `decay`.
    pub beta: &'a Tensor,
}

/// The sizes of the inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) heads: i64,
    pub(crate) key_dim: i64,
    pub(crate) value_dim: i64,
}

impl DeltaRuleInputs<'_> {
    /// Checks the tensors, which have the dimensions `leading` before the heads.
    fn check(&self, leading: usize) -> Result<Sizes> {
        for (name, tensor) in self.named() {
            check_floating(name, tensor)?;
            check_device(name, tensor, "value", self.value.device())?;
        }
        let (keys, values) = (self.key.size(), self.value.size());
        let letters = ["(N, ", "(B, T, "][leading - 1];
        if keys.len() != leading + 2 {
            return Err(wrong_shape("key", self.key, format!("{letters}H_k, D_k)")));
        }
        if values.len() != leading + 2 || values[..leading] != keys[..leading] {
            let expected = format!("{letters}H, D_v), with the tokens of `key` ({keys:?})");
            return Err(wrong_shape("value", self.value, expected));
        }
        check_shape("query", self.query, &keys, "the shape of `key`")?;
        let (key_heads, key_dim) = (keys[leading], keys[leading + 1]);
        let (heads, value_dim) = (values[leading], values[leading + 1]);
        if key_heads == 0 || key_dim == 0 {
            let expected = "with at least one head and a head dimension of at least 1";
            return Err(wrong_shape("key", self.key, expected));
        }
        if heads % key_heads != 0 {
            let expected =
                format!("{letters}H, D_v) with H a multiple of the {key_heads} heads of `key`");
            return Err(wrong_shape("value", self.value, expected));
        }
        let numbers = &values[..=leading];
        check_shape("decay", self.decay, numbers, &format!("{letters}H)"))?;
        check_shape("beta", self.beta, numbers, &format!("{letters}H)"))?;
        Ok(Sizes {
            heads,
            key_dim,
            value_dim,
        })
    }

    fn named(&self) -> [(&'static str, &Tensor); 5] {
        [
            ("query", self.query),
            ("key", self.key),
            ("value", self.value),
            ("decay", self.decay),
            ("beta", self.beta),
        ]
    }

    /// Returns the dtype of the arithmetic and of the states.
    pub(crate) fn state_kind(&self) -> Kind {
        let doubles = self.named().map(|(_, x)| x.kind() == Kind::Double);
        match doubles.contains(&true) {
            true => Kind::Double,
            false => Kind::Float,
        }
    }

    /// Returns other tensors with the names of these.
    fn try_map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<[Tensor; 5]> {
        let [query, key, value, decay, beta] = self.named().map(|(_, x)| f(x));
        Ok([query?, key?, value?, decay?, beta?])
    }
}

/// Borrows the tensors of `try_map`.
fn inputs_of([query, key, value, decay, beta]: &[Tensor; 5]) -> DeltaRuleInputs<'_> {
    DeltaRuleInputs {
        query,
        key,
        value,
        decay,
        beta,
    }
}

/// Returns the scale of the queries.
fn scale_of(options: &DeltaRuleOptions, sizes: Sizes) -> f64 {
    options
        .scale
        .unwrap_or_else(|| 1.0 / (sizes.key_dim as f64).sqrt())
}

/// Checks a state, or a pool of them.
fn check_state(
    name: &'static str,
    state: &Tensor,
    rows: i64,
    sizes: Sizes,
    inputs: &DeltaRuleInputs<'_>,
    letters: &str,
) -> Result<()> {
    let expected = [rows, sizes.heads, sizes.key_dim, sizes.value_dim];
    check_shape(name, state, &expected, letters)?;
    let reason = ", the dtype of the arithmetic";
    check_kind(name, state, inputs.state_kind(), reason)?;
    check_device(name, state, "value", inputs.value.device())
}

/// Computes linear attention by the gated delta rule (Yang, Kautz & Hatamizadeh 2024,
/// [arXiv:2412.06464](https://arxiv.org/abs/2412.06464)), as Qwen3-Next does.
///
/// Each value head has a state, a matrix (D_k, D_v) that maps keys to values. Token `t` lets it decay, replaces a part of
/// the value at its key, and reads the value at its query:
///
/// ```text
/// S = exp(g_t) · S
/// S = S + k_t · (β_t · (v_t - Sᵀ k_t))ᵀ
/// o_t = Sᵀ · (scale · q_t)
/// ```
///
/// The arithmetic is in f32 (f64 if an input is f64). Returns the output (B, T, H, D_v) in the dtype of `value`, and the
/// state (B, H, D_k, D_v) after the last token in f32 (f64). `state` is the state before the first token, in that shape and
/// dtype; zeros if `None`. Both results can be differentiated by all inputs and by `state`.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) for an option out of range and for a tensor of the wrong shape, dtype or device.
///
/// ```
/// use overdrive_linear_attention::{DeltaRuleInputs, DeltaRuleOptions, gated_delta_rule};
/// use tch::{Device, Kind, Tensor};
///
/// let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Float, Device::Cpu));
/// let (query, key, value) = (random(&[1, 10, 2, 16]), random(&[1, 10, 2, 16]), random(&[1, 10, 4, 8]));
/// let (decay, beta) = (random(&[1, 10, 4]).abs().neg(), random(&[1, 10, 4]).sigmoid());
/// let inputs = DeltaRuleInputs { query: &query, key: &key, value: &value, decay: &decay, beta: &beta };
/// let options = DeltaRuleOptions { qk_l2norm: true, ..Default::default() };
/// let (output, state) = gated_delta_rule(inputs, None, &options)?;
/// assert_eq!(output.size(), [1, 10, 4, 8]);
/// assert_eq!(state.size(), [1, 4, 16, 8]);
/// # Ok::<(), overdrive_linear_attention::Error>(())
/// ```
pub fn gated_delta_rule(
    inputs: DeltaRuleInputs<'_>,
    state: Option<&Tensor>,
    options: &DeltaRuleOptions,
) -> Result<(Tensor, Tensor)> {
    options.check()?;
    let sizes = inputs.check(2)?;
    if let Some(state) = state {
        let batch = inputs.value.size()[0];
        check_state("state", state, batch, sizes, &inputs, "(B, H, D_k, D_v)")?;
    }
    let Some(kind) = kernel_kind(&inputs, options.backend)? else {
        return math(&inputs, state, sizes, options);
    };
    let [batch, tokens] = [0, 1].map(|dimension| inputs.value.size()[dimension]);
    let plan = plan(batch_sequences(batch, tokens), sizes, options);
    let (output, state) = delta_fused::batch(&Converted::new(&inputs, kind)?, state, plan)?;
    Ok((output.f_to_kind(inputs.value.kind())?, state))
}

/// Returns the dtype in which the kernel takes queries, keys and values; `None` if libtorch's operators run.
fn kernel_kind(inputs: &DeltaRuleInputs<'_>, backend: Backend) -> Result<Option<Kind>> {
    choose(backend, delta_fused::kernel_kind(inputs), "an input")
}

fn plan(sequences: Vec<Sequence>, sizes: Sizes, options: &DeltaRuleOptions) -> Plan {
    Plan {
        sequences,
        sizes,
        scale: scale_of(options, sizes),
        qk_l2norm: options.qk_l2norm,
    }
}

/// Runs libtorch's operators on a batch.
fn math(
    inputs: &DeltaRuleInputs<'_>,
    state: Option<&Tensor>,
    sizes: Sizes,
    options: &DeltaRuleOptions,
) -> Result<(Tensor, Tensor)> {
    let kind = inputs.state_kind();
    let batch = inputs.value.size()[0];
    let state = match state {
        Some(state) => state.shallow_clone(),
        None => {
            let shape = [batch, sizes.heads, sizes.key_dim, sizes.value_dim];
            Tensor::f_zeros(shape, (kind, inputs.value.device()))?
        }
    };
    if inputs.decay.numel() == 0 || sizes.value_dim == 0 {
        // No token changes a state that has elements. A copy, as every other result is.
        return Ok((inputs.value.f_zeros_like()?, state.f_mul_scalar(1.0)?));
    }
    // Autocast would round the widened operands.
    let _full_precision = autocast::off(inputs.value.device())?;
    let terms = Terms::new(inputs, kind, scale_of(options, sizes), options.qk_l2norm)?;
    let (output, state) = terms.run(&state, options.chunk_size)?;
    Ok((output.f_to_kind(inputs.value.kind())?, state))
}

/// Computes [`gated_delta_rule`] for packed sequences, each from a state of zeros: training on packs.
///
/// The tensors have the tokens of all sequences one after another, (N, heads, …); sequence `i` has the rows
/// `offsets[i]..offsets[i + 1]` (flash-attn's `cu_seqlens`). Returns the output (N, H, D_v) in the dtype of `value`, in which
/// no sequence depends on another.
///
/// # Errors
/// As [`gated_delta_rule`]; [`Error::Sequences`](crate::Error::Sequences) if the offsets do not divide the rows.
pub fn gated_delta_rule_varlen(
    inputs: DeltaRuleInputs<'_>,
    offsets: &[i64],
    options: &DeltaRuleOptions,
) -> Result<Tensor> {
    options.check()?;
    let sizes = inputs.check(1)?;
    let value_kind = inputs.value.kind();
    let lengths = lengths(offsets, inputs.value.size()[0])?;
    if let Some(kind) = kernel_kind(&inputs, options.backend)? {
        let plan = plan(packed_sequences(offsets, &lengths, None), sizes, options);
        let inputs = Converted::new(&inputs, kind)?.unsqueezed()?;
        let output = delta_fused::varlen(&inputs, plan)?.f_squeeze_dim(0)?;
        return Ok(output.f_to_kind(value_kind)?);
    }
    let mut outputs = vec![inputs.value.f_narrow(0, 0, 0)?];
    for (&start, &length) in offsets.iter().zip(&lengths) {
        let rows = inputs.try_map(|x| Ok(x.f_narrow(0, start, length)?.f_unsqueeze(0)?))?;
        let (output, _) = math(&inputs_of(&rows), None, sizes, options)?;
        outputs.push(output.f_squeeze_dim(0)?);
    }
    Ok(Tensor::f_cat(&outputs, 0)?)
}

/// Computes [`gated_delta_rule`] for packed sequences whose states are in a pool, and updates the pool: inference, without
/// gradients.
///
/// The tensors are packed as for [`gated_delta_rule_varlen`]. `states` (S, H, D_k, D_v), contiguous and in f32 (f64 if an
/// input is f64), is the pool; sequence `i` continues from row `slots[i]`, and its new state replaces that row, or another
/// one ([`StateSlot`]). Other rows stay as they are. Returns the output (N, H, D_v) in the dtype of `value`.
///
/// On a CPU (unless `backend` is `Math`), neither the output nor a state depends, in any bit, on how the tokens of a
/// sequence are divided among calls, on the other sequences of a call, or on the number of threads.
///
/// # Errors
/// As [`gated_delta_rule`]; [`Error::Sequences`](crate::Error::Sequences) if the offsets do not divide the rows, if the slots
/// are not different rows of the pool, or if one is read for a sequence and written for another. The states are unchanged
/// then.
pub fn gated_delta_rule_update(
    inputs: DeltaRuleInputs<'_>,
    states: &mut Tensor,
    slots: &[impl Copy + Into<StateSlot>],
    offsets: &[i64],
    options: &DeltaRuleOptions,
) -> Result<Tensor> {
    options.check()?;
    let sizes = inputs.check(1)?;
    let pool = states.size().first().copied().unwrap_or(0);
    check_state("states", states, pool, sizes, &inputs, "(S, H, D_k, D_v)")?;
    let lengths = lengths(offsets, inputs.value.size()[0])?;
    let slots = checked_slots(slots, lengths.len(), pool)?;
    let _no_grad = NoGradGuard::new();
    let inputs = inputs.try_map(|input| apart(input, states))?;
    let inputs = inputs_of(&inputs);
    let scale = scale_of(options, sizes);
    if let Some(output) = gpu::delta_rule(&inputs, states, &slots, offsets, scale, options)? {
        return Ok(output);
    }
    if let Some(kind) = kernel_kind(&inputs, options.backend)? {
        check_contiguous(states)?;
        let plan = plan(
            packed_sequences(offsets, &lengths, Some(&slots)),
            sizes,
            options,
        );
        let converted = Converted::new(&inputs, kind)?.unsqueezed()?;
        let output = delta_fused::update(&converted, &plan, states)?.f_squeeze_dim(0)?;
        return Ok(output.f_to_kind(inputs.value.kind())?);
    }
    copy_states(states, &slots)?;
    let device = inputs.value.device();
    let mut output = inputs.value.f_zeros_like()?;
    each_group(offsets, &lengths, &slots, device, |group| {
        let tokens = inputs.try_map(|x| group.tokens(x))?;
        let state = states.f_index_select(0, &group.slots)?;
        let (part, state) = math(&inputs_of(&tokens), Some(&state), sizes, options)?;
        let _same = output.f_index_copy_(0, &group.rows, &part.f_flatten(0, 1)?)?;
        let _same = states.f_index_copy_(0, &group.slots, &state)?;
        Ok(())
    })?;
    Ok(output)
}
