//! Key/value caches for autoregressive generation.
