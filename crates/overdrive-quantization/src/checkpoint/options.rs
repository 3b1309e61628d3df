use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use crate::Scheme;
use crate::calibrate::{CalibrationOptions, InputCollector, Migration};

/// Which tensors of a checkpoint are quantized, and how.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CheckpointOptions {
    /// Of the head; default `None`: kept. A tied head takes the embedding with it.
    pub head: Option<Scheme>,
    /// Of the embedding; default `None`: kept.
    pub embedding: Option<Scheme>,
    /// Maps that are kept: those whose name is one of these or ends with `.` and one of these. What
    /// transformers calls `llm_int8_skip_modules`; default none.
    pub skip_modules: Vec<String>,
    /// Is asked for each linear map, by name, whether it is quantized; default: all are.
    pub filter: Option<Filter>,
    /// A file holds at most so many bytes of tensors (a larger tensor has its own); default 5 GB.
    pub max_shard_bytes: u64,
    /// How codes and scales are chosen; default: by rounding.
    pub calibration: CalibrationOptions,
    /// What was gathered of the maps' inputs; default nothing. Needed by GPTQ and migration.
    pub statistics: Option<Rc<InputCollector>>,
    /// Whether difficulty is moved between activations and weights; default not.
    pub migration: Option<Migration>,
    /// Is told how far it is; default: nobody.
    pub progress: Option<Progress>,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        CheckpointOptions {
            head: None,
            embedding: None,
            skip_modules: Vec::new(),
            filter: None,
            max_shard_bytes: 5_000_000_000,
            calibration: CalibrationOptions::default(),
            statistics: None,
            migration: None,
            progress: None,
        }
    }
}

impl CheckpointOptions {
    /// Whether the linear map `module` is quantized.
    pub(super) fn takes(&self, module: &str) -> bool {
        let skipped = self.skip_modules.iter().any(|name| {
            let rest = module.strip_suffix(name.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        });
        !skipped && self.filter.as_ref().is_none_or(|filter| (filter.0)(module))
    }
}

/// Chooses linear maps by name.
#[derive(Clone)]
pub struct Filter(Arc<dyn Fn(&str) -> bool + Send + Sync>);

impl Filter {
    /// `takes` is asked with the name of each map, without `.weight`.
    pub fn new(takes: impl Fn(&str) -> bool + Send + Sync + 'static) -> Filter {
        Filter(Arc::new(takes))
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Filter(..)")
    }
}

/// Is told how far the quantization of a checkpoint is.
#[derive(Clone)]
pub struct Progress(Arc<dyn Fn(u64, u64) + Send + Sync>);

impl Progress {
    /// `report` is called with the bytes of the source that are done and with all there are: once before
    /// the first tensor, and after each.
    pub fn new(report: impl Fn(u64, u64) + Send + Sync + 'static) -> Progress {
        Progress(Arc::new(report))
    }

    pub(super) fn report(&self, done: u64, all: u64) {
        (self.0)(done, all);
    }
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Progress(..)")
    }
}
