use crate::{Error, Result};

/// How a model is written as ONNX.
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
    /// Version of ONNX's operators, 18 to 26; default 21, which ONNX Runtime 1.18 and later run. From
    /// 20 on GELU is one operator, from 23 on so are RMSNorm, rotation and attention.
    pub opset: i64,
    /// Format of activations, caches and weights that are not quantized; default fp32.
    pub precision: Precision,
    /// Which operators attention is made of; default [`Attention::Composed`].
    pub attention: Attention,
    /// In what quantized weights are multiplied; default as their scheme says.
    pub activations: Activations,
    /// Whether earlier keys and values are inputs and outputs; default true. Without, the graph is for
    /// whole texts.
    pub use_cache: bool,
    /// For which positions there are logits; default all.
    pub logits: LogitsFor,
    /// Where the weights are; default beside the graph where all together are 2 GB or more.
    pub external_data: ExternalData,
    /// Whether weights that no operator of ONNX multiplies in their quantized form (groups with offsets
    /// that are no multiples of their scales, groups of reordered inputs) are written in full; default
    /// false, an error that names the weight.
    pub dense_fallback: bool,
    /// Entries of the file's metadata, beside those that this crate writes.
    pub metadata: Vec<(String, String)>,
}

/// Format of activations, caches and weights that are not quantized. Token ids are int64, logits fp32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Precision {
    /// 32 bits. Weights of bf16 and fp16 are kept exactly.
    #[default]
    Float32,
    /// 16 bits; norms, positions and softmax are computed in 32. For GPUs: ONNX Runtime's CPU kernels
    /// cast to 32 bits and back.
    Float16,
}

/// Which operators attention is made of. All give the same numbers within rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Attention {
    /// Products, a softmax and a mask: any runtime computes them.
    #[default]
    Composed,
    /// ONNX's own `Attention`, of opset 23 and later.
    Standard,
    /// `com.microsoft.GroupQueryAttention`, which turns queries and keys and reads the cache in place;
    /// ONNX Runtime only. Padding may be on either side; after the prompt a batch goes on by one token at a
    /// time (the operator takes several tokens after others for one row alone).
    GroupQuery,
}

/// In what quantized weights are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Activations {
    /// As the scheme of the weight says: `int8` with activations quantized to 8 bits token by token, as
    /// this workspace's own kernels do, integers of 8 bits in groups with activations quantized by
    /// group, all others with activations as they are.
    #[default]
    Scheme,
    /// As they are, for every scheme: the numbers of the dequantized model.
    Float,
    /// In 8 bits wherever ONNX Runtime has a kernel for it: 4-bit groups too (`accuracy_level` 4), which
    /// makes them faster by half.
    Int8,
}

/// For which positions there are logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LogitsFor {
    /// All: `(batch_size, sequence_length, vocabulary)`.
    #[default]
    All,
    /// The last one: `(batch_size, 1, vocabulary)`, all that generation needs where padding is on the
    /// left.
    Last,
}

/// Where the weights are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum ExternalData {
    /// In the file of the graph, unless all together are 2 GB or more, which protobuf cannot hold.
    #[default]
    WhenLarge,
    /// In a file beside it, from which a runtime maps them; tensors of less than 1 KiB stay in the graph.
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
    /// Checks that the options fit one another.
    ///
    /// # Errors
    /// [`Error::BadOption`] naming the one that does not.
    pub fn validate(&self) -> Result<()> {
        let bad = |option, found: String, expected: &str| {
            Err(Error::BadOption {
                option,
                found,
                expected: expected.to_owned(),
            })
        };
        if !(18..=26).contains(&self.opset) {
            return bad("opset", self.opset.to_string(), "18 to 26");
        }
        if self.attention == Attention::Standard && self.opset < 23 {
            let found = format!("Standard with opset {}", self.opset);
            return bad("attention", found, "opset 23 or later, or Composed");
        }
        if self.attention == Attention::GroupQuery && !self.use_cache {
            let found = "GroupQuery without a cache".to_owned();
            return bad("attention", found, "use_cache, or Composed");
        }
        let reserved = |(key, _): &&(String, String)| key.starts_with("overdrive.");
        if let Some((key, _)) = self.metadata.iter().find(reserved) {
            let found = format!("`{key}`");
            return bad(
                "metadata",
                found,
                "keys that do not begin with `overdrive.`",
            );
        }
        Ok(())
    }

    /// The version of the file format that goes with the operators.
    pub(crate) fn ir_version(&self) -> i64 {
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
