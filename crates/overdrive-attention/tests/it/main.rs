//! Attention on a CPU: each back end against the math back end and against flash-attn.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod against_math;
mod autocast;
mod cuda;
mod dropout;
mod flash_attn_semantics;
mod packed;
mod paged;
mod rows;
mod selection;
