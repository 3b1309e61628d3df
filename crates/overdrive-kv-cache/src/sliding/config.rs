use crate::{Error, Result};

/// What a [`SlidingCache`](crate::SlidingCache) keeps.
#[derive(Debug, Clone, PartialEq)]
pub struct SlidingCacheConfig {
    /// For each layer the tokens that a query sees, its own included (Hugging Face's
    /// `sliding_window`); `None` for a layer that keeps all. Default: none; there must be one for each
    /// layer of the model.
    pub windows: Vec<Option<i64>>,
    /// How many of the first tokens are kept besides, for layers with a window; default 0. Models that
    /// were trained with full attention need a few (4 in StreamingLLM) to go on beyond a window.
    pub sinks: i64,
    /// Tokens that are kept beyond the window, so that up to `slack + 1` can be taken back after
    /// speculation; default 0.
    pub slack: i64,
    /// Rotary frequencies, radians a token, `1 / base^(2i/D)` as the model scales them, for channels
    /// `i` and `i + D/2` (Llama's half-split convention): sinks are then turned on as tokens are
    /// dropped, so that no distance exceeds the cache. Default `None`: sinks stay where they are, at
    /// growing distances. Not for frequencies that change with the length (dynamic NTK scaling).
    pub inverse_frequencies: Option<Vec<f64>>,
    /// Tokens for which memory is taken at the first append, at most; default 64.
    pub initial_capacity: i64,
}

impl Default for SlidingCacheConfig {
    fn default() -> Self {
        SlidingCacheConfig {
            windows: Vec::new(),
            sinks: 0,
            slack: 0,
            inverse_frequencies: None,
            initial_capacity: 64,
        }
    }
}

impl SlidingCacheConfig {
    /// The same window for each of `layers` layers.
    pub fn uniform(layers: usize, window: i64) -> SlidingCacheConfig {
        SlidingCacheConfig {
            windows: vec![Some(window); layers],
            ..SlidingCacheConfig::default()
        }
    }

    /// Whether the settings are in range.
    ///
    /// # Errors
    /// [`Error::BadConfig`] with the setting that is not.
    pub fn validate(&self) -> Result<()> {
        let bad = |key, found: String, expected| {
            Err(Error::BadConfig {
                key,
                found,
                expected,
            })
        };
        if let Some(window) = self.windows.iter().flatten().find(|window| **window < 1) {
            let expected = "at least 1: a token sees itself (None for a layer without a window)";
            return bad("windows", window.to_string(), expected);
        }
        for (key, value) in [("sinks", self.sinks), ("slack", self.slack)] {
            if value < 0 {
                return bad(key, value.to_string(), "at least 0");
            }
        }
        match &self.inverse_frequencies {
            Some(all) if all.is_empty() || all.iter().any(|f| !f.is_finite()) => {
                let expected = "finite numbers, one for each pair of channels that turns";
                bad("inverse_frequencies", format!("{all:?}"), expected)
            }
            _ => Ok(()),
        }
    }
}

/// `128,full,128`; a single number where all are the same.
pub(super) fn windows_text(windows: &[Option<i64>]) -> String {
    let text = |window: &Option<i64>| window.map_or("full".to_owned(), |n| n.to_string());
    match windows {
        [first, rest @ ..] if rest.iter().all(|window| window == first) => text(first),
        _ => windows.iter().map(text).collect::<Vec<_>>().join(","),
    }
}
