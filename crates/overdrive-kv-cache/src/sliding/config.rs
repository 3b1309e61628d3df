use overdrive_core::{check_non_negative, check_option};

use crate::Result;

/// The options of a [`SlidingCache`](crate::SlidingCache).
#[derive(Debug, Clone, PartialEq)]
pub struct SlidingCacheConfig {
    /// The window of each layer of the model, one entry for each layer: the number of tokens that a query
    /// sees, including its own (Hugging Face's `sliding_window`); `None` for a layer that keeps every token.
    /// Default empty.
    pub windows: Vec<Option<i64>>,
    /// The number of first tokens that layers with a window keep as attention sinks, in addition to the
    /// window. Default 0. Models that were trained with full attention need a few (4 in StreamingLLM) to
    /// generate beyond a window.
    pub sinks: i64,
    /// The number of tokens to keep beyond the window, so that up to `slack + 1` tokens can be undone
    /// after speculation. Default 0.
    pub slack: i64,
    /// The rotary frequencies in radians per token, `1 / base^(2i/D)` as the model scales them, for
    /// channels `i` and `i + D/2` (Llama's half-split convention). If given, the sinks are rotated forward
    /// as tokens are dropped, so that no distance exceeds the cache. Default `None`: sinks keep their
    /// positions, at growing distances. Not for frequencies that change with the length (dynamic NTK
    /// scaling).
    pub inverse_frequencies: Option<Vec<f64>>,
    /// The largest number of tokens to allocate at the first append. Default 64.
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
    /// Returns a configuration with the same window for each of `layers` layers.
    pub fn uniform(layers: usize, window: i64) -> SlidingCacheConfig {
        SlidingCacheConfig {
            windows: vec![Some(window); layers],
            ..SlidingCacheConfig::default()
        }
    }

    /// Checks every option against its range.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) out of its range.
    pub fn validate(&self) -> Result<()> {
        for window in self.windows.iter().flatten() {
            let expected = "at least 1: a token sees itself (None for a layer without a window)";
            check_option(*window >= 1, "windows", window, expected)?;
        }
        check_non_negative("sinks", self.sinks)?;
        check_non_negative("slack", self.slack)?;
        if let Some(all) = &self.inverse_frequencies {
            let valid = !all.is_empty() && all.iter().all(|f| f.is_finite());
            let expected = "finite numbers, one for each pair of channels that rotates";
            check_option(valid, "inverse_frequencies", format!("{all:?}"), expected)?;
        }
        Ok(())
    }
}

/// Returns the windows as text, `128,full,128`, or a single window if all are the same.
pub(super) fn windows_text(windows: &[Option<i64>]) -> String {
    let text = |window: &Option<i64>| window.map_or("full".to_owned(), |n| n.to_string());
    match windows {
        [first, rest @ ..] if rest.iter().all(|window| window == first) => text(first),
        _ => windows.iter().map(text).collect::<Vec<_>>().join(","),
    }
}
