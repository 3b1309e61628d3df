//! Automatic mixed precision: autocast, gradient scaling, TF32, precision policies.
