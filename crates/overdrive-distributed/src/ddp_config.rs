//! Options of data parallel training.

use overdrive_sys::c10d::ReducerOptions;
use serde::{Deserialize, Serialize};
use tch::Kind;

use crate::Result;

const MIB: f64 = 1024.0 * 1024.0;

/// The dtype in which gradients are reduced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientCompression {
    /// The gradients' own dtype.
    #[default]
    None,
    /// bfloat16 (`bf16_compress_hook`): half the bytes, 8 bits of precision.
    Bf16,
    /// float16 (`fp16_compress_hook`): half the bytes, 11 bits of precision, overflow from 65504.
    Fp16,
}

/// The options of [`DistributedDataParallel`](crate::DistributedDataParallel). Names and defaults are those of
/// torch, except for the default of `gradient_as_bucket_view`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DdpConfig {
    /// The size of a bucket, the gradients that are reduced together, in MiB. Default 25; the first bucket
    /// has at most 1 MiB, so that reduction starts early.
    pub bucket_cap_mb: f64,
    /// If `true`, the graph is searched before each backward for parameters that it does not reach. If
    /// `false`, a parameter without a gradient is an error in the next forward. Default `false`, because the
    /// search walks the whole graph.
    pub find_unused_parameters: bool,
    /// If `true`, every backward pass uses the same parameters, as often as the first one does. The first pass then
    /// counts them and reduces at its end, so that later ones need no search for parameters that are not reached,
    /// and a parameter that receives its gradient in several parts is reduced after the last. Default
    /// `false`.
    pub static_graph: bool,
    /// If `true`, gradients are views of the buckets, without a second copy. Default `true` (torch: `false`,
    /// because Python code may detach gradients in place).
    pub gradient_as_bucket_view: bool,
    /// If `true`, the buffers of rank 0 are broadcast before each forward. Default `true`.
    pub broadcast_buffers: bool,
    /// The dtype in which gradients are reduced.
    pub compression: GradientCompression,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            find_unused_parameters: false,
            static_graph: false,
            gradient_as_bucket_view: true,
            broadcast_buffers: true,
            compression: GradientCompression::None,
        }
    }
}

impl DdpConfig {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a bucket size that is not positive.
    pub fn validate(&self) -> Result<()> {
        overdrive_core::check_positive("bucket_cap_mb", self.bucket_cap_mb)?;
        Ok(())
    }

    pub(crate) fn reducer_options(&self) -> ReducerOptions {
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "above 0 and finite, and saturating"
        )]
        let bucket_bytes = (self.bucket_cap_mb * MIB).max(1.0) as usize;
        ReducerOptions {
            bucket_bytes,
            // torch caps the first bucket for its default size only; a smaller first bucket never hurts.
            first_bucket_bytes: bucket_bytes.min(1024 * 1024),
            find_unused_parameters: self.find_unused_parameters,
            static_graph: self.static_graph,
            gradient_as_bucket_view: self.gradient_as_bucket_view,
            compression: match self.compression {
                GradientCompression::None => None,
                GradientCompression::Bf16 => Some(Kind::BFloat16),
                GradientCompression::Fp16 => Some(Kind::Half),
            },
        }
    }
}
