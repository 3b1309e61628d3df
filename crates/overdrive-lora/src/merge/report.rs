use overdrive_quantization::Scheme;

/// How adapters are merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MergeOptions {
    /// Computes each merged weight beside the old one and takes it only where all its numbers are
    /// finite (PEFT's `safe_merge`); default false.
    pub safe: bool,
    /// Keeps the dense weights as they were, so that [`unmerge_adapters`](crate::unmerge_adapters) gives
    /// them back bit for bit, at their memory's price; default false. Without it the change is subtracted
    /// again, which is exact to rounding only. Packed weights are always kept.
    pub keep_original: bool,
}

/// What merging did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MergeReport {
    /// Every map with a merged adapter, in the order of the model.
    pub maps: Vec<MergedMap>,
}

/// What merging did to one map.
#[derive(Debug, Clone, PartialEq)]
pub struct MergedMap {
    /// The map's name.
    pub name: String,
    /// The adapters, in the order in which they were merged.
    pub adapters: Vec<String>,
    /// What quantizing anew cost, where the weight is packed.
    pub requantized: Option<Requantized>,
}

/// The error of a packed weight that was merged into.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Requantized {
    /// How it is packed.
    pub scheme: Scheme,
    /// `‖Q − W‖ / ‖W‖` (Frobenius) of the new packed weight against the merged one in full.
    pub error: f64,
    /// `‖Q − W‖ / ‖change‖`: near or above 1 the adapter is lost in rounding.
    pub error_of_change: f64,
}

impl MergeReport {
    /// The largest [`Requantized::error`], or 0.
    pub fn worst_error(&self) -> f64 {
        let errors = self.maps.iter().filter_map(|map| map.requantized);
        errors
            .map(|requantized| requantized.error)
            .fold(0.0, f64::max)
    }
}
