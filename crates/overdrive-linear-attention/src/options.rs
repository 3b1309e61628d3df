//! The options of both functions.

use overdrive_core::check_at_least;

use crate::Result;

/// The implementations to choose from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Backend {
    /// The kernel of this crate if it takes the tensors, else libtorch's operators.
    #[default]
    Auto,
    /// libtorch's operators: on any device, in any floating-point dtype, differentiable any number of times. The delta
    /// rule runs in its chunked form.
    Math,
    /// The kernel of this crate: on a CPU, in f32, bf16 and f16 (arithmetic in f32), differentiable once. The delta rule
    /// runs in its recurrent form, whose bits depend neither on how the tokens of a sequence are divided among calls nor
    /// on the other sequences of a call.
    Fused,
}

/// Returns `kernel`, what the kernel needs if it can run, or `None` if libtorch's operators shall run.
pub(crate) fn choose<T>(backend: Backend, kernel: Option<T>, what: &str) -> Result<Option<T>> {
    match (backend, kernel) {
        (Backend::Math, _) => Ok(None),
        (Backend::Fused, None) => {
            let expected =
                format!("Auto or Math, since {what} is not on the CPU in Float, BFloat16 or Half");
            Err(overdrive_core::Error::option("backend", "Fused", expected).into())
        }
        (_, kernel) => Ok(kernel),
    }
}

/// The options of [`gated_delta_rule`](crate::gated_delta_rule) and its variants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DeltaRuleOptions {
    /// If `true`, queries and keys are divided by `sqrt(Σ x² + 1e-6)` first (flash-linear-attention's
    /// `use_qk_l2norm_in_kernel`). Default: `false`.
    pub qk_l2norm: bool,
    /// The factor of the queries. Default: `1/sqrt(D_k)`.
    pub scale: Option<f64>,
    /// The implementation. Default: automatic.
    pub backend: Backend,
    /// The number of tokens in a chunk of the chunked form (libtorch's operators), which changes no result but for
    /// rounding. Default: 64.
    pub chunk_size: i64,
}

impl Default for DeltaRuleOptions {
    fn default() -> Self {
        DeltaRuleOptions {
            qk_l2norm: false,
            scale: None,
            backend: Backend::Auto,
            chunk_size: 64,
        }
    }
}

impl DeltaRuleOptions {
    pub(crate) fn check(&self) -> Result<()> {
        check_at_least("chunk_size", self.chunk_size, 1)?;
        if let Some(scale) = self.scale.filter(|scale| !scale.is_finite()) {
            let expected = "finite, or None for 1/sqrt(D_k)";
            return Err(overdrive_core::Error::option("scale", scale, expected).into());
        }
        Ok(())
    }
}

/// The function that follows the convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ConvActivation {
    /// No function.
    Identity,
    /// `x · sigmoid(x)`.
    #[default]
    Silu,
}

/// The options of [`causal_conv1d`](crate::causal_conv1d) and its variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CausalConv1dOptions {
    /// The function that follows the convolution. Default: SiLU.
    pub activation: ConvActivation,
    /// The implementation. Default: automatic.
    pub backend: Backend,
}
