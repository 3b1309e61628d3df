//! Gradient accumulation: token-weighted micro-batches, batch plans, batch-size search.
