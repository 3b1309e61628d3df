//! Lazy datasets for training: memory-mapped token stores, tokenization, windows.
