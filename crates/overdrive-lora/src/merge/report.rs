use overdrive_quantization::Scheme;

/// Options for merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MergeOptions {
    /// If `true`, each merged weight is computed separately and replaces the old one only if all its elements are
    /// finite (PEFT's `safe_merge`). Default: `false`.
    pub safe: bool,
    /// If `true`, a copy of each dense weight is kept, so that [`unmerge_adapters`](crate::unmerge_adapters)
    /// restores it bit for bit, at the cost of the weights' memory. Default: `false`: the update is subtracted
    /// again, which is exact up to rounding. Quantized weights are always kept.
    pub keep_original: bool,
}

/// The result of merging.
#[derive(Debug, Clone, PartialEq, Default)]
#[non_exhaustive]
pub struct MergeReport {
    /// The layers with a merged adapter, in the order of the model.
    pub layers: Vec<MergedLayer>,
}

/// The result of merging into one layer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MergedLayer {
    /// The layer's name.
    pub name: String,
    /// The adapters, in the order in which they were merged.
    pub adapters: Vec<String>,
    /// The error of requantization, if the weight is quantized.
    pub requantized: Option<Requantized>,
}

/// The error of a quantized weight after merging.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Requantized {
    /// The scheme of the weight, which merging does not change.
    pub scheme: Scheme,
    /// `‖Q − W‖ / ‖W‖` (Frobenius) of the quantized weight against the merged one in fp32.
    pub error: f64,
    /// `‖Q − W‖ / ‖update‖`; near or above 1, rounding loses the adapter.
    pub error_of_change: f64,
}

impl MergeReport {
    /// Returns the largest [`Requantized::error`], or 0.
    pub fn worst_error(&self) -> f64 {
        let errors = self.layers.iter().filter_map(|layer| layer.requantized);
        errors
            .map(|requantized| requantized.error)
            .fold(0.0, f64::max)
    }
}
