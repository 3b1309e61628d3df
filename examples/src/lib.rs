//! The examples of Overdrive: one file each under `examples/`, run with
//! `cargo run --release -p overdrive-examples --example NAME`.
