use overdrive_core::{Error, check_option};

use crate::Result;

/// The options of an export.
///
/// ```
/// use overdrive_onnx::{ExportOptions, Precision};
///
/// let options = ExportOptions {
///     precision: Precision::Float16,
///     ..ExportOptions::default()
/// };
/// assert_eq!((options.opset, options.use_cache), (21, true));
/// options.validate()?;
/// # Ok::<(), overdrive_onnx::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportOptions {
    /// The version of ONNX's operators, 18 to 26; default 21, which ONNX Runtime 1.18 and later run. GELU is one
    /// operator from 20 on; RMSNorm, RoPE and attention are from 23 on.
    pub opset: i64,
    /// The dtype of activations, caches and weights that are not quantized; default fp32.
    pub precision: Precision,
    /// The operators that compute attention; default [`Attention::Composed`].
    pub attention: Attention,
    /// The dtype of the activations of quantized layers; default: that of their scheme.
    pub activations: Activations,
    /// If `true`, past keys and values are inputs and outputs. If `false`, the graph computes whole sequences
    /// only. Default: `true`.
    pub use_cache: bool,
    /// The positions whose logits are computed; default all.
    pub logits: LogitsFor,
    /// The file of the weights; default: a file beside the graph if the weights are 2 GB or more.
    pub external_data: ExternalData,
    /// If `true`, weights that no operator of ONNX multiplies in their quantized form (groups with offsets
    /// that are not multiples of their scales, groups of reordered inputs) are written dequantized. Default:
    /// `false`, which returns an error with the name of the weight.
    pub dense_fallback: bool,
    /// Metadata to add to that which this crate writes.
    pub metadata: Vec<(String, String)>,
}

/// The dtype of activations, caches and weights that are not quantized. Token ids are int64, logits fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Precision {
    /// 32 bits. Weights in bf16 and fp16 are converted exactly.
    #[default]
    Float32,
    /// 16 bits; norms, positions and softmax are computed in 32 bits. It is meant for GPUs: ONNX Runtime's CPU
    /// kernels cast to 32 bits and back.
    Float16,
}

/// The operators that compute attention. All give the same values within rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Attention {
    /// Matmuls, a softmax and a mask, which every runtime supports.
    #[default]
    Composed,
    /// ONNX's own `Attention`, of opset 23 and later.
    Standard,
    /// `com.microsoft.GroupQueryAttention` of ONNX Runtime, which rotates queries and keys and reads the cache in
    /// place. Padding may be on either side. After the prompt a batch continues by one token at a time: the
    /// operator takes several new tokens after past ones for a batch of one row only.
    GroupQuery,
}

/// The dtype of the activations of quantized layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Activations {
    /// The activations of the weight's scheme: `int8` quantizes activations to 8 bits token by token, as this
    /// workspace's own kernels do, schemes of 8-bit integers in groups quantize activations by group, and all
    /// others have floating-point activations.
    #[default]
    Scheme,
    /// Floating-point activations for every scheme, which give the results of the dequantized model.
    Float,
    /// 8-bit activations wherever ONNX Runtime has a kernel for them, including 4-bit groups (`accuracy_level`
    /// 4), which makes these faster by half.
    Int8,
}

/// The positions whose logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LogitsFor {
    /// All positions: `(batch_size, sequence_length, vocabulary)`.
    #[default]
    All,
    /// The last position: `(batch_size, 1, vocabulary)`, which is enough for generation with padding on the left.
    Last,
}

/// The file of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ExternalData {
    /// The file of the graph, or a file beside it if the weights are 2 GB or more, which protobuf cannot hold.
    #[default]
    WhenLarge,
    /// A file beside the graph, which a runtime can map into memory; tensors of less than 1 KiB stay in the graph.
    Always,
}

impl Default for ExportOptions {
    fn default() -> Self {
        ExportOptions {
            opset: 21,
            precision: Precision::default(),
            attention: Attention::default(),
            activations: Activations::default(),
            use_cache: true,
            logits: LogitsFor::default(),
            external_data: ExternalData::default(),
            dense_fallback: false,
            metadata: Vec::new(),
        }
    }
}

impl ExportOptions {
    /// Checks that the options are valid and compatible.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the invalid option.
    pub fn validate(&self) -> Result<()> {
        let opset = self.opset;
        check_option((18..=26).contains(&opset), "opset", opset, "from 18 to 26")?;
        check_option(
            self.attention != Attention::Standard || opset >= 23,
            "attention",
            format!("standard with opset {opset}"),
            "composed with an opset below 23; standard needs opset 23",
        )?;
        check_option(
            self.attention != Attention::GroupQuery || self.use_cache,
            "attention",
            "group-query without a cache",
            "composed where `use_cache` is false",
        )?;
        let reserved = |(key, _): &&(String, String)| key.starts_with("overdrive.");
        if let Some((key, _)) = self.metadata.iter().find(reserved) {
            let expected = "without keys that begin with `overdrive.`";
            return Err(Error::option("metadata", format!("`{key}`"), expected).into());
        }
        Ok(())
    }

    /// Returns the IR version that belongs to the opset.
    pub(crate) fn ir_version(&self) -> i64 {
        // From the table of releases in onnx's `Versioning.md`.
        match self.opset {
            ..=18 => 8,
            19..=20 => 9,
            21..=22 => 10,
            23 => 11,
            24 => 12,
            _ => 13,
        }
    }
}
