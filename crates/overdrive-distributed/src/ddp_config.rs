//! How data parallel training works.

use overdrive_sys::c10d::ReducerOptions;
use serde::{Deserialize, Serialize};
use tch::Kind;

use crate::{Error, Result};

const MIB: f64 = 1024.0 * 1024.0;

/// The dtype that gradients travel in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GradientCompression {
    /// Their own.
    #[default]
    None,
    /// bfloat16 (`bf16_compress_hook`): half the bytes, 8 bits of precision.
    Bf16,
    /// float16 (`fp16_compress_hook`): half the bytes, 11 bits of precision, overflow from 65504.
    Fp16,
}

/// How [`DistributedDataParallel`](crate::DistributedDataParallel) works. The names and defaults are torch's, except for
/// `gradient_as_bucket_view`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DdpConfig {
    /// MiB of gradients that are reduced together. Default 25; the bucket that is reduced first has at
    /// most 1 MiB, so that reducing begins early.
    pub bucket_cap_mb: f64,
    /// Looks through the graph before each backward for parameters that it will not reach. Without, one
    /// that gets no gradient is an error in the next forward. Default false: it costs a walk of the graph.
    pub find_unused_parameters: bool,
    /// Gradients are views of the buckets: no second copy of them. Default true (torch: false, because
    /// Python code may detach gradients in place).
    pub gradient_as_bucket_view: bool,
    /// Copies the buffers of rank 0 to all before each forward. Default true.
    pub broadcast_buffers: bool,
    /// The dtype that gradients travel in.
    pub compression: GradientCompression,
}

impl Default for DdpConfig {
    fn default() -> Self {
        Self {
            bucket_cap_mb: 25.0,
            find_unused_parameters: false,
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
    /// [`Error::InvalidArgument`] for a bucket size that is not above 0.
    pub fn validate(&self) -> Result<()> {
        if self.bucket_cap_mb > 0.0 && self.bucket_cap_mb.is_finite() {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            argument: "bucket_cap_mb",
            value: self.bucket_cap_mb.to_string(),
            expected: "a number above 0".to_owned(),
        })
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
            // torch does this for its default size only; a smaller first bucket than the others is never bad.
            first_bucket_bytes: bucket_bytes.min(1024 * 1024),
            find_unused_parameters: self.find_unused_parameters,
            gradient_as_bucket_view: self.gradient_as_bucket_view,
            compression: match self.compression {
                GradientCompression::None => None,
                GradientCompression::Bf16 => Some(Kind::BFloat16),
                GradientCompression::Fp16 => Some(Kind::Half),
            },
        }
    }
}
