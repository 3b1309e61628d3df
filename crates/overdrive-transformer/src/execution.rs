/// Which of several equal ways of computing a Llama's attention are used.
///
/// The results differ by rounding only. The defaults are the fastest measured
/// (`examples/time_step.rs` prints all of them); they are switches so that another machine can be
/// measured, and so that one can be ruled out in a search for a difference.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Execution {
    /// Rotate query and key as complex numbers, one product each, instead of a product, a roll and a
    /// fused multiply-add. It needs the two halves of a head interleaved, which is had by
    /// reordering the rows of the two projection weights in each forward (tiny beside the
    /// activations). Used where parameters are fp32 or fp64 and no cache is given; default true.
    pub complex_rotary: bool,
    /// Concatenate the query, key and value weights in each forward and do one product instead of
    /// three. Used where no cache is given; default false.
    pub fused_qkv: bool,
    /// Use libtorch's `rms_norm` instead of the norm in elementary operators. `None`, the default:
    /// where the device is not a CPU (there it is one kernel, while on a CPU it decomposes into
    /// more passes than ours).
    pub native_rms_norm: Option<bool>,
}

impl Default for Execution {
    fn default() -> Self {
        Execution {
            complex_rotary: true,
            fused_qkv: false,
            native_rms_norm: None,
        }
    }
}
