use overdrive_autograd::NoGradGuard;
use overdrive_sys::autocast;
use tch::Tensor;

use crate::conv_fused::{self, Filter};
use crate::conv_math::convolve;
use crate::error::{
    check_contiguous, check_device, check_floating, check_kind, check_shape, wrong_shape,
};
use crate::gpu;
use crate::options::choose;
use crate::sequences::{batch_sequences, each_group, lengths, packed_sequences};
use crate::state_slot::{apart, checked_slots, copy_states};
use crate::{Backend, CausalConv1dOptions, Result, StateSlot};

/// Checks the tensors but for the state; `x` has the dimensions `leading` before the channels. Returns the numbers of
/// channels and weights of each.
fn check(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, leading: usize) -> Result<(i64, i64)> {
    check_floating("x", x)?;
    check_floating("weight", weight)?;
    check_device("weight", weight, "x", x.device())?;
    let sizes = x.size();
    if sizes.len() != leading + 1 {
        let expected = ["(N, C)", "(B, T, C)"][leading - 1];
        return Err(wrong_shape("x", x, expected));
    }
    let channels = sizes[leading];
    let width = match weight.size()[..] {
        [rows, width] if rows == channels && width > 0 => width,
        _ => {
            let expected = format!(
                "(C, K) with C = {channels}, the channels of `x`, and K at least 1; squeeze a weight (C, 1, K)"
            );
            return Err(wrong_shape("weight", weight, expected));
        }
    };
    if let Some(bias) = bias {
        check_floating("bias", bias)?;
        check_device("bias", bias, "x", x.device())?;
        check_shape("bias", bias, &[channels], "(C,)")?;
    }
    Ok((channels, width))
}

/// Checks a state, or a pool of them.
fn check_state(
    name: &'static str,
    state: &Tensor,
    expected: [i64; 3],
    letters: &str,
    x: &Tensor,
) -> Result<()> {
    check_shape(name, state, &expected, letters)?;
    check_kind(name, state, x.kind(), ", as `x` is: it holds inputs")?;
    check_device(name, state, "x", x.device())
}

/// Returns `true` if the kernel runs, `false` if libtorch's operators do.
fn uses_kernel(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: &CausalConv1dOptions,
) -> Result<bool> {
    let kind = conv_fused::kernel_kind(x, weight, bias);
    // Nothing to convolve, and blocks of no channels.
    let kind = kind.filter(|_| options.backend == Backend::Fused || x.numel() > 0);
    Ok(choose(options.backend, kind, "an input")?.is_some())
}

fn zero_state(x: &Tensor, batch: i64, channels: i64, width: i64) -> Result<Tensor> {
    Ok(Tensor::f_zeros(
        [batch, channels, width - 1],
        (x.kind(), x.device()),
    )?)
}

/// Convolves each channel with its own few weights, over its last K inputs, and applies SiLU or nothing: the short
/// convolution before linear attention.
///
/// ```text
/// y[t, c] = activation(bias[c] + Σ_j weight[c, j] · x[t - K + 1 + j, c])
/// ```
///
/// `x` (B, T, C), `weight` (C, K), as `nn.Conv1d(C, C, K, groups=C)` has it without its middle dimension, `bias` (C,).
/// `state` (B, C, K - 1), in the dtype of `x`, has the inputs before the first token, the oldest first; zeros if `None`. Returns
/// `y` (B, T, C) in the dtype of `x`, and the state after the last token. The arithmetic is in f32 (f64 if `x` or `weight` is
/// f64), and results are rounded once. Both results can be differentiated by all inputs.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) for a tensor of the wrong shape, dtype or device.
///
/// ```
/// use overdrive_linear_attention::{CausalConv1dOptions, causal_conv1d};
/// use tch::{Device, Kind, Tensor};
///
/// let x = Tensor::randn([1, 10, 6], (Kind::Float, Device::Cpu));
/// let weight = Tensor::randn([6, 4], (Kind::Float, Device::Cpu));
/// let options = CausalConv1dOptions::default();
/// let (y, _) = causal_conv1d(&x, &weight, None, None, &options)?;
/// // In two calls.
/// let (first, state) = causal_conv1d(&x.narrow(1, 0, 7), &weight, None, None, &options)?;
/// let (second, _) = causal_conv1d(&x.narrow(1, 7, 3), &weight, None, Some(&state), &options)?;
/// assert!(Tensor::cat(&[first, second], 1).allclose(&y, 1e-5, 1e-6, false));
/// # Ok::<(), overdrive_linear_attention::Error>(())
/// ```
pub fn causal_conv1d(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: Option<&Tensor>,
    options: &CausalConv1dOptions,
) -> Result<(Tensor, Tensor)> {
    let (channels, width) = check(x, weight, bias, 2)?;
    let (batch, tokens) = (x.size()[0], x.size()[1]);
    if let Some(state) = state {
        let expected = [batch, channels, width - 1];
        check_state("state", state, expected, "(B, C, K - 1)", x)?;
    }
    if uses_kernel(x, weight, bias, options)? {
        let filter = Filter::new(weight, bias, options.activation)?;
        return conv_fused::apply_filter(x, &filter, state, batch_sequences(batch, tokens));
    }
    let state = match state {
        Some(state) => state.shallow_clone(),
        None => zero_state(x, batch, channels, width)?,
    };
    math(x, weight, bias, &state, options)
}

/// Runs libtorch's operators on a batch.
fn math(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: &Tensor,
    options: &CausalConv1dOptions,
) -> Result<(Tensor, Tensor)> {
    if x.numel() == 0 {
        // No token changes a state that has elements. A copy, as every other result is.
        return Ok((x.f_zeros_like()?, state.f_mul_scalar(1.0)?));
    }
    // Autocast would round the widened operands.
    let _full_precision = autocast::off(x.device())?;
    convolve(x, weight, bias, state, options.activation)
}

/// Computes [`causal_conv1d`] for packed sequences, each from a state of zeros: training on packs.
///
/// `x` (N, C) has the tokens of all sequences one after another; sequence `i` has the rows `offsets[i]..offsets[i + 1]`
/// (flash-attn's `cu_seqlens`). Returns `y` (N, C), in which no sequence depends on another.
///
/// # Errors
/// As [`causal_conv1d`]; [`Error::Sequences`](crate::Error::Sequences) if the offsets do not divide the rows.
pub fn causal_conv1d_varlen(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    offsets: &[i64],
    options: &CausalConv1dOptions,
) -> Result<Tensor> {
    let (channels, width) = check(x, weight, bias, 1)?;
    let lengths = lengths(offsets, x.size()[0])?;
    if uses_kernel(x, weight, bias, options)? {
        let filter = Filter::new(weight, bias, options.activation)?;
        let sequences = packed_sequences(offsets, &lengths, None);
        let (y, _) = conv_fused::apply_filter(&x.f_unsqueeze(0)?, &filter, None, sequences)?;
        return Ok(y.f_squeeze_dim(0)?);
    }
    let state = zero_state(x, 1, channels, width)?;
    let mut outputs = vec![x.f_narrow(0, 0, 0)?];
    for (&start, &length) in offsets.iter().zip(&lengths) {
        let rows = x.f_narrow(0, start, length)?.f_unsqueeze(0)?;
        let (y, _) = math(&rows, weight, bias, &state, options)?;
        outputs.push(y.f_squeeze_dim(0)?);
    }
    Ok(Tensor::f_cat(&outputs, 0)?)
}

/// Computes [`causal_conv1d`] for packed sequences whose states are in a pool, and updates the pool: inference, without
/// gradients.
///
/// `x` (N, C) is packed as for [`causal_conv1d_varlen`]. `states` (S, C, K - 1), contiguous and in the dtype of `x`, is the
/// pool; sequence `i` continues from row `slots[i]`, and its new state replaces that row, or another one ([`StateSlot`]).
/// Other rows stay as they are. Returns `y` (N, C).
///
/// # Errors
/// As [`causal_conv1d`]; [`Error::Sequences`](crate::Error::Sequences) as for
/// [`gated_delta_rule_update`](crate::gated_delta_rule_update). The states are unchanged then.
pub fn causal_conv1d_update(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    states: &mut Tensor,
    slots: &[impl Copy + Into<StateSlot>],
    offsets: &[i64],
    options: &CausalConv1dOptions,
) -> Result<Tensor> {
    let (channels, width) = check(x, weight, bias, 1)?;
    let pool = states.size().first().copied().unwrap_or(0);
    let expected = [pool, channels, width - 1];
    check_state("states", states, expected, "(S, C, K - 1)", x)?;
    let lengths = lengths(offsets, x.size()[0])?;
    let slots = checked_slots(slots, lengths.len(), pool)?;
    let _no_grad = NoGradGuard::new();
    let (x, weight) = (&apart(x, states)?, &apart(weight, states)?);
    let bias = bias.map(|bias| apart(bias, states)).transpose()?;
    let bias = bias.as_ref();
    if let Some(y) = gpu::causal_conv1d(x, weight, bias, states, &slots, offsets, options)? {
        return Ok(y);
    }
    if uses_kernel(x, weight, bias, options)? {
        check_contiguous(states)?;
        let filter = Filter::new(weight, bias, options.activation)?;
        let sequences = packed_sequences(offsets, &lengths, Some(&slots));
        let y = conv_fused::update(&x.f_unsqueeze(0)?, &filter, &sequences, states)?;
        return Ok(y.f_squeeze_dim(0)?);
    }
    copy_states(states, &slots)?;
    let mut output = x.f_zeros_like()?;
    each_group(offsets, &lengths, &slots, x.device(), |group| {
        let state = states.f_index_select(0, &group.slots)?;
        let (y, state) = math(&group.tokens(x)?, weight, bias, &state, options)?;
        let _same = output.f_index_copy_(0, &group.rows, &y.f_flatten(0, 1)?)?;
        let _same = states.f_index_copy_(0, &group.slots, &state)?;
        Ok(())
    })?;
    Ok(output)
}
