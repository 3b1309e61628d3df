//! The choice of the back end of a call.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Mutex, OnceLock, PoisonError};

use tch::{Device, Kind, Tensor};

use crate::call::Call;
use crate::gpu_preference;
use crate::{Alignment, AttentionOptions, Backend, Error, PackedLengths, Result};

/// The back end that an attention would run on, and the reasons against the others.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explanation {
    /// The back end that would run; `None` if the requested back end cannot.
    pub backend: Option<Backend>,
    /// The reason for the choice.
    pub reason: String,
    /// All back ends, in the order of preference on this device.
    pub verdicts: Vec<Verdict>,
}

/// The reasons against one back end.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Verdict {
    /// The back end.
    pub backend: Backend,
    /// The reasons why it cannot run; empty if it can.
    pub refusals: Vec<String>,
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.backend {
            Some(backend) => writeln!(f, "{backend} runs: {}", self.reason)?,
            None => writeln!(f, "no back end runs: {}", self.reason)?,
        }
        for verdict in &self.verdicts {
            match verdict.refusals.as_slice() {
                [] => writeln!(f, "  {}: can run", verdict.backend)?,
                refusals => writeln!(f, "  {}: {}", verdict.backend, refusals.join("; "))?,
            }
        }
        Ok(())
    }
}

/// Returns the back end that [`attention`](crate::attention) would use for these arguments and the reasons against
/// the others, without computing anything.
///
/// # Errors
/// Those of [`attention`](crate::attention) for shapes, dtypes and options, but not for a requested back end
/// that cannot run, which the explanation reports.
pub fn explain(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: &AttentionOptions<'_>,
) -> Result<Explanation> {
    Ok(explanation(&Call::new(query, key, value, options, false)?))
}

/// Returns the explanation of [`explain`] for [`attention_varlen`](crate::attention_varlen).
///
/// # Errors
/// As [`explain`].
pub fn explain_varlen(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    lengths: &PackedLengths,
    options: &AttentionOptions<'_>,
) -> Result<Explanation> {
    Ok(explanation(&Call::packed(
        query, key, value, lengths, options, false,
    )?))
}

/// Returns the back end for a call; a requested back end that cannot run is an error with its reasons.
pub(crate) fn select(call: &Call<'_>) -> Result<Backend> {
    if call.options.backend == Backend::Auto && !tracing::enabled!(tracing::Level::DEBUG) {
        // Omits the reasons against the other back ends: formatting them takes longer than the attention of one
        // token.
        let mut backends = preference(call).into_iter();
        let first = backends.find(|backend| refusals(call, *backend).is_empty());
        return Ok(first.unwrap_or(Backend::Math));
    }
    let explanation = explanation(call);
    let forced = call.options.backend;
    let Some(backend) = explanation.backend else {
        let refused = explanation
            .verdicts
            .iter()
            .find(|verdict| verdict.backend == forced);
        let able = explanation
            .verdicts
            .iter()
            .filter(|verdict| verdict.refusals.is_empty());
        let names: Vec<_> = able
            .map(|verdict| format!("Backend::{:?}", verdict.backend))
            .collect();
        return Err(Error::Backend {
            backend: forced,
            reasons: refused
                .map(|verdict| verdict.refusals.clone())
                .unwrap_or_default(),
            alternatives: names.join(", "),
        });
    };
    log_once(call, backend, &explanation.reason);
    Ok(backend)
}

fn explanation(call: &Call<'_>) -> Explanation {
    let forced = call.options.backend;
    let verdicts: Vec<Verdict> = preference(call)
        .into_iter()
        .map(|backend| Verdict {
            backend,
            refusals: refusals(call, backend),
        })
        .collect();
    let able = |backend: Backend| {
        verdicts
            .iter()
            .any(|verdict| verdict.backend == backend && verdict.refusals.is_empty())
    };
    let (backend, reason) = match forced {
        Backend::Auto => {
            let first = verdicts.iter().find(|verdict| verdict.refusals.is_empty());
            let backend = first.map_or(Backend::Math, |verdict| verdict.backend);
            (Some(backend), preferred_because(call, backend))
        }
        forced if able(forced) => (Some(forced), "it was requested".to_owned()),
        forced => (
            None,
            format!("{forced} was requested but cannot run this attention"),
        ),
    };
    Explanation {
        backend,
        reason,
        verdicts,
    }
}

/// Returns the back ends from the fastest to the slowest.
fn preference(call: &Call<'_>) -> [Backend; 5] {
    match call.device {
        // On a CPU this crate's kernel comes before libtorch's flash: on two cores with AVX-512 (Zen 4),
        // causal, batch 2, 6 heads of 64, f32, they reach 147 and 66 GFLOP/s forward at T = 512 and 191 and
        // 137 at T = 4096; with backward 132 and 63, and 195 and 134. It is also faster in bf16, f16 and
        // f64, without causality, and from T = 64 on (benches/attention).
        Device::Cpu => [
            Backend::Blockwise,
            Backend::Flash,
            Backend::Math,
            Backend::Efficient,
            Backend::CuDnn,
        ],
        _ if gpu_preference::of(call) => [
            Backend::CuDnn,
            Backend::Flash,
            Backend::Efficient,
            Backend::Math,
            Backend::Blockwise,
        ],
        _ => [
            Backend::Flash,
            Backend::Efficient,
            Backend::CuDnn,
            Backend::Math,
            Backend::Blockwise,
        ],
    }
}

fn preferred_because(call: &Call<'_>, backend: Backend) -> String {
    match (call.device, backend) {
        (Device::Cpu, Backend::Blockwise) => {
            "on a CPU it supports every option and is the fastest".to_owned()
        }
        (_, Backend::Math) => "no fused back end supports all of these options".to_owned(),
        (_, Backend::CuDnn) if gpu_preference::of(call) => {
            "it is the fastest on this GPU for training in few shapes".to_owned()
        }
        _ => "it is the fastest that supports all of these options".to_owned(),
    }
}

fn refusals(call: &Call<'_>, backend: Backend) -> Vec<String> {
    let mut reasons = Vec::new();
    match (backend, call.device) {
        (Backend::Auto, _) => {}
        (Backend::Math, _) => {
            if seeded(call) {
                reasons.push("its dropout takes no seed".to_owned());
            }
        }
        (Backend::Blockwise, Device::Cpu) => of_blockwise(call, &mut reasons),
        (Backend::Blockwise, device) => {
            reasons.push(format!("it runs on a CPU, the query is on {device:?}"));
        }
        (Backend::Flash, Device::Cpu) => of_cpu_flash(call, &mut reasons),
        (Backend::Flash, Device::Cuda(_)) => of_cuda_flash(call, &mut reasons),
        (Backend::Flash, device) => {
            reasons.push(format!(
                "it runs on a CPU or CUDA, the query is on {device:?}"
            ));
        }
        (Backend::Efficient, Device::Cuda(_)) => of_efficient(call, &mut reasons),
        (Backend::CuDnn, Device::Cuda(_)) => of_cudnn(call, &mut reasons),
        (Backend::Efficient | Backend::CuDnn, device) => {
            reasons.push(format!("it runs on CUDA, the query is on {device:?}"));
        }
    }
    reasons
}

fn seeded(call: &Call<'_>) -> bool {
    call.options.dropout_p > 0.0 && call.options.dropout_seed.is_some()
}

fn dtype(call: &Call<'_>, allowed: &[Kind], reasons: &mut Vec<String>) {
    if !allowed.contains(&call.kind) {
        reasons.push(format!("dtype {:?} is not one of {allowed:?}", call.kind));
    }
}

fn of_blockwise(call: &Call<'_>, reasons: &mut Vec<String>) {
    let allowed = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    dtype(call, &allowed, reasons);
}

/// Adds the options that no kernel of libtorch supports.
fn of_libtorch(call: &Call<'_>, reasons: &mut Vec<String>) {
    if call.is_empty() {
        reasons.push("a dimension is empty".to_owned());
    }
    if call.sizes.key_dim != call.sizes.value_dim {
        reasons.push(format!(
            "keys have {} dimensions and values {}",
            call.sizes.key_dim, call.sizes.value_dim
        ));
    }
    if call.options.softcap.is_some() {
        reasons.push("it has no softcap".to_owned());
    }
    if call.limits.sink_tokens > 0 {
        reasons.push("it has no sink tokens under a window".to_owned());
    }
    if seeded(call) {
        reasons.push("its dropout takes no seed".to_owned());
    }
    if call.with_lse && call.needs_grad {
        reasons.push("its log-sum-exp has no gradient".to_owned());
    }
}

/// Adds the options that the kernels of PyTorch's `scaled_dot_product_attention` do not support either: all but a
/// causal mask from the top left.
fn of_sdpa(call: &Call<'_>, reasons: &mut Vec<String>) {
    if call.is_packed {
        reasons.push("it takes no packed sequences".to_owned());
    }
    if !call.sees_all() && !call.is_causal() {
        reasons.push("it has no window".to_owned());
    }
    if call.is_causal() && !call.is_square && call.options.alignment == Alignment::BottomRight {
        reasons.push(format!(
            "its causal mask is aligned to the top left, which differs for {} queries and {} keys",
            call.sizes.queries, call.sizes.keys
        ));
    }
    if call.options.alibi_slopes.is_some() {
        reasons.push("it has no ALiBi".to_owned());
    }
    if call.options.sinks.is_some() {
        reasons.push("it has no sink logits".to_owned());
    }
}

fn of_cpu_flash(call: &Call<'_>, reasons: &mut Vec<String>) {
    of_libtorch(call, reasons);
    of_sdpa(call, reasons);
    let allowed = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half];
    dtype(call, &allowed, reasons);
    if call.options.dropout_p > 0.0 {
        reasons.push("it has no dropout on a CPU".to_owned());
    }
    if let Some(mask) = &call.mask {
        if mask.requires_grad() && overdrive_autograd::is_grad_enabled() {
            reasons.push("it has no gradient for the mask".to_owned());
        }
        if call.with_lse {
            reasons.push(
                "its log-sum-exp is 0 rather than -inf for queries that a mask hides all keys from"
                    .to_owned(),
            );
        }
    }
}

fn of_cuda_flash(call: &Call<'_>, reasons: &mut Vec<String>) {
    of_libtorch(call, reasons);
    dtype(call, &[Kind::Half, Kind::BFloat16], reasons);
    head_size(call, 256, reasons);
    if call.mask.is_some() {
        reasons.push("it takes no mask".to_owned());
    }
    if call.options.alignment == Alignment::TopLeft && !call.is_square && !call.sees_all() {
        reasons.push(format!(
            "its positions are aligned to the bottom right, which differs for {} queries and {} keys",
            call.sizes.queries, call.sizes.keys
        ));
    }
    // It is compiled with FLASHATTENTION_DISABLE_ALIBI, and throws at slopes.
    if call.options.alibi_slopes.is_some() {
        reasons.push("libtorch's build of it has no ALiBi".to_owned());
    }
}

fn of_efficient(call: &Call<'_>, reasons: &mut Vec<String>) {
    of_libtorch(call, reasons);
    of_sdpa(call, reasons);
    dtype(call, &[Kind::Float, Kind::Half, Kind::BFloat16], reasons);
    if call.mask.is_some() && call.is_causal() {
        reasons.push("it takes a mask or causality, not both".to_owned());
    }
}

fn of_cudnn(call: &Call<'_>, reasons: &mut Vec<String>) {
    of_libtorch(call, reasons);
    of_sdpa(call, reasons);
    dtype(call, &[Kind::Half, Kind::BFloat16], reasons);
    head_size(call, 128, reasons);
    if call.mask.is_some() {
        reasons.push("it takes no mask here".to_owned());
    }
    if call.sizes.keys == 1 {
        reasons.push("it does not take a single key".to_owned());
    }
    if call.sizes.queries == 1 && call.options.dropout_p > 0.0 {
        reasons.push("it has no dropout for a single query".to_owned());
    }
}

fn head_size(call: &Call<'_>, most: i64, reasons: &mut Vec<String>) {
    let dim = call.sizes.key_dim;
    // The kernels load 16 bytes, eight half-precision elements, at a time.
    if dim > most || dim % 8 != 0 {
        reasons.push(format!(
            "head size {dim} is not a multiple of 8 up to {most}"
        ));
    }
}

/// Logs with `tracing` which back end runs, once for each kind of call.
fn log_once(call: &Call<'_>, backend: Backend, reason: &str) {
    // Checked before the line is formatted, since this runs for each layer of each step.
    if !tracing::enabled!(tracing::Level::DEBUG) {
        return;
    }
    static SEEN: OnceLock<Mutex<HashSet<String>>> = OnceLock::new();
    let line = format!(
        "{backend} on {:?} in {:?}: {reason}",
        call.device, call.kind
    );
    let mut seen = SEEN
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if seen.insert(line.clone()) {
        tracing::debug!(%backend, "attention: {line}");
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn flash_on_cuda_is_refused_with_alibi_also_without_a_gradient() {
        let x = Tensor::zeros([1, 2, 4, 8], (Kind::Half, Device::Cpu));
        let slopes = Tensor::from_slice(&[0.5_f32, 0.25]);
        let refused = |alibi_slopes| {
            let options = AttentionOptions {
                alibi_slopes,
                ..AttentionOptions::causal()
            };
            let mut call = Call::new(&x, &x, &x, &options, false).unwrap();
            assert!(!call.needs_grad);
            // The reasons depend on the device alone, so no GPU is needed.
            call.device = Device::Cuda(0);
            refusals(&call, Backend::Flash)
        };
        assert_eq!(refused(None), Vec::<String>::new());
        assert_eq!(
            refused(Some(&slopes)),
            ["libtorch's build of it has no ALiBi"]
        );
    }
}
