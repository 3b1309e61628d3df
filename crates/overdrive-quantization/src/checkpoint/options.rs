use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use crate::calibrate::{CalibrationOptions, InputCollector, Migration};
use crate::{Result, Scheme, skips_modules};

/// The options of [`quantize_checkpoint`](crate::quantize_checkpoint).
#[derive(Debug, Clone)]
pub struct CheckpointOptions {
    /// The scheme of the output head; default `None`: it stays dense. If the head is tied, the embedding is
    /// quantized with it.
    pub head: Option<Scheme>,
    /// The scheme of the embedding; default `None`: it stays dense.
    pub embedding: Option<Scheme>,
    /// The linear layers that stay dense, in the form of transformers' `llm_int8_skip_modules`
    /// ([`skips_modules`](crate::skips_modules)); default none.
    pub skip_modules: Vec<String>,
    /// A filter of the linear layers by name; default: all are quantized.
    pub filter: Option<Filter>,
    /// The maximum number of bytes of tensors in a file (a larger tensor gets its own file); default 5 GB.
    pub max_shard_bytes: u64,
    /// The calibration; default: rounding to the nearest.
    pub calibration: CalibrationOptions,
    /// The statistics of the inputs of the layers, which GPTQ and migration need; default none.
    pub statistics: Option<Rc<InputCollector>>,
    /// The migration from activations to weights, for models of the Llama family, Phi and Gemma; default none. It is
    /// an error if the model has no norm or layer that it can change.
    pub migration: Option<Migration>,
    /// The callback for progress; default none.
    pub progress: Option<Progress>,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        CheckpointOptions {
            head: None,
            embedding: None,
            skip_modules: Vec::new(),
            filter: None,
            // The default of transformers when it was written, decimal as there.
            max_shard_bytes: 5_000_000_000,
            calibration: CalibrationOptions::default(),
            statistics: None,
            migration: None,
            progress: None,
        }
    }
}

impl CheckpointOptions {
    /// Returns `true` if the linear layer `module` is quantized.
    pub(super) fn includes(&self, module: &str) -> Result<bool> {
        let skipped = skips_modules(&self.skip_modules, module)?;
        Ok(!skipped && self.filter.as_ref().is_none_or(|filter| (filter.0)(module)))
    }
}

/// A filter of linear layers by name.
#[derive(Clone)]
pub struct Filter(Arc<dyn Fn(&str) -> bool + Send + Sync>);

impl Filter {
    /// Returns the filter that calls `includes` with the name of each layer, without `.weight`.
    pub fn new(includes: impl Fn(&str) -> bool + Send + Sync + 'static) -> Filter {
        Filter(Arc::new(includes))
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Filter(..)")
    }
}

/// A callback for the progress of the quantization of a checkpoint.
#[derive(Clone)]
pub struct Progress(Arc<dyn Fn(u64, u64) + Send + Sync>);

impl Progress {
    /// Returns the callback `report(done, total)` in bytes of the source, called once before the first tensor
    /// and after each.
    pub fn new(report: impl Fn(u64, u64) + Send + Sync + 'static) -> Progress {
        Progress(Arc::new(report))
    }

    pub(super) fn report(&self, done: u64, total: u64) {
        (self.0)(done, total);
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress(..)")
    }
}
