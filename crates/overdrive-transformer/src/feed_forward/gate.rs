use overdrive_fused::Activation;

use super::clamped_swiglu::ClampedSwiglu;

/// The function of gate and up.
#[derive(Debug, Clone, Copy)]
pub(super) enum Gate {
    /// `act(gate) · up` of gate and up, one after the other.
    Plain(Activation),
    /// gpt-oss's function of gate and up, which alternate.
    Clamped(ClampedSwiglu),
}
