//! The caches by the names of `cache_implementation`.

use overdrive_kv_cache::{GrowingCache, KvCache};
use overdrive_transformer::CausalLm;

use crate::{Error, GenerationConfig, Result};

/// The cache that `config` asks for, with room for `tokens` tokens a row.
pub(crate) fn of(
    config: &GenerationConfig,
    model: &CausalLm,
    tokens: i64,
) -> Result<Box<dyn KvCache>> {
    let name = config.cache_implementation.as_deref().unwrap_or("dynamic");
    Ok(match name {
        "dynamic" => Box::new(GrowingCache::with_capacity(model.num_layers(), tokens)),
        _ => {
            return Err(Error::BadConfig {
                key: "cache_implementation".to_owned(),
                found: format!("{name:?}"),
                expected: "dynamic".to_owned(),
            });
        }
    })
}
