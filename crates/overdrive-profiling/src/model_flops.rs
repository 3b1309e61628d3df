//! The arithmetic of a model per token, and its model FLOPs utilization (MFU).

/// The shape of a decoder that determines its arithmetic.
///
/// Training costs `6·N + 12·L·H·Q·T` floating-point operations per token: two for each weight forward
/// and four backward, and the same for the matrix products of attention, which have no weights (PaLM,
/// Chowdhery et al. 2022, appendix B; nanoGPT's `estimate_mfu`). Of the four backward, two are for the
/// gradient of the activations and two for that of the weight, which a frozen weight does not have: a model of
/// `N` weights of which `M` are trained, as with LoRA, costs `4·N + 2·M + 12·L·H·Q·T`. Recomputed activations do
/// not count: they are work of the method, not of the model.
///
/// ```
/// use overdrive_profiling::ModelFlops;
///
/// let model = ModelFlops {
///     parameters: 124_000_000, trainable_parameters: 124_000_000,
///     layers: 12, heads: 12, head_dim: 64, sequence_length: 1024,
/// };
/// assert_eq!(model.per_token(), 857_246_208.0);
/// // 150,000 tokens per second on a device that can do 312 TFLOP/s:
/// let mfu = model.utilization(150_000.0, 312e12);
/// assert!((mfu - 0.412).abs() < 1e-3);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelFlops {
    /// The number of weights in matrix products (N): all parameters except position embeddings.
    pub parameters: u64,
    /// The number of those weights that are trained: all of them, or the adapters' alone.
    pub trainable_parameters: u64,
    /// The number of decoder layers (L).
    pub layers: u64,
    /// The number of query heads (H).
    pub heads: u64,
    /// The number of features per head (Q).
    pub head_dim: u64,
    /// The number of tokens per sequence (T).
    pub sequence_length: u64,
}

impl ModelFlops {
    /// Returns the floating-point operations of forward and backward a token.
    pub fn per_token(&self) -> f64 {
        let weights = 4.0 * self.parameters as f64 + 2.0 * self.trainable_parameters as f64;
        let width = self.heads as f64 * self.head_dim as f64;
        weights + 12.0 * self.layers as f64 * width * self.sequence_length as f64
    }

    /// Returns the model FLOPs utilization (MFU), 0 to 1, of `tokens_per_second` on a device with a peak of
    /// `peak_flops` floating-point operations per second. NaN if the peak is not positive.
    pub fn utilization(&self, tokens_per_second: f64, peak_flops: f64) -> f64 {
        if peak_flops > 0.0 {
            self.per_token() * tokens_per_second / peak_flops
        } else {
            f64::NAN
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frozen_weights_have_no_gradient_of_their_own() {
        let full = ModelFlops {
            parameters: 1_000_000,
            trainable_parameters: 1_000_000,
            layers: 2,
            heads: 4,
            head_dim: 8,
            sequence_length: 16,
        };
        // 12 · 2 · 32 · 16 for attention.
        assert_eq!(full.per_token(), 6_000_000.0 + 12_288.0);
        // A frozen base of a million weights with adapters of 10,000: 4 for each weight, and 2 more for each
        // of the adapters'.
        let lora = ModelFlops {
            parameters: 1_010_000,
            trainable_parameters: 10_000,
            ..full
        };
        assert_eq!(lora.per_token(), 4_040_000.0 + 20_000.0 + 12_288.0);
        // Forward and backward of 100 tokens per second on a device with 1 GFLOP/s.
        assert!((lora.utilization(100.0, 1e9) - 0.407_228_8).abs() < 1e-12);
    }
}
