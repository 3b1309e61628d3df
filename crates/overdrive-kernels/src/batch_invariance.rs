//! A switch that makes the result of a row independent of the other rows, bit for bit.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

const UNSET: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNSET);

/// Sets whether the CPU kernels of this process compute each row (a token of a sequence) bit for bit as they would
/// compute it alone, for any number of rows.
///
/// By default a kernel adds the terms of a row in the order that is fastest for the number of rows, so results differ
/// in their last bits: a sequence may get other tokens if it is decoded together with others, or if its prompt is
/// processed in chunks of another size. Weights with 4 bits, or with 8 bits in groups, are always multiplied in the
/// same integers and, if these are bytes, in the same order. The switch also fixes the order if they are words, and for
/// attention, dense matmuls that are not recorded for gradients, and weights with 8 bits by row, at the cost of slower
/// prefill (as vLLM's `VLLM_BATCH_INVARIANT`).
///
/// Without a call, the environment variable `OVERDRIVE_BATCH_INVARIANT=1` sets it.
///
/// Not covered: GPUs, libtorch's matmuls (f64, `fused_kernels: false`, weights with 4 bits and
/// [`Activations::Float`]), `llm-int8`, whose outlier columns depend on the whole batch, and gradients.
///
/// [`Activations::Float`]: https://docs.rs/overdrive-quantization
pub fn set_batch_invariant(on: bool) {
    STATE.store(if on { ON } else { OFF }, Ordering::Relaxed);
}

/// Returns `true` if the result of a row must not depend on the other rows ([`set_batch_invariant`]).
pub fn is_batch_invariant() -> bool {
    static VARIABLE: OnceLock<bool> = OnceLock::new();
    match STATE.load(Ordering::Relaxed) {
        UNSET => *VARIABLE.get_or_init(|| {
            std::env::var("OVERDRIVE_BATCH_INVARIANT").is_ok_and(|value| value == "1")
        }),
        state => state == ON,
    }
}
