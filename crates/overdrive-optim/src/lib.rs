//! Optimizers for tch: fused AdamW, clipping, learning-rate schedules, early stopping.
