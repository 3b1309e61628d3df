//! A switch that makes the result of a row independent of the other rows, bit for bit.

use std::sync::Once;

use overdrive_core::Switch;

static SWITCH: Switch = Switch::new(
    "OVERDRIVE_BATCH_INVARIANT",
    "0 (off) or 1 (rows do not depend on one another)",
);

/// Sets whether the CPU kernels of this process compute each row (a token of a sequence) bit for bit as they would
/// compute it alone, for any number of rows (as vLLM's `VLLM_BATCH_INVARIANT`).
///
/// Attention always does, and so do weights of 4 bits, of 8 bits in groups, and of `int8`, whose activations are rounded
/// to integers. Dense weights, and those of 8 bits with activations in floats (`int8-weight`, `fp8`), do so for up to 32
/// rows in one call: with more, a library multiplies them, which is faster, but adds in an order that depends on the
/// number of rows. With the switch, a kernel of this workspace multiplies any number of rows, at half the speed for
/// long prompts.
///
/// Without a call, the environment variable `OVERDRIVE_BATCH_INVARIANT=1` sets it.
///
/// Not covered: GPUs, libtorch's matmuls (f64, `fused_kernels: false`, weights with 4 bits and
/// [`Activations::Float`]), the matmuls of adapters that are not merged, `llm-int8`, whose outlier columns depend on the
/// whole batch, and gradients.
///
/// [`Activations::Float`]: https://docs.rs/overdrive-quantization
pub fn set_batch_invariant(on: bool) {
    SWITCH.replace(Some(on));
}

/// Returns `true` if the result of a row must not depend on the other rows ([`set_batch_invariant`]).
///
/// A variable that is neither 0 nor 1 is reported once and does not turn it on.
pub fn is_batch_invariant() -> bool {
    static REPORT: Once = Once::new();
    let setting = SWITCH.get().unwrap_or_else(|error| {
        REPORT.call_once(|| tracing::warn!("{error}; it is off"));
        None
    });
    setting.unwrap_or(false)
}
