//! The switch by which the result of a row has the same bits whatever rows lie beside it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

const UNSET: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

static STATE: AtomicU8 = AtomicU8::new(UNSET);

/// Sets whether the kernels of this process compute a row (a token of a sequence) bit for bit as they would compute it
/// alone, whatever the number of rows of the call, on CPUs.
///
/// By default a kernel adds the terms of a row in the order that is fastest for the number of rows, so that results differ in
/// their last bits: a sequence that is decoded alone and one that is decoded beside others, or whose prompt is read in
/// chunks of another size, may differ in a token. Weights of 4 bits, or of 8 bits in groups, are multiplied in the same integers
/// in any case, and where these are bytes in the same order too. The switch also fixes the order where they are words, in
/// attention, in dense matmuls that are not recorded for gradients, and with 8 bits by row, at the cost of speed in prefill
/// (vLLM's `VLLM_BATCH_INVARIANT`).
///
/// The environment variable `OVERDRIVE_BATCH_INVARIANT=1` sets it where no call does.
///
/// Not covered: GPUs, matmuls of libtorch's own (f64, `fused_kernels: false`, weights of 4 bits with
/// [`Activations::Float`]), `llm-int8`, whose outlier columns are those of the whole batch, and gradients.
///
/// [`Activations::Float`]: https://docs.rs/overdrive-quantization
pub fn set_batch_invariant(on: bool) {
    STATE.store(if on { ON } else { OFF }, Ordering::Relaxed);
}

/// Returns `true` if results of a row must not depend on the rows beside it ([`set_batch_invariant`]).
pub fn is_batch_invariant() -> bool {
    static VARIABLE: OnceLock<bool> = OnceLock::new();
    match STATE.load(Ordering::Relaxed) {
        UNSET => *VARIABLE.get_or_init(|| {
            std::env::var("OVERDRIVE_BATCH_INVARIANT").is_ok_and(|value| value == "1")
        }),
        state => state == ON,
    }
}
